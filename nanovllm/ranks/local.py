"""LocalExecutor: the model in this process: alone, without a process group, or one rank of several.

`launch(plan)` starts a step and returns an InFlight; `InFlight.result()` waits for it. On the CPU the work is done
inside `launch`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.errors import EngineDeadError
from nanovllm.hardware.device import Device, keep_for_ever
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.packed import count_weights, formats_of
from nanovllm.layers.scaled_attention import scaled_layers
from nanovllm.model_config import ModelConfig
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.moe.offload.offload import Offload
from nanovllm.moe.rebalance import Balancer
from nanovllm.runner.build import Blueprint, build_draft, build_model, logged, open_balancer
from nanovllm.runner.expert_memory import card_bytes
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.memory import fit_cache
from nanovllm.runner.model_runner import InFlight
from nanovllm.runner.probe import Probe
from nanovllm.scheduling.plan import StepPlan
from nanovllm.weights.checkpoint import Checkpoint

GPU_DECODE_STEPS = 8
ALONE = Parallel()
T = TypeVar("T")


class LocalExecutor:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
        parallel: Parallel = ALONE,
    ) -> None:
        """`parallel`: this process's place among the ranks, if there are others (multiprocess.py)."""
        self.device = device
        self.offload: Offload | None = None
        self.balancer: Balancer | None = None
        self.blueprint = Blueprint.draw(config, model_config, checkpoint, device, limits, parallel)
        self.parallel, self.dtype = self.blueprint.parallel, self.blueprint.dtype
        self.selection, self.low_rank = self.blueprint.selection, self.blueprint.low_rank
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config = self.blueprint.config
        if self.device.is_gpu and config.gpu_memory_gb is not None:
            self.device.limit_memory(card_bytes(config, self.device))
        draft = build_draft(self.blueprint)
        model = build_model(self.blueprint, self._own, draft)
        self.balancer = open_balancer(self.blueprint, model)
        self.num_parameters, self.weight_bytes = count_weights(model)
        self.formats = formats_of(model)
        with logged("memory of the largest step measured"):
            self.layout = fit_cache(self.blueprint, model, draft)
        if self.offload is not None:
            self.offload.forget()  # all tokens of the trial step are 0: its experts are not those of real text
        with logged("cache allocated and graphs captured"):
            self.runner = self.blueprint.make_runner(model, self.layout, draft)
            self.runner.use_balancer(self.balancer)
            if not config.enforce_eager:
                self.runner.capture()
            self.runner.warm_up()

    def _own(self, offload: Offload) -> None:
        self.offload = offload

    @property
    def overlap(self) -> int:
        """With offloaded experts the host takes part in every layer, so the next plan cannot be made meanwhile."""
        return self.runner.overlap if self.offload is None else 1

    @property
    def decode_steps(self) -> int:
        """Several on a GPU, where the scheduler would take longer than a step; one where a step takes long itself."""
        return GPU_DECODE_STEPS if self.device.is_gpu and self.offload is None else 1

    @property
    def num_drafts(self) -> int:
        return self.blueprint.config.num_guesses if self.runner.drafter is not None else 0

    def expert_stats(self) -> ExpertStats | None:
        """Cumulative; None unless experts are offloaded."""
        return None if self.offload is None else self.offload.stats()

    def expert_load(self) -> list[list[int]] | None:
        moe = self.blueprint.model_config.moe
        if moe is None:
            return None
        runner = self.runner
        runner.load = runner.load or ExpertLoad(sum(moe.layers), moe.num_experts, self.device.torch_device)
        return runner.load.read()

    def probe(self) -> Probe:
        return Probe(self.device, self.layout, self.runner, self.offload)

    def launch(self, plan: StepPlan) -> InFlight:
        flight = self._guard(lambda: self.runner.launch(plan))
        return InFlight(lambda: self._guard(flight.result))

    def _guard(self, function: Callable[[], T]) -> T:
        """A step fails alone, unless the card is lost with it. With other ranks any failure ends the engine, and
        kernels on the card may wait for those ranks for ever, so the card is not synchronised (several.py)."""
        try:
            return function()
        except Exception as error:
            if self.parallel.size == 1 and self.device.is_lost():
                keep_for_ever(self.runner)
                raise EngineDeadError(
                    f"the GPU can no longer be used by this process ({type(error).__name__}: {error}); start a new one"
                ) from error
            raise

    def check(self) -> None:
        """Nothing to check: a lost card is found by the step that loses it."""

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        try:
            self._free()
        except RuntimeError:
            if not self.device.is_lost():  # what a lost card holds is free when the process ends
                raise

    def _free(self) -> None:
        if self.offload is not None:
            self.offload.close()
            self.offload = None
        self.balancer = None  # it has the experts' weights and a spare buffer
        if hasattr(self, "runner"):
            del self.runner
            if self.device.is_gpu:
                gc.collect()  # captured graphs and their buffers refer to each other; the memory must be free *now*
        self.device.release_cached()
        self.device.limit_memory(None)

    def describe(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "architecture": self.device.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": ", ".join(self.formats) or "none",
            "weight_bytes": self.weight_bytes,
            "attn_backend": self.selection.backend.name,
            "attn_reasons": dict(self.selection.reasons),
            "kv_block_size": self.layout.block_size,
            "kv_blocks": self.layout.num_blocks,
            "kv_bytes": self.layout.num_bytes,
            "kv_cache_dtype": str(self.blueprint.kv_dtype or self.dtype).removeprefix("torch."),
            **self._describe_kv_scales(),
            **self._describe_experts(),
        }

    def _describe_kv_scales(self) -> dict[str, str]:
        layers = scaled_layers(self.runner.model.layers)
        return {"kv_scales": "checkpoint" if layers[0].from_checkpoint else "first prompts"} if layers else {}

    def _describe_experts(self) -> dict[str, Any]:
        """Empty if all experts are on the device as the checkpoint has them."""
        experts: dict[str, Any] = {} if self.offload is None else self.offload.describe()
        if self.parallel.expert_size > 1:
            experts = {"placement": "resident", "spread_over": self.parallel.expert_size}
            if self.balancer is not None:
                experts["redundant"] = self.blueprint.config.num_redundant_experts
        if self.low_rank is not None:
            experts = {"placement": "resident", **experts, **self.low_rank.describe()}
        return {"experts": experts} if experts else {}

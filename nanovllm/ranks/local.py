"""LocalExecutor: the model in this process: alone, without a process group, or one rank of several.

`launch(plan)` starts a step and returns an InFlight; `InFlight.result()` waits for it. On the CPU the work is done
inside `launch`; the contract is the one that overlapping devices and other processes need.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from nanovllm.attention.select import Selection, select_backend
from nanovllm.config import EngineConfig
from nanovllm.errors import EngineDeadError
from nanovllm.hardware.device import Device, keep_for_ever
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer, attention_specs
from nanovllm.moe.cache import ExpertStats
from nanovllm.moe.offload import Offload
from nanovllm.moe.sizing import CONTEXT_BYTES, GRAPH_BYTES
from nanovllm.ops.opset import choose_ops
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.runner.expert_memory import card_bytes, check_expert_ranks, open_offload, size_experts
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.kv_cache import CacheLayout, allocate, block_bytes
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.low_rank import open_low_rank
from nanovllm.runner.mixed_graphs import TOKEN_BUCKETS
from nanovllm.runner.model_runner import InFlight, ModelRunner, try_largest_step
from nanovllm.runner.no_effect import options_without_effect
from nanovllm.scheduling.plan import StepPlan
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.loader import check_weights, load_dummy, load_weights
from nanovllm.weights.svd_checkpoint import RULES as SVD_RULES

logger = logging.getLogger("nanovllm")

GPU_DECODE_STEPS = 8
ALONE = Parallel()
T = TypeVar("T")


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - started)


class Runner(Protocol):
    overlap: int

    def launch(self, plan: StepPlan) -> InFlight: ...

    def reset(self) -> None: ...


class LocalExecutor:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint, device: Device,
        limits: StepLimits, parallel: Parallel = ALONE,
    ) -> None:  # fmt: skip
        """`parallel`: this process's place among the ranks, if there are others (multiprocess.py)."""
        if config.expert_parallel_size > 1:
            parallel = replace(parallel, expert_size=config.expert_parallel_size)
        self.parallel = parallel
        check_expert_ranks(model_config, parallel)
        self.device = device
        self.dtype = self.device.resolve_dtype(config.dtype, model_config.dtype)
        specs = attention_specs(model_config, self.dtype, parallel)
        self.selection: Selection = select_backend(config.attn_backend, specs, self.device, limits.block_size)
        others = {name: said for name, said in self.selection.reasons.items() if said.startswith("refused")}
        logger.info("attention backend %s on %s; %s", self.selection.backend.name, self.device.name, others)
        self.offload: Offload | None = None
        self.low_rank = open_low_rank(config, model_config, checkpoint)
        try:
            self._start(config, model_config, checkpoint, limits)
        except BaseException:
            self.close()
            raise

    def _start(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint, limits: StepLimits
    ) -> None:
        max_model_len, max_num_batched_tokens = limits.max_model_len, limits.max_num_batched_tokens
        block_size = limits.block_size
        if self.device.is_gpu and config.gpu_memory_gb is not None:
            self.device.limit_memory(card_bytes(config, self.device))
        build = Build(self.dtype, self.device.torch_device, choose_ops(self.device.is_gpu, self.dtype), self.parallel)
        layouts = experts = None
        if self.low_rank is not None:
            checkpoint, layouts, experts = self.low_rank.checkpoint, self.low_rank.layouts, self.low_rank.resident
        if model_config.moe is not None:
            tiers = size_experts(config, model_config, self.device, self.dtype, limits, layouts, self.parallel)
            if tiers.placement == "offload" and config.load_format != "dummy":
                # Locking host memory takes long: a checkpoint that is not whole is refused before.
                nowhere = replace(build, device=torch.device("meta"))
                empty = Parts(nowhere, self.selection.backend, max_model_len, experts)
                model = find_family(model_config)(model_config, empty)
                check_weights(model, checkpoint, model.rules + SVD_RULES)
            self.offload = open_offload(config, model_config, self.device, build, tiers, checkpoint, layouts)
        self._warn(config, model_config)
        experts = experts if self.offload is None else self.offload.experts
        parts = Parts(build, self.selection.backend, max_model_len, experts)
        model = find_family(model_config)(model_config, parts).eval()
        with logged("weights loaded and kernels compiled"):
            compiled = self._compile_ahead(config, model, max_model_len, block_size, max_num_batched_tokens)
            self._load(config, model, checkpoint)
            compiled()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        with logged("memory of the largest step measured"):
            spare = self._spare_bytes(config, model, max_model_len, max_num_batched_tokens, block_size)
        if self.offload is not None:
            self.offload.forget()  # the step that was tried says nothing about which experts will be wanted
        specs = model.specs
        # Every rank must have as many blocks: the one with the least room decides.
        layout = CacheLayout.fit(self.parallel.gather_numbers(spare), specs, block_size, config.num_kvcache_blocks)
        most = config.max_num_seqs * -(-max_model_len // block_size)
        if config.num_kvcache_blocks is None and layout.num_blocks > most and not self.device.is_gpu:
            layout = CacheLayout(block_size, most, block_bytes(specs, block_size))  # more could never be used at once
        self.layout = layout
        with logged("cache allocated and graphs captured"):
            self.runner = self._make_runner(config, model, max_model_len, max_num_batched_tokens)

    def _warn(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Of what a user should not have to find out, once for all ranks."""
        if self.parallel.rank > 0:
            return
        if self.low_rank is not None:
            logger.warning("%s", self.low_rank.notice)
        placement = None if model_config.moe is None else "resident" if self.offload is None else "offload"
        for name, why in options_without_effect(config, self.device.is_gpu, placement).items():
            logger.warning("%s=%r %s", name, getattr(config, name), why)

    def _load(self, config: EngineConfig, model: Transformer, checkpoint: Checkpoint) -> None:
        places = None if self.offload is None else self.offload.places()
        if config.load_format == "dummy":
            load_dummy(model, config.seed, places)
        else:
            load_weights(model, checkpoint, model.rules + SVD_RULES, places)
        if self.offload is not None:
            self.offload.watch_gates(model.router_weights())

    def _compile_ahead(
        self, config: EngineConfig, model: Transformer, max_model_len: int, block_size: int, max_num_tokens: int
    ) -> Callable[[], None]:
        """Kernels are compiled in threads while weights load: start-up of Qwen3-0.6B on an H200 with an empty kernel
        cache took 23.6 s without."""
        if not self._uses_gpu_runner(model) or not model.graph_safe:  # a trial would choose experts by garbage
            return lambda: None
        from nanovllm.ops.triton.compile_ahead import compile_ahead
        from nanovllm.runner.gpu_runner import GpuRunner

        layout = CacheLayout(block_size, 1, 0)
        trial = GpuRunner(
            model, layout, self.device, config.max_num_seqs, max_model_len, max_num_tokens, eager=config.enforce_eager
        )
        return compile_ahead(trial.launch_every_kernel, self.device.torch_device)

    def _uses_gpu_runner(self, model: Transformer) -> bool:
        return self.device.is_gpu and model.ops.name == "triton" and self.selection.backend.graph_safe

    def _spare_bytes(
        self, config: EngineConfig, model: Transformer, max_model_len: int, num_tokens: int, block_size: int
    ) -> int:
        """Memory for the cache. On a GPU: our share of the card, less what our tensors hold, less what the largest step
        really took when it was tried; and never more than is free now. Memory of other processes only counts
        where it makes the card full: it is not ours."""
        if not self.device.is_gpu:
            return int(config.cpu_kvcache_gb * 2**30)
        step_bytes = self.device.peak_bytes(
            lambda: try_largest_step(model, self.device, num_tokens, max_model_len, config.max_num_seqs, block_size)
        )
        free, _ = self.device.memory()
        card = card_bytes(config, self.device)
        ours = int(card * config.gpu_memory_utilization)
        if config.gpu_memory_gb is not None:
            ours = min(ours, card - CONTEXT_BYTES)  # on a real card of that size the context would take its part
        graphs = 0 if config.enforce_eager else GRAPH_BYTES
        if self._uses_gpu_runner(model):
            graphs += SamplerState.num_bytes(config.max_num_seqs + 1, model.head.vocab_size)
        if graphs and model.graph_safe:  # a captured step of up to 2,048 tokens keeps its scratch for ever
            graphs += step_bytes * min(num_tokens, TOKEN_BUCKETS[-1]) // num_tokens
        return min(free, ours - self.device.allocated_bytes()) - step_bytes - graphs

    def _make_runner(self, config: EngineConfig, model: Transformer, max_model_len: int, max_num_tokens: int) -> Runner:
        seqs = config.max_num_seqs
        if self._uses_gpu_runner(model):
            from nanovllm.runner.gpu_runner import GpuRunner

            runner = GpuRunner(
                model, self.layout, self.device, seqs, max_model_len, max_num_tokens, eager=config.enforce_eager
            )
            runner.capture()
            return runner
        caches = allocate(self.layout, model.specs, self.device)
        batch = InputBatch(seqs, max_model_len, self.layout.block_size)
        return ModelRunner(model, self.layout, self.device, caches, batch)

    @property
    def overlap(self) -> int:
        """How many plans may be launched before the first is committed. With offloaded experts the host takes part in
        every layer, so there is nothing to plan ahead of."""
        return self.runner.overlap if self.offload is None else 1

    @property
    def decode_steps(self) -> int:
        """Tokens between two looks of the scheduler, for who does not say: a GPU's host must not be asked for each, but
        where a token takes long, nobody should wait for eight."""
        return GPU_DECODE_STEPS if self.device.is_gpu and self.offload is None else 1

    def expert_stats(self) -> ExpertStats | None:
        """Cumulative; None unless experts are offloaded."""
        return None if self.offload is None else self.offload.stats()

    def launch(self, plan: StepPlan) -> InFlight:
        flight = self._guard(lambda: self.runner.launch(plan))
        return InFlight(lambda: self._guard(flight.result))

    def _guard(self, function: Callable[[], T]) -> T:
        """A step fails alone, unless the card is lost with it. With other ranks any failure ends the engine, and what
        runs on the card may wait for them, so the card is not tried (several.py)."""
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
        """While nothing is computed nothing fails here: a lost card is found by the step that loses it."""

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
            "attn_backend": self.selection.backend.name,
            "attn_reasons": dict(self.selection.reasons),
            "kv_block_size": self.layout.block_size,
            "kv_blocks": self.layout.num_blocks,
            "kv_bytes": self.layout.num_bytes,
            **self._describe_experts(),
        }

    def _describe_experts(self) -> dict[str, Any]:
        """Nothing of experts that are as the model has them, on the device."""
        experts: dict[str, Any] = {} if self.offload is None else self.offload.describe()
        if self.parallel.expert_size > 1:
            experts = {"placement": "resident", "spread_over": self.parallel.expert_size}
        if self.low_rank is not None:
            experts = {"placement": "resident", **experts, **self.low_rank.describe()}
        return {"experts": experts} if experts else {}



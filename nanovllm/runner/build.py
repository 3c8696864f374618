"""From a checkpoint to a model that can compute: placed, loaded, its kernels compiled.

A `Blueprint` holds what is decided before anything is allocated; `build_model` follows it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from nanovllm.attention.select import BackendChoice, select_backend
from nanovllm.config import EngineConfig
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.lowrank.checkpoint import RULES as SVD_RULES
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer, attention_specs
from nanovllm.moe.layer import MakeExperts
from nanovllm.moe.offload.offload import Offload
from nanovllm.ops.opset import choose_ops
from nanovllm.runner.expert_memory import check_expert_ranks, open_offload, size_experts
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.low_rank import LowRank, open_low_rank
from nanovllm.runner.model_runner import ModelRunner, captures_attention, runs_on_device
from nanovllm.runner.no_effect import options_without_effect
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.loader import check_weights, load_dummy, load_weights

logger = logging.getLogger("nanovllm")


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - started)


@dataclass(frozen=True)
class Blueprint:
    config: EngineConfig
    model_config: ModelConfig
    device: Device
    limits: StepLimits
    parallel: Parallel
    dtype: torch.dtype
    selection: BackendChoice  # of the attention backend
    low_rank: LowRank | None
    checkpoint: Checkpoint  # with low-rank experts, if there are

    @classmethod
    def draw(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
        parallel: Parallel,
    ) -> Blueprint:
        if config.expert_parallel_size > 1:
            parallel = replace(parallel, expert_size=config.expert_parallel_size)
        check_expert_ranks(model_config, parallel)
        dtype = device.resolve_dtype(config.dtype, model_config.dtype)
        specs = attention_specs(model_config, dtype, parallel)
        selection = select_backend(config.attn_backend, specs, device, limits.block_size)
        others = {name: reason for name, reason in selection.reasons.items() if reason.startswith("refused")}
        logger.info("attention backend %s on %s; %s", selection.backend.name, device.name, others)
        low_rank = open_low_rank(config, model_config, checkpoint)
        files = checkpoint if low_rank is None else low_rank.checkpoint
        return cls(config, model_config, device, limits, parallel, dtype, selection, low_rank, files)

    def make_model(self, build: Build, experts: MakeExperts | None) -> Transformer:
        parts = Parts(build, self.selection.backend, self.limits.max_model_len, experts)
        return find_family(self.model_config)(self.model_config, parts).eval()

    def make_runner(self, model: Transformer, layout: CacheLayout) -> ModelRunner:
        on_device = runs_on_device(model, self.device)
        return ModelRunner(model, layout, self.device, self.limits, self.config.max_num_seqs, on_device)


def build_model(blueprint: Blueprint, own: Callable[[Offload], None]) -> Transformer:
    """`own` gets the Offload as soon as it has memory: the caller closes it, also if this function fails."""
    device, dtype = blueprint.device, blueprint.dtype
    build = Build(dtype, device.torch_device, choose_ops(device.is_gpu, dtype), blueprint.parallel)
    offload = _place_experts(blueprint, build)
    if offload is not None:
        own(offload)
    _warn(blueprint, offload)
    experts = None if blueprint.low_rank is None else blueprint.low_rank.resident
    model = blueprint.make_model(build, experts if offload is None else offload.experts)
    with logged("weights loaded and kernels compiled"):
        wait_for_kernels = _compile_ahead(blueprint, model)
        _load(blueprint, model, offload)
        wait_for_kernels()
    return model


def _place_experts(blueprint: Blueprint, build: Build) -> Offload | None:
    """None: they stay on the device."""
    config, model_config, low_rank = blueprint.config, blueprint.model_config, blueprint.low_rank
    device, limits = blueprint.device, blueprint.limits
    if model_config.moe is None:
        return None
    forms = None if low_rank is None else low_rank.forms
    tiers = size_experts(config, model_config, device, blueprint.dtype, limits, forms, blueprint.parallel)
    if tiers.placement == "offload" and config.load_format != "dummy":
        # Locking host memory takes long: a checkpoint that is not whole is refused before.
        nowhere = replace(build, device=torch.device("meta"))
        empty = blueprint.make_model(nowhere, None if low_rank is None else low_rank.resident)
        check_weights(empty, blueprint.checkpoint, empty.rules + SVD_RULES)
    return open_offload(config, model_config, device, build, tiers, blueprint.checkpoint, forms)


def _warn(blueprint: Blueprint, offload: Offload | None) -> None:
    """Of low-rank experts and of options without effect, on rank 0 only."""
    config = blueprint.config
    if blueprint.parallel.rank > 0:
        return
    if blueprint.low_rank is not None:
        logger.warning("%s", blueprint.low_rank.notice)
    placement = None if blueprint.model_config.moe is None else "resident" if offload is None else "offload"
    for name, why in options_without_effect(config, blueprint.device.is_gpu, placement).items():
        logger.warning("%s=%r %s", name, getattr(config, name), why)


def _load(blueprint: Blueprint, model: Transformer, offload: Offload | None) -> None:
    places = None if offload is None else offload.places()
    if blueprint.config.load_format == "dummy":
        load_dummy(model, blueprint.config.seed, places)
    else:
        load_weights(model, blueprint.checkpoint, model.rules + SVD_RULES, places)
    if offload is not None:
        offload.watch_gates(model.router_weights())


def _compile_ahead(blueprint: Blueprint, model: Transformer) -> Callable[[], None]:
    """Kernels are compiled in threads while weights load: start-up of Qwen3-0.6B on an H200 with an empty kernel cache
    took 23.6 s without. Not with offloaded experts: uninitialised router outputs would choose them."""
    if not (runs_on_device(model, blueprint.device) and captures_attention(model) and model.graph_safe):
        return lambda: None
    from nanovllm.ops.triton.compile_ahead import compile_ahead

    trial = blueprint.make_runner(model, CacheLayout(blueprint.limits.block_size, 1, 0))
    return compile_ahead(trial.launch_every_kernel, blueprint.device.torch_device)

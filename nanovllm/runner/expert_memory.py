"""Where the experts of a mixture-of-experts model live: facts of this machine in, an `Offload` or None (resident) out.

The arithmetic is `memory/budget.py`, which `nanovllm plan` uses too, so an estimate made before anything is loaded and
the engine agree.

Several ranks must place experts alike: if one had fewer expert buffers than another, all would wait for it. They take
the least that any rank found of each fact, and then each rank does the same arithmetic. What differs after that,
because it is measured (idle time, and so guesses) or granted (how much memory may be locked), only changes when an
expert's bytes arrive on that rank, or whether its CPU computes a rare miss: every rank gives its part of every token's
sum in any case, and nothing else is sent between ranks (moe/projections.py).

gpu_memory_gb, expert_cache_gb and expert_host_gb are limits of one rank. Where none is given, ranks share their
machine's memory evenly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.hardware.pinned import available_host_bytes
from nanovllm.layers.build import Build
from nanovllm.memory.budget import GIB, DoesNotFit, Memory, Tiers, Wants, default_step_tokens, gib, size_tiers
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload.offload import Offload, OffloadOptions
from nanovllm.runner.limits import StepLimits
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm

logger = logging.getLogger("nanovllm")

ALONE = Parallel()
CPU_SHARE = 0.9  # of the memory that is available now: gpu_memory_utilization is about a card


def card_bytes(config: EngineConfig, device: Device) -> int:
    """The card's memory, or that of the smaller one it stands in for (gpu_memory_gb)."""
    _, total = device.memory()
    if config.gpu_memory_gb is None:
        return total
    if config.gpu_memory_gb * GIB > total:
        raise ConfigError(f"gpu_memory_gb={config.gpu_memory_gb}: {device.name} has {gib(total)}; give at most that")
    return int(config.gpu_memory_gb * GIB)


def machine_memory(config: EngineConfig, device: Device, parallel: Parallel = ALONE) -> Memory:
    """The least that any rank has."""
    here = parallel.count_neighbours()
    host, free = parallel.least(available_host_bytes() // here), parallel.least(device.memory()[0])
    card = parallel.least(card_bytes(config, device))
    if device.is_gpu:
        return Memory(card, host, config.gpu_memory_utilization, free_bytes=free)
    return Memory(min(card // here, host), host, CPU_SHARE, context_bytes=0)


def batched_tokens_for_experts(config: EngineConfig, model: ModelConfig, device: Device, dtype: torch.dtype) -> int:
    """max_num_batched_tokens of a mixture-of-experts model on a GPU, where the user gave none."""
    num_ranks, groups = config.tensor_parallel_size, config.expert_parallel_size
    check_expert_ranks(model, Parallel(0, num_ranks, expert_size=groups))
    facts = ModelFacts(model, dtype.itemsize, num_ranks=num_ranks, expert_size=groups)
    return default_step_tokens(machine_memory(config, device), facts, config.max_num_seqs)


def check_expert_ranks(model: ModelConfig, parallel: Parallel) -> None:
    """Refuses experts that cannot be cut or spread over so many ranks; the message has the sizes that can."""
    if model.moe is not None:
        parallel.experts_here(model.moe.num_experts)
        parallel.shard_expert(model.moe.intermediate_size)
    elif parallel.expert_size > 1:
        raise ConfigError(
            f"expert_parallel_size={parallel.expert_size}: {model.architecture} has no experts to spread; leave it out "
            f"(tensor_parallel_size={parallel.size} cuts all of its weights)"
        )


def size_experts(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    dtype: torch.dtype,
    limits: StepLimits,
    forms: tuple[ExpertForm, ...] | None = None,
    parallel: Parallel = ALONE,
    stored: Mapping[str, Any] | None = None,
) -> Tiers:
    """`forms`: of low-rank experts. `stored`: what ModelFacts are to know of matrices that stay as a file has them."""
    wants = Wants(
        limits.max_model_len,
        limits.max_num_batched_tokens,
        config.max_num_seqs,
        config.expert_placement,
        config.expert_cache_gb,
        config.expert_host_gb,
        limits.block_size,
    )
    if parallel.expert_size > 1:
        wants = replace(wants, placement="resident")  # config.py refuses to offload them
    if not device.is_gpu:
        # Buffers and host memory are the same memory here: resident unless the user wants otherwise.
        wanted = "offload" if config.expert_cache_gb is not None else config.expert_placement
        wants = replace(wants, placement="resident" if wanted == "auto" else wanted, reserve_bytes=0)
    redundant = config.num_redundant_experts if config.enable_eplb else None
    sizes = (parallel.size, parallel.expert_size, redundant, config.quantization, config.kv_cache_dtype)
    facts = ModelFacts(model, dtype.itemsize, limits.max_model_len, forms, *sizes)
    facts = replace(facts, **(stored or {}))
    try:
        return size_tiers(machine_memory(config, device, parallel), facts, wants)
    except DoesNotFit as error:
        if device.is_gpu or config.gpu_memory_gb is not None:  # a cap plays a card's part on a CPU
            raise
        text = f"{gib(error.missing_bytes)} of memory are missing for this model; take a machine with more"
        if config.quantization in ("auto", "none"):
            text += ", quantization='int4' (a fifth of float32), dtype='bfloat16' (half)"
        text += ", or expert_placement='offload' (experts are read from disk)"
        raise DoesNotFit(text, error.missing_bytes) from error


def open_offload(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    build: Build,
    tiers: Tiers,
    checkpoint: Checkpoint,
    forms: tuple[ExpertForm, ...] | None = None,
) -> Offload | None:
    if tiers.placement == "resident":
        return None
    if config.expert_cpu_misses and build.scaling is not None and build.scaling.experts:
        raise ConfigError(
            f"expert_cpu_misses=True: an expert in {build.scaling.name} is not computed on the CPU, where expanding it "
            "takes longer than its copy; leave it out, or set quantization='none'"
        )
    for line in tiers.notes:
        logger.info("experts: %s", line)
    assert model.moe is not None
    settings = (config.expert_policy, config.expert_prefetch, config.expert_cpu_misses)
    options = OffloadOptions(tiers.num_cached, tiers.num_streaming, *settings, tiers.host_bytes)
    files = None if config.load_format == "dummy" else checkpoint
    offload = Offload(model.moe, model.hidden_size, build, device, options, files, forms=forms)
    size, num_buffers = gib(tiers.expert_bytes), tiers.num_cached + tiers.num_streaming
    logger.info(
        "experts: %d buffers of %s on %s, %d of them stream", num_buffers, size, device.name, tiers.num_streaming
    )
    return offload

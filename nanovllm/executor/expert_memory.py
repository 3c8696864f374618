"""Where the experts of a mixture-of-experts model live: facts of this machine in, an `Offload` or None (resident) out.

The arithmetic is `moe/sizing.py`, which `nanovllm plan` uses too, so a plan made before anything is loaded and the
engine agree.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.executor.limits import StepLimits
from nanovllm.hardware.device import Device
from nanovllm.hardware.pinned import available_host_bytes
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.moe.offload import Offload, OffloadOptions
from nanovllm.moe.sizing import GIB, Memory, ModelFacts, Tiers, Wants, default_step_tokens, gib, size_tiers
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_layout import ExpertLayout

logger = logging.getLogger("nanovllm")

CPU_SHARE = 0.9  # of the memory that is available now: gpu_memory_utilization speaks of a card


def card_bytes(config: EngineConfig, device: Device) -> int:
    """The card's memory, or that of the smaller one it stands in for (gpu_memory_gb)."""
    _, total = device.memory()
    if config.gpu_memory_gb is None:
        return total
    if config.gpu_memory_gb * GIB > total:
        raise ConfigError(f"gpu_memory_gb={config.gpu_memory_gb}: {device.name} has {gib(total)}; give at most that")
    return int(config.gpu_memory_gb * GIB)


def machine_memory(config: EngineConfig, device: Device) -> Memory:
    host, free = available_host_bytes(), device.memory()[0]
    card = card_bytes(config, device)
    if device.is_gpu:
        return Memory(card, host, config.gpu_memory_utilization, free_bytes=free)
    return Memory(min(card, host), host, CPU_SHARE, context_bytes=0)


def batched_tokens_for_experts(config: EngineConfig, model: ModelConfig, device: Device, dtype: torch.dtype) -> int:
    """max_num_batched_tokens of a mixture-of-experts model on a GPU, for who gave none."""
    return default_step_tokens(machine_memory(config, device), ModelFacts(model, dtype.itemsize), config.max_num_seqs)


def size_experts(
    config: EngineConfig, model: ModelConfig, device: Device, dtype: torch.dtype, limits: StepLimits,
    layouts: tuple[ExpertLayout, ...] | None = None,
) -> Tiers:  # fmt: skip
    """`layouts`: of low-rank experts."""
    wants = Wants(
        limits.max_model_len, limits.max_num_batched_tokens, config.max_num_seqs, config.expert_placement,
        config.expert_cache_gb, config.expert_host_gb, limits.block_size,
    )  # fmt: skip
    if not device.is_gpu:
        # Slots and host memory are the same memory here: resident unless asked otherwise, whatever it takes.
        wanted = "offload" if config.expert_cache_gb is not None else config.expert_placement
        wants = replace(wants, placement="resident" if wanted == "auto" else wanted, reserve_bytes=0)
    facts = ModelFacts(model, dtype.itemsize, limits.max_model_len, layouts)
    return size_tiers(machine_memory(config, device), facts, wants)


def open_offload(
    config: EngineConfig, model: ModelConfig, device: Device, build: Build, tiers: Tiers, checkpoint: Checkpoint,
    layouts: tuple[ExpertLayout, ...] | None = None,
) -> Offload | None:  # fmt: skip
    if tiers.placement == "resident":
        return None
    for line in tiers.notes:
        logger.info("experts: %s", line)
    assert model.moe is not None
    options = OffloadOptions(
        tiers.num_cached, tiers.num_streaming, config.expert_policy, config.expert_prefetch, config.expert_cpu_misses,
        tiers.host_bytes,
    )  # fmt: skip
    files = None if config.load_format == "dummy" else checkpoint
    offload = Offload(model.moe, model.hidden_size, build, device, options, files, layouts=layouts)
    logger.info(
        "experts: %d slots of %s on %s, %d of them stream", tiers.num_slots, gib(tiers.expert_bytes), device.name,
        tiers.num_streaming,
    )  # fmt: skip
    return offload

"""Values of options and seeds that the user has not set."""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.hardware.device import Device
from nanovllm.hardware.host import computing_process
from nanovllm.model_config import ModelConfig
from nanovllm.runner.expert_memory import batched_tokens_for_experts
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.resolve import resolve_model

logger = logging.getLogger("nanovllm")
# A step of a CPU takes long even if it is small, and small blocks waste less of the cache; a GPU needs large steps.
DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "gpu": 16384}
DEFAULT_BLOCK_SIZE = {"cpu": 16, "gpu": 64}


def refuse_fork(owner: int | None = None) -> None:
    """`owner`: the process that made an engine; None: for a new one, which one thread alone can compute."""
    here = os.getpid()
    if owner not in (None, here) or (owner is None and computing_process() != here and torch.get_num_threads() > 1):
        raise EngineDeadError(
            "this process was forked from one that has made an engine, and without its threads the first product would "
            "wait for ever: use multiprocessing's 'spawn', or make the first engine after the fork"
        )


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Any:
    if config.tokenizer is None:
        return checkpoint.load_tokenizer()
    other = open_checkpoint(resolve_model(config.tokenizer))
    try:
        return other.load_tokenizer()
    finally:
        other.close()


def resolve_block_size(config: EngineConfig, device: Device) -> int:
    if config.kvcache_block_size is not None:
        return config.kvcache_block_size
    if config.attn_backend == "flash":
        return 256  # flash-attn 2 reads no smaller pages
    return DEFAULT_BLOCK_SIZE["gpu" if device.is_gpu else "cpu"]


def batched_tokens(config: EngineConfig, model: ModelConfig, device: Device) -> int:
    if model.moe is not None and device.is_gpu:
        dtype = device.resolve_dtype(config.dtype, model.dtype)
        return batched_tokens_for_experts(config, model, device, dtype)
    return max(DEFAULT_BATCHED_TOKENS["gpu" if device.is_gpu else "cpu"], config.max_num_seqs)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest text for which the model's rotary embedding is defined, or less if the user sets less."""
    factor = model.rope.params.get("factor", 1.0)
    trained = model.max_position_embeddings
    if model.rope.kind in ("linear", "dynamic"):
        trained = int(trained * factor)
    elif model.rope.kind == "yarn":
        trained = max(trained, int(model.rope.params.get("original_max_position_embeddings", trained) * factor))
    if config.max_model_len is None:
        return trained
    if config.max_model_len > trained:
        raise ConfigError(f"max_model_len={config.max_model_len}: this model reads at most {trained} tokens")
    return config.max_model_len


def warn_of_small_cache(config: EngineConfig, max_model_len: int, layout: CacheLayout, device: Device) -> None:
    capacity = layout.num_blocks * layout.block_size
    if capacity >= max_model_len:
        return
    remedy = f"raise {'gpu_memory_utilization' if device.is_gpu else 'cpu_kvcache_gb'}"
    if config.num_kvcache_blocks is not None:
        remedy = f"set num_kvcache_blocks={-(-max_model_len // layout.block_size)}"
    logger.warning(
        "the KV cache holds %d tokens, fewer than max_model_len=%d: prompt and output together end there; %s or lower "
        "max_model_len",
        capacity,
        max_model_len,
        remedy,
    )


def derive_seed(engine_seed: int, request_number: int, user_seed: int | None, index: int) -> int:
    """64 bits. A user's seed gives the same completions in every engine and batch; without one, the seed depends on
    the engine's seed and the order of the requests, so that a whole run can be repeated."""
    if user_seed is not None:
        return (user_seed + index) % 2**64
    text = f"{engine_seed} {request_number} {index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

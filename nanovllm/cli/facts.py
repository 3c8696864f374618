"""`nanovllm info`: the machine, the attention backends, and what a model would need, without loading it.

Parameters are counted by building the model on torch's meta device, where tensors have shapes but no memory: the
count is that of the real model, for any family, and takes no time.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nanovllm.attention.base import CacheSpec, attention_specs, expanded_bytes
from nanovllm.attention.select import attention_backend_info, select_backend
from nanovllm.bench.report import versions
from nanovllm.config import EngineConfig
from nanovllm.engine.defaults import resolve_block_size, resolve_max_model_len
from nanovllm.engine.generation_config import read_sampling_defaults
from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.packed import count_weights, expected_bytes
from nanovllm.layers.scaled import Scales
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops.opset import Ops, choose_ops
from nanovllm.runner.build import open_draft
from nanovllm.runner.kv_cache import CacheLayout, block_bytes
from nanovllm.runner.low_rank import open_low_rank
from nanovllm.runner.mtp import check_mtp
from nanovllm.runner.no_effect import options_without_effect
from nanovllm.runner.quantization import choose_kv_dtype, choose_packing, choose_scales, why_not_quantised
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.resolve import resolve_model

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


def collect(config: EngineConfig) -> dict[str, Any]:
    device = Device.choose(config.device)
    free, total = device.memory()
    fp32 = choose_ops(device.is_gpu, torch.float32)  # what the processor can do, whatever dtype was chosen
    offered = attention_backend_info(device)
    facts: dict[str, Any] = {
        "hardware": {
            "device": device.name,
            "architecture": device.architecture,
            "compute_capability": offered["compute_capability"] or "none (no GPU)",
            "memory_bytes": total,
            "free_bytes": free,
            "quantised_products": quantised_products(device.is_gpu, fp32),
        },
        "versions": versions(),
        "attention_backends": offered["backends"],  # for a common model, until ours is known
    }
    try:
        path = resolve_model(config.model, offline=True, progress=False)
    except ModelError as error:  # a model that is not here yet is no mistake; a broken one is
        facts["model"] = {"name": config.model, "not_on_disk": str(error)}
        return facts
    with contextlib.closing(open_checkpoint(path)) as checkpoint:
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        found = outline(config, model, checkpoint, device)
    guesser: Outline | None = None
    if config.speculative_model is not None:
        with open_draft(config, model.vocab_size, offline=True, progress=False) as (own, draft, files):
            guesser = outline(own, draft, files, device)
    facts["attention_backends"] = found.reasons
    facts["model"] = {
        "name": config.model,
        "path": str(path),
        "architecture": model.architecture,
        "dtype": str(found.dtype)[6:],
        "quantization": found.quantization,
        **{name: getattr(model, name) for name in SIZES},
        "max_model_len": found.max_model_len,
        "num_parameters": found.num_parameters,
        "weight_bytes": found.weight_bytes,
        "sampling_defaults": str(read_sampling_defaults(config.generation_config, checkpoint.path)),
    }
    if found.notice is not None:
        facts["model"]["experts"] = found.notice
    placement = expected_placement(config, model, device, found.packs)
    facts |= unused_options(config, device, placement)
    parts = [found] if guesser is None else [found, guesser]
    if guesser is not None:
        sizes = {"num_parameters": guesser.num_parameters, "weight_bytes": guesser.weight_bytes}
        facts["draft_model"] = {"name": config.speculative_model, "quantization": guesser.quantization, **sizes}
    specs, weight_bytes = [spec for part in parts for spec in part.specs], sum(part.weight_bytes for part in parts)
    facts["memory_plan"] = estimate_memory(config, device, specs, found.max_model_len, weight_bytes)
    return facts


@dataclass(frozen=True)
class Outline:
    """Of a model, without its weights."""

    dtype: torch.dtype
    quantization: str
    packs: bool
    max_model_len: int
    num_parameters: int
    weight_bytes: int
    specs: list[CacheSpec]  # of its KV cache
    reasons: dict[str, str]  # for or against each attention backend
    notice: str | None  # of low-rank experts


def outline(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, device: Device) -> Outline:
    low_rank = open_low_rank(replace(config, load_format="dummy"), model, checkpoint)  # dummy: the sizes alone
    uses_mtp = config.speculative_method == "mtp"
    if uses_mtp:
        check_mtp(config, model, checkpoint, low_rank)
    dtype = device.resolve_dtype(config.dtype, model.dtype)
    kv_dtype = choose_kv_dtype(config, model, device.is_gpu, dtype)
    specs = attention_specs(model, dtype, Parallel(), kv_dtype)
    selection = select_backend(config.attn_backend, specs, device, resolve_block_size(config, device))
    max_model_len = resolve_max_model_len(config, model)
    ops = choose_ops(device.is_gpu, dtype)
    packing = choose_packing(config, checkpoint, device.is_gpu, ops)
    scales = choose_scales(config, model, checkpoint, device.is_gpu, low_rank is not None)
    build = Build(dtype, torch.device("meta"), ops, Parallel(), packs=packing is not None, scaling=scales)
    experts = None if low_rank is None else low_rank.resident
    skeleton = find_family(model)(model, Parts(build, selection.backend, max_model_len, experts, uses_mtp))
    return Outline(
        dtype,
        describe_packing(packing, scales, checkpoint),
        packing is not None and low_rank is None,
        max_model_len,
        count_weights(skeleton)[0],
        expected_bytes(skeleton, packing, checkpoint, skeleton.rules),
        [*specs, skeleton.mtp.spec] if uses_mtp else specs,
        dict(selection.reasons),
        None if low_rank is None else low_rank.notice,
    )


def unused_options(config: EngineConfig, device: Device, placement: str | None) -> dict[str, Any]:
    unused = options_without_effect(config, device.is_gpu, placement)
    return {"options": unused} if unused else {}


def quantised_products(is_gpu: bool, ops: Ops) -> str:
    if is_gpu:
        return "fp8, int8, int4" if ops.gemv is not None else "no: they need triton"
    return ops.quantised or f"no: {why_not_quantised(ops)}"


def describe_packing(packing: str | None, scales: Scales | IntegerForm | None, checkpoint: Checkpoint) -> str:
    if isinstance(scales, Scales):
        return "FP8"
    if scales is not None:
        stored = checkpoint.packed_forms() or checkpoint.quantised_types()
        return f"int{scales.bits}" if scales.quantises else ", ".join(sorted(set(stored.values())))
    kinds = ", ".join(sorted(set(checkpoint.quantised_types().values())))
    form = ", ".join(sorted(set(checkpoint.packed_forms().values()))) or kinds
    if packing == "auto":
        return kinds if form == kinds else f"{form}, in memory as {kinds}"
    return packing or (f"none ({form} is expanded)" if form else "none")


def expected_placement(config: EngineConfig, model: ModelConfig, device: Device, packs: bool) -> str | None:
    """Of experts, as far as it is known without measuring memory; offload where it may come to that. `packs`: they are
    quantised."""
    if model.moe is None or config.expert_placement == "resident":
        return None if model.moe is None else "resident"
    wanted = device.is_gpu or config.expert_placement == "offload" or config.expert_cache_gb is not None
    return ("disk" if packs else "offload") if wanted else "resident"


def estimate_memory(
    config: EngineConfig, device: Device, specs: list[CacheSpec], max_model_len: int, weight_bytes: int
) -> dict[str, Any]:
    """As the executor would size it; on a GPU less precisely, because the executor computes a step to measure it."""
    block_size = resolve_block_size(config, device)
    found: dict[str, Any] = {"kv_bytes_per_token": block_bytes(specs, 1), "kv_block_size": block_size}
    if expanded := expanded_bytes(specs):
        found["expanded_kv_bytes"] = expanded
    spare = int(config.cpu_kvcache_gb * 2**30)
    if device.is_gpu:
        free, total = device.memory()
        spare = min(free, int(total * config.gpu_memory_utilization)) - weight_bytes
    try:
        layout = CacheLayout.fit([spare], specs, block_size, config.num_kvcache_blocks)
    except ConfigError as error:
        return {**found, "does_not_fit": str(error)}
    num_blocks = layout.num_blocks
    if config.num_kvcache_blocks is None and not device.is_gpu:
        num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // block_size))
    num_tokens = num_blocks * block_size
    return {
        **found,
        "kv_blocks": num_blocks,
        "kv_bytes": num_blocks * layout.bytes_per_block,
        "kv_tokens": num_tokens,
        "full_length_sequences": round(num_tokens / max_model_len, 2),
    }


def show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for section, values in facts.items():
        table = Table(title=section.replace("_", " "), title_justify="left", show_header=False, box=None)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in values.items():
            table.add_row(name.replace("_", " "), readable(name, value))
        console.print(table)
        console.print()


def readable(name: str, value: Any) -> str:
    if name.endswith("bytes") or name == "kv_bytes_per_token":
        return f"{value:,} ({value / 2**30:.2f} GiB)" if value >= 2**27 else f"{value:,} ({value / 2**10:.1f} KiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)

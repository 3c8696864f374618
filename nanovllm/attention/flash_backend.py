"""Attention by the flash-attention library: one launch for a whole mixed step, from the paged cache where it can.

Four ways lead to these kernels; the first that is here is used:
- flash-attn 3 (module `flash_attn_interface`, Hopper only): takes a page table with lengths, blocks of any size;
- flash-attn 2 (module `flash_attn`, 2.5 or newer has block tables): cumulative lengths and a block table;
- torch's own copy of flash-attn 2, `torch.nn.attention.varlen.varlen_attn`, if it takes a block table (torch 2.12);
- the same in torch 2.10 and 2.11, which take none: the keys and values of the step are gathered side by side first, one
  layer at a time, and read again by the kernel. Three times the traffic of a block table; blocks of any size.

Flash-attn 2 loads keys in tiles of up to 256 and a tile must not cross a block, hence its blocks of 256 slots.

All of them align the causal mask to the *last* key (query i of n sits at position context_len - n + i), as our cache
needs after a cached prefix. Their window (left, right) counts the neighbours, ours the token itself too: left is
window - 1. Lengths are summed on the device, once a step: nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.optional import load, needs_ampere_in_16_bits
from nanovllm.attention.sdpa import GATHER_BYTES, bytes_per_token, find_slots, runs
from nanovllm.hardware.device import Device


@dataclass(frozen=True)
class Kernels:
    library: str
    block_multiple: int
    attend: Callable[..., torch.Tensor]  # (q, k_cache, v_cache, batch, spec)
    has_window: bool = True


def _window(spec: AttentionSpec) -> tuple[int, int]:
    return (-1 if spec.window is None else spec.window - 1, 0)


def _cumulative_context_lens(batch: AttentionBatch) -> torch.Tensor:
    if "cu_seqlens_k" not in batch.memo:
        batch.memo["cu_seqlens_k"] = F.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return batch.memo["cu_seqlens_k"]


def _flash3(batch: AttentionBatch, spec: AttentionSpec) -> dict[str, Any]:
    """Its varlen function refuses cumulative key lengths beside a page table; this one takes the lengths themselves."""
    return {
        "cache_seqlens": batch.context_lens,
        "page_table": batch.block_tables,
        "cu_seqlens_q": batch.query_starts,
        "max_seqlen_q": max(batch.on_host.query_lens),
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": _window(spec),
    }


def _flash2(batch: AttentionBatch, spec: AttentionSpec) -> dict[str, Any]:
    return {
        "cu_seqlens_q": batch.query_starts,
        "cu_seqlens_k": _cumulative_context_lens(batch),
        "max_seqlen_q": max(batch.on_host.query_lens),
        "max_seqlen_k": batch.max_context_len,
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": _window(spec),
        "block_table": batch.block_tables,
    }


def _torch_varlen(batch: AttentionBatch, spec: AttentionSpec) -> dict[str, Any]:
    """Causal is a window of nothing to the right."""
    return {
        "cu_seq_q": batch.query_starts,
        "cu_seq_k": _cumulative_context_lens(batch),
        "max_q": max(batch.on_host.query_lens),
        "max_k": batch.max_context_len,
        "scale": spec.scale,
        "window_size": _window(spec),
        "seqused_k": batch.context_lens,
        "block_table": batch.block_tables,
    }


def _paged(
    function: Callable[..., torch.Tensor], arguments: Callable[..., dict[str, Any]], **flags: Any
) -> Callable[..., torch.Tensor]:
    """`arguments(batch, spec)`: all but q and the caches, by the names that the function gives them."""
    return lambda q, k_cache, v_cache, batch, spec: function(q, k_cache, v_cache, **arguments(batch, spec), **flags)


@dataclass(frozen=True)
class Gathered:
    """Some sequences of a step whose keys are laid side by side, and where they lie in the cache."""

    rows: slice  # of q
    cu_q: torch.Tensor  # int32 [sequences + 1]
    cu_k: torch.Tensor  # int32 [sequences + 1]
    max_q: int
    max_k: int
    slots: torch.Tensor  # int64 [keys]


def gathered_keys(batch: AttentionBatch, spec: AttentionSpec, block_size: int) -> list[Gathered]:
    """What all layers of this kind share: one piece, or more so that no copy exceeds GATHER_BYTES. Nothing here waits
    for the device: every size comes from the lists on the host."""
    host, starts = batch.on_host, [0, *accumulate(batch.on_host.query_lens)]
    lens, cu_k = batch.context_lens, _cumulative_context_lens(batch)
    pieces = []
    for run in runs(host.context_lens, GATHER_BYTES // bytes_per_token(spec)):
        first, last, total = run.start, run.stop, sum(host.context_lens[run])
        own_cu_k = cu_k[first : last + 1] - cu_k[first]
        numbers = torch.arange(last - first, device=lens.device).repeat_interleave(lens[run], output_size=total)
        positions = torch.arange(total, device=lens.device) - own_cu_k[numbers]
        own_cu_q = batch.query_starts[first : last + 1] - starts[first]
        longest = max(host.query_lens[run]), max(host.context_lens[run])
        slots = find_slots(batch.block_tables, numbers + first, positions, block_size)
        pieces.append(Gathered(slice(starts[first], starts[last]), own_cu_q, own_cu_k, *longest, slots))
    return pieces


def _torch_gathered(function: Callable[..., torch.Tensor], parameters: set[str]) -> Callable[..., torch.Tensor]:
    """Torch 2.10 (is_causal; neither scale nor window) and 2.11 (scale and window_size). They share
    KV heads without a flag."""

    def flags(spec: AttentionSpec) -> dict[str, Any]:
        chosen: dict[str, Any] = {"scale": spec.scale} if "scale" in parameters else {}  # the default is the same
        if "enable_gqa" in parameters:
            chosen["enable_gqa"] = True
        return chosen | ({"window_size": _window(spec)} if "window_size" in parameters else {"is_causal": True})

    def attend(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        if ("gathered", spec) not in batch.memo:
            batch.memo["gathered", spec] = gathered_keys(batch, spec, k_cache.shape[1])
        outputs = []
        for piece in batch.memo["gathered", spec]:
            keys, values = (cache.flatten(0, 1).index_select(0, piece.slots) for cache in (k_cache, v_cache))
            places = (piece.cu_q, piece.cu_k, piece.max_q, piece.max_k)
            outputs.append(function(q[piece.rows], keys, values, *places, **flags(spec)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return attend


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) if callable(function) else set()


@functools.cache
def find_kernels(hopper: bool) -> Kernels | str:
    """The library to use, or why there is none. What is installed does not change in the life of a process."""
    refusals = []
    flash3 = load("flash_attn_interface") if hopper else "flash-attn 3 is for Hopper"
    if not isinstance(flash3, str):
        function = getattr(flash3, "flash_attn_with_kvcache", None)
        if "page_table" in _parameters(function):
            return Kernels("flash-attn 3", 16, _paged(function, _flash3))  # type: ignore[arg-type]
    flash2 = load("flash_attn")
    if isinstance(flash2, str):
        refusals.append(flash2)
    else:
        function = getattr(flash2, "flash_attn_varlen_func", None)
        if "block_table" in _parameters(function):
            return Kernels("flash-attn 2", 256, _paged(function, _flash2))  # type: ignore[arg-type]
        refusals.append(f"flash_attn {getattr(flash2, '__version__', '')} has no block tables (2.5 has)")
    varlen = load("torch.nn.attention.varlen")
    function = None if isinstance(varlen, str) else getattr(varlen, "varlen_attn", None)
    parameters = _parameters(function)
    if function is not None and {"block_table", "seqused_k", "window_size"} <= parameters:
        gqa = {"enable_gqa": True} if "enable_gqa" in parameters else {}  # without this flag KV heads are shared, too
        return Kernels(f"torch {torch.__version__}", 256, _paged(function, _torch_varlen, **gqa))
    if function is not None and parameters & {"is_causal", "window_size"}:
        library = f"torch {torch.__version__} varlen_attn, gathered"
        return Kernels(library, 1, _torch_gathered(function, parameters), has_window="window_size" in parameters)
    without = "varlen_attn (2.10 has)" if function is None else "causal mask in varlen_attn"
    return f"{'; '.join(refusals)}, and torch {torch.__version__} has no {without}"


class FlashBackend:
    name = "flash"
    graph_safe = False  # the longest query of the step is a number on the host, and sets the launch grid
    kv_dtypes: tuple[torch.dtype, ...] = ()

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        if reason := needs_ampere_in_16_bits(spec, device):
            return reason
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"head_dim={spec.head_dim}: must be a multiple of 8, at most 256"
        kernels = find_kernels(device.capability is not None and device.capability[0] == 9)
        if isinstance(kernels, str):
            return kernels
        if spec.window is not None and not kernels.has_window:
            return f"{kernels.library}, has no sliding window (torch 2.11 has, and flash-attn)"
        if block_size % kernels.block_multiple:
            least = kernels.block_multiple
            return f"{kernels.library} reads blocks of {least} slots, not {block_size}; set kvcache_block_size={least}"
        return None

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        kernels = find_kernels(q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9)
        assert isinstance(kernels, Kernels), "rejects() was called before"
        return kernels.attend(q, k_cache, v_cache, batch, spec)

"""Attention through torch's scaled_dot_product_attention. Runs on every device.

SDPA takes keys as one dense [length, heads, head_dim] tensor; a paged cache has them in blocks. Two things keep the
cost of that down. A sequence whose blocks happen to lie one after the other (the block manager prefers that) is passed
as a *view* of the cache: nothing is copied. Otherwise only the slots that are needed are gathered, and only for the
layer being computed: at no time does a dense copy of the cache exist.

On a CPU every sequence is a call of its own. A GPU is faster than its host can make calls, so there the decodes of a
step are one call, padded to the longest of them: `padded_decodes` computes, once a step, which slots to gather and what
to mask, and cuts the step into pieces whose copies stay below GATHER_BYTES. A prompt's chunk is one call everywhere.

The q heads that share a KV head are packed as extra query rows of that head: for one new token and a group of 3, K and
V are read once instead of three times (2 cores, SmolLM2, context 200: 33 us a call against 46 with enable_gqa).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.hardware.device import Device
from nanovllm.ops.kv_cache import expand_kv

# The most that gathered keys and values may take at a time. The step that start-up tries is one of prompts, so this
# copy was not measured then: it must fit in what is kept free besides (GRAPH_BYTES, memory/budget.py), and SDPA's plain
# formula makes a second copy. 256 MiB are 65,536 tokens of a layer of Qwen3-0.6B: a card is busy with those for longer
# than its host needs for the next call.
GATHER_BYTES = 256 << 20
# SDPA's fused kernel for masked rows copies a mask whose rows are no multiple of 16 bytes, in every layer.
MASK_MULTIPLE = 16


def bytes_per_token(spec: AttentionSpec) -> int:
    """K and V of one token in one layer."""
    return 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


def gather(cache: torch.Tensor, span: slice | torch.Tensor, context_len: int) -> torch.Tensor:
    """One sequence's keys or values, [context_len, kv_heads, head_dim]: a view where its blocks adjoin, else a copy."""
    if isinstance(span, slice):
        return cache.flatten(0, 1)[span]
    return cache.index_select(0, span).flatten(0, 1)[:context_len]


def find_slots(block_tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """int64, like positions: where the tokens at these positions of these rows' sequences lie, in blocks of `size`."""
    return block_tables[rows, positions // size].long() * size + positions % size


def runs(lens: list[int], most: int) -> Iterator[slice]:
    """Neighbours whose lengths add up to at most `most`; a longer one is a run of its own."""
    start = total = 0
    for i, length in enumerate(lens):
        if i > start and total + length > most:
            yield slice(start, i)
            start, total = i, 0
        total += length
    if lens:
        yield slice(start, len(lens))


@dataclass(frozen=True)
class Padded:
    """Decodes that are one call: sequences `rows` of the step, each with as many keys as the longest."""

    rows: slice
    slots: torch.Tensor  # int64 [sequences * keys]; beyond a sequence's end its last slot again
    mask: torch.Tensor  # [sequences, 1, 1, keys] in the dtype of q: 0 or -inf, added to the scores
    empty: torch.Tensor | None  # bool [sequences, 1, 1]: no context at all (padding); None if there is no such row


def padded_decodes(batch: AttentionBatch, spec: AttentionSpec, block_size: int) -> list[Padded]:
    """What all layers of this kind share. Nothing here waits for the device: sizes come from the lists on the host."""
    pieces = []
    for rows, num_keys in _cut(batch.on_host.context_lens[: batch.num_decodes], spec):
        lens = batch.context_lens[rows, None].long()
        first = torch.zeros_like(lens) if spec.window is None else (lens - spec.window).clamp(min=0)
        positions = first + torch.arange(num_keys, device=lens.device)
        # A repeated key of its own, not whatever lies beyond: a masked NaN of another request would still be a NaN.
        inside = positions.minimum((lens - 1).clamp(min=0))
        numbers = torch.arange(rows.start, rows.stop, device=lens.device)[:, None]
        mask = torch.zeros(positions.shape, dtype=spec.dtype, device=lens.device)
        mask.masked_fill_(positions >= lens.clamp(min=1), float("-inf"))  # one key is always seen: no row is 0 / 0
        pieces.append(
            Padded(
                rows,
                find_slots(batch.block_tables, numbers, inside, block_size).flatten(),
                mask[:, None, None],
                (lens == 0)[..., None] if 0 in batch.on_host.context_lens[rows] else None,
            )
        )
    return pieces


def _cut(context_lens: list[int], spec: AttentionSpec) -> Iterator[tuple[slice, int]]:
    """Runs of sequences, each with its number of keys, of at most GATHER_BYTES when padded; at least one sequence."""
    most = GATHER_BYTES // bytes_per_token(spec)
    start = num_keys = 0
    for i, context_len in enumerate(context_lens):
        seen = max(1, context_len if spec.window is None else min(context_len, spec.window))
        seen = -(-seen // MASK_MULTIPLE) * MASK_MULTIPLE
        if i > start and (i + 1 - start) * max(num_keys, seen) > most:
            yield slice(start, i), num_keys
            start, num_keys = i, 0
        num_keys = max(num_keys, seen)
    yield slice(start, len(context_lens)), num_keys


class SdpaBackend:
    name = "sdpa"
    graph_safe = False
    kv_dtypes: tuple[torch.dtype, ...] = ()  # it could, but would expand all keys of every sequence for each token

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        return None

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        outputs = []
        start = 0  # sequence and row alike: decodes stand first, with a row each
        if q.device.type != "cpu" and batch.num_decodes > 1:  # one alone needs neither padding nor mask
            start = batch.num_decodes
            outputs.append(self._decode_padded(q[:start], k_cache, v_cache, batch, spec))
        rest = batch.on_host.after(start)
        for num_new, context_len, span in zip(rest.query_lens, rest.context_lens, rest.spans):
            # Also this step's own keys as they are stored: however a prompt is cut, a token sees the same.
            keys, values = (expand_kv(gather(cache, span, context_len), spec.dtype) for cache in (k_cache, v_cache))
            attend = self._decode if num_new == 1 else self._prefill
            outputs.append(attend(q[start : start + num_new], keys, values, spec))
            start += num_new
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode_padded(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """The leading decodes of a step, q [decodes, heads, head_dim]."""
        if ("padded", spec) not in batch.memo:
            batch.memo["padded", spec] = padded_decodes(batch, spec, k_cache.shape[1])
        outputs = []
        for piece in batch.memo["padded", spec]:
            shape = (-1, piece.mask.shape[-1])
            keys, values = (  # [sequences, kv_heads, keys, head_dim]
                cache.flatten(0, 1).index_select(0, piece.slots).unflatten(0, shape).transpose(1, 2)
                for cache in (k_cache, v_cache)
            )
            packed = q[piece.rows].unflatten(1, (spec.num_kv_heads, -1))  # [sequences, kv_heads, group, head_dim]
            out = self._sdpa(packed, keys, values, spec, mask=piece.mask).reshape(-1, spec.num_heads, spec.head_dim)
            outputs.append(out if piece.empty is None else out.masked_fill(piece.empty, 0.0))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if len(keys) == 0:
            return torch.zeros_like(q)
        if spec.window is not None:
            keys, values = keys[-spec.window :], values[-spec.window :]
        packed = q.unflatten(1, (spec.num_kv_heads, -1))  # [1, kv_heads, group, head_dim]
        out = self._sdpa(packed, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], spec)
        return out.reshape(1, spec.num_heads, spec.head_dim)

    def _prefill(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        num_new, context_len = len(q), len(keys)
        mask = None
        if num_new != context_len or spec.window is not None:  # is_causal aligns top-left: wrong after a cached prefix
            distance = (
                torch.arange(context_len - num_new, context_len, device=q.device)[:, None]
                - torch.arange(context_len, device=q.device)[None, :]
            )
            mask = distance >= 0
            if spec.window is not None:
                mask &= distance < spec.window
        if q.device.type != "cpu" and spec.num_heads != spec.num_kv_heads:
            return self._prefill_by_kv_head(q, keys, values, spec, mask)
        q, keys, values = (t.transpose(0, 1)[None] for t in (q, keys, values))  # [1, heads, length, head_dim]
        out = self._sdpa(q, keys, values, spec, mask=mask, is_causal=mask is None)
        return out[0].transpose(0, 1)

    def _prefill_by_kv_head(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Shared KV heads for kernels without them: the KV heads are the batch, their groups the heads, and K and V are
        repeated by a stride of 0. On a GPU `enable_gqa` is for the flash kernel alone, which takes no mask, no float32
        and no card before Ampere; anywhere else torch falls back to the plain formula, which writes all scores."""
        packed = q.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, new, head_dim]
        group = packed.shape[1]
        keys, values = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (keys, values))
        out = self._sdpa(packed, keys, values, spec, mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _sdpa(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        spec: AttentionSpec,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        grouped = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=grouped
        )


class SdpaMathBackend(SdpaBackend):
    """The same with torch's plain matmul-softmax-matmul: the baseline that others are measured against."""

    name = "sdpa.math"

    def _sdpa(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super()._sdpa(*args, **kwargs)

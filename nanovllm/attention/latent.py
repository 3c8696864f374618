"""Backends for latent attention (layers/mla.py): absorbed for decodes, expanded for prompts.

A decode reads the cached latents themselves, for all heads. A prompt's chunk computes keys and values of its new tokens
from their latents and attends to those; what was cached before it (earlier chunks, a shared prefix) is expanded in
pieces of at most WORKSPACE_BYTES, and the pieces are merged by their log-sum-exp: however long a context is, a step of
so many new tokens takes the same memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from nanovllm.attention.base import AttentionBatch, LatentSpec
from nanovllm.attention.sdpa import find_slots
from nanovllm.hardware.device import Device
from nanovllm.ops import mla

# Keys and values of a piece. Start-up measures a step of whole prompts, without cached prefixes: this must fit in what
# is kept free besides (GRAPH_BYTES, memory/budget.py). 128 MiB are 13,107 tokens of DeepSeek-V2-Lite.
WORKSPACE_BYTES = 128 << 20
Piece = tuple[torch.Tensor, torch.Tensor]  # slots of the keys, int64; key_starts, int32 (ops/mla.py)


class LatentBackend:
    """In plain PyTorch."""

    name = "torch.mla"
    graph_safe = False
    kv_dtypes: tuple[torch.dtype, ...] = ()

    def rejects(self, spec: LatentSpec, device: Device, block_size: int) -> str | None:
        return None

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        spec: LatentSpec,
        kv_up: torch.Tensor,
    ) -> torch.Tensor:
        """q_nope [tokens, heads, nope_dim], q_pe [tokens, heads, rope_dim]; `latent` of the step's tokens, which is in
        the cache already; kv_up [heads * (nope_dim + v_dim), kv_rank] -> [tokens, heads, v_dim]."""
        n = batch.num_decodes
        decoded = self._absorbed(q_nope[:n], q_pe[:n], cache, batch, spec, kv_up) if n else None
        if n == len(batch.context_lens):
            assert decoded is not None
            return decoded
        prompts = self._expanded(q_nope[n:], q_pe[n:], latent[n:], cache, batch, spec, kv_up)
        return prompts if decoded is None else torch.cat((decoded, prompts))

    def _absorbed(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        spec: LatentSpec,
        kv_up: torch.Tensor,
    ) -> torch.Tensor:
        to_k, to_v = kv_up.view(spec.num_heads, -1, spec.kv_rank).split((spec.nope_dim, spec.v_dim), dim=1)
        return self._decode(q_nope, q_pe, to_k, to_v, cache, batch, spec.scale)

    def _expanded(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        spec: LatentSpec,
        kv_up: torch.Tensor,
    ) -> torch.Tensor:
        if "latent" not in batch.memo:  # the same for all layers
            rest = batch.without_decodes() if batch.num_decodes else batch
            batch.memo["latent"] = rest.query_starts, list(prefix_pieces(rest, spec, cache))
        starts, pieces = batch.memo["latent"]

        def attend(keys: torch.Tensor, key_starts: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
            c, k_pe = keys.split((spec.kv_rank, spec.rope_dim), dim=1)
            kv = torch.nn.functional.linear(c, kv_up).unflatten(1, (spec.num_heads, -1))
            return self._piece(q_nope, q_pe, kv, k_pe, starts, key_starts, spec.scale, causal)

        out, logsum = attend(latent, starts, True)
        for slots, key_starts in pieces:
            more = attend(cache.flatten(0, 1).index_select(0, slots), key_starts, False)
            out, logsum = mla.merge_pieces(out, logsum, *more)
        return out

    def _decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        to_k: torch.Tensor,
        to_v: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        n = len(q_pe)
        q_latent = mla.per_head(q_nope, to_k)  # [n, heads, kv_rank]
        found = mla.latent_decode(q_latent, q_pe, cache, batch.context_lens[:n], batch.block_tables[:n], scale)
        return mla.per_head(found, to_v.transpose(1, 2))

    def _piece(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return mla.latent_piece(*args)


def prefix_pieces(batch: AttentionBatch, spec: LatentSpec, cache: torch.Tensor) -> Iterator[Piece]:
    """What the prompts of a step had in the cache before it, cut into pieces that fit the workspace: neighbouring
    sequences share a piece, a long prefix takes several."""
    most = max(1, WORKSPACE_BYTES // spec.expanded_bytes)
    host = batch.on_host
    spans: list[tuple[int, int, int]] = []  # of the piece at hand: (sequence, from, to)
    room = most
    for number, (context_len, num_new) in enumerate(zip(host.context_lens, host.query_lens)):
        start, prefix = 0, context_len - num_new
        while start < prefix:
            stop = min(prefix, start + room)
            spans.append((number, start, stop))
            start, room = stop, room - (stop - start)
            if room == 0:
                yield _make_piece(spans, batch, cache.shape[1])
                spans, room = [], most
    if spans:
        yield _make_piece(spans, batch, cache.shape[1])


def _make_piece(spans: list[tuple[int, int, int]], batch: AttentionBatch, block_size: int) -> Piece:
    device = batch.block_tables.device
    lens = [0] * len(batch.on_host.context_lens)
    slots = []
    for number, start, stop in spans:
        lens[number] = stop - start
        positions = torch.arange(start, stop, device=device)
        slots.append(find_slots(batch.block_tables, torch.full_like(positions, number), positions, block_size))
    starts = torch.tensor([0, *lens], device=device).cumsum(0).int()
    return torch.cat(slots), starts


class TritonLatentBackend(LatentBackend):
    """By our own kernels. Those of decodes may be captured in a graph, and read each latent once for all heads."""

    name = "triton.mla"
    graph_safe = True

    def rejects(self, spec: LatentSpec, device: Device, block_size: int) -> str | None:
        if not device.is_gpu:
            return "needs a GPU"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if device.capability is not None and device.capability < (8, 0):
            return f"needs compute capability 8.0 (Ampere) or newer, this card has {device.capability}"
        return None

    def _decode(self, *args: Any) -> torch.Tensor:
        from nanovllm.ops.triton.mla_absorb import FEW_ROWS, absorb
        from nanovllm.ops.triton.mla_decode import latent_decode

        q_nope, q_pe, to_k, to_v, cache, batch, scale = args
        n = len(q_pe)
        q_latent = absorb(q_nope, to_k) if n <= FEW_ROWS else mla.per_head(q_nope, to_k)
        places = (cache, batch.context_lens[:n], batch.block_tables[:n], scale, batch.max_context_len)
        return latent_decode(q_latent, q_pe, *places, to_v=to_v)

    def _piece(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from nanovllm.ops.triton.mla_prefill import latent_piece

        return latent_piece(*args)

"""Attention by our own Triton kernels, which read the paged cache in place: no gather, no dense copy, no host sync.

Sequences with one query (decodes) go to the split-KV kernel, the others to the flash kernel; the runner sorts
decodes first, so a mixed step is two launches over two slices.
"""

from __future__ import annotations

import importlib.util

import torch

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.hardware.device import Device
from nanovllm.ops.kv_cache import E4M3


class TritonBackend:
    name = "triton"
    graph_safe = True
    kv_dtypes: tuple[torch.dtype, ...] = (E4M3,)

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        if not device.is_gpu:
            return "needs a GPU"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if device.capability is not None and device.capability < (7, 5):
            return f"needs compute capability 7.5 (Turing) or newer, this card has {device.capability}"
        if spec.head_dim > 256:
            return f"head_dim={spec.head_dim}: at most 256"
        return None

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from nanovllm.ops.triton.common import empty_rows
        from nanovllm.ops.triton.decode_attention import decode_attention, launch_for
        from nanovllm.ops.triton.prefill_attention import prefill_attention

        n, lens, tables = batch.num_decodes, batch.context_lens, batch.block_tables
        out, scale, window = empty_rows(len(q), q.shape[1] * q.shape[2], q).view(q.shape), spec.scale, spec.window
        if n:
            longest = min(batch.max_context_len, window or 2**31)
            launch = launch_for(q[:n], spec.num_kv_heads, longest, scales is not None)
            decodes = (q[:n], k_cache, v_cache, lens[:n], tables[:n], scale, launch, window, out[:n])
            decode_attention(*decodes, scales=scales)
        if n < len(lens):
            rest = (q, k_cache, v_cache, batch.query_starts[n:], lens[n:], tables[n:], scale, window, out)
            prefill_attention(*rest, scales=scales)
        return out

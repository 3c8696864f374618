"""Attention on a CPU with our own C kernel: decodes read the paged cache in place, nothing is gathered or copied.

A prompt's chunk has enough arithmetic to be worth a matrix library, so those go to SDPA (sdpa.py).
"""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.hardware.device import Device
from nanovllm.ops.native.build import load_library
from nanovllm.ops.native.ops import NativeOps


class NativeBackend(SdpaBackend):
    name = "native"
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.int8)

    def __init__(self, kernels: NativeOps | None = None) -> None:
        """`kernels`: of the engine that computes with it; `rejects` needs none."""
        self._kernels = kernels

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        if device.is_gpu:
            return "for CPUs"
        if spec.dtype != torch.float32:
            return f"computes in float32, not {str(spec.dtype).removeprefix('torch.')}"
        library = load_library()
        return library if isinstance(library, str) else None

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        n = batch.num_decodes
        if n == 0:
            return super().attend(q, k_cache, v_cache, batch, spec)
        assert self._kernels is not None
        decoded = self._kernels.decode_attention(
            q[:n].contiguous(),
            k_cache,
            v_cache,
            batch.context_lens[:n],
            batch.block_tables[:n],
            spec.scale,
            spec.window,
        )
        if n == q.shape[0]:
            return decoded
        return torch.cat((decoded, super().attend(q[n:], k_cache, v_cache, batch.without_decodes(), spec)))

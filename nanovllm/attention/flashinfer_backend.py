"""Attention by FlashInfer's paged prefill kernels, which serve decodes too (a prefill of one token).

FlashInfer plans before it runs: it reads the lengths on the host and cuts the work into equal shares for the
multiprocessors. One such plan serves all layers of a step with the same AttentionSpec, so it is kept with the step.
Planning waits for the GPU, once a step; that wait also keeps one step's plan from overwriting, in the library's pinned
memory, the plan of a step whose copy to the GPU is still queued.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.optional import load, needs_ampere_in_16_bits
from nanovllm.hardware.device import Device

WORKSPACE_BYTES = 128 << 20  # partial results of split sequences; the size that FlashInfer recommends
HEAD_DIMS = (64, 128, 256)


class FlashInferBackend:
    name = "flashinfer"
    graph_safe = False
    kv_dtypes: tuple[torch.dtype, ...] = ()

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        if reason := needs_ampere_in_16_bits(spec, device):
            return reason
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim={spec.head_dim}: must be one of {', '.join(map(str, HEAD_DIMS))}"
        module = load("flashinfer")
        if isinstance(module, str):
            return module
        if not hasattr(module, "BatchPrefillWithPagedKVCacheWrapper"):
            return "this version of flashinfer has no BatchPrefillWithPagedKVCacheWrapper"
        return None

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        key = ("flashinfer", spec)
        if key not in batch.memo:
            batch.memo[key] = self._plan(q, k_cache.shape[1], batch, spec)
        return batch.memo[key].run(q, (k_cache, v_cache))

    def _plan(self, q: torch.Tensor, block_size: int, batch: AttentionBatch, spec: AttentionSpec) -> Any:
        flashinfer = load("flashinfer")
        assert not isinstance(flashinfer, str), "rejects() was called before"
        lens = batch.context_lens
        num_blocks = (lens + block_size - 1) // block_size
        columns = torch.arange(batch.block_tables.shape[1], device=q.device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            batch.query_starts,
            F.pad(num_blocks.cumsum(0, dtype=torch.int32), (1, 0)),
            batch.block_tables[columns < num_blocks[:, None]],  # the tables, one after the other, unpadded
            (lens - 1) % block_size + 1,  # slots in use of each sequence's last block
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            block_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return wrapper

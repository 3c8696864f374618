"""Attention by flash-attn 1.x: the last version for Turing cards, older than paged caches.

It has no block tables and no shared KV heads, so the keys of this step's sequences are gathered side by side and
repeated for each query head, one layer at a time. It aligns the causal mask to the *first* key, where ours is aligned
to the last; the two are equal only if there are as many queries as keys. So a step is three kinds of sequence: decodes
(one query sees everything: no mask), whole prompts (causal), and chunks after a cached prefix, which SDPA computes.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.optional import load, major_version
from nanovllm.attention.sdpa import SdpaBackend, gather, runs
from nanovllm.hardware.device import Device

MODULE = "flash_attn.flash_attn_interface"
MAX_GATHERED = 16384  # tokens whose keys are copied at a time: bounds the copy, whatever the batch


class Flash1Backend(SdpaBackend):
    name = "flash1"

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None:
        if not device.is_gpu or device.capability is None:
            return "needs a GPU"
        major, minor = device.capability
        if not (7, 5) <= device.capability < (10, 0):
            return f"is for compute capability 7.5 (Turing) to 9.0 (Hopper), this card has {major}.{minor}"
        if spec.dtype != torch.float16 and (spec.dtype != torch.bfloat16 or major < 8):
            return f"has no {str(spec.dtype).removeprefix('torch.')} on this card; use dtype='float16'"
        if spec.head_dim > 128 or spec.head_dim % 8:
            return f"head_dim={spec.head_dim}: must be a multiple of 8, at most 128"
        if spec.window is not None:
            return "has no sliding window"
        package = load("flash_attn")
        if isinstance(package, str):
            return package
        if major_version(package) != 1:
            return f"needs flash_attn 1.x, {getattr(package, '__version__', 'an unknown version')} is installed"
        module = load(MODULE)
        return module if isinstance(module, str) else None

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        out, host = torch.empty_like(q), batch.on_host
        starts = [0, *accumulate(host.query_lens)]
        decodes, prompts = [], []
        for i, (num_new, context_len) in enumerate(zip(host.query_lens, host.context_lens)):
            if num_new == 1:
                decodes.append(i)
            elif num_new == context_len:
                prompts.append(i)
            else:
                keys, values = (gather(cache, host.spans[i], context_len) for cache in (k_cache, v_cache))
                rows = slice(starts[i], starts[i + 1])
                out[rows] = self._prefill(q[rows], keys, values, spec)
        for causal, some in ((False, decodes), (True, prompts)):
            for run in runs([host.context_lens[i] for i in some], MAX_GATHERED):
                self._flash(q, k_cache, v_cache, batch, spec, some[run], causal, out)
        return out

    def _flash(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        some: list[int],
        causal: bool,
        out: torch.Tensor,
    ) -> None:
        """The sequences numbered `some`, written to their rows of `out`."""
        flash = load(MODULE)
        assert not isinstance(flash, str), "rejects() was called before"
        group = spec.num_heads // spec.num_kv_heads
        host = batch.on_host
        starts = [0, *accumulate(host.query_lens)]
        query_lens, context_lens = ([lens[i] for i in some] for lens in (host.query_lens, host.context_lens))
        rows = [slice(starts[i], starts[i + 1]) for i in some]
        keys, values = (
            torch.cat([gather(cache, host.spans[i], host.context_lens[i]) for i in some]).repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(q.device, non_blocking=True)
            for lens in (query_lens, context_lens)
        )
        result = flash.flash_attn_unpadded_func(
            torch.cat([q[row] for row in rows]),
            keys,
            values,
            cu_q,
            cu_k,
            max(query_lens),
            max(context_lens),
            0.0,
            softmax_scale=spec.scale,
            causal=causal,
        )
        for row, piece in zip(rows, result.split(query_lens)):
            out[row] = piece

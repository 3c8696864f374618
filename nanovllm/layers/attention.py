"""The attention layer: project, turn, store, attend, project.

`forward(x, step, cache)` reads all it needs from its arguments: which tokens (step) and where their keys and values
live (cache). There is no context that a caller must have set up before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.ops.kv_cache import store_kv
from nanovllm.ops.norm import rms_norm
from nanovllm.ops.rotary import apply_rotary


@dataclass(frozen=True)
class Step:
    """The tensors of one step. Tokens of all sequences stand in one row after another; nothing is padded."""

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    logit_rows: torch.Tensor  # int64: the tokens whose logits are wanted
    attention: AttentionBatch


KVCache = tuple[torch.Tensor, torch.Tensor]  # of one layer: [blocks, block_size, kv_heads, head_dim] each


class HeadNorm(nn.Module):
    """RMSNorm over each head of q and k (Qwen3)."""

    def __init__(self, head_dim: int, eps: float, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(head_dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(
        self, hidden: int, spec: AttentionSpec, backend: AttentionBackend, like: torch.Tensor, parallel: Parallel,
        qkv_bias: bool, out_bias: bool, head_norm_eps: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.backend = backend
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = QKVParallelLinear(
            hidden, heads * parallel.size, kv_heads * parallel.size, head_dim, qkv_bias, like, parallel
        )
        self.out = RowParallelLinear(heads * parallel.size * head_dim, hidden, out_bias, like, parallel)
        self.q_norm = HeadNorm(head_dim, head_norm_eps, like) if head_norm_eps else None
        self.k_norm = HeadNorm(head_dim, head_norm_eps, like) if head_norm_eps else None

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, step: Step, cache: KVCache) -> torch.Tensor:
        """cos_sin [tokens, rotary_dim]: gathered once a step, the same for every layer."""
        spec = self.spec
        qkv = self.qkv(x).view(len(x), -1, spec.head_dim)  # [tokens, heads + 2 kv_heads, head_dim]
        q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, k, cos_sin, None)
        k_cache, v_cache = cache
        store_kv(k, v, k_cache, v_cache, step.attention.slots)
        out = self.backend.attend(q, k_cache, v_cache, step.attention, spec)
        return self.out(out.flatten(1))

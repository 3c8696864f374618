"""The attention layer: project, rotate (RoPE), store, attend, project.

`forward(x, rope, step, cache)` reads everything from its arguments: the tokens (step) and the place of their keys and
values (cache). There is no global context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from nanovllm.attention.select import print_attention_backend_info as print_attention_backend_info
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class Step:
    """The tensors of one step: the tokens of all sequences one after another, without padding."""

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    logit_rows: torch.Tensor | None  # int64: the tokens whose logits are computed; None = all
    attention: AttentionBatch


KVCache = tuple[torch.Tensor, ...]  # of one layer: K and V, [blocks, block_size, kv_heads, head_dim] each


@dataclass(frozen=True)
class Rope:
    """Angles for the tokens of a step, in the form that the operators take (ops/opset.py)."""

    angles: Any  # gathered for each token, or the whole table if positions are given
    positions: torch.Tensor | None


class HeadNorm(Layer):
    """The weight of an RMSNorm over each head of q or k (Qwen3); applied together with RoPE."""

    def __init__(self, head_dim: int, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(head_dim)


class Attention(Layer):
    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        num_kv_heads: int,
        backend: AttentionBackend,
        build: Build,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm_eps: float | None = None,
    ) -> None:
        """`spec` is this rank's, `num_kv_heads` the model's: ranks may share one."""
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.ops = build.ops
        heads = spec.num_heads * build.parallel.size
        rest = (qkv_bias, build, spec.kv_dtype is None)  # in parts: RoPE takes the dtype of q from the cache
        self.qkv = QKVParallelLinear(hidden, heads, num_kv_heads, spec.head_dim, *rest)
        self.out = RowParallelLinear(heads * spec.head_dim, hidden, out_bias, build, in_parts=True)
        self.head_norm_eps = head_norm_eps
        if head_norm_eps is not None:
            self.q_norm = HeadNorm(spec.head_dim, build)
            self.k_norm = HeadNorm(spec.head_dim, build)

    def forward(self, x: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> torch.Tensor:
        return self.out(self.mix(self.qkv(x), rope, step, cache))

    def mix(self, qkv: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> torch.Tensor:
        """All between the two projections: [tokens, (heads + 2 kv_heads) * head_dim] -> [tokens, heads * head_dim]."""
        norms = None if self.head_norm_eps is None else (self.q_norm.weight, self.k_norm.weight)
        places = (rope.angles, rope.positions, *cache, step.attention.slots)
        # q: [tokens, heads, head_dim]. This step's K and V are in the cache afterwards.
        q = self.ops.qk_norm_rope(qkv, norms, self.head_norm_eps or 0.0, *places, self.spec.num_heads)
        return self.backend.attend(q, cache[0], cache[1], step.attention, self.spec).flatten(1)

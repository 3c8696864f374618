"""Multi-head latent attention (DeepSeek): all keys and values of a token are computed from one vector, and only that is
cached.

    c = norm(W_DKV h)  (512 numbers)         k_i = [W_UK_i c | k_pe]      v_i = W_UV_i c       for head i
    k_pe = rotate(W_KR h)  (64)              q_i = [q_nope_i | rotate(q_pe_i)]

c and k_pe are cached, 576 numbers a token, however many heads there are. RoPE must not stand between c and W_UK, or the
absorption below would be impossible: so a part of each key carries the position (k_pe, the same for all heads), and the
rest carries none.

Expanded: k_i and v_i are computed as written. Right for a prompt, where each is used by many queries.

Absorbed: for one query, k_i and v_i need not exist. With scores s over the keys j and p = softmax(s),

    s_j = q_nope . (W_UK c_j) + q_pe . k_pe_j = (W_UK^T q_nope) . c_j + q_pe . k_pe_j
        = [W_UK^T q_nope | q_pe] . [c_j | k_pe_j]
    out = sum_j p_j (W_UV c_j) = W_UV (sum_j p_j c_j)

so W_UK is applied to the query and W_UV to the result, once a token, and attention itself has one key [c | k_pe] and
one value c for all heads. More arithmetic for each key (576 + 512 numbers a head, not 192 + 128), but 576 numbers are
read in place of heads * 320: a decode is limited by what it reads.

Of several ranks each has a share of the heads: W_UK, W_UV, W_UQ and W_O are cut; c and k_pe are computed and cached by
all.
"""

from __future__ import annotations

import torch

from nanovllm.attention.base import LatentSpec
from nanovllm.attention.latent import LatentBackend
from nanovllm.layers.attention import KVCache, Rope, Step
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.model_config import MlaConfig

EPS = 1e-6  # of the norms inside, whatever rms_norm_eps is


class LatentAttention(Layer):
    def __init__(self, hidden: int, mla: MlaConfig, spec: LatentSpec, backend: LatentBackend, build: Build) -> None:
        super().__init__()
        self.mla, self.spec, self.backend, self.ops = mla, spec, backend, build.ops
        heads = spec.num_heads * build.parallel.size
        q_size = heads * mla.head_dim
        # W_DKV, W_KR and what makes q (W_DQ, or all of it) read the same input: one product.
        if mla.q_rank is None:
            shards = {"q": build.parallel.shard(0, q_size, "num_attention_heads * head_dim")}
            self.down = Linear(hidden, {"q": shards["q"].length, "kv": mla.latent_size}, False, build, shards)
        else:
            self.down = Linear(hidden, {"q": mla.q_rank, "kv": mla.latent_size}, False, build)
            self.q_norm = RMSNorm(mla.q_rank, EPS, build)
            self.q_up = ColumnParallelLinear(mla.q_rank, q_size, False, build)
        self.kv_norm = RMSNorm(mla.kv_rank, EPS, build)
        plain = build.plain  # its weight is used as a tensor
        self.kv_up = ColumnParallelLinear(mla.kv_rank, heads * (mla.nope_dim + mla.v_dim), False, plain)
        self.out = RowParallelLinear(heads * mla.v_dim, hidden, False, build)

    @property
    def value_weight(self) -> torch.Tensor:
        """W_UV, [heads, v_dim, kv_rank]."""
        return self.kv_up.weight.view(self.spec.num_heads, -1, self.mla.kv_rank)[:, self.mla.nope_dim :]

    def forward(self, x: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> torch.Tensor:
        q, kv = self.down(x).split(tuple(self.down.parts.values()), dim=1)
        if self.mla.q_rank is not None:
            q = self.q_up(self.q_norm(q, None)[0])
        q_nope, q_pe = q.unflatten(1, (-1, self.mla.head_dim)).split((self.mla.nope_dim, self.mla.rope_dim), dim=2)
        q_pe, latent = self._rotate(q_pe, kv, rope, step, cache)
        out = self.backend.attend(q_nope, q_pe, latent, cache[0], step.attention, self.spec, self.kv_up.weight)
        return self.out(out.flatten(1))

    def store(self, x: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> None:
        """Only what later tokens read of these."""
        _, kv = self.down(x).split(tuple(self.down.parts.values()), dim=1)
        unused = kv[:, None, self.mla.kv_rank :]  # in the place of q_pe, which nothing reads
        self._rotate(unused, kv, rope, step, cache)

    def _rotate(
        self, q_pe: torch.Tensor, kv: torch.Tensor, rope: Rope, step: Step, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, places = (self.kv_norm.weight, EPS), (rope.angles, rope.positions, *cache, step.attention.slots)
        return self.ops.latent_rope(q_pe, kv, *norm, *places, self.mla.interleaved)

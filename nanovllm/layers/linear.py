"""Linear layers in the Megatron form, and the parts a checkpoint fills them with.

A column-parallel layer splits its output over the ranks, a row-parallel layer its input; one all-reduce follows the
latter, none is needed between the two. Several matrices with the same input are stacked into one (one GEMM instead of
three). The weight loader reads three tables: `parts` (the stacked parts and their numbers of rows), `shards` (which
part of the checkpoint's tensor each is) and `elsewhere` (which parts are another rank's).
"""

from __future__ import annotations

import torch

from nanovllm.hardware.parallel import Parallel, Shard
from nanovllm.layers.build import Build, Layer


class Linear(Layer):
    """y = x @ weight.T + bias, with weight [rows, columns] filled by one or more named parts of the checkpoint."""

    def __init__(
        self,
        in_size: int,
        parts: dict[str, int],
        bias: bool,
        build: Build,
        shards: dict[str, Shard] | None = None,
        in_parts: bool = False,
    ) -> None:
        """`in_parts`: the result may come in parts, which the operator that reads it adds up (Ops.linear_parts)."""
        super().__init__()
        self.parts = parts  # name -> number of rows, in order
        self.shards = shards or {}  # name -> which part of the checkpoint's tensor; absent = all of it
        self.elsewhere: dict[str, tuple[int, ...]] = {}  # parts that other ranks have, and their shapes
        self.product = build.ops.linear_parts if in_parts else build.ops.linear
        self.weight = build.matrix(parts, in_size)
        self.bias = build.parameter(sum(parts.values())) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    def __init__(self, in_size: int, out_size: int, bias: bool, build: Build) -> None:
        shard = build.parallel.shard(0, out_size, "output size")
        super().__init__(in_size, {"": shard.length}, bias, build, {"": shard})


class MergedColumnParallelLinear(Linear):
    """gate and up of an MLP: two column-parallel layers over one input."""

    def __init__(self, in_size: int, out_sizes: dict[str, int], bias: bool, build: Build) -> None:
        shards = {part: build.parallel.shard(0, size, "intermediate_size") for part, size in out_sizes.items()}
        super().__init__(in_size, {part: shard.length for part, shard in shards.items()}, bias, build, shards)


class QKVParallelLinear(Linear):
    """Query, key and value projections, split by heads. Ranks beyond the number of KV heads share one."""

    def __init__(
        self,
        in_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        build: Build,
        in_parts: bool = False,
    ) -> None:
        q = build.parallel.shard(0, num_heads * head_dim, "num_attention_heads * head_dim")
        build.parallel.share(num_heads, "num_attention_heads")
        kv_heads, first = build.parallel.share_kv_heads(num_kv_heads)
        kv = Shard(0, first * head_dim, kv_heads * head_dim, num_kv_heads * head_dim)
        shards = {"q": q, "k": kv, "v": kv}
        parts = {part: shard.length for part, shard in shards.items()}
        super().__init__(in_size, parts, bias, build, shards, in_parts)


class RowParallelLinear(Linear):
    """Its input is already split; the partial results are added up over the ranks, the bias by one of them."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool,
        build: Build,
        reduces: bool = True,
        in_parts: bool = False,
    ) -> None:
        """`reduces`: False if the caller adds up the ranks' results. `in_parts`: as in Linear, with one rank only."""
        shard = build.parallel.shard(1, in_size, "input size")
        in_parts = in_parts and build.parallel.size == 1
        super().__init__(shard.length, {"": out_size}, bias, build, {"": shard}, in_parts)
        self.parallel = build.parallel if reduces else Parallel(build.parallel.rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.parallel.rank == 0 else None
        return self.parallel.all_reduce(self.product(x, self.weight, bias))

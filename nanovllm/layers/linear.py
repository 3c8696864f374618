"""Linear layers in the Megatron form, and the parts a checkpoint fills them with.

A column-parallel layer splits its output over the ranks, a row-parallel layer its input; one all-reduce follows the
latter, none is needed between the two. Several matrices that read the same input are stacked into one (one GEMM
instead of three): `parts` names the stacked pieces and their rows, which is all that the weight loader needs to know.
"""

from __future__ import annotations

import torch

from nanovllm.layers.build import Build, Layer


class Linear(Layer):
    """y = x @ weight.T + bias, with weight [rows, columns] filled by one or more named parts of the checkpoint."""

    def __init__(self, in_size: int, parts: dict[str, int], bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts  # name -> number of rows, in order
        self.ops = build.ops
        self.weight = build.parameter(sum(parts.values()), in_size)
        self.bias = build.parameter(sum(parts.values())) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    def __init__(self, in_size: int, out_size: int, bias: bool, build: Build) -> None:
        super().__init__(in_size, {"": build.parallel.share(out_size, "output size")}, bias, build)


class MergedColumnParallelLinear(Linear):
    """gate and up of an MLP: two column-parallel layers over one input."""

    def __init__(self, in_size: int, out_sizes: dict[str, int], bias: bool, build: Build) -> None:
        shares = {part: build.parallel.share(size, "intermediate_size") for part, size in out_sizes.items()}
        super().__init__(in_size, shares, bias, build)


class QKVParallelLinear(Linear):
    """Query, key and value projections, split by heads."""

    def __init__(
        self, in_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, build: Build
    ) -> None:
        q_rows = build.parallel.share(num_heads, "num_attention_heads") * head_dim
        kv_rows = build.parallel.share(num_kv_heads, "num_key_value_heads") * head_dim
        super().__init__(in_size, {"q": q_rows, "k": kv_rows, "v": kv_rows}, bias, build)


class RowParallelLinear(Linear):
    def __init__(self, in_size: int, out_size: int, bias: bool, build: Build) -> None:
        super().__init__(build.parallel.share(in_size, "input size"), {"": out_size}, bias, build)
        self.parallel = build.parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(super().forward(x))

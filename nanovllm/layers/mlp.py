"""The gated MLP of the Llama family: down(silu(gate(x)) * up(x)), gate and up in one GEMM."""

from __future__ import annotations

import torch

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(Layer):
    def __init__(
        self, hidden: int, intermediate: int, bias: bool, build: Build, reduces: bool = True, in_parts: bool = False
    ) -> None:
        """`reduces`, `in_parts`: of RowParallelLinear."""
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(hidden, {"gate": intermediate, "up": intermediate}, bias, build)
        self.down = RowParallelLinear(intermediate, hidden, bias, build, reduces, in_parts)
        self.ops = build.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.gated_linear(x, self.gate_up.weight, self.gate_up.bias))

"""The gated MLP of the Llama family: down(silu(gate(x)) * up(x)), gate and up in one GEMM."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.ops.activation import silu_mul


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, bias: bool, like: torch.Tensor, parallel: Parallel) -> None:
        super().__init__()
        sizes = {"gate": intermediate, "up": intermediate}
        self.gate_up = MergedColumnParallelLinear(hidden, sizes, bias, like, parallel)
        self.down = RowParallelLinear(intermediate, hidden, bias, like, parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))

"""RMSNorm as a layer: the weight and its epsilon; the arithmetic is in ops/norm.py."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.ops.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed sum, sum): the residual stream travels beside the branch, so adding and norming are one pass."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

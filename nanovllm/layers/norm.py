"""RMSNorm as a layer: the weight and its epsilon; the arithmetic is in ops/."""

from __future__ import annotations

import torch

from nanovllm.layers.build import Build, Layer


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.eps = eps
        self.ops = build.ops

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed sum, sum): the residual stream travels beside the branch, so adding and norming are one pass."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

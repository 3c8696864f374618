"""Build: what every layer is built from, whatever the model: operators, ranks, and where parameters live."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.hardware.parallel import Parallel
from nanovllm.ops.opset import Ops


@dataclass(frozen=True)
class Build:
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    parallel: Parallel

    def parameter(self, *shape: int) -> nn.Parameter:
        """Not initialised: the loader proves that every parameter is filled."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

"""Build: what every layer is built from, whatever the model: operators, ranks, and where parameters live.
Layer: an nn.Module whose call is its forward and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.hardware.parallel import Parallel
from nanovllm.ops.opset import Ops


class Layer(nn.Module):
    """Parameters are found and named as in any module, but there are no hooks: looking for them costs 3 us a call, 270
    times a token in SmolLM2."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


@dataclass(frozen=True)
class Build:
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    parallel: Parallel

    def parameter(self, *shape: int) -> nn.Parameter:
        """Not initialised: the loader proves that every parameter is filled."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

"""Build: what every layer is built from, whatever the model: operators, ranks, and where parameters live.
Layer: an nn.Module whose call is its forward and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanovllm.hardware.huge_pages import HugePages
from nanovllm.hardware.parallel import Parallel
from nanovllm.hardware.side_stream import SideStream
from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.packed import PackedWeight
from nanovllm.layers.scaled import Scales
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
    side: SideStream | None = None  # where small work may run beside other work
    packs: bool = False  # matrices stay quantised in memory
    kv_dtype: torch.dtype | None = None  # of the KV cache, where it is not dtype
    memory: HugePages | None = None  # for weights on a CPU
    scaling: Scales | IntegerForm | None = None  # matrices are in fewer bits, on a GPU

    def matrix(self, parts: dict[str, int], columns: int, fine: bool = False) -> Any:
        """The weight of a linear map: rows of the named parts below each other. `fine`: see PackedWeight."""
        if self.packs:
            return PackedWeight(parts, columns, fine, self.memory)
        if self.scaling is not None and not fine:
            return self.scaling.weight(parts, columns, self.dtype, self.device)
        return self.parameter(sum(parts.values()), columns)

    @property
    def plain(self) -> Build:
        """For weights that are used as tensors, or are too small or too important to be quantised."""
        return replace(self, packs=False, scaling=None)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Not initialised: the loader proves that every parameter is filled."""
        dtype = dtype or self.dtype
        if self.memory is not None and self.device.type == "cpu":
            return nn.Parameter(self.memory.empty(shape, dtype), requires_grad=False)
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)

"""A layer's part of `Offload` (offload.py): meets `SplitExperts` (layer.py), dense or low-rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.layers.build import Build
from nanovllm.moe.lowrank import SharedFactors
from nanovllm.weights.expert_layout import ExpertLayout

if TYPE_CHECKING:
    from nanovllm.moe.offload import Offload


class OffloadedExperts:
    """No module and no parameters: the experts live in the store."""

    graph_safe = False  # the host looks at what was chosen

    def __init__(self, offload: Offload, layer: int) -> None:
        self.offload, self.layer = offload, layer  # layer: among the sparse ones

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.offload.compute(self.layer, x, ids, weights)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave(self, total: torch.Tensor) -> torch.Tensor:
        return total


class OffloadedLowRank(SharedFactors):
    """V lives in the store, the shared matrices are parameters."""

    graph_safe = False

    def __init__(self, offload: Offload, layer: int, layout: ExpertLayout, build: Build) -> None:
        super().__init__(layout, build)
        self.offload, self.layer = offload, layer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.leave(self.offload.compute(self.layer, x, ids, weights, self.enter(x)))

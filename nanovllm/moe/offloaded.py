"""A layer's part of `Offload` (offload.py): meets `SplitExperts` (layer.py), dense or low-rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.layers.build import Build
from nanovllm.moe.factors import Factors
from nanovllm.weights.expert_layout import ExpertLayout

if TYPE_CHECKING:
    from nanovllm.moe.offload import Offload


class OffloadedExperts(Factors):
    """Experts live in the store; what low-rank ones share is a parameter."""

    graph_safe = False  # the host looks at what was chosen

    def __init__(self, offload: Offload, layer: int, layout: ExpertLayout, build: Build) -> None:
        """`layer`: among the sparse ones. `layout`: of whole experts."""
        super().__init__(layout, build)
        self.offload, self.layer = offload, layer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.leave(self.offload.compute(self.layer, x, ids, weights, self.enter(x)))

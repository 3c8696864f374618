"""A layer's part of `Offload` (offload.py): meets `Experts` (moe/layer.py), dense or low-rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.layers.build import Build
from nanovllm.moe.projections import SharedProjections
from nanovllm.weights.expert_form import ExpertForm

if TYPE_CHECKING:
    from nanovllm.moe.offload.offload import Offload


class OffloadedExperts(SharedProjections):
    """Experts live in the store; the projections that low-rank ones share are parameters."""

    graph_safe = False  # the host reads what was chosen

    def __init__(self, offload: Offload, layer: int, form: ExpertForm, build: Build) -> None:
        """`layer`: among the sparse ones. `form`: of whole experts."""
        super().__init__(form, build)
        self.offload, self.layer = offload, layer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.leave(self.offload.compute(self.layer, x, ids, weights, self.enter(x)))

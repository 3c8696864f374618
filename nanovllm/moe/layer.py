"""The sparse layer: a router chooses top_k experts for every token, and their outputs are added, each by its weight.

Where the experts live is hidden behind `Experts`: ResidentExperts keeps all of them in the memory of the device;
OffloadedExperts brings those that do not fit from elsewhere and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear
from nanovllm.model_config import MoeConfig


class Experts(Protocol):
    """How the chosen experts are computed, wherever they live."""

    graph_safe: bool  # no host sync and fixed addresses: a step with these experts can be captured

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, /) -> torch.Tensor:
        """x [tokens, hidden], ids int32 and weights float32 [tokens, top_k] -> [tokens, hidden]."""


MakeExperts = Callable[[int, MoeConfig, int, Build], Experts]  # (layer index, facts, hidden size, build)


class MoeLayer(Layer):
    def __init__(self, moe: MoeConfig, hidden: int, experts: Experts, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.top_k, self.renormalise = moe.top_k, moe.renormalise
        self.gate = Linear(hidden, {"": moe.num_experts}, False, build)  # whole on every rank: all must choose alike
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.route(x))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts and their weights, [tokens, top_k] each."""
        return self.ops.route(self.gate(x), self.top_k, self.renormalise)

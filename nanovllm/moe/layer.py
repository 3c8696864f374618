"""The sparse layer: a router chooses top_k experts for every token, and their outputs are added, each by its weight.

Where the experts live is hidden behind `Experts`: ResidentExperts keeps all of them in the memory of the device;
OffloadedExperts brings those that do not fit from elsewhere and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.model_config import MoeConfig

# Up to so many the shared MLP runs beside the experts, on a stream of its own. DeepSeek-V2-Lite's layer on an H200, us
# in a captured graph, one after the other / beside / folded into the stack of experts; more was not measured:
#     tokens      1                8             64            256           512          2048
#             53 / 44 / 51  180 / 167 / 170 304 / 289 / 314 325 / 317 / 334 347 / 336 / 365 659 / 653 / 706
OVERLAP_TOKENS = 2048


class Experts(Protocol):
    """How the chosen experts are computed, wherever they live."""

    graph_safe: bool  # no host sync and fixed addresses: a step with these experts can be captured

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, /) -> torch.Tensor:
        """x [tokens, hidden], ids int32 and weights float32 [tokens, top_k] -> [tokens, hidden]. Beside a shared MLP,
        experts that are cut over ranks give this rank's part of the sum. Those that are graph_safe also take `join`,
        which waits for what is to be added to the sum, and gives it."""


MakeExperts = Callable[[int, MoeConfig, int, Build], Experts]  # (layer index, facts, hidden size, build)


class MoeLayer(Layer):
    def __init__(self, moe: MoeConfig, hidden: int, experts: Experts, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.top_k, self.renormalise = moe.top_k, moe.renormalise
        self.groups, self.scale = (moe.num_groups, moe.top_groups), moe.scale
        # Whole on every rank, so that all choose alike; and never quantised: it is small, and decides between experts.
        self.gate = Linear(hidden, {"": moe.num_experts}, False, build.plain)
        # In fp32: it was trained by small steps, and decides between scores that differ little.
        self.gate_bias = build.parameter(moe.num_experts, dtype=torch.float32) if moe.scoring == "sigmoid" else None
        self.experts = experts
        # Experts that are cut over ranks give partial sums, as the shared MLP does: add_shared reduces both at once.
        cut = build.parallel.expert_size == 1
        self.ranks = build.parallel if cut else Parallel()
        self.shared = GatedMLP(hidden, moe.shared_size, False, build, not cut) if moe.shared_size else None
        self.side = build.side if experts.graph_safe else None
        # By the last call of `route`; counted after the step (moe/load.py)
        self.chosen = torch.empty(0, moe.top_k, dtype=torch.int32, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.side is None or self.shared is None or len(x) > OVERLAP_TOKENS:
            return self.add_shared(self.experts(x, *self.route(x)), x)
        join = self.side.start(self.shared, x)
        return self.experts(x, *self.route(x), join)  # type: ignore[call-arg]

    def add_shared(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """With what the MLP gives that every token of x takes (DeepSeek)."""
        return routed if self.shared is None else self.ranks.all_reduce(routed + self.shared(x))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts and their weights, [tokens, top_k] each."""
        choice = (self.top_k, self.renormalise, self.scale, *self.groups)
        ids, weights = self.ops.route(self.gate(x), *choice, self.gate_bias)
        self.__dict__["chosen"] = ids  # setattr of a module takes 2 us
        return ids, weights

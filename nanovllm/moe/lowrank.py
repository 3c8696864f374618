"""Low-rank experts: each token goes through the shared matrices once, its experts work in few dimensions.

    z = x @ [U1 | U3]                                  once a token, for all of its experts       `enter`
    pairs = expert_pairs(z, V...)                      gate reads the first half of z, up the second
    w2 "input":   silu(gate) * up is multiplied by U2 inside expert_pairs (`between`), since it differs by expert
    w2 "output":  the experts are added in r2 dimensions, then U2 is applied once                 `leave`

V is stacked as dense experts are, so kernels, slots, copies and captured pieces are those of dense experts with other
sizes (weights/expert_layout.py). The shared matrices are parameters, on the device wherever V lives.
"""

from __future__ import annotations

import torch

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear
from nanovllm.model_config import MoeConfig
from nanovllm.moe.layer import MakeExperts, ResidentExperts, expert_parts
from nanovllm.weights.expert_layout import DOWN, ExpertLayout


class SharedFactors(Layer):
    """What the experts of a layer have in common."""

    def __init__(self, layout: ExpertLayout, build: Build) -> None:
        super().__init__()
        assert layout.is_low_rank
        assert build.parallel.size == 1, "an executor for several ranks would cut V by its intermediate size"
        self.ops, self.layout = build.ops, layout
        self.u13 = Linear(layout.hidden, {"w1": layout.columns, "w3": layout.columns}, False, build)
        rows, columns = layout.shared["u2"]
        self.u2 = Linear(columns, {"": rows}, False, build)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self.u13(x)

    @property
    def between(self) -> torch.Tensor | None:
        return self.u2.weight if self.layout.side == "input" else None

    def leave(self, total: torch.Tensor) -> torch.Tensor:
        return self.u2(total) if self.layout.side == "output" else total


class LowRankExperts(SharedFactors):
    """All V of a layer in the memory of the device."""

    graph_safe = True

    def __init__(self, layout: ExpertLayout, num_experts: int, build: Build) -> None:
        super().__init__(layout, build)
        rows, columns = layout.parts[DOWN]
        self.gate_up = Linear(layout.columns, expert_parts(num_experts, layout.intermediate), False, build)
        self.down = Linear(columns, {str(e): rows for e in range(num_experts)}, False, build)
        self.gate_up_shape = (num_experts, 2 * layout.intermediate, layout.columns)
        self.down_shape = (num_experts, rows, columns)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up.weight.view(self.gate_up_shape), self.down.weight.view(self.down_shape)
        pairs = self.ops.expert_pairs(self.enter(x), gate_up, down, ids, weights, between=self.between)
        return self.leave(self.ops.sum_pairs(pairs))


def resident_experts(layouts: dict[int, ExpertLayout]) -> MakeExperts:
    """`Parts.experts` for a model with these layouts by layer; experts that were multiplied out are dense ones."""

    def make(layer: int, moe: MoeConfig, hidden: int, build: Build) -> LowRankExperts | ResidentExperts:
        layout = layouts[layer]
        if layout.is_low_rank:
            return LowRankExperts(layout, moe.num_experts, build)
        return ResidentExperts(moe, hidden, build)

    return make

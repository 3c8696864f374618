"""The sparse layer: a router chooses top_k experts for every token, and their outputs are added, each by its weight.

The layer knows how experts are chosen, not where they live: that is `Experts`. ResidentExperts keeps all of them in the
memory of the device; those that do not fit it come from elsewhere and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear
from nanovllm.model_config import MoeConfig
from nanovllm.moe.factors import Factors
from nanovllm.moe.spread import Spread
from nanovllm.weights.expert_layout import DOWN, GATE, UP, ExpertLayout


class Experts(Protocol):
    """How the chosen experts are computed, wherever they live."""

    graph_safe: bool  # no host sync and fixed addresses: a step with these experts can be captured

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], ids int32 and weights float32 [tokens, top_k] -> [tokens, hidden]."""


class SplitExperts(Experts, Protocol):
    """Experts whose computing can be taken apart: `leave(sum_pairs(pairs of enter(x)))`. Dense ones read x and write
    the result; low-rank ones (factors.py) work in fewer dimensions, which a token enters and leaves once."""

    def enter(self, x: torch.Tensor) -> torch.Tensor: ...

    def leave(self, total: torch.Tensor) -> torch.Tensor: ...


MakeExperts = Callable[[int, MoeConfig, int, Build], Experts]  # (layer index, facts, hidden size, build)


class ResidentExperts(Factors):
    """Experts of a layer, stacked in two matrices: all of them, of which several ranks have a share each as of a dense
    MLP; or those that this rank was given, if they are spread over ranks (spread.py)."""

    def __init__(self, moe: MoeConfig, hidden: int, build: Build, layout: ExpertLayout | None = None) -> None:
        """`layout`: of low-rank experts."""
        super().__init__(layout or ExpertLayout.dense(hidden, moe.intermediate_size), build)
        here, parallel = build.parallel.experts_here(moe.num_experts), build.parallel
        self.gate_up = self._stack(expert_parts(moe.num_experts), here, build)
        self.down = self._stack({str(e): DOWN for e in range(moe.num_experts)}, here, build)
        share = self.layout
        self.gate_up_shape = (len(here), 2 * share.intermediate, share.columns)
        self.down_shape = (len(here), *share.parts[DOWN])
        self.spread = Spread(len(here), parallel) if parallel.expert_size > 1 else None
        self.graph_safe = self.spread is None

    def _stack(self, kinds: dict[str, str], here: range, build: Build) -> Linear:
        """`kinds`: name of a part in the stack ("3.gate", "3") -> which part of an expert it is."""
        mine = {name: kind for name, kind in kinds.items() if int(name.split(".")[0]) in here}
        rows = {name: self.layout.parts[kind][0] for name, kind in mine.items()}
        shards = {name: self.shards[kind] for name, kind in mine.items() if kind in self.shards}
        stack = Linear(self.layout.parts[next(iter(kinds.values()))][1], rows, False, build, shards)
        stack.elsewhere = {name: self.whole.parts[kind] for name, kind in kinds.items() if name not in mine}
        return stack

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.spread is not None:
            return self.spread(self, x, ids, weights)
        return self.leave(self.ops.sum_pairs(self.pairs(self.enter(x), ids, weights)))

    def pairs(self, z: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What each chosen expert gives, [tokens, top_k, out_size]. Expert e is in slot e, less the first one here."""
        gate_up, down = self.gate_up.weight.view(self.gate_up_shape), self.down.weight.view(self.down_shape)
        return self.ops.expert_pairs(z, gate_up, down, slots, weights, between=self.between)


def resident_experts(layouts: dict[int, ExpertLayout]) -> MakeExperts:
    """`Parts.experts` for a model with these layouts by layer. V of low-rank experts is stacked as dense experts are,
    so kernels, slots, copies and captured pieces are theirs with other sizes (weights/expert_layout.py)."""
    return lambda layer, moe, hidden, build: ResidentExperts(moe, hidden, build, layouts[layer])


def expert_parts(num_experts: int) -> dict[str, str]:
    """gate and up of expert 0, then of expert 1, ...: an expert is one contiguous piece of the stack."""
    return {f"{e}.{which}": which for e in range(num_experts) for which in (GATE, UP)}


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

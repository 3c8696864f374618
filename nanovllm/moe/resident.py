"""Experts that all stay in the device's memory: those of a layer stacked in two matrices; in fewer bits one block of
bytes after the other, as offloaded ones are kept (scaled.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nanovllm.layers.build import Build
from nanovllm.layers.linear import Linear
from nanovllm.model_config import MoeConfig
from nanovllm.moe.layer import MakeExperts
from nanovllm.moe.projections import SharedProjections
from nanovllm.moe.scaled import ScaledExperts, dense_form
from nanovllm.moe.spread import Spread
from nanovllm.weights.expert_form import DOWN, GATE, UP, ExpertForm


class ResidentExperts(SharedProjections):
    """All experts of a layer, of which several ranks have a share each as of a dense MLP; or, if experts are spread
    over ranks (spread.py), those of this rank."""

    def __init__(self, moe: MoeConfig, hidden: int, build: Build, form: ExpertForm | None = None) -> None:
        """`form`: of low-rank experts."""
        super().__init__(form or dense_form(moe, hidden, build), build, not moe.shared_size)
        build = replace(build.plain, packs=build.packs and form is None)
        here, parallel = build.parallel.experts_here(moe.num_experts), build.parallel
        self.scaled: ScaledExperts | None = None
        if self.form.is_bytes:
            self.scaled = ScaledExperts(self.form, self.shards, here, moe.num_experts, build.device)
        else:
            self.gate_up = self._stack(expert_parts(moe.num_experts), here, build)
            self.down = self._stack({str(e): DOWN for e in range(moe.num_experts)}, here, build)
        share = self.form
        self.gate_up_shape = (len(here), 2 * share.intermediate, share.columns)
        self.down_shape = (len(here), *share.parts[DOWN])
        self.spread = Spread(len(here), parallel) if parallel.expert_size > 1 else None
        self.graph_safe = self.spread is None

    def _stack(self, kinds: dict[str, str], here: range, build: Build) -> Linear:
        """`kinds`: name of a part in the stack ("3.gate", "3") -> which part of an expert it is."""
        mine = {name: kind for name, kind in kinds.items() if int(name.split(".")[0]) in here}
        rows = {name: self.form.parts[kind][0] for name, kind in mine.items()}
        shards = {name: self.shards[kind] for name, kind in mine.items() if kind in self.shards}
        stack = Linear(self.form.parts[next(iter(kinds.values()))][1], rows, False, build, shards)
        stack.elsewhere = {name: self.whole.parts[kind] for name, kind in kinds.items() if name not in mine}
        return stack

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, join: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        if self.spread is not None:
            return self.spread(self, x, ids, weights)
        pairs = self.pairs(self.enter(x), ids, weights)
        more = None if join is None else join()
        if more is None or self.form.is_low_rank:
            total = self.leave(self.ops.sum_pairs(pairs))
            return total if more is None else total + more
        return self.ops.sum_pairs(pairs, more)

    def pairs(self, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What each chosen expert gives, [tokens, top_k, out_size]. `ids`: among those of this rank."""
        if self.scaled is not None:
            gate_up, down = self.scaled.views
        else:
            gate_up, down = self.gate_up.weight.view(self.gate_up_shape), self.down.weight.view(self.down_shape)
        return self.ops.expert_pairs(z, gate_up, down, ids, weights, between=self.between)


def resident_experts(forms: dict[int, ExpertForm]) -> MakeExperts:
    """`Parts.experts` for a model with these forms by layer. V of low-rank experts is stacked as dense experts are:
    kernels, buffers, copies and captured segments are the same with other sizes (weights/expert_form.py)."""
    return lambda layer, moe, hidden, build: ResidentExperts(moe, hidden, build, forms[layer])


def expert_parts(num_experts: int) -> dict[str, str]:
    """gate and up of expert 0, then of expert 1, ...: an expert is one contiguous piece of the stack."""
    return {f"{e}.{which}": which for e in range(num_experts) for which in (GATE, UP)}

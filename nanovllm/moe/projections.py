"""Projections that the low-rank experts of a layer share (U1 and U3 before them, U2 inside or after them), and the
all-reduce of the experts' sum over tensor-parallel ranks.

    z = enter(x)                       dense: x itself. Low-rank: x @ [U1 | U3], once a token, for all of its experts
    pairs = expert_pairs(z, ...)       low-rank: gate reads the first half of z, up the second; w2 "input": U2 is
                                       applied inside (`between`), since it acts on what differs by expert
    y = leave(sum of pairs)            w2 "output": the experts were added in r2 dimensions, U2 is applied once

Each of several ranks has a share of every expert and so a part of every sum: `leave` adds the parts up, in one
all-reduce a layer (why one is enough: weights/expert_form.py), before U2, where they are shortest. In a layer with a
shared MLP `leave` adds nothing: U2 is applied to the part, which takes as long, and layer.py adds the parts of both up
at once. Experts that are spread over ranks are added up by spread.py.
"""

from __future__ import annotations

import torch

from nanovllm.hardware.parallel import Parallel, Shard
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.linear import Linear
from nanovllm.weights.expert_form import ExpertForm


def cut_expert(form: ExpertForm, parallel: Parallel) -> tuple[ExpertForm, dict[str, Shard]]:
    """This rank's part of an expert of this form, and of what its layer shares: (its form, part -> which piece of
    the checkpoint's tensor it is). A part that is not named is whole."""
    cut = parallel.shard_expert(form.intermediate)
    shards = {part: Shard(dim, cut.start, cut.length, cut.total) for part, dim in form.cut_dims.items()}
    return form.share(parallel.ranks_per_expert), shards


class SharedProjections(Layer):
    """Parameters u13 and u2 of low-rank experts; of dense ones nothing."""

    def __init__(self, form: ExpertForm, build: Build, reduces: bool) -> None:
        """`form`: of whole experts. `reduces`: False if the layer has a shared MLP."""
        super().__init__()
        self.ops, self.whole = build.ops, form
        self.form, self.shards = cut_expert(form, build.parallel)  # of this rank's share
        self._ranks = build.parallel if reduces and build.parallel.expert_size == 1 else Parallel()
        if form.is_low_rank:
            build = build.plain  # `between` is used as a tensor
            self.u13 = Linear(form.hidden, {"w1": form.columns, "w3": form.columns}, False, build)
            rows, columns = self.form.shared["u2"]
            cut = {"": self.shards["u2"]} if "u2" in self.shards else {}
            self.u2 = Linear(columns, {"": rows}, False, build, cut)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self.u13(x) if self.form.is_low_rank else x

    @property
    def between(self) -> torch.Tensor | None:
        return self.u2.weight if self.form.side == "input" else None

    def leave(self, total: torch.Tensor) -> torch.Tensor:
        """`total`, [tokens, out_size], is overwritten."""
        total = self._ranks.all_reduce(total)
        return self.u2(total) if self.form.side == "output" else total

"""One layer of experts -> Factors, on the rows that the layer really receives (solve.py has the derivation).

The inputs are those of the student: earlier layers are already compressed, and inside the layer w2 is fitted on the
output of the low-rank w1 and w3, toward the output of the teacher's expert for the same x. So each fit repairs part of
the error before it. Measured on tests/fixtures/tiny-mixtral, half of the bytes of V kept, mean KL to the teacher: w1
and w3 fitted, w2 only projected 2.58; w2 refitted 2.33; its input side 1.99; inputs from compressed layers 1.98;
experts weighted by what is sent through them 1.94. PCA: 3.38.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from nanovllm.lowrank.compress.factors import Factors, Pair
from nanovllm.lowrank.compress.model import Expert, run_dense
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.solve import (
    best_basis,
    correct,
    fit,
    gram,
    gram_of_size,
    pca_basis,
    pooled,
    shares_of,
    top_directions,
    weight_gram,
)
from nanovllm.lowrank.compress.stream import Rows
from nanovllm.lowrank.format import MATRICES

WINDOW_ROWS = 512  # --chunk counts windows


def pca_layer(experts: list[Expert], svd_ranks: dict[str, int], w2_mode: str, dtype: torch.dtype) -> Factors:
    """Method 1, from the weights alone."""
    equal = [1 / len(experts)] * len(experts)
    u, v = {}, {}
    for w in MATRICES:
        on_output = w == "w2" and w2_mode == "output"
        sides = [getattr(e, w) if on_output else getattr(e, w).T for e in experts]  # [n, d], n the side of U
        u[w] = pca_basis(weight_gram(sides, equal), svd_ranks[w]).u
        v[w] = torch.stack([(u[w].T @ a.double()) for a in sides])
    return Factors(w2_mode, u, v).to(dtype=dtype)


class LayerFit:
    """Method 2: first `front`, then `with_w2` on one or both sides."""

    def __init__(self, rows: Rows, experts: list[Expert], options: Options, dtype: torch.dtype = torch.float32) -> None:
        self.rows, self.experts, self.options, self.dtype = rows, experts, options, dtype
        self.counts, self.device = rows.counts(len(experts)), experts[0].w1.device

    def _stored(self, u: torch.Tensor) -> torch.Tensor:
        """As it will be read again: V is fitted to U with its rounding."""
        return u.to(self.dtype).double()

    @torch.no_grad()
    def front(self, svd_ranks: dict[str, int]) -> Factors:
        """w1 and w3, in fp32 for running; w2 is missing."""
        grams = []
        for e in range(len(self.experts)):
            grams.append(gram_of_size(self.rows.x.shape[1], self.device))
            for x, weights in self.rows.batches_of(e, self.options.chunk * WINDOW_ROWS, self.device):
                gram(x * weights[:, None], grams[e])
        total, shares = pooled(grams), shares_of([float(g.trace()) for g in grams])
        u, v = {}, {}
        for w in ("w1", "w3"):
            sides = [getattr(expert, w).T for expert in self.experts]
            basis = best_basis(total, weight_gram(sides, shares), svd_ranks[w], self.options.pca_oversample)
            base = self._stored(basis.u)
            solved = []
            for g, side, count in zip(grams, sides, self.counts):
                a = side.double()  # for one expert at a time: 470 MB of Mixtral's
                solved.append(fit(base, g, g @ a, base.T @ a, self.options.ridge, count).to(self.dtype).float())
            u[w], v[w] = base.float(), torch.stack(solved)
        return Factors("", u, v)

    @torch.no_grad()
    def with_w2(self, front: Factors, svd_rank: int, w2_mode: str) -> Factors:
        """`svd_rank` belongs to `w2_mode`."""
        u2, v2 = (self._input_w2 if w2_mode == "input" else self._output_w2)(front, svd_rank)
        return Factors(w2_mode, {**front.u, "w2": u2}, {**front.v, "w2": v2}).to(dtype=self.dtype)

    def _actives(self, front: Factors, e: int) -> Iterator[Pair]:
        """(student's, teacher's) input of w2 for the rows of expert e, each times the router's weight."""
        for x, weights in self.rows.batches_of(e, self.options.chunk_w2 * WINDOW_ROWS, self.device):
            mine, teachers = front.active(e, front.project(x)), self.experts[e].active(x)
            yield mine * weights[:, None], teachers * weights[:, None]

    def _output_w2(self, front: Factors, svd_rank: int) -> Pair:
        """U2: the directions of the layer's output. V2 [r, I] maps the student's a to the teacher's U2^T y."""
        outputs, run = gram_of_size(self.rows.x.shape[1], self.device), run_dense(self.experts)
        for batch in self.rows.batches(self.options.chunk_w2 * WINDOW_ROWS, self.device, held=False):
            gram(run(*batch), outputs)
        u = self._stored(top_directions(outputs)[1][:, :svd_rank].contiguous())
        solved = []
        for e, expert in enumerate(self.experts):
            target = expert.w2.T.double() @ u  # [I, r]
            k, missing = gram_of_size(len(target), self.device), torch.zeros_like(target)
            for mine, teachers in self._actives(front, e):
                gram(mine, k)
                gram(mine, missing, (teachers - mine) @ target.float())
            solved.append(correct(target, k, missing, self.options.ridge, self.counts[e]).T.contiguous())
        return u, torch.stack(solved)

    def _input_w2(self, front: Factors, svd_rank: int) -> Pair:
        total, traces = gram_of_size(self.experts[0].w1.shape[0], self.device), [0.0]
        for e in range(len(self.experts)):
            for mine, _ in self._actives(front, e):
                gram(mine, total)
            traces.append(float(total.trace()))
        shares = shares_of([after - before for before, after in pairwise(traces)])
        sides = [expert.w2.T for expert in self.experts]  # [I, H]
        u = self._stored(best_basis(total, weight_gram(sides, shares), svd_rank, self.options.pca_oversample).u)
        solved = []
        for e, side in enumerate(sides):
            prior = u.T @ side.double()
            k, missing = gram_of_size(u.shape[1], self.device), torch.zeros_like(prior)
            for mine, teachers in self._actives(front, e):
                z = mine @ u.float()
                gram(z, k)
                gram(z, missing, teachers @ side - z @ prior.float())
            solved.append(correct(prior, k, missing, self.options.ridge, self.counts[e]))
        return u, torch.stack(solved)


@torch.no_grad()
def held_out_errors(rows: Rows, experts: list[Expert], factors: Factors, size: int = 8192) -> dict[str, Any]:
    """Relative error (norm of the difference by norm of the teacher's) of the layer and of each expert, on rows that no
    fit saw. None for an expert that no such row chose."""
    device = experts[0].w1.device
    factors = factors.to(device, torch.float32)

    def relative(pairs: Iterator[Pair]) -> float | None:
        gap = norm = 0.0
        for found, wanted in pairs:
            gap += float((found - wanted).square().sum())
            norm += float(wanted.square().sum())
        return (gap / norm) ** 0.5 if norm else None

    def of_expert(e: int) -> Iterator[Pair]:
        for x, weights in rows.batches_of(e, size, device, held=True):
            yield factors.expert(e, x) * weights[:, None], experts[e](x) * weights[:, None]

    run = run_dense(experts)
    layer = relative((factors(*batch), run(*batch)) for batch in rows.batches(size, device, held=True))
    return {"layer": layer, "experts": [relative(of_expert(e)) for e in range(len(experts))]}

"""One layer of experts -> Factors, on the rows the layer really sees (solve.py has the derivation).

The inputs are those of the student: earlier layers are already compressed, and inside the layer w2 is fitted on what
the low-rank w1 and w3 give, toward what the teacher's expert gives for the same x. So each fit repairs part of the
error before it. Measured on tests/fixtures/tiny-mixtral, half of the bytes of V kept, mean KL to the teacher: w1 and w3
fitted, w2 only projected 2.58; w2 refitted 2.33; its input side 1.99; inputs from compressed layers 1.98; experts
weighted by what is sent through them 1.94. PCA: 3.38.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.solve import (
    best_basis,
    correct,
    fit,
    gram,
    pca_basis,
    shares_of,
    top_directions,
    weight_gram,
)
from nanovllm.lowrank.compress.stream import Rows, parts_of, run_dense
from nanovllm.lowrank.compress.windows import Expert

WINDOW_ROWS = 512  # --chunk counts windows


@dataclass(frozen=True)
class Fit:
    """How a layer is fitted."""

    mode: str = "shared"
    ridge: float = 1e-4
    dtype: torch.dtype = torch.float32
    chunk: int = 64  # windows at a time, for w1 and w3
    chunk_w2: int = 16  # and for w2, whose rows are wider
    oversample: int = 32


def stored(u: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As it will be read again: V is fitted to the U that there is, rounding included."""
    return u.to(dtype).double()


def pca_layer(experts: list[Expert], ranks: dict[str, int], w2_mode: str, dtype: torch.dtype) -> Factors:
    """Method 1, from the weights alone."""
    equal = [1 / len(experts)] * len(experts)
    u, v = {}, {}
    for w in ("w1", "w2", "w3"):
        on_output = w == "w2" and w2_mode == "output"
        sides = [getattr(e, w) if on_output else getattr(e, w).T for e in experts]  # [n, d], n the side of U
        u[w] = pca_basis(weight_gram(sides, equal), ranks[w]).u
        v[w] = torch.stack([(u[w].T @ a.double()) for a in sides])
    return Factors("shared", w2_mode, u, v).to(dtype)


def distil_layer(rows: Rows, experts: list[Expert], ranks: dict[str, int], w2_mode: str, how: Fit) -> Factors:
    """Method 2. `ranks["w2"]` belongs to `w2_mode`."""
    front = fit_front(rows, experts, ranks, how)
    return fit_w2(rows, experts, front, ranks["w2"], w2_mode, how)


@dataclass(frozen=True)
class FirstProducts:
    """w1 and w3 of a layer, compressed; fp32 for running."""

    u: dict[str, torch.Tensor]
    v: dict[str, torch.Tensor]

    def active(self, e: int, x: torch.Tensor) -> torch.Tensor:
        def product(w: str) -> torch.Tensor:
            u = self.u[w] if self.u[w].dim() == 2 else self.u[w][e]
            return (x @ u) @ self.v[w][e]

        return F.silu(product("w1")) * product("w3")


@torch.no_grad()
def fit_front(rows: Rows, experts: list[Expert], ranks: dict[str, int], how: Fit) -> FirstProducts:
    device, hidden = experts[0].w1.device, rows.x.shape[1]
    grams = []
    for e in range(len(experts)):
        grams.append(torch.zeros(hidden, hidden, dtype=torch.float64, device=device))
        for x, weights in parts_of(rows, e, how.chunk * WINDOW_ROWS, device):
            gram(x * weights[:, None], grams[e])
    counts = rows.counts(len(experts))
    u, v = {}, {}
    for w in ("w1", "w3"):
        sides = [getattr(expert, w).T for expert in experts]
        bases = _bases(grams, sides, ranks[w], how)
        solved = []
        for e, a in enumerate(sides):
            a, base = a.double(), bases[e]
            solved.append(fit(base, grams[e], grams[e] @ a, base.T @ a, how.ridge, counts[e]).to(how.dtype).float())
        u[w] = (bases[0] if how.mode == "shared" else torch.stack(bases)).float()
        v[w] = torch.stack(solved)
    return FirstProducts(u, v)


def _bases(grams: list[torch.Tensor], sides: list[torch.Tensor], rank: int, how: Fit) -> list[torch.Tensor]:
    """U for each expert: one for all of them (shared), or its own."""
    if how.mode == "private":
        found = [best_basis(g, weight_gram([a], [1.0]), rank, how.oversample).u for g, a in zip(grams, sides)]
        return [stored(u, how.dtype) for u in found]
    pooled = grams[0].clone()
    for g in grams[1:]:
        pooled += g
    shared = best_basis(pooled, weight_gram(sides, shares_of(grams)), rank, how.oversample).u
    return [stored(shared, how.dtype)] * len(sides)


Pair = tuple[torch.Tensor, torch.Tensor]


def _actives(rows: Rows, experts: list[Expert], front: FirstProducts, e: int, how: Fit) -> Iterator[Pair]:
    """(student's, teacher's) input of w2 for the rows of expert e, each times the router's weight."""
    for x, weights in parts_of(rows, e, how.chunk_w2 * WINDOW_ROWS, experts[e].w1.device):
        yield front.active(e, x) * weights[:, None], experts[e].active(x) * weights[:, None]


@torch.no_grad()
def fit_w2(rows: Rows, experts: list[Expert], front: FirstProducts, rank: int, w2_mode: str, how: Fit) -> Factors:
    if how.mode == "private":
        u2, v2 = _private_w2(rows, experts, front, rank, how)
    else:
        u2, v2 = (_input_w2 if w2_mode == "input" else _output_w2)(rows, experts, front, rank, how)
    return Factors(how.mode, w2_mode, {**front.u, "w2": u2}, {**front.v, "w2": v2}).to(how.dtype)


def _output_w2(rows: Rows, experts: list[Expert], front: FirstProducts, rank: int, how: Fit) -> Pair:
    """U2: the directions of the layer's output. V2 [r, I] maps the student's a to where the teacher's a would go."""
    device, counts = experts[0].w1.device, rows.counts(len(experts))
    outputs = torch.zeros(rows.x.shape[1], rows.x.shape[1], dtype=torch.float64, device=device)
    run, fitted = run_dense(experts), ~rows.held
    for part in zip(*(t[fitted].split(how.chunk_w2 * WINDOW_ROWS) for t in (rows.x, rows.ids, rows.weights))):
        gram(run(*(t.to(device) for t in part)), outputs)
    u = stored(top_directions(outputs)[1][:, :rank].contiguous(), how.dtype)
    solved = []
    for e, expert in enumerate(experts):
        target = expert.w2.T.double() @ u  # [I, r]
        k = torch.zeros(len(target), len(target), dtype=torch.float64, device=device)
        missing = torch.zeros_like(target)
        for mine, teachers in _actives(rows, experts, front, e, how):
            gram(mine, k)
            gram(mine, missing, (teachers - mine) @ target.float())
        solved.append(correct(target, k, missing, how.ridge, counts[e]).T.contiguous())
    return u, torch.stack(solved)


def _input_w2(rows: Rows, experts: list[Expert], front: FirstProducts, rank: int, how: Fit) -> Pair:
    size, device, counts = experts[0].w1.shape[0], experts[0].w1.device, rows.counts(len(experts))
    pooled = torch.zeros(size, size, dtype=torch.float64, device=device)
    traces = []
    for e in range(len(experts)):
        before = float(pooled.trace())
        for mine, _ in _actives(rows, experts, front, e, how):
            gram(mine, pooled)
        traces.append(pooled.new_tensor([[float(pooled.trace()) - before]]))
    sides = [expert.w2.T for expert in experts]
    u = stored(best_basis(pooled, weight_gram(sides, shares_of(traces)), rank, how.oversample).u, how.dtype)
    solved = [_fit_input(rows, experts, front, e, u, how, counts[e]) for e in range(len(experts))]
    return u, torch.stack(solved)


def _private_w2(rows: Rows, experts: list[Expert], front: FirstProducts, rank: int, how: Fit) -> Pair:
    size, counts = experts[0].w1.shape[0], rows.counts(len(experts))
    us, vs = [], []
    for e, expert in enumerate(experts):
        g = torch.zeros(size, size, dtype=torch.float64, device=expert.w2.device)
        for mine, _ in _actives(rows, experts, front, e, how):
            gram(mine, g)
        us.append(stored(best_basis(g, weight_gram([expert.w2.T], [1.0]), rank, how.oversample).u, how.dtype))
        vs.append(_fit_input(rows, experts, front, e, us[e], how, counts[e]))
    return torch.stack(us), torch.stack(vs)


def _fit_input(
    rows: Rows, experts: list[Expert], front: FirstProducts, e: int, u: torch.Tensor, how: Fit, num_rows: int
) -> torch.Tensor:
    side = experts[e].w2.T  # [I, H]
    prior = u.T @ side.double()
    k = torch.zeros(u.shape[1], u.shape[1], dtype=torch.float64, device=u.device)
    missing = torch.zeros_like(prior)
    for mine, teachers in _actives(rows, experts, front, e, how):
        z = mine @ u.float()
        gram(z, k)
        gram(z, missing, teachers @ side - z @ prior.float())
    return correct(prior, k, missing, how.ridge, num_rows)


@torch.no_grad()
def held_out_errors(rows: Rows, experts: list[Expert], factors: Factors, size: int = 8192) -> dict[str, object]:
    """Relative error (norm of the difference by norm of the teacher's) of the layer and of each expert, on rows that no
    fit saw. None for an expert that no such row chose."""
    device = experts[0].w1.device
    factors = factors.to(device).to(torch.float32)
    found: list[float | None] = []
    for e, expert in enumerate(experts):
        gap = norm = 0.0
        for x, weights in parts_of(rows, e, size, device, held=True):
            wanted = expert(x) * weights[:, None]
            gap += float((factors.expert(e, x) * weights[:, None] - wanted).square().sum())
            norm += float(wanted.square().sum())
        found.append((gap / norm) ** 0.5 if norm else None)
    gap = norm = 0.0
    run = run_dense(experts)
    for part in zip(*(t[rows.held].split(size) for t in (rows.x, rows.ids, rows.weights))):
        part = [t.to(device) for t in part]
        wanted = run(*part)
        gap += float((factors(*part) - wanted).square().sum())
        norm += float(wanted.square().sum())
    return {"layer": (gap / norm) ** 0.5 if norm else None, "experts": found}

"""The mathematics of low-rank experts: tensors in, tensors out, fp64 throughout.

A matrix of an expert is used as A = W^T [n, d]: rows of inputs X times A. All experts of a layer share U [n, r], each
has its own V_e [r, d]. With G = X^T X (a "Gram matrix") the error of U V_e on the inputs is

    |X (A_e - U V_e)|^2 = tr (A_e - U V_e)^T G (A_e - U V_e)

**Which U.** Let G = S S^T (S = Q diag(s) from eigh: a Gram of few rows is singular, which Cholesky does not survive),
and C = sum_e pi_e A_e A_e^T. In the coordinates S^T the error is a plain Frobenius norm, so the best r directions are
the top eigenvectors P of M = S^T C S, U = S^-T P, and the error is the sum of M's other eigenvalues: the whole curve of
error by SVD rank from one eigh. PCA of the weights is the case G = I: it minimises the error on inputs without any
preferred direction, which no layer has.

**Large n** (the input side of w2, n = intermediate size). S^T C S P = P D gives C G U = U D after multiplying by S^-T:
U spans an invariant subspace of C G, and no inverse is needed. `subspace_basis` iterates U <- orth(C G U) with some
extra columns, then picks the best r directions inside that span.

**Which V.** U given, V_e = (U^T G_e U + lam)^-1 (U^T R_e + lam V0_e), where R_e = X_e^T T_e meets the targets T_e
(those of the teacher: R_e = G_e A_e when the inputs are the same). The ridge pulls toward the prior V0 = U^+ A_e, the
best without data, never toward zero; an expert that saw no rows is its prior.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

EIGH_SIZE = 6144  # from here on the subspace iteration is the faster one: eigh takes n^3, and its workspace 3 n^2
BLOCK_ROWS = 4096  # that are in fp64 at a time
RELATIVE_FLOOR = 1e-9  # of the mean eigenvalue, added to a Gram: directions no input has are not divided by zero


@dataclass(frozen=True)
class Basis:
    u: torch.Tensor  # [n, r], orthonormal columns; contiguous, where `qr` gives it by columns
    gains: torch.Tensor  # eigenvalues of M, descending: what each direction explains (r + oversample of them at least)
    total: float  # the error of keeping nothing

    def losses(self) -> torch.Tensor:
        """[len(gains) + 1]: predicted relative error (squared) of keeping 0, 1, 2, ... directions."""
        kept = torch.cat([self.gains.new_zeros(1), self.gains.cumsum(0)])
        return (1 - kept / self.total).clamp(min=0) if self.total > 0 else torch.zeros_like(kept)


def gram_of_size(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device=device)


def gram(rows: torch.Tensor, total: torch.Tensor | None = None, others: torch.Tensor | None = None) -> torch.Tensor:
    """rows^T rows, or rows^T others, added to `total` in place. Products of fp32 numbers are exact in fp64, and a sum
    of n of them is off by n * 1.1e-16 of its terms at most; in fp32 that is n * 6e-8, and differs by processor."""
    others = rows if others is None else others
    if total is None:
        total = torch.zeros(rows.shape[1], others.shape[1], dtype=torch.float64, device=rows.device)
    for block, other in zip(rows.split(BLOCK_ROWS), others.split(BLOCK_ROWS)):
        total.addmm_(block.T.double(), other.double())
    return total


def weight_gram(matrices: Iterable[torch.Tensor], shares: Iterable[float]) -> torch.Tensor:
    """C = sum_e pi_e A_e A_e^T of A_e [n, d]."""
    return pooled(share * ((d := a.double()) @ d.T) for a, share in zip(matrices, shares))


def pooled(grams: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum; one of them and the sum are in memory."""
    total = None
    for g in grams:
        total = g.clone() if total is None else total.add_(g)
    assert total is not None
    return total


def top_directions(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(eigenvalues, eigenvectors) descending."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def pca_basis(c: torch.Tensor, svd_rank: int) -> Basis:
    gains, vectors = top_directions(c)
    return Basis(vectors[:, :svd_rank].contiguous(), gains, float(gains.sum()))


def whitened_basis(g: torch.Tensor, c: torch.Tensor, svd_rank: int) -> Basis:
    """The best shared U for inputs with Gram g [n, n] and weights with c = weight_gram(...) [n, n]."""
    values, q = torch.linalg.eigh(g)
    mean = float(values.mean())
    if not mean > 0:
        return pca_basis(c, svd_rank)
    s = (values.clamp(min=0) + RELATIVE_FLOOR * mean).sqrt()
    root = q * s
    gains, p = top_directions(root.T @ c @ root)
    u, _ = torch.linalg.qr((q / s) @ p[:, :svd_rank])
    return Basis(u.contiguous(), gains, float(gains.sum()))


def subspace_basis(g: torch.Tensor, c: torch.Tensor, svd_rank: int, oversample: int = 32, steps: int = 4) -> Basis:
    """The same for large n, in O(n^2 r)."""
    n = len(g)
    width = min(n, svd_rank + oversample)
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(n, width, generator=generator, dtype=torch.float64).to(g.device)
    for _ in range(steps):
        y, _ = torch.linalg.qr(c @ (g @ y))
    # Inside the span: U = Y B, explained = tr (B^T K B)^-1 B^T R B with K = Y^T G Y, R = Y^T G C G Y.
    gy = g @ y
    k, r = y.T @ gy, gy.T @ c @ gy
    values, q = torch.linalg.eigh(k)
    s = (values.clamp(min=0) + RELATIVE_FLOOR * values.mean()).sqrt()
    gains, p = top_directions((q / s).T @ r @ (q / s))
    u, _ = torch.linalg.qr(y @ ((q / s) @ p[:, :svd_rank]))
    return Basis(u.contiguous(), gains, float((g * c).sum()))  # tr G C


def best_basis(g: torch.Tensor, c: torch.Tensor, svd_rank: int, oversample: int = 32) -> Basis:
    return whitened_basis(g, c, svd_rank) if len(g) <= EIGH_SIZE else subspace_basis(g, c, svd_rank, oversample)


def shares_of(traces: list[float]) -> list[float]:
    """pi_e: each expert's part of all that is sent through the layer, from the traces of their Gram matrices. All equal
    where nothing was sent."""
    total = sum(traces)
    return [t / total for t in traces] if total > 0 else [1 / len(traces)] * len(traces)


def fit(
    u: torch.Tensor, g: torch.Tensor, cross: torch.Tensor, prior: torch.Tensor, ridge: float, num_rows: int
) -> torch.Tensor:
    """V [r, d]: cross [n, d] = inputs^T targets. With fewer rows than unknowns the ridge grows, toward the prior."""
    k = u.T @ (g @ u)
    return correct(prior, k, u.T @ cross - k @ prior, ridge, num_rows)


def correct(prior: torch.Tensor, k: torch.Tensor, missing: torch.Tensor, ridge: float, num_rows: int) -> torch.Tensor:
    """The same when inputs z are already in the coordinates of U: k [r, r] = z^T z, missing [r, d] = z^T (T - z V0).
    Where the prior is right that is nothing, row by row, which a difference of two sums would not be."""
    size = len(k)
    level = float(k.trace()) / size
    if num_rows == 0 or not level > 0:
        return prior
    lam = max(ridge, 1e-12) * level * max(1.0, size / num_rows)
    # V0 + (K + lam)^-1 z^T (T - z V0) is the formula above, and V0 stays exact where the data say nothing.
    k_ridge = k.clone()
    k_ridge.diagonal().add_(lam)
    factor, info = torch.linalg.cholesky_ex(k_ridge)
    if int(info) == 0:
        return prior + torch.cholesky_solve(missing, factor)
    return prior + torch.linalg.lstsq(k_ridge, missing).solution


@dataclass(frozen=True)
class Curve:
    """Loss and cost of a matrix of a layer by SVD rank."""

    losses: list[float]  # by SVD rank, 0 first
    cost: int  # of one SVD rank more, over all experts


def allocate_svd_ranks(curves: Mapping[Key, Curve], budget: int, step: int = 1) -> dict[Key, int]:
    """Greedy: the next `step` SVD ranks go where they lower the predicted loss most by cost. Losses of the curves are
    convex (eigenvalues descend), so this is the best there is, up to one step. Every matrix gets one step at least."""
    found = {key: min(step, len(curve.losses) - 1) for key, curve in curves.items()}
    left = budget - sum(svd_rank * curves[key].cost for key, svd_rank in found.items())

    def gain(key: Key, more: int) -> float:
        losses, svd_rank = curves[key].losses, found[key]
        return (losses[svd_rank] - losses[svd_rank + more]) / (more * curves[key].cost)

    while True:
        steps = {key: min(step, len(curve.losses) - 1 - found[key]) for key, curve in curves.items()}
        offers = {key: more for key, more in steps.items() if 0 < more * curves[key].cost <= left}
        if not offers:
            return found
        best = max(offers, key=lambda key: gain(key, offers[key]))
        found[best] += offers[best]
        left -= offers[best] * curves[best].cost

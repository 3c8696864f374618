"""The mathematics of low-rank experts on made-up layers, where the right answer is known."""

from __future__ import annotations

import pytest
import torch

from nanovllm.lowrank.compress import solve
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import LayerFit, held_out_errors, pca_layer
from nanovllm.lowrank.compress.model import Expert
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.stream import Rows
from nanovllm.lowrank.format import MATRICES

H, SIZE, E = 24, 40, 4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(n: int, seed: int = 0, decay: float = 0.7) -> torch.Tensor:
    """[n, n]: inputs times this have directions of very different strength."""
    return torch.linalg.qr(rand(n, n, seed=seed))[0] * decay ** torch.arange(n, dtype=torch.float64)


def make_experts() -> list[Expert]:
    def matrix(i: int, *shape: int) -> torch.Tensor:
        return (rand(*shape, seed=i) / shape[1] ** 0.5).float()

    return [Expert(matrix(3 * e, SIZE, H), matrix(3 * e + 1, H, SIZE), matrix(3 * e + 2, SIZE, H)) for e in range(E)]


def make_rows(num: int = 600, mixed: torch.Tensor | None = None, experts: int = E) -> Rows:
    x = rand(num, H, seed=7)
    x = (x if mixed is None else x @ mixed.T).float()
    ids = torch.stack([torch.arange(num) % experts, (torch.arange(num) + 1) % experts], 1)
    weights = rand(num, 2, seed=8).softmax(-1).float()
    return Rows(x, ids, weights, torch.arange(num) % 10 == 9)


def svd_ranks(r: int, r2: int | None = None) -> dict[str, int]:
    return {"w1": r, "w2": r if r2 is None else r2, "w3": r}


def distil(rows: Rows, experts: list[Expert], ranks: dict[str, int], side: str, ridge: float = 1e-4) -> Factors:
    fit = LayerFit(rows, experts, Options(ridge=ridge))
    return fit.with_w2(fit.front(ranks), ranks["w2"], side)


# ---- bases -----------------------------------------------------------------------------------------------------------


def planted(svd_rank: int) -> list[torch.Tensor]:
    shared = rand(H, svd_rank, seed=3)
    return [shared @ rand(svd_rank, SIZE, seed=10 + e) for e in range(E)]


@pytest.mark.parametrize("svd_rank", [4, 5, 6])
def test_a_planted_svd_rank_is_found(svd_rank: int) -> None:
    sides = planted(5)
    g = solve.gram((rand(300, H) @ spread(H, decay=0.9)).float())
    c = solve.weight_gram(sides, [1 / E] * E)
    bases = (
        solve.pca_basis(c, svd_rank),
        solve.whitened_basis(g, c, svd_rank),
        solve.subspace_basis(g, c, svd_rank, 3),
    )
    for basis in bases:
        u = basis.u
        assert torch.allclose(u.T @ u, torch.eye(svd_rank, dtype=torch.float64), atol=1e-9)
        left = max(float((a - u @ solve.fit(u, g, g @ a, u.T @ a, 1e-10, 300)).norm() / a.norm()) for a in sides)
        assert (left < 1e-5) == (svd_rank >= 5)
        assert (basis.losses()[svd_rank] < 1e-7) == (svd_rank >= 5)


@pytest.mark.parametrize("svd_rank", [1, 7, H - 1, H])
def test_the_predicted_loss_is_the_measured_one(svd_rank: int) -> None:
    """All experts see the same rows, so the pooled metric is each one's own. The subspace iteration finds the same."""
    sides = [rand(H, SIZE, seed=20 + e) for e in range(E)]
    x = rand(500, H) @ spread(H, decay=0.85)
    g, c = x.T @ x, solve.weight_gram(sides, [1 / E] * E)
    basis = solve.whitened_basis(g, c, svd_rank)
    fitted = [basis.u @ solve.fit(basis.u, g, g @ a, basis.u.T @ a, 1e-12, len(x)) for a in sides]
    measured = sum(float((x @ (a - b)).square().sum()) for a, b in zip(sides, fitted))
    total = sum(float((x @ a).square().sum()) for a in sides)
    loss = float(basis.losses()[svd_rank])
    assert measured / total == pytest.approx(loss, abs=1e-4)
    found = solve.subspace_basis(g, c, svd_rank, oversample=8, steps=6)
    assert float(found.losses()[svd_rank]) == pytest.approx(loss, abs=1e-5)
    assert float(torch.linalg.svdvals(basis.u.T @ found.u).min()) > 0.99


def test_a_gram_of_few_rows_is_no_problem() -> None:
    """Singular: fewer rows than directions, and no rows at all."""
    c = solve.weight_gram(planted(H), [1 / E] * E)
    few = rand(3, H)
    for g in (few.T @ few, torch.zeros(H, H, dtype=torch.float64)):
        u = solve.best_basis(g, c, 6).u
        assert torch.allclose(u.T @ u, torch.eye(6, dtype=torch.float64), atol=1e-8)


def test_the_ridge_pulls_to_the_prior_and_not_to_zero() -> None:
    """Toward zero, an expert with few rows would lose what its weights alone give."""
    a, u = rand(H, SIZE, seed=1), torch.linalg.qr(rand(H, 6))[0]
    x = rand(200, H) @ spread(H)
    g, prior = x.T @ x, u.T @ a
    assert torch.equal(solve.fit(u, g * 0, g * 0 @ a, prior, 1e-4, 0), prior)
    assert torch.allclose(solve.fit(u, g, g @ a, prior, 1e9, 200), prior, atol=1e-5)
    free = solve.fit(u, g, g @ a, prior, 1e-12, 200)
    assert float((x @ (u @ free - a)).norm()) < float((x @ (u @ prior - a)).norm())


def test_sums_are_in_double() -> None:
    """2**24 + 4095 is no number of fp32, whatever the order of its sum; in fp64 every partial sum is exact."""
    rows = torch.ones(4096, 2)
    rows[0] = 4096.0
    others = torch.cat([rows, -rows], 1)
    assert solve.gram(rows).eq(2**24 + 4095).all()
    assert solve.gram(rows, solve.gram(rows)).eq(2 * (2**24 + 4095)).all()
    assert solve.gram(rows, None, others)[0].tolist() == [2**24 + 4095] * 2 + [-(2**24) - 4095] * 2


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("w2_mode", "full"), [("output", H), ("input", SIZE)])
def test_full_rank_is_the_teacher_and_factors_lie_in_memory_as_in_a_file(w2_mode: str, full: int) -> None:
    """Row by row: a product of the same numbers in another form may round otherwise."""
    rows, experts = make_rows(), make_experts()
    for ranks in (svd_ranks(H, full), svd_ranks(6), svd_ranks(1)):
        pca = pca_layer(experts, ranks, w2_mode, torch.float32)
        for factors in (distil(rows, experts, ranks, w2_mode), pca):
            assert all(t.is_contiguous() for t in factors.tensors())
            if ranks["w2"] == full:
                errors = held_out_errors(rows, experts, factors)
                assert max(errors["layer"], *errors["experts"]) < 1e-5


def test_what_inputs_look_like_decides() -> None:
    """Inputs with strong and weak directions, a quarter kept: PCA is worst, then V alone, then U too."""
    rows, experts, ranks = make_rows(4000, spread(H, decay=0.75)), make_experts(), svd_ranks(6)
    pca = pca_layer(experts, ranks, "output", torch.float32)
    v_only = v_fitted_to(pca, rows, experts)
    whitened = distil(rows, experts, ranks, "output", 1e-6)
    errors = [held_out_errors(rows, experts, f)["layer"] for f in (pca, v_only, whitened)]
    assert errors[0] > 1.05 * errors[1] > 1.05**2 * errors[2], errors


def v_fitted_to(pca: Factors, rows: Rows, experts: list[Expert]) -> Factors:
    """U of PCA, V fitted to activations."""
    v = {w: t.clone() for w, t in pca.v.items()}
    for w in ("w1", "w3"):
        u = pca.u[w].double()
        for e, expert in enumerate(experts):
            found, weights = rows.of(e)
            g = solve.gram(rows.x[found] * weights[:, None])
            a = getattr(expert, w).T.double()
            v[w][e] = solve.fit(u, g, g @ a, u.T @ a, 1e-6, len(found)).float()
    return Factors("output", pca.u, v)


def test_an_expert_without_rows_is_its_prior() -> None:
    experts = make_experts()
    rows = make_rows(300, spread(H), experts=E - 1)  # the last one is never chosen
    factors = distil(rows, experts, svd_ranks(6), "output")
    for w in MATRICES:
        a = experts[-1].w2 if w == "w2" else getattr(experts[-1], w).T
        assert torch.allclose(factors.v[w][-1].double(), factors.u[w].double().T @ a.double(), atol=1e-5)
    assert held_out_errors(rows, experts, factors)["experts"][-1] is None


@pytest.mark.parametrize("w2_mode", ["input", "output"])
def test_factors_compute_what_they_stand_for(w2_mode: str) -> None:
    """Once a token for all experts, or one expert at a time: the same; and an expert may have no rows."""
    rows = make_rows(40, experts=3)
    n2, d2 = (SIZE, H) if w2_mode == "input" else (H, SIZE)
    u = {"w1": rand(H, 5, seed=1), "w3": rand(H, 7, seed=2), "w2": rand(n2, 6, seed=3)}
    v = {"w1": rand(E, 5, SIZE, seed=4), "w3": rand(E, 7, SIZE, seed=5), "w2": rand(E, 6, d2, seed=6)}
    factors = Factors(w2_mode, u, v)
    x, weights = rows.x.double(), rows.weights.double()

    def dense(e: int) -> Expert:
        whole = {w: u[w] @ v[w][e] for w in MATRICES}
        return Expert(whole["w1"].T, whole["w2"].T if w2_mode == "input" else whole["w2"], whole["w3"].T)

    wanted = torch.zeros(len(x), H, dtype=torch.float64)
    for choice in range(2):
        for t in range(len(x)):
            wanted[t] += dense(int(rows.ids[t, choice]))(x[t]) * weights[t, choice]
    assert torch.allclose(factors(x, rows.ids, weights), wanted, rtol=1e-9, atol=1e-9)
    assert torch.allclose(factors.expert(1, x), dense(1)(x), rtol=1e-9, atol=1e-9)


# ---- SVD ranks -------------------------------------------------------------------------------------------------------


def test_svd_ranks_go_where_they_help_most() -> None:
    curves = {
        "steep": solve.Curve([1.0, 0.3, 0.1, 0.0], 10),
        "flat": solve.Curve([1.0, 0.9, 0.8, 0.7], 10),
        "cheap": solve.Curve([1.0, 0.9, 0.8, 0.7], 1),
    }
    wanted = {21: (1, 1, 1), 23: (1, 1, 3), 33: (2, 1, 3), 63: (3, 3, 3), 10**9: (3, 3, 3)}
    assert {budget: tuple(solve.allocate_svd_ranks(curves, budget).values()) for budget in wanted} == wanted


@pytest.mark.parametrize("step", [1, 2])
def test_a_budget_is_kept_and_used(step: int) -> None:
    curves = {i: solve.Curve((1 - torch.linspace(0, 1, 33) ** (0.2 + 0.1 * i)).tolist(), 3) for i in range(5)}
    found = solve.allocate_svd_ranks(curves, 3 * 80, step)
    assert 80 - step < sum(found.values()) <= 80
    assert found[0] < found[4]

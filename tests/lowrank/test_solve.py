"""The mathematics of low-rank experts on made-up layers, where the right answer is known."""

from __future__ import annotations

import pytest
import torch

from nanovllm.lowrank.compress import solve
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.layer import Fit, distil_layer, held_out_errors, pca_layer
from nanovllm.lowrank.compress.stream import Rows
from nanovllm.lowrank.compress.windows import Expert

H, SIZE, E = 24, 40, 4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(n: int, seed: int = 0, decay: float = 0.7) -> torch.Tensor:
    """[n, n]: inputs times this have directions of very different strength."""
    return torch.linalg.qr(rand(n, n, seed=seed))[0] * decay ** torch.arange(n, dtype=torch.float64)


def make_experts(seed: int = 0, size: int = SIZE) -> list[Expert]:
    def matrix(i: int, *shape: int) -> torch.Tensor:
        return (rand(*shape, seed=seed + i) / shape[1] ** 0.5).float()

    return [Expert(matrix(3 * e, size, H), matrix(3 * e + 1, H, size), matrix(3 * e + 2, size, H)) for e in range(E)]


def make_rows(num: int = 600, mixed: torch.Tensor | None = None, experts: int = E, seed: int = 7) -> Rows:
    x = rand(num, H, seed=seed)
    x = (x if mixed is None else x @ mixed.T).float()
    ids = torch.stack([torch.arange(num) % experts, (torch.arange(num) + 1) % experts], 1)
    weights = rand(num, 2, seed=seed + 1).softmax(-1).float()
    return Rows(x, ids, weights, torch.arange(num) % 10 == 9)


def ranks(r: int, r2: int | None = None) -> dict[str, int]:
    return {"w1": r, "w2": r if r2 is None else r2, "w3": r}


def error(rows: Rows, experts: list[Expert], factors: Factors) -> float:
    found = held_out_errors(rows, experts, factors)["layer"]
    assert isinstance(found, float)
    return found


# ---- bases -----------------------------------------------------------------------------------------------------------


def planted(rank: int) -> list[torch.Tensor]:
    shared = rand(H, rank, seed=3)
    return [shared @ rand(rank, SIZE, seed=10 + e) for e in range(E)]


@pytest.mark.parametrize("rank", [4, 5, 6])
def test_a_planted_rank_is_found(rank: int) -> None:
    sides = planted(5)
    g = solve.gram((rand(300, H) @ spread(H, decay=0.9)).float())
    c = solve.weight_gram(sides, [1 / E] * E)
    for basis in (solve.pca_basis(c, rank), solve.whitened_basis(g, c, rank), solve.subspace_basis(g, c, rank, 3)):
        u = basis.u
        assert torch.allclose(u.T @ u, torch.eye(rank, dtype=torch.float64), atol=1e-9)
        left = max(float((a - u @ solve.fit(u, g, g @ a, u.T @ a, 1e-10, 300)).norm() / a.norm()) for a in sides)
        assert (left < 1e-5) == (rank >= 5)
        assert (basis.loss(rank) < 1e-7) == (rank >= 5)


@pytest.mark.parametrize("rank", [1, 7, H - 1, H])
def test_the_predicted_loss_is_the_measured_one(rank: int) -> None:
    """All experts see the same rows, so the pooled metric is each one's own."""
    sides = [rand(H, SIZE, seed=20 + e) for e in range(E)]
    x = rand(500, H) @ spread(H, decay=0.85)
    g, c = x.T @ x, solve.weight_gram(sides, [1 / E] * E)
    basis = solve.whitened_basis(g, c, rank)
    fitted = [basis.u @ solve.fit(basis.u, g, g @ a, basis.u.T @ a, 1e-12, len(x)) for a in sides]
    measured = sum(float((x @ (a - b)).square().sum()) for a, b in zip(sides, fitted))
    total = sum(float((x @ a).square().sum()) for a in sides)
    assert measured / total == pytest.approx(basis.loss(rank), abs=1e-4)
    assert solve.output_error(g, sides[0], fitted[0]) == pytest.approx(
        float((x @ (sides[0] - fitted[0])).square().sum()), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("rank", [1, 8, H])
def test_the_iteration_finds_what_the_eigenvectors_say(rank: int) -> None:
    sides = [rand(H, SIZE, seed=20 + e) for e in range(E)]
    x = rand(500, H) @ spread(H, decay=0.8)
    g, c = x.T @ x, solve.weight_gram(sides, [0.4, 0.3, 0.2, 0.1])
    exact, found = solve.whitened_basis(g, c, rank), solve.subspace_basis(g, c, rank, oversample=8, power_steps=4)
    assert found.loss(rank) == pytest.approx(exact.loss(rank), abs=1e-5)
    overlap = torch.linalg.svdvals(exact.u.T @ found.u)
    assert float(overlap.min()) > 0.999


def test_a_gram_of_few_rows_is_no_problem() -> None:
    """Singular: fewer rows than directions, and no rows at all."""
    sides = planted(H)
    c = solve.weight_gram(sides, [1 / E] * E)
    few = rand(3, H)
    for g in (few.T @ few, torch.zeros(H, H, dtype=torch.float64)):
        basis = solve.whitened_basis(g, c, 6)
        assert basis.u.isfinite().all()
        assert torch.allclose(basis.u.T @ basis.u, torch.eye(6, dtype=torch.float64), atol=1e-8)


def test_the_ridge_pulls_to_the_prior_and_not_to_zero() -> None:
    """Lesson 33."""
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


FULL = [("shared", "output", H), ("shared", "input", SIZE), ("private", "input", H)]


@pytest.mark.parametrize(("mode", "w2_mode", "r2"), FULL)
def test_full_rank_is_the_teacher(mode: str, w2_mode: str, r2: int) -> None:
    rows, experts = make_rows(), make_experts()
    factors = distil_layer(rows, experts, ranks(H, r2), w2_mode, Fit(mode=mode))
    wanted = held_out_errors(rows, experts, factors)
    assert error(rows, experts, factors) < 1e-5
    assert all(found < 1e-5 for found in wanted["experts"])  # type: ignore[attr-defined]
    if mode == "shared":
        assert error(rows, experts, pca_layer(experts, ranks(H, r2), w2_mode, torch.float32)) < 1e-5


@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize(("mode", "w2_mode", "_"), FULL)
def test_factors_lie_in_memory_as_they_do_in_a_file(mode: str, w2_mode: str, rank: int, _: int) -> None:
    """Row by row. A product of the same numbers in another form may round otherwise."""
    rows, experts = make_rows(), make_experts()
    found = [distil_layer(rows, experts, ranks(rank), w2_mode, Fit(mode=mode))]
    found += [pca_layer(experts, ranks(rank), w2_mode, torch.float32)] * (mode == "shared")
    assert all(t.is_contiguous() for factors in found for t in factors.tensors())


def test_what_inputs_look_like_decides() -> None:
    """Inputs with strong and weak directions, a quarter kept: PCA is worst, then V alone, U too, one U each."""
    rows, experts, r = make_rows(4000, spread(H, decay=0.75)), make_experts(), 6
    how = Fit(ridge=1e-6)
    pca = pca_layer(experts, ranks(r), "output", torch.float32)
    whitened = distil_layer(rows, experts, ranks(r), "output", how)
    v_only = v_fitted_to(pca, rows, experts)
    equal = {w: solve.private_rank(r, H, SIZE, E) for w in ("w1", "w2", "w3")}
    assert equal["w1"] * (H + SIZE) * E <= r * (SIZE * E + H)
    private = distil_layer(rows, experts, equal, "input", Fit("private", 1e-6))
    errors = [error(rows, experts, f) for f in (pca, v_only, whitened, private)]
    assert errors[0] > 1.05 * errors[1], errors
    assert errors[1] > 1.05 * errors[2], errors
    assert errors[2] > errors[3], errors


def v_fitted_to(pca: Factors, rows: Rows, experts: list[Expert]) -> Factors:
    """Distillation as it was: PCA's U, V fitted to activations."""
    v = {w: t.clone() for w, t in pca.v.items()}
    for w in ("w1", "w3"):
        u = pca.u[w].double()
        for e, expert in enumerate(experts):
            found, weights = rows.of(e)
            g = solve.gram(rows.x[found] * weights[:, None])
            a = getattr(expert, w).T.double()
            v[w][e] = solve.fit(u, g, g @ a, u.T @ a, 1e-6, len(found)).float()
    return Factors("shared", "output", pca.u, v)


def test_an_expert_without_rows_is_its_prior() -> None:
    experts = make_experts()
    rows = make_rows(300, spread(H), experts=E - 1)  # the last one is never chosen
    factors = distil_layer(rows, experts, ranks(6), "output", Fit())
    for w in ("w1", "w3"):
        prior = factors.u[w].double().T @ getattr(experts[-1], w).T.double()
        assert torch.allclose(factors.v[w][-1].double(), prior, atol=1e-5)
    prior = factors.u["w2"].double().T @ experts[-1].w2.double()
    assert torch.allclose(factors.v["w2"][-1].double(), prior, atol=1e-5)
    assert held_out_errors(rows, experts, factors)["experts"][-1] is None  # type: ignore[index]


@pytest.mark.parametrize("mode", ["shared", "private"])
@pytest.mark.parametrize("w2_mode", ["input", "output"])
def test_factors_compute_what_they_stand_for(mode: str, w2_mode: str) -> None:
    """Once a token for all experts, or one expert at a time: the same; and empty experts are no trouble."""
    experts, rows = make_experts(), make_rows(40, experts=3)
    lead = () if mode == "shared" else (E,)
    n2, d2 = (SIZE, H) if w2_mode == "input" else (H, SIZE)
    u = {"w1": rand(*lead, H, 5, seed=1), "w3": rand(*lead, H, 7, seed=2), "w2": rand(*lead, n2, 6, seed=3)}
    v = {"w1": rand(E, 5, SIZE, seed=4), "w3": rand(E, 7, SIZE, seed=5), "w2": rand(E, 6, d2, seed=6)}
    factors = Factors(mode, w2_mode, u, v)
    x, weights = rows.x.double(), rows.weights.double()

    def dense(e: int) -> Expert:
        def whole(w: str) -> torch.Tensor:
            return (u[w] if mode == "shared" else u[w][e]) @ v[w][e]

        return Expert(whole("w1").T, whole("w2").T if w2_mode == "input" else whole("w2"), whole("w3").T)

    wanted = torch.zeros(len(x), H, dtype=torch.float64)
    for place in range(2):
        for t in range(len(x)):
            wanted[t] += dense(int(rows.ids[t, place]))(x[t]) * weights[t, place]
    assert torch.allclose(factors(x, rows.ids, weights), wanted, rtol=1e-9, atol=1e-9)
    assert torch.allclose(factors.expert(1, x), dense(1)(x), rtol=1e-9, atol=1e-9)
    assert len(experts) == factors.num_experts


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_go_where_they_help_most() -> None:
    curves = {
        "steep": solve.Curve([1.0, 0.3, 0.1, 0.0], 10),
        "flat": solve.Curve([1.0, 0.9, 0.8, 0.7], 10),
        "cheap": solve.Curve([1.0, 0.9, 0.8, 0.7], 1),
    }
    assert solve.allocate_ranks(curves, 21) == {"steep": 1, "flat": 1, "cheap": 1}
    assert solve.allocate_ranks(curves, 23) == {"steep": 1, "flat": 1, "cheap": 3}
    assert solve.allocate_ranks(curves, 33) == {"steep": 2, "flat": 1, "cheap": 3}
    assert solve.allocate_ranks(curves, 63) == {"steep": 3, "flat": 3, "cheap": 3}
    assert solve.allocate_ranks(curves, 10**9) == {"steep": 3, "flat": 3, "cheap": 3}


@pytest.mark.parametrize("step", [1, 2])
def test_a_budget_is_kept_and_used(step: int) -> None:
    curves = {i: solve.Curve((1 - torch.linspace(0, 1, 33) ** (0.2 + 0.1 * i)).tolist(), 3) for i in range(5)}
    found = solve.allocate_ranks(curves, 3 * 80, step)
    assert 80 - step < sum(found.values()) <= 80
    assert found[0] < found[4]

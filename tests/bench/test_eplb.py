"""`bench eplb`: a arrangement made from the first half of a skewed trace divides the second half evenly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanovllm.bench.eplb import SkewedTrace, replay
from tests.cli.runner import Run


@pytest.mark.parametrize("seed", range(3))
def test_a_quarter_more_places_balance_a_zipf_trace(seed: int) -> None:
    """64 experts, 8 ranks, 16 redundant: what the design promises, for the layers' sums and for single steps."""
    found = replay(SkewedTrace(seed=seed, num_layers=4))
    before, after = found["before"], found["after"]
    assert before["balancedness"] < 0.7 < 0.95 < after["balancedness"]
    assert min(after["by_layer"]) >= 0.9
    assert after["of_a_step"] >= 0.9
    assert after["balancedness"] == pytest.approx(sum(after["by_layer"]) / 4)


def test_the_mean_is_taken_over_layers_and_not_over_their_sum() -> None:
    """With popular experts that differ by layer the sums over layers are even, which helps no layer."""
    found = replay(SkewedTrace(num_layers=16, num_steps=4))["before"]
    assert found["balancedness"] == pytest.approx(sum(found["by_layer"]) / 16)
    assert found["balancedness"] < 0.65


def test_without_redundant_experts_packing_alone_helps_less() -> None:
    packed, copied = (replay(SkewedTrace(num_redundant_experts=count, num_layers=2)) for count in (0, 16))
    assert packed["before"]["by_layer"] == copied["before"]["by_layer"]
    assert packed["before"]["balancedness"] < packed["after"]["balancedness"] < copied["after"]["balancedness"]


def test_command(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    size = ("--num-layers", 2, "--num-nodes", 2, "--num-groups", 8)
    result = run("bench", "eplb", *size, "--save", "--plot", tmp_path / "loads.png")
    assert result.code == 0
    report = result.last_json
    assert report["trace"]["num_groups"] == 8
    assert report["results"]["after"]["balancedness"] > 0.9
    assert "mean over layers" in result.out
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
    [saved] = (tmp_path / "benchmarks/results").iterdir()
    assert json.loads(saved.read_text()) == report
    again = run("bench", "eplb", *size)
    assert again.last_json["results"] == report["results"], "the same seed gives the same trace"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-redundant-experts", 15), "79 places for 64 experts on 8 GPUs"),
        (("--num-redundant-experts", -8), "56 places for 64 experts on 8 GPUs"),
        (("--num-ranks", 7, "--num-redundant-experts", 6), "64 experts on 7 GPUs: must divide"),
        (("--top-k", 65), "--top-k 65: must be 1 to 64"),
        (("--num-steps", 1), "at least 2 steps"),
        (("--skew", "nan"), "--skew nan: must be 0"),
        (("--num-nodes", 3), "possible: [1]"),
        (("--seed", -1), "--seed -1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(run: Run, options: tuple, message: str) -> None:
    result = run("bench", "eplb", *options)
    assert result.code != 0
    assert message in " ".join(result.err.split())

"""The scheduler benchmark shows what the policies promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanovllm.bench.schedulers import SimulatedMachine, TrafficShape
from tests.cli.runner import SMALL, Run
from tests.tiny_models import TinyModel


@pytest.mark.parametrize("seed", range(5))
def test_order_of_the_policies(seed: int) -> None:
    jobs = TrafficShape().jobs(seed)
    longs = [index for index, job in enumerate(jobs) if job.is_long]
    patience = 8
    fcfs = SimulatedMachine().run(jobs, "fcfs", None)
    sjf = SimulatedMachine().run(jobs, "sjf", None)
    aged = SimulatedMachine().run(jobs, "sjf", patience)

    def mean(values: dict[int, float]) -> float:
        return sum(values.values()) / len(values)

    assert mean(sjf.first_token) < mean(fcfs.first_token)
    # With more patience aging costs less: the default lies between the two.
    assert mean(sjf.first_token) < mean(SimulatedMachine().run(jobs, "sjf", 64).first_token) < mean(fcfs.first_token)
    assert max(fcfs.steps_passed.values()) == 0
    assert max(sjf.steps_passed.values()) > patience  # else this trace proves nothing about aging
    assert max(aged.steps_passed.values()) <= patience
    assert max(aged.first_token[i] for i in longs) < max(sjf.first_token[i] for i in longs)
    for served in (fcfs, sjf, aged):
        assert set(served.finished) == set(range(len(jobs)))
        assert all(served.first_token[i] <= served.finished[i] for i in served.finished)


def test_simulation_repeats() -> None:
    runs = [SimulatedMachine().run(TrafficShape(2, 20).jobs(3), "sjf", 8) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != SimulatedMachine().run(TrafficShape(2, 20).jobs(4), "sjf", 8)


def test_command(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("bench", "schedulers", "--num-short", 60, "--max-wait-steps", 4, "--save")
    assert result.code == 0
    report = result.last_json
    assert report["served_first"] == {"fcfs": "long", "sjf": "short"}
    assert "fcfs serves the long one first" in result.out
    assert "sjf serves the short one first" in result.out
    rows = report["results"]
    assert rows["sjf"]["ttft"]["mean"] < rows["fcfs"]["ttft"]["mean"]
    assert rows["sjf + aging"]["most_steps_passed_over"] <= 4 < rows["sjf"]["most_steps_passed_over"]
    assert {"mean", "p50", "p99"} <= set(rows["fcfs"]["ttft"]) & set(rows["fcfs"]["e2e"])
    assert report["date"]
    assert report["versions"]["torch"]
    [saved] = (tmp_path / "benchmarks/results").iterdir()
    assert json.loads(saved.read_text()) == report


def test_on_the_real_engine(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model reads 160 tokens at most, so the long prompts are shorter here."""
    from nanovllm.bench import schedulers

    monkeypatch.setattr(schedulers, "REAL_TRACE", TrafficShape(3, 24, (96, 128), (8, 24), (2, 4)))
    monkeypatch.setattr(schedulers, "REAL_SIZES", (128, 16))
    sizes = ("--num-long", 2, "--num-short", 6, "--rate", 200)
    result = run("bench", "schedulers", "--real", *sizes, "--model", llama.path, *SMALL)
    assert result.code == 0
    report = result.last_json
    assert [report["trace"][name] for name in ("num_long", "num_short", "rate")] == [2, 6, 200]
    assert report["served_first"] == {"fcfs": "long", "sjf": "short"}
    assert report["engine"]["attn_backend"] in ("native", "sdpa")  # native where there is a C compiler
    assert report["results"]["sjf"]["e2e"]["max"] > 0

"""nanovllm bench serve against our own server: the numbers are those of the load that was asked for."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench.serve import Load, Seen, ServerUnderTest, measure
from nanovllm.errors import ConfigError
from tests.cli.runner import Run, make_runner
from tests.server.rig import Running, running
from tests.tiny_models import TinyModel

BASE: dict[str, Any] = {
    "num_requests": 12,
    "rate": 50.0,
    "arrivals": "fixed",
    "input_len": "8..20",
    "output_len": "6",
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def server(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path) as made:
        yield made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return make_runner(monkeypatch, capsys)


def test_send_times() -> None:
    load = Load(**{**BASE, "num_requests": 4000})
    times = load.send_times(random.Random(0))
    assert {round(b - a, 6) for a, b in pairwise(times)} == {0.02}
    poisson = Load(**{**BASE, "num_requests": 4000, "arrivals": "poisson"}).send_times(random.Random(0))
    gaps = sorted(b - a for a, b in pairwise(poisson))
    assert sum(gaps) / len(gaps) == pytest.approx(0.02, rel=0.05)
    assert gaps[len(gaps) // 2] == pytest.approx(0.02 * 0.693, rel=0.08)  # the median of an exponential: ln 2
    with pytest.raises(ConfigError, match="arrivals"):
        Load(**{**BASE, "arrivals": "never"}).send_times(random.Random(0))


def test_prompts_share_prefixes(tmp_path: Path) -> None:
    load = Load(**{**BASE, "num_requests": 40, "prefix_len": 10, "num_prefixes": 3})
    prompts = load.prompts(random.Random(0))
    assert prompts == load.prompts(random.Random(0))
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} <= set(range(18, 31))
    assert len({tuple(prompt[10:14]) for prompt in prompts}) > 30
    file = tmp_path / "text"
    file.write_text("one two three four")
    [text] = Load(**{**BASE, "num_requests": 1, "input_len": "6", "text": str(file)}).prompts(random.Random(0))
    assert len(text.split()) == 6
    assert set(text.split()) <= {"one", "two", "three", "four"}


def test_times_of_one_request() -> None:
    times = Seen(events=[1.0, 1.5, 3.0], num_tokens=5, end=3.1).times
    assert times == {"ttft": [1.0], "tpot": [0.5], "itl": [0.5, 1.5], "e2e": [3.1]}


def test_measure(server: Running) -> None:
    load = Load(**{**BASE, "url": server.url, "prefix_len": 32, "slo_ttft_ms": 30_000.0, "slo_e2e_ms": 1e-6})
    found, good = measure(ServerUnderTest.of(load), load)
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, {})
    assert {one.num_tokens for one in good} == {6}
    assert found["output_tokens_per_second"] == pytest.approx(72 / found["seconds"])
    assert found["seconds"] >= 11 / 50
    assert found["ttft"]["mean"] < found["e2e"]["mean"]
    assert found["goodput"]["share"] == 0
    met = replace(load, slo_e2e_ms=30_000.0)
    assert measure(ServerUnderTest.of(met), met)[0]["goodput"]["share"] == 1
    assert server.engine.scheduler.blocks.num_hits > 0


@pytest.mark.parametrize("clients", [1, 3, 20])
def test_a_closed_loop(server: Running, clients: int) -> None:
    """More clients than requests is fine. A client never has two requests at once."""
    most, launch = 0, server.engine.add_request

    def add_request(*args: Any, **kwargs: Any) -> None:
        nonlocal most
        launch(*args, **kwargs)
        most = max(most, len(server.engine._requests))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "add_request", add_request)
        load = Load(**{**BASE, "url": server.url, "clients": clients, "prefix_len": 4})
        found, good = measure(ServerUnderTest.of(load), load)
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, {})
    assert {(one.num_tokens, one.num_prompt_tokens) <= (6, 24) for one in good} == {True}
    assert sum(one.num_tokens for one in good) == 72
    assert found["output_tokens_per_second"] == pytest.approx(72 / found["seconds"])
    assert 0 < found["ttft"]["mean"] <= found["e2e"]["mean"]
    assert found["send_delay"] is None
    assert 1 <= most <= clients


def test_failures_of_a_closed_loop_are_counted(server: Running) -> None:
    load = Load(**{**BASE, "url": server.url, "seed": 2, "input_len": "140..170", "clients": 2})
    fits = [len(prompt) + 6 <= 160 for prompt in load.prompts(random.Random(2))]
    assert fits[0], "the first is tried before"
    found, _ = measure(ServerUnderTest.of(load), load)
    assert (found["completed"], found["failed"]) == (sum(fits), 12 - sum(fits))
    assert 0 < sum(fits) < 12
    with pytest.raises(ConfigError, match="clients=0"):
        Load(clients=0)


def test_failures_are_counted_not_hidden(server: Running) -> None:
    load = Load(
        **{**BASE, "url": server.url, "seed": 3, "input_len": "150..170"}
    )  # max_model_len is 160: some of them fit
    rng = random.Random(3)
    fits = [len(prompt) + 6 <= 160 for prompt in load.prompts(rng)]
    assert any(fits)
    assert not all(fits)
    if not fits[0]:
        with pytest.raises(ConfigError, match="first request"):
            measure(ServerUnderTest.of(load), load)
    else:
        found, _ = measure(ServerUnderTest.of(load), load)
        assert (found["completed"], found["failed"]) == (sum(fits), 12 - sum(fits))
        assert "max_model_len" in next(iter(found["errors"]))


def test_the_command(server: Running, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(
        "bench", "serve", "--url", server.url + "/v1", "--num-requests", 5, "--rate", 100, "--input-len", "5..9",
        "--output-len", 4, "--vocab-size", 300, "--slo-ttft-ms", 60000, "--save",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "TTFT" in result.out
    assert "goodput" in result.out
    report = result.last_json
    assert report["benchmark"] == "serve"
    assert report["results"]["goodput"]["share"] == 1
    assert list(tmp_path.glob("benchmarks/results/serve-*.json"))


def test_nobody_there(run: Run) -> None:
    result = run("bench", "serve", "--url", "http://127.0.0.1:9")
    assert (result.code, "is a server running" in result.err) == (2, True)
    assert run("bench", "serve", "--rate", "0").code == 2


def test_a_plot(server: Running, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    options = ("--num-requests", 4, "--rate", 100, "--input-len", 5, "--output-len", 4, "--vocab-size", 300)
    assert run("bench", "serve", "--url", server.url, *options, "--plot", file).code == 0
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_a_plot_needs_what_its_extra_installs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message, the help and pyproject.toml agree."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^plot = \[.*"matplotlib', project, re.M)
    assert re.search(r'^server = \[.*?"httpx', project, re.M | re.S)
    assert "nano-vllm[plot]" in " ".join(run("bench", "serve", "--help").out.split())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("nanovllm.bench.report.find_spec", lambda name: None)
    result = run("bench", "serve", "--plot", tmp_path / "out.png")
    assert result.code == 2
    assert "pip install 'nano-vllm[plot]'" in result.err

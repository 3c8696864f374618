"""The table of backends: its form, its refusals before anything is loaded, and OOM in a cell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.bench import crossover, report
from nanovllm.bench.crossover import LengthSweep, does_not_fit
from nanovllm.bench.named import Ceiling, decode_limit_seconds, limit_seconds
from nanovllm.bench.workload import Workload
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.memory.facts import ModelFacts
from nanovllm.ranks.local import LocalExecutor
from nanovllm.telemetry.stats import StepStats
from tests.cli.runner import SMALL, Result, Run
from tests.tiny_models import TinyModel

ROOT = Path(__file__).parents[2]
BACKENDS = ("--backends", "sdpa,sdpa.math")


@pytest.fixture
def sweep(run: Run, llama: TinyModel) -> Any:
    """sweep(options) -> the command's result; the tiny model reads 160 tokens, its cache holds 64 blocks of 16."""

    def start(*options: Any) -> Result:
        return run("bench", "crossover", "--model", llama.path, *SMALL, *BACKENDS, *options)

    return start


def cells(result: Result, batch: int) -> list[list[str]]:
    """The rows of the table of that batch size, without the frame."""
    _, _, rest = result.out.partition(f"batch {batch}: ")
    lines = rest.split("batch ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def rates(result: Result) -> dict[tuple[str, int, int], float | None]:
    rows = result.last_json["results"]
    return {(r["backend"], r["batch_size"], r["input_len"]): r["decode_tokens_per_second"] for r in rows}


def test_tables_and_json(sweep: Any) -> None:
    result = sweep("--batch-sizes", "1,3", "--input-lens", "2,17", "--repeat", 2)
    assert result.code == 0, result.err
    found = rates(result)
    assert set(found) == {(b, n, length) for b in ("sdpa", "sdpa.math") for n in (1, 3) for length in (2, 17)}
    assert all(rate > 0 for rate in found.values())
    for batch in (1, 3):
        assert [row[0] for row in cells(result, batch)] == ["2", "17"]
        for row, length in zip(cells(result, batch), (2, 17)):
            first, second = (found[b, batch, length] for b in ("sdpa", "sdpa.math"))
            assert row[1:3] == [f"{first:,.0f}", f"{second:,.0f}"]
            winner = "sdpa" if first >= second else "sdpa.math"
            assert row[3:] == [winner, f"{max(first, second) / min(first, second):.2f}x"]
    assert re.search("Winner.*Speedup", result.out)
    made = result.last_json
    assert made["benchmark"] == "crossover"
    assert made["hardware"]
    assert [row["attn_backend"] for row in made["results"]] == ["sdpa"] * 4 + ["sdpa.math"] * 4
    assert all(row["output_len"] == row["input_len"] for row in made["results"])
    assert "attention backend that ran: sdpa.math (asked: sdpa.math)" in result.out


def test_only_decode_steps_count(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.config import EngineConfig

    steps: list[tuple[int, float]] = []
    count = StepStats.count

    def spy(self: StepStats, plan: Any, progress: Any, seconds: float) -> None:
        if all(entry.num_new == 1 for entry in plan.entries):
            steps.append((sum(len(moved.token_ids) for moved in progress), seconds))
        count(self, plan, progress, seconds)

    with LLMEngine(EngineConfig(model=str(llama.path), device="cpu", num_kvcache_blocks=64)) as engine:
        monkeypatch.setattr(StepStats, "count", spy)
        rate = crossover.decode_rate(engine, Workload([[1, 2, 3], [4, 5, 6]], [5, 5]))
    assert [tokens for tokens, _ in steps] == [2] * 4  # the first token of each came with the prompt
    assert rate == pytest.approx(8 / sum(seconds for _, seconds in steps))


@pytest.mark.parametrize(("length", "fits"), [(80, True), (81, False)])
def test_lengths_meet_the_model(sweep: Any, monkeypatch: pytest.MonkeyPatch, length: int, fits: bool) -> None:
    loaded = []
    monkeypatch.setattr(crossover, "measure_sweep", lambda *_: loaded.append(1) or ({"hardware": None}, []))
    monkeypatch.setattr(crossover, "print_tables", lambda *_: None)
    result = sweep("--batch-sizes", "1", "--input-lens", f"8,{length},16")
    assert bool(loaded) == fits
    assert result.code == (0 if fits else 2)
    if not fits:
        assert "162" in result.err
        assert "max_model_len=160" in result.err
        assert "--max-model-len" in result.err
        assert result.out == ""


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--batch-sizes", "9", "max_num_seqs=8"),
        ("--batch-sizes", "0", "at least 1"),
        ("--batch-sizes", "1,,2", "comma"),
        ("--input-lens", "1", "at least 2"),
        ("--input-lens", "x", "commas"),
        ("--backends", "sdpa,nothing", "nothing"),
        ("--backends", "sdpa,triton", "needs a GPU"),
    ],
)
def test_refused_before_anything_is_loaded(
    sweep: Any, monkeypatch: pytest.MonkeyPatch, option: str, value: str, word: str
) -> None:
    monkeypatch.setattr(LocalExecutor, "__init__", lambda *_: pytest.fail("a model was loaded"))
    result = sweep("--batch-sizes", "1", "--input-lens", "4", option, value)
    assert result.code == 2
    assert word in result.err
    assert result.out == ""


def test_a_cell_without_room_in_the_cache(sweep: Any) -> None:
    """8 sequences of 2 x 64 tokens fill 64 blocks exactly; one token more does not fit."""
    result = sweep("--batch-sizes", "8", "--input-lens", "64,65,16")
    assert result.code == 0, result.err
    assert [[cell == "OOM" for cell in row[1:3]] for row in cells(result, 8)] == [[False] * 2, [True] * 2, [False] * 2]
    assert cells(result, 8)[1][3:] == ["-", "-"]
    assert rates(result)["sdpa", 8, 65] is None
    [row] = [r for r in result.last_json["results"] if (r["backend"], r["input_len"]) == ("sdpa", 65)]
    assert "72 blocks" in row["oom"]


def test_a_step_out_of_memory(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LocalExecutor.launch

    def fail(self: LocalExecutor, plan: Any) -> Any:
        if self.selection.backend.name == "sdpa" and len(plan.entries) == 4:
            raise torch.OutOfMemoryError("Tried to allocate 99 GiB")
        return launch(self, plan)

    monkeypatch.setattr(LocalExecutor, "launch", fail)
    result = sweep("--batch-sizes", "4,2", "--input-lens", "8")
    assert result.code == 0, result.err
    found = rates(result)
    assert found["sdpa", 4, 8] is None
    assert cells(result, 4)[0][1] == "OOM"
    assert cells(result, 4)[0][3:] == ["sdpa.math", "-"]
    assert all(rate for key, rate in found.items() if key != ("sdpa", 4, 8))  # the run went on, in the same engine too


def test_a_backend_that_leaves_no_room(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    init = LocalExecutor.__init__

    def fail(self: LocalExecutor, config: Any, *args: Any) -> None:
        if config.attn_backend == "sdpa":
            raise ConfigError("no room for the KV cache: 0 MiB are left")
        init(self, config, *args)

    monkeypatch.setattr(LocalExecutor, "__init__", fail)
    result = sweep("--batch-sizes", "1", "--input-lens", "4,8")
    assert result.code == 0, result.err
    assert [rate is None for rate in rates(result).values()] == [True, True, False, False]
    assert [row[1] for row in cells(result, 1)] == ["OOM", "OOM"]
    assert result.last_json["engine"]["attn_backend"] == "sdpa.math"


def test_another_failure_is_not_hidden(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(LocalExecutor, "launch", fail)
    result = sweep("--batch-sizes", "1", "--input-lens", "4")
    assert result.code == 2
    assert "shapes do not match" in result.err


def test_what_counts_as_out_of_memory() -> None:
    assert does_not_fit(torch.OutOfMemoryError(""))
    assert does_not_fit(EngineDeadError("step failed: OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    assert does_not_fit(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert does_not_fit(ConfigError("num_kvcache_blocks=9 needs 2.00 GiB, but 1.00 GiB are left: at most 4 blocks"))
    assert not does_not_fit(RuntimeError("out of resource: shared memory"))
    assert not does_not_fit(ConfigError("attn_backend='triton' cannot be used here: needs a GPU"))


def test_share_of_the_limit(sweep: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A card is known by name; here the CPU is one. The plot gets both rows of charts."""
    from nanovllm.hardware.device import Device

    drawn: list[Any] = []
    monkeypatch.setattr(crossover, "CEILINGS", {Device.choose("cpu").name: Ceiling(1e12, 1e15)})
    monkeypatch.setattr(report, "check_plot", lambda _: None)
    monkeypatch.setattr(crossover, "plot_lines", lambda *args: drawn.append(args))
    result = sweep("--batch-sizes", "2,1", "--input-lens", "4,8", "--plot", tmp_path / "out.png")
    assert result.code == 0, result.err
    for row in result.last_json["results"]:
        assert row["share_of_limit"] == pytest.approx(row["decode_tokens_per_second"] / row["limit"])
    [(path, _, grid)] = drawn
    assert path == tmp_path / "out.png"
    assert list(grid) == ["decode tokens per second", "share of the card's limit"]
    for charts in grid.values():
        assert list(charts) == ["input = output = 4", "input = output = 8"]
        for series in charts.values():
            assert [[x for x, _ in points] for points in series.values()] == [[1, 2], [1, 2]]


def test_the_decode_limit_is_the_rest_of_the_limit(tiny: Any) -> None:
    from nanovllm.model_config import ModelConfig

    model = ModelFacts(ModelConfig.from_hf(json.loads((Path(tiny("qwen3").path) / "config.json").read_text())))
    ceiling = Ceiling(1e9, 1e30)  # arithmetic is free: a step takes what its bytes take
    one, two = (Workload([[0] * 4], [new]) for new in (1, 2))
    assert decode_limit_seconds(one, model, ceiling) == 0
    rest = limit_seconds(two, model, ceiling) - limit_seconds(one, model, ceiling)
    assert rest == pytest.approx(decode_limit_seconds(two, model, ceiling))
    assert rest > 0


def test_an_axis_is_logarithmic_where_one_line_would_flatten_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure, drawn = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append(self))
    rows = {"KL": {"a": {"x": [(1, 0.01), (8, 9.0)]}}, "tok/s": {"a": {"x": [(1, 2.0)]}}}
    report.plot_lines(tmp_path / "out.png", "bytes", rows, log_y=("KL",))
    assert [axes.get_yscale() for axes in drawn[0].axes] == ["log", "linear"]


def test_each_value_once() -> None:
    assert LengthSweep.parse("sdpa, sdpa", "8,1,8", "4,4") == LengthSweep(("sdpa",), (8, 1), (4,))


def test_winner_and_speedup() -> None:
    def row(backend: str, rate: float | None) -> dict[str, Any]:
        return {"backend": backend, "decode_tokens_per_second": rate}

    names = {"a": "a", "b": "b (sdpa)", "c": "c"}
    assert crossover._winner([row("a", 10.0), row("b", 30.0), row("c", 20.0)], names) == ("b (sdpa)", "1.50x")
    assert crossover._winner([row("a", None), row("b", 30.0), row("c", None)], names) == ("b (sdpa)", "-")
    assert crossover._winner([row("a", None), row("b", None)], names) == ("-", "-")


@pytest.mark.parametrize(
    ("options", "backends"),
    [
        (["--backends", "sdpa", "--batch-sizes", "2", "--input-lens", "4"], ["sdpa"]),
        (
            ["--attn-backend", "sdpa", "sdpa.math", "--batch-sizes", "1", "2", "--input-lens", "4", "8"],
            ["sdpa", "sdpa.math"],
        ),
    ],
)
def test_script(llama: TinyModel, options: list[str], backends: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench_my.py"), *options, "--model-path", str(llama.path), *SMALL, "--load-format",
         "dummy"], capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["benchmark"] == "crossover"
    assert made["sweep"]["backends"] == backends
    assert len(made["results"]) == (1 if len(backends) == 1 else 8)
    assert ("Winner" in done.stdout) == (len(backends) > 1)

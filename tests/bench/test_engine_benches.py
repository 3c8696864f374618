"""Benchmarks of the engine on a tiny model: the numbers mean nothing, their form and their counts do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.bench import compare_hf, sampling
from nanovllm.bench.speculation import CASES, check_length
from nanovllm.bench.workload import Lengths, WorkloadShape
from nanovllm.errors import ConfigError, ModelError
from tests.cli.runner import SMALL, Run
from tests.tiny_models import TinyModel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def args(llama: TinyModel) -> tuple[str, ...]:
    return ("--model", str(llama.path), *SMALL)


def check_report(report: dict[str, Any], kind: str) -> None:
    assert report["benchmark"] == kind
    assert report["date"]
    assert report["hardware"]
    assert report["versions"]["transformers"]
    assert report["engine"]["attn_backend"] in ("native", "sdpa")  # native where there is a C compiler


def test_throughput(run: Run, args: Any) -> None:
    sizes = ("--num-seqs", 5, "--input-len", "3..40", "--output-len", "7")
    result = run("bench", "throughput", *args, *sizes, "--repeat", 2)
    assert result.code == 0
    check_report(result.last_json, "throughput")
    found = result.last_json["results"]
    assert found["output_tokens"] == 5 * 7
    assert 5 * 3 <= found["prompt_tokens"] <= 5 * 40
    assert found["output_tokens_per_second"] == pytest.approx(35 / found["seconds"])
    assert found["kv_slots_per_token"] >= 1
    assert f"attention backend that ran: {result.last_json['engine']['attn_backend']}" in result.out


def test_latency(run: Run, args: Any) -> None:
    result = run("bench", "latency", *args, "--num-seqs", 3, "--input-len", 20, "--output-len", 4)
    assert result.code == 0
    check_report(result.last_json, "latency")
    found = result.last_json["results"]
    for name in ("startup", "time_to_first_token", "time_per_output_token", "between_tokens"):
        assert 0 < found[name]["p50"] <= found[name]["p99"] <= found[name]["max"]
    parts = found["startup"]["last"]
    assert parts["import"] > 0.1  # torch is imported in the child, and inside the measured time
    assert sum(parts.values()) < found["startup"]["mean"]


def test_sampling(run: Run, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case runs, the grammar too, which needs a tokenizer where the other benchmarks load none."""
    workload = WorkloadShape(3, Lengths(3, 9), Lengths(6, 6)).draw(0, 100)
    monkeypatch.setattr(sampling, "parse_workload", lambda *_: (workload, False))
    result = run("bench", "sampling", *args, "--repeat", 1, "--cases", ",".join(sampling.CASES))
    assert result.code == 0
    check_report(result.last_json, "sampling")
    assert [row["case"] for row in result.last_json["results"]] == [case.title for case in sampling.CASES.values()]
    assert all(row["share"] > 0 for row in result.last_json["results"])


@pytest.mark.parametrize("cases", ["", "a", "plain,,"])
def test_cases_of_sampling_that_do_not_exist(run: Run, args: Any, cases: str) -> None:
    result = run("bench", "sampling", *args, "--cases", cases)
    assert result.code == 2
    assert "must be of" in result.err


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3", "mixtral", "mixtral-window-sharded", "qwen3-moe"])
def test_compare_hf(run: Run, tiny: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same tokens on both sides, so same work; a ratio of different work would mean nothing."""
    shapes = {
        "1 prompt": WorkloadShape(1, Lengths(9, 9), Lengths(6, 6)),
        "4 prompts": WorkloadShape(4, Lengths(3, 40), Lengths(6, 6)),
    }
    monkeypatch.setattr(compare_hf, "SHAPES", shapes)
    result = run("bench", "throughput", "--compare", "hf", "--repeat", 2, "--model", tiny(name).path, *SMALL)
    assert result.code == 0
    check_report(result.last_json, "throughput-compare-hf")
    assert result.last_json["engine"]["dtype"] == "float32"
    for row in result.last_json["results"].values():
        assert row["equal_greedy_tokens"] > 0.95
        low, high = row["ratio_spread"]
        assert 0 < low <= row["ratio"] <= high
        assert row["kv_slots_per_token"] >= 1


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_compare_hf_proves_that_all_tensors_are_used(
    tiny: Any, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, tensor = compare_hf.open_checkpoint, "model.layers.1.block_sparse_moe.gate.weight"

    def other(path: Path) -> Any:
        checkpoint = opened(path)
        names, read = checkpoint.names(), checkpoint.read
        changed = [name for name in names if name != tensor] if change == "missing" else [*names, "model.odd"]
        monkeypatch.setattr(checkpoint, "names", lambda: changed)
        monkeypatch.setattr(checkpoint, "read", lambda name: read(tensor if name == "model.odd" else name))
        return checkpoint

    monkeypatch.setattr(compare_hf, "open_checkpoint", other)
    with pytest.raises(ModelError, match="layers.1.mlp.gate.weight" if change == "missing" else r"model\.odd"):
        compare_hf.load_hf(str(tiny("mixtral").path), torch.float32, torch.device("cpu"))
    assert capsys.readouterr().err == ""


def test_compare_refuses_others(run: Run, args: Any) -> None:
    result = run("bench", "throughput", *args, "--compare", "vllm")
    assert result.code == 2
    assert "must be hf" in result.err


def test_bad_length(run: Run, args: Any) -> None:
    result = run("bench", "throughput", *args, "--input-len", "9..3")
    assert result.code == 2
    assert "9..3" in result.err


def test_plot(run: Run, args: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.png"
    assert run("bench", "schedulers", "--num-short", 10, "--plot", file).code == 0
    assert file.stat().st_size > 0


def test_family_script(llama: TinyModel) -> None:
    """bench.py with two backends and two lengths: a line for each that names what really ran, then JSON."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), "--model-path", str(llama.path), "--device", "cpu", "--num-seqs", "3",
         "--input-lens", "8", "16..20", "--output-len", "5", "--load-format", "dummy", "--attn-backend", "sdpa",
         "sdpa.math"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith("Total: 15tok, Time: ") for line in lines)
    names = [("sdpa", "8"), ("sdpa", "16..20"), ("sdpa.math", "8"), ("sdpa.math", "16..20")]
    assert [line.partition("Backend: ")[2] for line in lines] == [f"{name}, Input: {size}" for name, size in names]
    report = json.loads(last)
    assert report["benchmark"] == "main"
    assert [(row["attn_backend"], row["input_len"]) for row in report["results"]] == names
    assert report["results"][0]["prompt_tokens"] == 24
    assert report["workload"]["input_len"] == "8,16..20"


def test_example(llama: TinyModel) -> None:
    command = [sys.executable, str(ROOT / "example.py"), str(llama.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.count("Prompt: '<|user|>") == 2
    assert done.stdout.count("Completion: ") == 2


def test_speculation_refuses_what_it_could_not_write(make_llm: Any) -> None:
    engine = make_llm(max_model_len=80).engine
    check_length(engine, CASES["8-random"], 16)
    with pytest.raises(ConfigError, match=r"--output-len 17: .* prompts of 64 tokens, .*max_model_len=80; .*16 fits"):
        check_length(engine, CASES["8-random"], 17)
    with pytest.raises(ConfigError, match="prompts of 64 tokens; raise it"):
        check_length(make_llm(max_model_len=64).engine, CASES["8-random"], 1)

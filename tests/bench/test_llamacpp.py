"""The comparison with llama.cpp, whose package is replaced by a stand-in: the numbers mean nothing, their form does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanovllm.bench import compare_llamacpp
from nanovllm.bench.workload import Lengths, WorkloadShape
from tests.cli.runner import SMALL, Run
from tests.tiny_models import TinyModel

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from gguf_samples import tiny_state, write_model

STAND_IN = """
__version__ = "1.2.3"
class Part: pass
class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = Part(), Part(), Part()
class Server:
    def __init__(self, params):
        assert params.cpuparams.n_threads == 1 and params.n_parallel == 16, vars(params)
        print("a line of its own")
    def handle_completions(self, body):
        assert body["ignore_eos"] and not body["cache_prompt"] and not body["stream"]
        return {"usage": {"completion_tokens": body["max_tokens"]}, "timings": {"prompt_ms": 2.5}}
def get_system_info():
    return "CPU : AVX2 = 1 "
"""


def test_without_the_package(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_llamacpp, "find_spec", lambda name: None)
    result = run("bench", "throughput", "--compare", "llamacpp", "--model", llama.path, *SMALL)
    assert result.code != 0
    assert "pip install 'nano-vllm[llamacpp]'" in result.err


def test_a_folder_is_no_gguf_file(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_llamacpp, "find_spec", lambda name: True)
    result = run("bench", "throughput", "--compare", "llamacpp", "--model", llama.path, *SMALL)
    assert result.code != 0
    assert "give a .gguf file" in result.err


def test_both_sides_take_turns(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes = {
        "2 prompts": WorkloadShape(2, Lengths(3, 9), Lengths(6, 6)),
        "prefill": WorkloadShape(1, Lengths(20, 20), Lengths(1, 1)),
    }
    monkeypatch.setattr(compare_llamacpp, "SHAPES", shapes)
    path = write_model(tmp_path / "m.gguf", "llama", tiny_state(inner=64, tied=True))
    result = run("bench", "throughput", "--compare", "llamacpp", "--model", path, "--threads", 1, "--repeat", 2, *SMALL)
    assert result.code == 0, result.err
    found = result.last_json
    assert found["benchmark"] == "throughput-compare-llamacpp"
    assert found["llamacpp"] == {"version": "1.2.3", "system_info": "CPU : AVX2 = 1 "}
    assert {name: row["counts"] for name, row in found["results"].items()} == {
        "2 prompts": "output tokens",
        "prefill": "prompt tokens",
    }
    for row in found["results"].values():
        assert row["ours_tokens_per_second"] > 0
        assert row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1]
        assert row["llamacpp_prefill_ms"] == 2.5
        assert row["llamacpp_resident_mb"] > 0
    assert "AVX2 = 1" in result.out

"""Long commands show how far they are on a terminal, and nothing of it anywhere else."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench import compare_hf
from nanovllm.bench.workload import Lengths, WorkloadShape
from tests.cli.runner import SMALL, Run
from tests.server.rig import running
from tests.tiny_models import TinyModel

LOAD = ("--num-seqs", 3, "--input-len", 8, "--output-len", 5)
SHAPES = {"1 prompt": WorkloadShape(1, Lengths(9, 9), Lengths(6, 6))}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(run: Run, monkeypatch: pytest.MonkeyPatch, *args: Any) -> str:
    """What a command that must succeed writes on a terminal; it writes nothing of it into a pipe."""
    silent = run(*args)
    assert silent.code == 0
    assert "\r" not in silent.out + silent.err
    assert "%" not in silent.err
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        result = run(*args)
    assert result.code == 0
    assert "\r" not in result.out
    return terminal.getvalue()


def test_bench_throughput(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(run, monkeypatch, "bench", "throughput", "--model", llama.path, *SMALL, *LOAD, "--repeat", 2)
    assert "loading weights" in text
    assert text.index("warming up") < text.index("run 1 of 2") < text.index("run 2 of 2")
    assert "/15 " in text  # tokens of one run


def test_compare_hf(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_hf, "SHAPES", SHAPES)
    text = shown(run, monkeypatch, "bench", "throughput", "--compare", "hf", "--model", llama.path, *SMALL)
    assert "against Hugging Face" in text


@pytest.mark.parametrize("name", ["latency", "crossover"])
def test_other_benches(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sizes = {
        "latency": (*LOAD, "--startup", 0),
        "crossover": ("--backends", "sdpa", "--batch-sizes", 2, "--input-lens", 16),
    }
    title = {"latency": "one at a time", "crossover": "measuring"}[name]
    assert title in shown(run, monkeypatch, "bench", name, *sizes[name], "--model", llama.path, *SMALL)


def test_bench_serve(run: Run, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llama.path) as server:
        args = ("--url", server.url, "--num-requests", 3, "--rate", 100, "--input-len", 8, "--output-len", 3)
        assert "0/3" in shown(run, monkeypatch, "bench", "serve", *args, "--vocab-size", 300)


def test_plan_measure(
    run: Run, tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nanovllm.hardware import bandwidth

    monkeypatch.setattr(bandwidth, "host_to_device_bandwidth", lambda device: 5e9)
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: 7e9)
    args = ("plan", "--model", tiny("mixtral").path, "--gpu-memory-gb", 4, "--measure", "--json", tmp_path / "plan")
    text = shown(run, monkeypatch, *args)
    assert "measuring" in text
    assert "0/2" in text
    assert "host to GPU: 5 GB/s (measured)" in run(*args).out

"""Our engine against llama.cpp: the same GGUF file, prompts, number of threads; taking turns, llama.cpp in a process of
its own (`llamacpp_child.py`). Greedy, every output of full length.

Its server gets 16 slots. Rounding differs between the two, so tokens are not compared: each decides near-ties in its
own way.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.bench.report import Columns, print_rows
from nanovllm.bench.throughput import run_workload, warm_up
from nanovllm.bench.workload import Lengths, Workload, WorkloadShape
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.hardware.host import resident_bytes
from nanovllm.weights.resolve import resolve_model

SLOTS, TOKENS_A_SLOT = 16, 640
SHAPES = {
    "1 prompt": WorkloadShape(1, Lengths(32, 32), Lengths(64, 64)),
    "16 prompts": WorkloadShape(16, Lengths(32, 256), Lengths(64, 64)),
    "prefill": WorkloadShape(1, Lengths(500, 500), Lengths(1, 1)),
}


def check(model: str) -> Path:
    """Before anything is loaded."""
    if find_spec("xllamacpp") is None:
        raise ConfigError("--compare llamacpp needs the package xllamacpp: pip install 'nano-vllm[llamacpp]'")
    path = resolve_model(model)
    if path.suffix != ".gguf":
        raise ConfigError(f"--compare llamacpp: llama.cpp reads GGUF files, and {path} is none; give a .gguf file")
    return path


@dataclass(frozen=True)
class LlamaCpp:
    facts: dict[str, Any]
    process: subprocess.Popen[str]

    def ask(self, workload: Workload) -> dict[str, Any]:
        [num_tokens] = set(workload.output_lens)
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"prompts": workload.prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        return _read(self.process)


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    for line in process.stdout:
        if line.startswith("{"):  # llama.cpp may print lines of its own
            found: dict[str, Any] = json.loads(line)
            return found
    raise EngineDeadError(f"llama.cpp's process ended with code {process.wait()}; see its messages above")


@contextlib.contextmanager
def llama_cpp(path: Path, threads: int) -> Iterator[LlamaCpp]:
    command = [sys.executable, "-m", "nanovllm.bench.llamacpp_child", str(path)]
    sizes = [str(size) for size in (threads, SLOTS, TOKENS_A_SLOT)]
    with subprocess.Popen(
        command + sizes, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield LlamaCpp(_read(process), process)
        finally:
            process.kill()


def compare(engine: LLMEngine, other: LlamaCpp, shape: WorkloadShape, seed: int, repeat: int) -> dict[str, Any]:
    ours, theirs, waits, their_waits = [], [], [], []
    prefill = shape.output_len.high == 1
    title = f"{shape.num_seqs} prompts against llama.cpp"
    for turn in tqdm(range(repeat), desc=title, unit="turn", disable=None, leave=False):
        workload = shape.draw(seed + turn, engine.model_config.vocab_size)
        count = workload.num_prompt_tokens if prefill else workload.num_output_tokens
        run, asked = run_workload(engine, workload, temperature=0.0), other.ask(workload)
        assert asked["num_tokens"] == run.num_output_tokens == workload.num_output_tokens
        ours.append(count / run.seconds)
        theirs.append(count / asked["seconds"])
        waits.append(1000 * run.prefill_seconds)
        their_waits.append(asked["first_token_ms"])
    ratios = [a / b for a, b in zip(ours, theirs)]
    return {
        "num_seqs": shape.num_seqs,
        "input_len": str(shape.input_len),
        "output_len": str(shape.output_len),
        "counts": "prompt tokens" if prefill else "output tokens",
        "ours_tokens_per_second": statistics.median(ours),
        "llamacpp_tokens_per_second": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "ours_prefill_ms": statistics.median(waits),
        "llamacpp_prefill_ms": statistics.median(their_waits),
        "ours_resident_mb": resident_bytes() / 1e6,
        "llamacpp_resident_mb": asked["resident_mb"],
        "repeat": repeat,
    }


def compare_all(
    engine: LLMEngine, path: Path, threads: int, seed: int, repeat: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(by workload, facts about llama.cpp)"""
    with llama_cpp(path, threads) as other:
        warm_up(engine, seed)
        other.ask(WorkloadShape(2, Lengths(24, 24), Lengths(4, 4)).draw(seed, engine.model_config.vocab_size))
        return {name: compare(engine, other, shape, seed, repeat) for name, shape in SHAPES.items()}, other.facts


def print_comparison(found: dict[str, Any], facts: dict[str, Any]) -> None:
    columns: Columns = [
        ("workload", "name"),
        ("of", "counts"),
        ("ours tok/s", "ours_tokens_per_second"),
        ("llama.cpp tok/s", "llamacpp_tokens_per_second"),
        ("ratio", "ratio", "{:.2f}x"),
        ("spread", "ratio_spread", "{0[0]:.2f}..{0[1]:.2f}"),
        ("prefill ms", "ours_prefill_ms", "{:.0f}"),
        ("theirs", "llamacpp_prefill_ms", "{:.0f}"),
        ("memory MB", "ours_resident_mb", "{:.0f}"),
        ("theirs", "llamacpp_resident_mb", "{:.0f}"),
    ]
    print_rows("against llama.cpp", [{"name": name, **row} for name, row in found.items()], columns)
    print(f"llama.cpp: xllamacpp {facts['version']}, {facts['system_info'].strip()}")

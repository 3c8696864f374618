"""Tokens per second of a whole workload, every output of full length.

Each repeat draws fresh prompts, so nothing that is timed was left in the prefix cache by the repeat before.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.bench.workload import Lengths, Workload, WorkloadShape
from nanovllm.errors import EngineDeadError
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestDelta
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Run:
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int  # really produced
    token_ids: list[list[int]]
    kv_waste: float  # slots of the blocks in use / tokens held, at the peak
    num_preemptions: int
    prefill_seconds: float

    @property
    def output_rate(self) -> float:
        return self.num_output_tokens / self.seconds


def run_workload(
    engine: LLMEngine,
    workload: Workload,
    temperature: float,
    title: str = "measuring",
    params_of: Callable[[int], dict[str, Any]] = lambda _: {},
) -> Run:
    """On a terminal `title` and a bar of its tokens are shown, drawn at most ten times a second. `params_of`: other
    SamplingParams of the request of this number."""
    stats = engine.stats
    stats.peak_blocks, stats.peak_waste = 0, 1.0
    prefill_before = stats.prefill_seconds
    generated_before = stats.generated_tokens
    done: dict[str, RequestDelta] = {}
    with tqdm(total=workload.num_output_tokens, desc=title, unit="tok", disable=None, leave=False) as bar:
        started = time.perf_counter()
        for index, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lens)):
            given = {"temperature": temperature, "max_tokens": length, "ignore_eos": True, **params_of(index)}
            params = SamplingParams(**given)
            engine.add_request(f"bench-{index}", {"prompt_token_ids": prompt}, params, final_only=True)
        while engine.has_unfinished_requests():
            done.update((delta.request_id, delta) for delta in engine.step())
            bar.update(stats.generated_tokens - generated_before - bar.n)
        seconds = time.perf_counter() - started
    wholes = [done[f"bench-{index}"] for index in range(len(workload.prompts))]
    if failed := next((whole.error for whole in wholes if whole.error), None):
        raise EngineDeadError(f"the benchmark's step failed: {failed}")
    token_ids = [whole.outputs[0].token_ids for whole in wholes]
    return Run(
        seconds,
        workload.num_prompt_tokens,
        sum(map(len, token_ids)),
        token_ids,
        stats.peak_waste,
        sum(whole.metrics.num_preemptions for whole in wholes),
        stats.prefill_seconds - prefill_before,
    )


def warm_up(engine: LLMEngine, seed: int = 0) -> None:
    """First use of everything: allocations, kernels, threads."""
    workload = WorkloadShape(2, Lengths(24, 24), Lengths(4, 4)).draw(~seed, engine.model_config.vocab_size)
    run_workload(engine, workload, temperature=0.6, title="warming up")
    run_workload(engine, workload, temperature=0.0, title="warming up")


def measure(engine: LLMEngine, shape: WorkloadShape, temperature: float, seed: int, repeat: int) -> dict[str, Any]:
    warm_up(engine, seed)
    runs = []
    for index in range(repeat):
        workload = shape.draw(seed + index, engine.model_config.vocab_size)
        runs.append(run_workload(engine, workload, temperature, f"run {index + 1} of {repeat}"))
    rates = [run.output_rate for run in runs]
    middle = statistics.median_low(rates)
    run = runs[rates.index(middle)]
    return {
        "num_seqs": shape.num_seqs,
        "input_len": str(shape.input_len),
        "output_len": str(shape.output_len),
        "prompt_tokens": run.num_prompt_tokens,
        "output_tokens": run.num_output_tokens,
        "seconds": run.seconds,
        "output_tokens_per_second": middle,
        "total_tokens_per_second": (run.num_prompt_tokens + run.num_output_tokens) / run.seconds,
        "spread": [min(rates), max(rates)],
        "kv_slots_per_token": run.kv_waste,
        "num_preemptions": run.num_preemptions,
        "repeat": repeat,
    }


def read_config(name: str) -> ModelConfig:
    """Of a model that is not loaded."""
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model

    with contextlib.closing(open_checkpoint(resolve_model(name))) as checkpoint:
        return ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)


def engine_facts(engine: LLMEngine) -> dict[str, Any]:
    """For the report: what really ran, whatever the options were."""
    facts = engine.describe()
    runs_on = facts.pop("runs_on")
    hardware = f"{runs_on.pop('device')}, {runs_on.pop('architecture')}"
    return {"hardware": hardware, "engine": {**facts, **runs_on}}

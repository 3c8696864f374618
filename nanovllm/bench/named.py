"""The workloads by the names that the tables use, and the physical limit of each.

    main          256 prompts of 100..1024 random tokens, outputs of 100..1024 (see workload.py)
    64x512        batch 64, input = output = 512; output tokens per second, prefill included
    prefill 1x1024  one new token each; prompt tokens per second

The limit of a workload on a card: weights and KV read once per decode step at the card's read bandwidth, or its
arithmetic at the card's matrix rate, whichever takes longer, added up over all steps. No engine can be faster, so the
share of it shows how much is left to win.
"""

from __future__ import annotations

import random
import re
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.bench.throughput import run_workload
from nanovllm.bench.workload import LARGEST_TOKEN, Lengths, Workload, make_workload
from nanovllm.errors import ConfigError
from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.scaling import head_bytes, weights_read, weights_used
from nanovllm.ops.fp8 import BLOCK
from nanovllm.quantization_config import QuantizationConfig

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Ceiling:
    """What a card was measured to reach."""

    bytes_per_second: float
    flops: float


CEILINGS = {"NVIDIA H200": Ceiling(4.46e12, 780e12)}


def parse_workload(name: str, repeat: int = 0, vocab_size: int = LARGEST_TOKEN + 1) -> tuple[Workload, bool]:
    """(the workload, whether its figure is prompt tokens); a repeat has other tokens, so that no prefix is cached."""
    if name == "main":
        work = make_workload(random.Random(0), 256, Lengths(100, 1024), Lengths(100, 1024))
        shift, below = 131 * repeat, min(LARGEST_TOKEN, vocab_size)
        return Workload([[(t + shift) % below for t in p] for p in work.prompts], work.output_lens), False
    found = re.fullmatch(r"(prefill )?(\d+)x(\d+)", name.strip())
    if not found:
        raise ConfigError(f"workload {name!r}: write main, 64x512 or 'prefill 1x1024'")
    batch, length = int(found[2]), int(found[3])
    new = 1 if found[1] else length
    rng = random.Random(batch * 7919 + length + 104729 * repeat)
    return make_workload(rng, batch, Lengths(length, length), Lengths(new, new), vocab_size), bool(found[1])


def facts_of(engine: LLMEngine) -> ModelFacts:
    """Of one rank, in 16 bits, or in fewer what is quantised on a GPU."""
    config, runs = engine.config, engine.describe()["runs_on"]
    stored = QuantizationConfig.from_hf(engine.model_config.hf)
    block = BLOCK if stored is not None and stored.block == (BLOCK, BLOCK) else 0
    is_fp8 = "FP8" in runs["quantization"].split(", ")  # beside what the file has in 16 bits
    return ModelFacts(
        engine.model_config,
        2,
        num_ranks=config.tensor_parallel_size,
        expert_size=config.expert_parallel_size,
        quantization="fp8" if is_fp8 else runs["quantization"],
        kv_cache_dtype=config.kv_cache_dtype,
        expert_scales=block if is_fp8 else None,
    )


def limit_seconds(workload: Workload, model: ModelFacts, ceiling: Ceiling, tied: bool = False) -> float:
    """The least time the workload can take on such cards. Experts: those that even routing touches; a router that
    prefers some touches fewer, which is why `experts_touched` stands beside. `tied`: those of one token."""
    num_tokens = workload.num_prompt_tokens
    arithmetic = num_tokens * _flops_per_token(model) / ceiling.flops
    prompts = max(arithmetic, weights_read(model, 1 if tied else num_tokens) / ceiling.bytes_per_second)
    return prompts + decode_limit_seconds(workload, model, ceiling, tied)


def decode_limit_seconds(workload: Workload, model: ModelFacts, ceiling: Ceiling, tied: bool = False) -> float:
    """The part of it after the prompts: each sequence's first new token comes with its prompt, the others here."""
    lens, news = [len(prompt) for prompt in workload.prompts], workload.output_lens
    total = 0.0
    for step in range(1, max(news)):
        live = [n + step for n, new in zip(lens, news) if new > step]
        num_bytes = weights_read(model, 1 if tied else len(live)) + model.kv_bytes_per_token * sum(live)
        total += max(num_bytes / ceiling.bytes_per_second, _flops_per_token(model) * len(live) / ceiling.flops)
    return total


def _flops_per_token(model: ModelFacts) -> float:
    """Of the weights alone; attention is left out. Integers are multiplied as 16-bit numbers. 8-bit floats count half:
    tensor cores multiply them twice as fast."""
    if model.quantization != "fp8":
        model = replace(model, quantization="none", stored_bytes=None, expert_integers=None)
    return 2 * (weights_used(model) + head_bytes(model)) / model.itemsize


def measure_named(engine: LLMEngine, name: str, temperature: float, repeat: int, tied: bool = False) -> dict[str, Any]:
    """Runs it once to warm up (kernels for its shapes, buffers), then `repeat` times; the median counts. `tied`: all
    tokens take the same experts (Probe.tie_routing)."""
    rates = []
    for turn in range(repeat + 1):
        workload, is_prefill = parse_workload(name, turn, engine.model_config.vocab_size)
        run = run_workload(engine, workload, temperature, f"{name}, run {turn} of {repeat}" if turn else "warming up")
        tokens = run.num_prompt_tokens if is_prefill else run.num_output_tokens
        rates.append(tokens / run.seconds)
    row: dict[str, Any] = {
        "workload": name,
        "tokens_per_second": statistics.median(rates[1:]),
        "spread": [min(rates[1:]), max(rates[1:])],
        "first_pass": rates[0],
    }
    ceiling = CEILINGS.get(engine.executor.probe().device.name)
    if ceiling is not None:
        limit = tokens / limit_seconds(workload, facts_of(engine), ceiling, tied)
        row |= {"limit": limit, "share_of_limit": row["tokens_per_second"] / limit}
    if engine.model_config.moe is not None and not is_prefill:
        row["experts_touched"] = count_touched(engine, workload, temperature)
    return row


PROBE_TOKENS = 9


def count_touched(engine: LLMEngine, workload: Workload, temperature: float) -> float | None:
    """Distinct experts of a layer that one decode step of this many sequences touches, over the first few steps: with
    made-up weights far fewer than with a trained model's, and the fewer, the less is read. Measured apart from the
    clock, because nothing is captured meanwhile. None where the model is in other processes."""
    short = [min(new, PROBE_TOKENS) for new in workload.output_lens]
    with engine.executor.probe().routes() as routes:
        run_workload(engine, Workload(workload.prompts, short), temperature)
    touched = [route.num_distinct for route in routes if route.num_tokens <= len(workload.prompts)]
    return statistics.mean(touched) if touched else None

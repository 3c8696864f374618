"""What sampling parameters cost: the named workloads with filters, penalties, logprobs or a grammar, and beside each
the same workload with a temperature only, run in turn with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.bench.named import parse_workload
from nanovllm.bench.throughput import run_workload
from nanovllm.bench.workload import Workload

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

ParamsOf = Callable[[int], dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}, "minItems": 200}},
    "required": ["name", "tags"],
}


@dataclass(frozen=True)
class Case:
    title: str
    workload: str
    params_of: ParamsOf
    num_sequences: int | None = None  # of the workload; None = all


def _all(**params: Any) -> ParamsOf:
    return lambda _: params


CASES = {
    "main-top-k-top-p": Case("main, top_k=20 top_p=0.95", "main", _all(top_k=20, top_p=0.95)),
    "main-one-top-p": Case("main, one row with top_p", "main", lambda i: {"top_p": 0.9} if i == 0 else {}),
    "main-top-p": Case("main, top_p=0.9 alone", "main", _all(top_p=0.9)),
    "1-top-k-top-p": Case("1x512, top_k=20 top_p=0.95", "1x512", _all(top_k=20, top_p=0.95)),
    "64-penalties": Case(
        "64 of main, penalties", "main", _all(repetition_penalty=1.1, presence_penalty=0.5), num_sequences=64
    ),
    "64-logprobs": Case("64 of main, logprobs=5", "main", _all(logprobs=5), num_sequences=64),
    "64-schema": Case(
        "64 of main, a JSON schema each",
        "main",
        _all(structured_outputs={"json": SCHEMA}, ignore_eos=False),
        num_sequences=64,
    ),
}


def measure_case(engine: LLMEngine, case: Case, repeat: int) -> dict[str, Any]:
    """Plain and not, in turn, after one run of each to warm up; medians, and the median of the ratios of pairs."""
    rates: dict[str, list[float]] = {"plain": [], "asked": []}
    for turn in range(repeat + 1):
        for kind, params_of in (("plain", _all()), ("asked", case.params_of)):
            workload, _ = parse_workload(case.workload, 2 * turn + (kind == "asked"))
            if case.num_sequences is not None:
                count = case.num_sequences
                workload = Workload(workload.prompts[:count], workload.output_lens[:count])
            title = f"{case.title}, {kind}, run {turn} of {repeat}" if turn else "warming up"
            run = run_workload(engine, workload, 0.6, title, params_of)
            if turn:
                rates[kind].append(run.output_rate)
    shares = [asked / plain for plain, asked in zip(rates["plain"], rates["asked"])]
    return {
        "case": case.title,
        "tokens_per_second": statistics.median(rates["asked"]),
        "plain": statistics.median(rates["plain"]),
        "share": statistics.median(shares),
        "shares": shares,
    }

"""Where one attention backend overtakes another: decode tokens per second over backends, batch sizes and lengths.

Every cell of the table runs `batch` prompts of `length` random tokens to `length` new ones each. Only steps that do
nothing but decode are counted, so how fast a backend reads prompts does not count here. A cell that does not
fit shows OOM, and the run goes on. One engine serves all cells of a backend. With several backends, Winner is the
fastest of a row and Speedup how many times as fast it is as the next.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.attention.base import attention_specs
from nanovllm.attention.select import select_backend
from nanovllm.bench.named import CEILINGS, decode_limit_seconds, facts_of
from nanovllm.bench.report import Series, plot_lines, print_table
from nanovllm.bench.throughput import engine_facts, read_config, run_workload, warm_up
from nanovllm.bench.workload import Lengths, Workload, WorkloadShape, parse_counts
from nanovllm.config import EngineConfig
from nanovllm.engine.defaults import resolve_block_size, resolve_max_model_len
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device, is_out_of_memory
from nanovllm.hardware.parallel import Parallel
from nanovllm.hardware.utilisation import sampled
from nanovllm.runner.quantization import choose_kv_dtype

TEMPERATURE = 0.6
OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "no room for the KV cache", "GiB are left")
RATE = "decode tokens per second"


@dataclass(frozen=True)
class LengthSweep:
    backends: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    input_lens: tuple[int, ...]

    @classmethod
    def parse(cls, backends: str, batch_sizes: str, input_lens: str) -> LengthSweep:
        names = dict.fromkeys(name.strip() for name in backends.split(","))  # each once
        batches = dict.fromkeys(parse_counts("--batch-sizes", batch_sizes, 1))
        # The first new token comes with the prompt: a decode step needs a second one.
        lengths = dict.fromkeys(parse_counts("--input-lens", input_lens, 2))
        return cls(tuple(names), tuple(batches), tuple(lengths))

    def check(self, config: EngineConfig) -> None:
        """What can be checked without loading weights is refused before a run of many minutes begins."""
        model = read_config(config.model)
        limit, longest = resolve_max_model_len(config, model), max(self.input_lens)
        if 2 * longest > limit:
            raise ConfigError(
                f"--input-lens {longest}: with as many new tokens that is {2 * longest}, over max_model_len={limit}; "
                f"use lengths up to {limit // 2} or raise --max-model-len"
            )
        if max(self.batch_sizes) > config.max_num_seqs:
            raise ConfigError(
                f"--batch-sizes {max(self.batch_sizes)}: only max_num_seqs={config.max_num_seqs} run at the same time; "
                f"raise --max-num-seqs"
            )
        device = Device.choose(config.device)
        dtype = device.resolve_dtype(config.dtype, model.dtype)
        for name in self.backends:
            own = replace(config, attn_backend=name)
            specs = attention_specs(model, dtype, Parallel(), choose_kv_dtype(own, model, device.is_gpu, dtype))
            select_backend(name, specs, device, resolve_block_size(own, device))


FAILURES = (RuntimeError, MemoryError, ConfigError)  # OutOfMemoryError and EngineDeadError are RuntimeErrors


def does_not_fit(error: BaseException) -> bool:
    """A failed step reaches us as text, so the text decides too; any other failure is a bug to be seen."""
    return is_out_of_memory(error) or any(words in str(error) for words in OUT_OF_MEMORY)


def measure_sweep(config: EngineConfig, sweep: LengthSweep, repeat: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(facts of the last engine that stood, rows: one a cell)."""
    facts: dict[str, Any] = {"hardware": None}
    rows = []
    for name in sweep.backends:
        found, cells = measure_backend(replace(config, attn_backend=name, skip_tokenizer_init=True), sweep, repeat)
        facts = found or facts
        rows += cells
        gc.collect()  # what an engine that failed half built still held
        Device.choose(config.device).release_cached()
    return facts, rows


def measure_backend(
    config: EngineConfig, sweep: LengthSweep, repeat: int
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    shapes = [(batch, length) for batch in sweep.batch_sizes for length in sweep.input_lens]
    rows: list[dict[str, Any]] = [
        {
            "backend": config.attn_backend,
            "attn_backend": None,
            "batch_size": batch,
            "input_len": length,
            "output_len": length,
            "decode_tokens_per_second": None,
        }
        for batch, length in shapes
    ]
    try:
        engine = LLMEngine(config)
    except FAILURES as error:
        if not does_not_fit(error):
            raise
        print(f"{config.attn_backend}: OOM while loading: {error}", flush=True)
        for row in rows:
            row["oom"] = str(error)
        return None, rows
    with engine:
        facts = engine_facts(engine)
        ran = facts["engine"]["attn_backend"]
        print(f"attention backend that ran: {ran} (asked: {config.attn_backend}) on {facts['hardware']}", flush=True)
        warm_up(engine, config.seed)
        for row in rows:
            row["attn_backend"] = ran
            row |= measure_cell(engine, row["batch_size"], row["input_len"], repeat)
            print(f"  {row['batch_size']}x{row['input_len']}: {_cell(row)}", flush=True)
    return facts, rows


def measure_cell(engine: LLMEngine, batch: int, length: int, repeat: int) -> dict[str, Any]:
    probe = engine.executor.probe()
    device, layout = probe.device, probe.layout
    needed = batch * -(-2 * length // layout.block_size)
    if needed > layout.num_blocks:
        # The engine would let some wait and run the others: another batch size than the table has.
        return {"oom": f"{needed} blocks of KV cache are needed, there are {layout.num_blocks}"}
    try:
        # A few tokens first: kernels and buffers of this shape, and what does not fit fails sooner.
        run_workload(engine, _draw(engine, batch, length, min(16, length), ~0), TEMPERATURE)
        with sampled(device) as busy:
            rates = [decode_rate(engine, _draw(engine, batch, length, length, turn)) for turn in range(repeat)]
    except FAILURES as error:
        if not does_not_fit(error):
            raise
        reason = str(error)
    else:
        rate = statistics.median(rates)
        share = _share(engine, batch, length, rate)
        if busy.percent is not None:
            share["gpu_busy_percent"] = busy.percent
        return {"decode_tokens_per_second": rate, "spread": [min(rates), max(rates)], **share}
    device.release_cached()  # out of the except: a traceback keeps the tensors of its frames alive
    return {"oom": reason}


def decode_rate(engine: LLMEngine, workload: Workload) -> float:
    stats = engine.stats
    tokens, seconds = stats.decode_tokens, stats.decode_seconds
    run_workload(engine, workload, TEMPERATURE)
    return (stats.decode_tokens - tokens) / (stats.decode_seconds - seconds)


def _draw(engine: LLMEngine, batch: int, length: int, new: int, turn: int) -> Workload:
    """Other prompts every time, so that none is in the prefix cache; the same for every backend."""
    seed = engine.config.seed + 7919 * batch + length + 104729 * turn
    return WorkloadShape(batch, Lengths(length, length), Lengths(new, new)).draw(seed, engine.model_config.vocab_size)


def _share(engine: LLMEngine, batch: int, length: int, rate: float) -> dict[str, float]:
    ceiling = CEILINGS.get(engine.executor.probe().device.name)
    if ceiling is None:
        return {}
    workload = Workload([[0] * length] * batch, [length] * batch)
    seconds = decode_limit_seconds(workload, facts_of(engine), ceiling)
    limit = batch * (length - 1) / seconds
    return {"limit": limit, "share_of_limit": rate / limit}


# ---- tables and plots ----------------------------------------------------------------------------------------------


def _cell(row: dict[str, Any]) -> str:
    if "oom" in row:
        return "OOM"
    share = f" ({row['share_of_limit']:.0%})" if "share_of_limit" in row else ""
    return f"{row['decode_tokens_per_second']:,.0f}{share}"


def _names(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Backend as asked -> as shown: with the one that ran, where that is another word."""
    return {
        row["backend"]: row["backend"]
        if row["attn_backend"] in (None, row["backend"])
        else f"{row['backend']} ({row['attn_backend']})"
        for row in rows
    }


def print_tables(sweep: LengthSweep, rows: list[dict[str, Any]]) -> None:
    found = {(row["backend"], row["batch_size"], row["input_len"]): row for row in rows}
    names = _names(rows)
    columns = ["input = output", *(names[backend] for backend in sweep.backends)]
    several = len(sweep.backends) > 1
    for batch in sweep.batch_sizes:
        lines = []
        for length in sweep.input_lens:
            line = [found[backend, batch, length] for backend in sweep.backends]
            lines.append([length, *map(_cell, line), *(_winner(line, names) if several else ())])
        print_table(f"batch {batch}: {RATE}", columns + ["Winner", "Speedup"] * several, lines)


def _winner(line: list[dict[str, Any]], names: dict[str, str]) -> tuple[str, str]:
    """(the fastest, how much faster than the next), as far as there are any that ran."""
    ran = [row for row in line if row["decode_tokens_per_second"] is not None]
    ran.sort(key=lambda row: -row["decode_tokens_per_second"])
    first, second = (row["decode_tokens_per_second"] for row in ran[:2]) if len(ran) > 1 else (None, None)
    return names[ran[0]["backend"]] if ran else "-", f"{first / second:.2f}x" if first else "-"


def plot_sweep(path: Any, sweep: LengthSweep, rows: list[dict[str, Any]]) -> None:
    """Throughput against batch, a chart for each length; below it the share of the card's limit and how busy the GPU
    was, where they are known."""
    names = _names(rows)

    def charts(key: str) -> dict[str, Series]:
        return {
            f"input = output = {length}": {
                names[backend]: sorted(
                    (row["batch_size"], row[key])
                    for row in rows
                    if (row["backend"], row["input_len"]) == (backend, length) and row.get(key) is not None
                )
                for backend in sweep.backends
            }
            for length in sweep.input_lens
        }

    grid = {RATE: charts("decode_tokens_per_second")}
    if any("share_of_limit" in row for row in rows):
        grid["share of the card's limit"] = charts("share_of_limit")
    if any("gpu_busy_percent" in row for row in rows):
        grid["% of time the GPU was busy"] = charts("gpu_busy_percent")
    plot_lines(path, "batch size", grid)

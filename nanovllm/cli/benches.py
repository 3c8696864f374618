"""The commands of `nanovllm bench`: each prints tables for people, then one JSON line for tools."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nanovllm.bench.workload import Lengths, WorkloadShape
from nanovllm.cli.options import ENGINE, OptionGroup, with_options
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError

bench = typer.Typer(name="bench", help="Measure. Each command ends with one JSON line.", no_args_is_help=True)


@dataclass(frozen=True)
class RequestOptions:
    num_seqs: int = 16
    input_len: str = "32..256"
    output_len: str = "64"
    temperature: float = 0.6

    @property
    def shape(self) -> WorkloadShape:
        return WorkloadShape(self.num_seqs, Lengths.parse(self.input_len), Lengths.parse(self.output_len))


REQUESTS = OptionGroup(
    title="Workload",
    of=RequestOptions,
    build=lambda values: RequestOptions(**values),
    help={
        "num_seqs": "Number of requests.",
        "input_len": "Prompt tokens: a number, or a range such as 32..256.",
        "output_len": "New tokens: a number or a range.",
        "temperature": "0 is greedy.",
    },
)


@dataclass(frozen=True)
class MoeOptions:
    parts: str | None = None
    shapes: str | None = None
    tune: bool = False
    cached: str = "2,4,6"
    tokens: int = 32
    input_len: int = 64
    routing: str | None = None
    num_layers: int | None = None
    bandwidth_gbs: float | None = None


MOE = OptionGroup(
    title="What to measure",
    of=MoeOptions,
    build=lambda values: MoeOptions(**values),
    common=frozenset({"parts", "shapes", "tune", "cached"}),
    help={
        "parts": "kernels, offload, or both with a comma; default: kernels on a GPU, offload if --model is given.",
        "shapes": "kernels: mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b; default: those of --model, or the usual ones.",
        "tune": "Find the best tiles on this GPU and write them into the table; then only the --parts that are named.",
        "cached": "offload: experts cached in each layer; with commas.",
        "tokens": "offload: tokens decoded while the clock runs.",
        "input_len": "offload: tokens of the prompt.",
        "routing": "offload: model, or spread = made-up routers like trained ones (default with dummy weights).",
        "num_layers": "offload, dummy weights: only so many layers of the model, if host memory is short.",
        "bandwidth_gbs": "offload: gigabytes a second from host to GPU for the bound; default: measured.",
    },
)
Threads = Annotated[int | None, typer.Option(min=1, metavar="INT", help="CPU threads; default: what torch takes.")]
Repeat = Annotated[int, typer.Option(min=1, metavar="INT", help="Measure so often; the table has the median.")]
Save = Annotated[bool, typer.Option("--save", help="Also write the JSON under benchmarks/results/.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the result into this file (needs 'nano-vllm[plot]').")
]


@bench.command()
@with_options(requests=REQUESTS, config=ENGINE)
def throughput(
    compare: Annotated[
        str | None,
        typer.Option(
            help="hf: against Hugging Face generate, taking turns, on 1 prompt and on 16 prompts of 32..256 "
            "tokens with 64 new ones, greedy, float32 unless --dtype says otherwise."
        ),
    ] = None,
    repeat: Repeat = 3,
    threads: Threads = None,
    save: Save = False,
    plot: Plot = None,
    *,
    requests: RequestOptions,
    config: EngineConfig,
) -> None:
    """Tokens per second of many requests at once."""
    if compare not in (None, "hf"):
        raise ConfigError(f"--compare {compare!r}: must be hf")
    from nanovllm.bench import report
    from nanovllm.bench.throughput import engine_facts, measure

    report.check_plot(plot)
    shape = requests.shape
    if compare and config.dtype == "auto":
        config = replace(config, dtype="float32")
    with bench_engine(config, threads) as engine:
        facts = engine_facts(engine)
        if compare:
            from nanovllm.bench.compare_hf import compare_all

            found = compare_all(engine, config.seed, repeat)
            _print_comparison(found)
            bars = {
                f"{name}: {side}": row[f"{side}_tokens_per_second"]
                for name, row in found.items()
                for side in ("ours", "hf")
            }
        else:
            found = measure(engine, shape, requests.temperature, config.seed, repeat)
            report.print_table("throughput", ["", "value"], [[k.replace("_", " "), v] for k, v in found.items()])
            bars = {"output": found["output_tokens_per_second"], "total": found["total_tokens_per_second"]}
    print(f"attention backend that ran: {facts['engine']['attn_backend']} on {facts['hardware']}")
    if plot:
        report.plot_bars(plot, f"throughput, {config.model}", "tokens per second", bars)
    kind = "throughput-compare-hf" if compare else "throughput"
    report.finish(report.make_report(kind, **facts, threads=_threads(), results=found), save)


@bench.command()
@with_options(config=ENGINE)
def workloads(
    names: Annotated[
        str, typer.Argument(help="Comma-separated: main, 64x512 (batch x input = output), 'prefill 1x1024'.")
    ] = "main,1x512,8x512,64x512,prefill 1x1024",
    repeat: Repeat = 3,
    save: Save = False,
    plot: Plot = None,
    *,
    config: EngineConfig,
) -> None:
    """The named workloads of the tables, with their share of what the card could do at most."""
    from nanovllm.bench import report
    from nanovllm.bench.named import measure_named, parse_workload
    from nanovllm.bench.throughput import engine_facts, warm_up

    report.check_plot(plot)
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        parse_workload(name)  # a typo is told before the model is loaded
    rows = []
    started = time.perf_counter()
    with bench_engine(config, None) as engine:
        facts = engine_facts(engine)
        warm_up(engine)
        facts["startup_seconds"] = time.perf_counter() - started
        for name in chosen:
            rows.append(measure_named(engine, name, 0.6, repeat))
            report.print_table(name, ["", "value"], [[k.replace("_", " "), v] for k, v in rows[-1].items()])
    print(f"attention backend that ran: {facts['engine']['attn_backend']} on {facts['hardware']}")
    if plot:
        bars = {row["workload"]: row["tokens_per_second"] for row in rows}
        report.plot_bars(plot, f"workloads, {config.model}", "tokens per second", bars)
    report.finish(report.make_report("workloads", **facts, results=rows), save)


@bench.command()
@with_options(config=ENGINE)
def crossover(
    backends: Annotated[str, typer.Option(help="Attention backends, with commas: triton,sdpa.")] = "auto,sdpa",
    batch_sizes: Annotated[str, typer.Option(help="How many sequences at once; with commas.")] = "1,8,64",
    input_lens: Annotated[str, typer.Option(help="Prompt tokens, and as many new ones; with commas.")] = "128,512",
    repeat: Repeat = 1,
    threads: Threads = None,
    save: Save = False,
    plot: Plot = None,
    *,
    config: EngineConfig,
) -> None:
    """Decode tokens per second of attention backends by batch size and length; OOM where a cell does not fit."""
    from nanovllm.bench import crossover as lab
    from nanovllm.bench import report

    report.check_plot(plot)
    sweep = lab.LengthSweep.parse(backends, batch_sizes, input_lens)
    _set_threads(threads)
    sweep.check(config)
    facts, rows = lab.measure_sweep(config, sweep, repeat)
    lab.print_tables(sweep, rows)
    if plot:
        lab.plot_sweep(plot, sweep, rows)
    settings = {"threads": _threads(), "repeat": repeat, "sweep": asdict(sweep)}
    report.finish(report.make_report("crossover", **facts, **settings, results=rows), save)


@bench.command()
def kernels(
    prefill: Annotated[str, typer.Option(help="Batch x length, with commas.")] = "8x2048,2x8192,64x1024,1x1024",
    decode: Annotated[str, typer.Option(help="Likewise.")] = "256x840,64x1024,64x2048,8x1024,1x1024",
    input_lens: Annotated[
        str, typer.Option(help="Lengths at which scores in memory meet flash.")
    ] = "128,512,2048,8192,32768,65536",
    heads: Annotated[str, typer.Option(help="Query heads, KV heads, size of a head.")] = "16,8,128",
    save: Save = False,
) -> None:
    """The attention kernels alone, against PyTorch's and against what this card can do. Needs a GPU."""
    from nanovllm.bench import kernels as lab
    from nanovllm.bench import report
    from nanovllm.bench.crossover import parse_counts

    shapes = lab.parse_shapes("--prefill", prefill), lab.parse_shapes("--decode", decode)
    lengths, sizes = parse_counts("--input-lens", input_lens, 1), lab.Heads.parse(heads)
    device = lab.choose_gpu()
    bench_lab = lab.Lab(device, device.resolve_dtype("auto", "bfloat16"), sizes)
    ceilings = lab.measure_ceilings(bench_lab)
    bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
    found = {
        "ceilings": ceilings,
        "prefill": lab.measure_shapes(bench_lab, "prefill", shapes[0], ceilings["matmul_flops"]),
        "decode": lab.measure_shapes(bench_lab, "decode", shapes[1], bandwidth),
        "crossover": lab.measure_crossover(bench_lab, lengths),
    }
    lab.print_kernels(found)
    hardware = f"{device.name}, {device.architecture}"
    report.finish(report.make_report("kernels", hardware, heads=asdict(sizes), results=found), save)


@bench.command()
@with_options(asked=MOE, config=ENGINE)
def moe(
    threads: Threads = None, save: Save = False, plot: Plot = None, *, asked: MoeOptions, config: EngineConfig
) -> None:
    """Mixture of experts: the kernels against what the card can do; offloaded experts against what the link can do.

    Offload decodes one sequence for each --cached and each way to use the cache (none, lru, lfu, lfu + prefetch), so
    --expert-policy, --expert-prefetch, --expert-placement and --max-num-seqs are set here.
    """
    from nanovllm.bench import moe as lab
    from nanovllm.bench import moe_kernels, report
    from nanovllm.hardware.device import Device

    report.check_plot(plot)
    device, has_model = Device.choose(config.device), config.model != EngineConfig.model
    parts = [] if asked.tune and asked.parts is None else lab.choose_parts(asked.parts, device.is_gpu, has_model)
    shapes = moe_kernels.SHAPES if asked.shapes is None else moe_kernels.parse_shapes(asked.shapes)
    if has_model and asked.shapes is None:
        shapes = (moe_kernels.shape_of(lab.read_model(config), config.model),)
    if asked.tune or "kernels" in parts:
        moe_kernels.need_gpu(device)
    _set_threads(threads)
    facts: dict[str, Any] = {"hardware": f"{device.name}, {device.architecture}", "model": config.model}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        offload = None
        if "offload" in parts:  # before anything is measured: a wrong option is told at once
            sizes = (asked.cached, asked.tokens, asked.input_len)
            offload = stack.enter_context(lab.prepared(config, asked.num_layers, sizes, asked.routing))
        if asked.tune:
            found["tuned"] = moe_kernels.tune_table(shapes, device)
            moe_kernels.print_tuned(found["tuned"])
        if "kernels" in parts:
            found["kernels"] = moe_kernels.measure(device, shapes)
            moe_kernels.print_measured(found["kernels"])
        if offload is not None:
            more, found["offload"] = offload.run(asked.bandwidth_gbs, plot)
            facts |= more
    report.finish(report.make_report("moe", **facts, threads=_threads(), results=found), save)


@bench.command()
def tables(
    folder: Annotated[Path, typer.Argument(help="The project's root: docs/ and benchmarks/results/.")] = Path("."),
) -> None:
    """Write the tables of docs/benchmarks.md anew from the JSON files under benchmarks/results/."""
    from nanovllm.bench.report import RESULTS
    from nanovllm.bench.tables import PAGES, fill, read_results

    results = read_results(folder / RESULTS)
    if not results:
        raise ConfigError(f"{folder / RESULTS}: no results; run a benchmark with --save first")
    for page, words in PAGES.items():
        print(f"{page}: {', '.join(fill(folder / page, results, words))}")


@bench.command()
@with_options(
    requests=replace(REQUESTS, defaults={"num_seqs": 8, "input_len": "128", "output_len": "32"}), config=ENGINE
)
def latency(
    startup: Annotated[
        int, typer.Option(min=0, help="How often to start a new process and wait for its first token; 0 = never.")
    ] = 1,
    threads: Threads = None,
    save: Save = False,
    plot: Plot = None,
    *,
    requests: RequestOptions,
    config: EngineConfig,
) -> None:
    """Time to the first token, between tokens, and from process start; requests run one at a time."""
    from nanovllm.bench import report
    from nanovllm.bench.latency import measure_requests, measure_startup
    from nanovllm.bench.throughput import engine_facts, warm_up

    report.check_plot(plot)
    shape = requests.shape
    found: dict[str, Any] = {}
    if startup:  # first, while this process holds no model
        found["startup"] = measure_startup(config, startup)
    with bench_engine(config, threads) as engine:
        facts = engine_facts(engine)
        warm_up(engine, config.seed)
        found |= measure_requests(engine, shape, requests.temperature, config.seed)
    columns = ("mean", "p50", "p99", "max")
    report.print_table(
        "latency in milliseconds",
        ["", *columns],
        [[name.replace("_", " "), *(row[column] * 1000 for column in columns)] for name, row in found.items()],
    )
    print(f"attention backend that ran: {facts['engine']['attn_backend']} on {facts['hardware']}")
    if plot:
        bars = {name.replace("_", " "): row["p50"] * 1000 for name, row in found.items()}
        report.plot_bars(plot, f"latency, {config.model}", "milliseconds (median)", bars)
    settings = {"threads": _threads(), "workload": asdict(requests)}
    report.finish(report.make_report("latency", **facts, **settings, results=found), save)


@bench.command()
@with_options(config=ENGINE)
def schedulers(
    num_long: Annotated[int | None, typer.Option(min=1, help="Long prompts, at the start: 6, with --real 3.")] = None,
    num_short: Annotated[int | None, typer.Option(min=1, help="Short ones that follow: 200, with --real 24.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Short prompts a second (Poisson).")] = 8.0,
    real: Annotated[
        bool, typer.Option("--real", help="Play a small trace on the real engine, by the wall clock.")
    ] = False,
    save: Save = False,
    plot: Plot = None,
    *,
    config: EngineConfig,
) -> None:
    """Waiting times under fcfs, sjf, and sjf with aging (--max-wait-steps), on one trace (--seed).

    Simulated unless --real: the real scheduler and a cost model of a step. Of the engine options the simulation uses
    only --seed and --max-wait-steps.
    """
    from nanovllm.bench import report
    from nanovllm.bench import schedulers as lab

    report.check_plot(plot)
    patience = 64 if config.max_wait_steps is None else config.max_wait_steps
    trace = lab.REAL_TRACE if real else lab.TrafficShape()
    trace = replace(trace, num_long=num_long or trace.num_long, num_short=num_short or trace.num_short, rate=rate)
    facts: dict[str, Any] = {"hardware": None}
    if real:
        config = replace(config, max_num_seqs=4, max_num_batched_tokens=64, skip_tokenizer_init=True)
        run: Any = functools.partial(_run_real, config, facts)
        sizes = lab.REAL_SIZES
    else:
        server = lab.SimulatedMachine()
        run = lambda jobs, policy, steps: lab.simulate(jobs, server, policy, steps)  # noqa: E731
        facts["cost_model"] = {
            "seconds_per_step": server.seconds_per_step,
            "seconds_per_token": server.seconds_per_token,
        }
        sizes = lab.SIZES
    first = lab.served_first(run, *sizes)
    for policy, winner in first.items():
        print(f"a prompt of {sizes[0]} tokens, then one of {sizes[1]}: {policy} serves the {winner} one first")
    found = lab.compare_policies(trace.jobs(config.seed), patience, run)
    _print_policies(found, trace)
    if plot:
        report.plot_bars(plot, "mean time to first token", "seconds", {k: v["ttft"]["mean"] for k, v in found.items()})
    settings = {"real": real, "seed": config.seed, "max_wait_steps": patience, "trace": vars(trace)}
    report.finish(report.make_report("schedulers", **facts, **settings, served_first=first, results=found), save)


def _run_real(config: EngineConfig, facts: dict[str, Any], jobs: Any, policy: str, max_wait_steps: int | None) -> Any:
    from nanovllm.bench.schedulers import run_real
    from nanovllm.bench.throughput import engine_facts, warm_up

    with bench_engine(replace(config, scheduling_policy=policy, max_wait_steps=max_wait_steps), None) as engine:
        facts.update(engine_facts(engine))
        warm_up(engine)
        return run_real(engine, jobs)


def bench_engine(config: EngineConfig, threads: int | None) -> Any:
    from nanovllm.engine.llm_engine import LLMEngine

    _set_threads(threads)
    return LLMEngine(replace(config, skip_tokenizer_init=True))  # prompts are token ids


def _set_threads(threads: int | None) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _print_comparison(found: dict[str, Any]) -> None:
    from nanovllm.bench.report import print_table

    columns = ["workload", "ours tok/s", "hf tok/s", "ratio", "spread", "equal tokens", "KV slots/token", "padded"]
    print_table(
        "against Hugging Face generate",
        columns,
        [
            [
                name,
                row["ours_tokens_per_second"],
                row["hf_tokens_per_second"],
                f"{row['ratio']:.2f}x",
                "{:.2f}..{:.2f}".format(*row["ratio_spread"]),
                f"{row['equal_greedy_tokens']:.1%}",
                f"{row['kv_slots_per_token']:.3f}",
                f"{row['kv_slots_per_token_of_a_padded_batch']:.3f}",
            ]
            for name, row in found.items()
        ],
    )


def _print_policies(found: dict[str, Any], trace: Any) -> None:
    from nanovllm.bench.report import print_table

    columns = ["seconds", "TTFT mean", "p50", "p99", "e2e mean", "p50", "p99", "long: mean", "max", "passed over"]
    print_table(
        f"{trace.num_long} long prompts, then {trace.num_short} short ones",
        columns,
        [
            [
                name,
                *(row["ttft"][k] for k in ("mean", "p50", "p99")),
                *(row["e2e"][k] for k in ("mean", "p50", "p99")),
                *(row["ttft_of_long"][k] for k in ("mean", "max")),
                row.get("most_steps_passed_over", "-"),
            ]
            for name, row in found.items()
        ],
    )

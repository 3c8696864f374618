"""The commands of `nanovllm bench`: each prints tables for people, then one JSON line for tools.

What a command measures is in bench/; torch is imported there, inside the commands, so that help is instant.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from nanovllm.bench import report
from nanovllm.bench.eplb import SkewedTrace
from nanovllm.bench.serve import Load
from nanovllm.cli.bench_options import LOAD, MOE, REQUESTS, TRACE, MoeOptions, Outcome, RequestOptions, bench_command
from nanovllm.cli.bench_options import bench as bench
from nanovllm.cli.options import ENGINE
from nanovllm.config import DEVICES, EngineConfig
from nanovllm.engine.interrupts import import_torch
from nanovllm.errors import ConfigError


@bench_command("repeat", "threads", "plot", requests=REQUESTS, config=ENGINE)
def throughput(
    compare: Annotated[
        str | None,
        typer.Option(
            help="hf: against Hugging Face generate, taking turns, on 1 prompt and on 16 prompts of 32..256 "
            "tokens with 64 new ones, greedy, float32 weights unless --dtype or --quantization says otherwise. "
            "llamacpp: against llama.cpp, on such prompts and on one of 500 tokens, with the GGUF file as it is (needs "
            "'nano-vllm[llamacpp]')."
        ),
    ] = None,
    *,
    outcome: Outcome,
    requests: RequestOptions,
    config: EngineConfig,
) -> None:
    """Tokens per second of many requests at once."""
    if compare not in (None, "hf", "llamacpp"):
        raise ConfigError(f"--compare {compare!r}: must be hf or llamacpp")
    import_torch()
    from nanovllm.bench import compare_hf, compare_llamacpp
    from nanovllm.bench.throughput import measure

    shape = requests.shape
    path = compare_llamacpp.check(config.model) if compare == "llamacpp" else None
    if compare and config.dtype == "auto":
        config = replace(config, dtype="float32")
    if compare == "hf" and config.quantization == "auto":  # the same weights on both sides
        config = replace(config, quantization="none")
    outcome.use_threads()
    if compare:
        typer.echo(f"{outcome.repeat} turns of each engine; this takes some minutes", err=True)
    with outcome.engine(config) as engine:
        if path is not None:
            found, facts = compare_llamacpp.compare_all(
                engine, path, outcome.facts["threads"], config.seed, outcome.repeat
            )
            compare_llamacpp.print_comparison(found, facts)
            outcome.facts["llamacpp"] = facts
        elif compare:
            found = compare_hf.compare_all(engine, config.seed, outcome.repeat)
            compare_hf.print_comparison(found)
        if compare:
            rates = {
                (name, side): row[f"{side}_tokens_per_second"]
                for name, row in found.items()
                for side in ("ours", compare)
            }
            bars = {f"{name}: {side}": rate for (name, side), rate in rates.items()}
        else:
            found = measure(engine, shape, requests.temperature, config.seed, outcome.repeat)
            report.print_values("throughput", found)
            bars = {"output": found["output_tokens_per_second"], "total": found["total_tokens_per_second"]}
    outcome.plot_bars(f"throughput, {config.model}", "tokens per second", bars)
    outcome.finish(f"throughput-compare-{compare}" if compare else "throughput", found)


@bench_command("repeat", "plot", config=ENGINE)
def workloads(
    names: Annotated[
        str, typer.Argument(help="Comma-separated: main, 64x512 (batch x input = output), 'prefill 1x1024'.")
    ] = "main,1x512,8x512,64x512,prefill 1x1024",
    tie_experts: Annotated[
        bool, typer.Option("--tie-experts", help="All tokens take the same experts: routers of zeros.")
    ] = False,
    *,
    outcome: Outcome,
    config: EngineConfig,
) -> None:
    """The named workloads of the tables, with their share of what the card could do at most."""
    import_torch()
    from nanovllm.bench.named import measure_named, parse_workload
    from nanovllm.bench.throughput import warm_up

    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        parse_workload(name)  # a typo is refused before the model is loaded
    rows = []
    started = time.perf_counter()
    with outcome.engine(config) as engine:
        if tie_experts:
            engine.executor.probe().tie_routing()
        warm_up(engine)
        outcome.facts["startup_seconds"] = time.perf_counter() - started
        for name in chosen:
            rows.append(measure_named(engine, name, 0.6, outcome.repeat, tie_experts))
            report.print_values(name, rows[-1])
    bars = {row["workload"]: row["tokens_per_second"] for row in rows}
    outcome.plot_bars(f"workloads, {config.model}", "tokens per second", bars)
    outcome.finish("workloads", rows, tie_experts=tie_experts)


@bench_command("repeat", "threads", "plot", repeat=1, config=ENGINE)
def crossover(
    backends: Annotated[str, typer.Option(help="Attention backends, with commas: triton,sdpa.")] = "auto,sdpa",
    batch_sizes: Annotated[str, typer.Option(help="How many sequences at once; with commas.")] = "1,8,64",
    input_lens: Annotated[str, typer.Option(help="Prompt tokens, and as many new ones; with commas.")] = "128,512",
    *,
    outcome: Outcome,
    config: EngineConfig,
) -> None:
    """Decode tokens per second of attention backends by batch size and length; OOM where a cell does not fit."""
    import_torch()
    from nanovllm.bench import crossover as lab

    sweep = lab.LengthSweep.parse(backends, batch_sizes, input_lens)
    outcome.use_threads()
    sweep.check(config)
    facts, rows = lab.measure_sweep(config, sweep, outcome.repeat)
    outcome.facts |= facts
    lab.print_tables(sweep, rows)
    if outcome.plot:
        lab.plot_sweep(outcome.plot, sweep, rows)
    outcome.finish("crossover", rows, repeat=outcome.repeat, sweep=asdict(sweep))


@bench_command()
def kernels(
    prefill: Annotated[str, typer.Option(help="Batch x length, with commas.")] = "8x2048,2x8192,64x1024,1x1024",
    decode: Annotated[str, typer.Option(help="Likewise.")] = "256x840,64x1024,64x2048,8x1024,1x1024",
    input_lens: Annotated[
        str, typer.Option(help="Lengths at which scores in memory meet flash.")
    ] = "128,512,2048,8192,32768,65536",
    heads: Annotated[str, typer.Option(help="Query heads, KV heads, size of a head.")] = "16,8,128",
    *,
    outcome: Outcome,
) -> None:
    """The attention kernels alone, against PyTorch's and against what this card can do. Needs a GPU."""
    import_torch()
    from nanovllm.bench import kernels as lab
    from nanovllm.bench.workload import parse_counts

    shapes = {"prefill": lab.parse_shapes("--prefill", prefill), "decode": lab.parse_shapes("--decode", decode)}
    lengths, sizes = parse_counts("--input-lens", input_lens, 1), lab.Heads.parse(heads)
    device = lab.choose_gpu()
    found = lab.measure(lab.Lab(device, device.resolve_dtype("auto", "bfloat16"), sizes), shapes, lengths)
    lab.print_kernels(found)
    outcome.facts["hardware"] = f"{device.name}, {device.architecture}"
    outcome.finish("kernels", found, heads=asdict(sizes))


@bench_command("threads", "plot", options=MOE, config=ENGINE)
def moe(*, outcome: Outcome, options: MoeOptions, config: EngineConfig) -> None:
    """Mixture of experts: the kernels against what the card can do; offloaded experts against what the link can do.

    Offload decodes one sequence for each --cached and each way to use the cache (none, lru, lfu, lfu + prefetch), so
    --expert-policy, --expert-prefetch, --expert-placement and --max-num-seqs are set here.
    """
    import_torch()
    from nanovllm.bench import moe as lab
    from nanovllm.bench import moe_kernels
    from nanovllm.hardware.device import Device

    device, has_model = Device.choose(config.device), config.model != EngineConfig.model
    parts = [] if options.tune and options.parts is None else lab.choose_parts(options.parts, device.is_gpu, has_model)
    shapes = moe_kernels.SHAPES if options.shapes is None else moe_kernels.parse_shapes(options.shapes)
    if has_model and options.shapes is None:
        shapes = (moe_kernels.shape_of(lab.read_model(config), config.model),)
    if options.tune or "kernels" in parts:
        moe_kernels.need_gpu(device)
    outcome.use_threads()
    outcome.facts |= {"hardware": f"{device.name}, {device.architecture}", "model": config.model}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        offload = None
        if "offload" in parts:  # before anything is measured: a wrong option is refused at once
            sizes = (options.cached, options.tokens, options.input_len)
            offload = stack.enter_context(lab.prepared(config, options.num_layers, sizes, options.routing))
        if options.tune:
            found["tuned"] = moe_kernels.tune_table(shapes, device)
            moe_kernels.print_tuned(found["tuned"])
        if "kernels" in parts:
            found["kernels"] = moe_kernels.measure(device, shapes)
            moe_kernels.print_measured(found["kernels"])
        if offload is not None:
            facts, found["offload"] = offload.run(options.bandwidth_gbs, outcome.plot)
            outcome.facts |= facts
    outcome.finish("moe", found)


@bench_command("plot", trace=TRACE)
def eplb(*, outcome: Outcome, trace: SkewedTrace) -> None:
    """Balancing experts over ranks: how evenly a skewed trace is divided, without and with redundant experts.

    Simulated: no model, no GPU. balancedness is mean / max tokens of a rank, of each layer, then the mean over layers.
    """
    from nanovllm.bench import eplb as lab

    found = lab.replay(trace)
    lab.print_replay(found, trace)
    if outcome.plot:
        report.plot_lines(outcome.plot, "number", lab.lines_of(found), log_x=False)
    outcome.finish("eplb", found, trace=asdict(trace))


@bench.command()
def tables(
    folder: Annotated[Path, typer.Argument(help="The project's root: docs/ and benchmarks/results/.")] = Path("."),
) -> None:
    """Write the tables of docs/benchmarks.md anew from the JSON files under benchmarks/results/."""
    from nanovllm.bench.tables import PAGES, fill, read_results

    results = read_results(folder / report.RESULTS)
    if not results:
        raise ConfigError(f"{folder / report.RESULTS}: no results; run a benchmark with --save first")
    for page in PAGES:
        print(f"{page}: {', '.join(fill(folder / page, results, PAGES[page]))}")


@bench_command(
    "threads",
    "plot",
    requests=replace(REQUESTS, defaults={"num_seqs": 8, "input_len": "128", "output_len": "32"}),
    config=ENGINE,
)
def latency(
    startup: Annotated[
        int, typer.Option(min=0, help="How often to start a new process and wait for its first token; 0 = never.")
    ] = 1,
    *,
    outcome: Outcome,
    requests: RequestOptions,
    config: EngineConfig,
) -> None:
    """Time to the first token, between tokens, and from process start; requests run one at a time."""
    from nanovllm.bench.latency import measure_requests, measure_startup
    from nanovllm.bench.throughput import warm_up

    shape = requests.shape
    found: dict[str, Any] = {}
    if startup:  # first, while this process holds no model
        found["startup"] = measure_startup(config, startup)
    outcome.use_threads()
    with outcome.engine(config) as engine:
        warm_up(engine, config.seed)
        found |= measure_requests(engine, shape, requests.temperature, config.seed)
        report.print_milliseconds(
            "latency in milliseconds", {name.replace("_", " "): row for name, row in found.items()}
        )
    bars = {name.replace("_", " "): row["p50"] * 1000 for name, row in found.items()}
    outcome.plot_bars(f"latency, {config.model}", "milliseconds (median)", bars)
    outcome.finish("latency", found, workload=asdict(requests))


@bench_command("plot", config=ENGINE)
def schedulers(
    num_long: Annotated[int | None, typer.Option(min=1, help="Long prompts, at the start: 6, with --real 3.")] = None,
    num_short: Annotated[int | None, typer.Option(min=1, help="Short ones that follow: 200, with --real 24.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Short prompts a second (Poisson).")] = 8.0,
    real: Annotated[
        bool, typer.Option("--real", help="Play a small trace on the real engine, by the wall clock.")
    ] = False,
    *,
    outcome: Outcome,
    config: EngineConfig,
) -> None:
    """Waiting times under fcfs, sjf, and sjf with aging (--max-wait-steps), on one trace (--seed).

    Simulated unless --real: the real scheduler and a cost model of a step. Of the engine options the simulation uses
    only --seed and --max-wait-steps.
    """
    from nanovllm.bench import schedulers as lab

    patience = 64 if config.max_wait_steps is None else config.max_wait_steps
    trace = lab.REAL_TRACE if real else lab.TrafficShape()
    trace = replace(trace, num_long=num_long or trace.num_long, num_short=num_short or trace.num_short, rate=rate)
    machine: lab.SimulatedMachine | lab.RealMachine = lab.RealMachine(config) if real else lab.SimulatedMachine()
    sizes = lab.REAL_SIZES if real else lab.SIZES
    first = lab.served_first(machine, *sizes)
    for policy, winner in first.items():
        print(f"a prompt of {sizes[0]} tokens, then one of {sizes[1]}: {policy} serves the {winner} one first")
    found = lab.compare_policies(machine, trace.jobs(config.seed), patience)
    lab.print_policies(found, trace)
    bars = {name: row["ttft"]["mean"] for name, row in found.items()}
    outcome.plot_bars("mean time to first token", "seconds", bars)
    outcome.facts |= machine.facts
    settings = {"real": real, "seed": config.seed, "max_wait_steps": patience, "trace": vars(trace)}
    outcome.finish("schedulers", found, **settings, served_first=first)


@bench_command("plot", load=LOAD)
def serve(*, outcome: Outcome, load: Load) -> None:
    """Latency and goodput of a server under a load that does not wait for it; any OpenAI-compatible one."""
    from nanovllm.bench import serve as lab

    if find_spec("httpx") is None:
        raise ConfigError("bench serve needs httpx: pip install 'nano-vllm[server]'")
    server = lab.ServerUnderTest.of(load)
    found, good = lab.measure(server, load)
    lab.print_measured(found)
    if outcome.plot and good:
        curves = {name: {name: points} for name, points in lab.distributions(good).items()}
        report.plot_lines(outcome.plot, "milliseconds", {"share at or below": curves})
    outcome.finish("serve", found, model=server.body["model"], load=asdict(load))


@bench_command("repeat", config=ENGINE)
def sampling(
    cases: Annotated[str | None, typer.Option(metavar="NAMES", help="With commas; default: all but 64-schema.")] = None,
    *,
    outcome: Outcome,
    config: EngineConfig,
) -> None:
    """What filters, penalties, logprobs and grammars cost beside a temperature alone."""
    import_torch()
    from nanovllm.bench.sampling import CASES, measure_case
    from nanovllm.bench.throughput import warm_up

    usual = [name for name in CASES if name != "64-schema"]
    names = usual if cases is None else [name.strip() for name in cases.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"--cases {unknown[0]!r}: must be of {', '.join(CASES)}")
    with outcome.engine(config, tokenizer="64-schema" in names) as engine:
        warm_up(engine)
        rows = [measure_case(engine, CASES[name], outcome.repeat) for name in names]
    columns: report.Columns = [
        ("case", "case"),
        ("tok/s", "tokens_per_second"),
        ("plain tok/s", "plain"),
        ("share", "share", "{:.3f}"),
    ]
    report.print_rows("sampling", rows, columns)
    outcome.finish("sampling", rows)


@bench_command("repeat", "threads", config=ENGINE)
def speculation(
    cases: Annotated[str | None, typer.Option(metavar="NAMES", help="With commas; default: all.")] = None,
    output_len: Annotated[int, typer.Option(min=1, metavar="INT", help="Tokens of each answer.")] = 256,
    *,
    outcome: Outcome,
    config: EngineConfig,
) -> None:
    """What guessing tokens gains on edits of a text, and costs on random text, beside the same without guesses."""
    from nanovllm.bench.speculation import CASES, check_length, measure_case
    from nanovllm.bench.throughput import warm_up

    names = list(CASES) if cases is None else [name.strip() for name in cases.split(",")]
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"--cases {unknown[0]!r}: must be of {', '.join(CASES)}")
    if config.speculative_method is None:
        config = replace(config, speculative_method="ngram")
    if config.prompt_lookup_min is None and config.prompt_lookup_max is None:
        config = replace(config, prompt_lookup_min=2, prompt_lookup_max=4)
    outcome.use_threads()
    with outcome.engine(config, tokenizer=any(CASES[name].is_edit for name in names)) as engine:
        for name in names:
            check_length(engine, CASES[name], output_len)
        warm_up(engine)
        rows = [measure_case(engine, CASES[name], output_len, outcome.repeat) for name in names]
    columns: report.Columns = [
        ("case", "case"),
        ("tok/s", "tokens_per_second"),
        ("without tok/s", "plain"),
        ("ratio", "ratio", "{:.2f}"),
        ("right guesses", "acceptance", "{:.2f}"),
        ("same tokens", "same_tokens"),
    ]
    report.print_rows("speculation", rows, columns)
    outcome.finish("speculation", rows, output_len=output_len)


@bench_command("threads", "plot")
def quality(
    text: Annotated[Path, typer.Option(help="Plain text; best some that the model has not seen.")],
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, a repository or an alias.")] = EngineConfig.model,
    formats: Annotated[
        str | None, typer.Option(metavar="NAMES", help="With commas, such as fp8-row+inputs,Q4_K; default: all.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, metavar="INT", help="Tokens that see each other.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, metavar="INT", help="Of the text, from its beginning.")] = 2048,
    device: Annotated[str, typer.Option(help="auto, cpu or a GPU.")] = "auto",
    *,
    outcome: Outcome,
) -> None:
    """What each quantised format changes: perplexity, KL divergence and agreement against the unquantised model.

    In float32, with weights rounded to the nearest, without calibration. "+inputs" rounds the inputs of products too.
    """
    import_torch()
    from nanovllm.bench import quality as lab
    from nanovllm.bench.quality_formats import find_formats
    from nanovllm.hardware.device import Device

    tried = find_formats(formats)
    if device not in DEVICES:
        raise ConfigError(f"--device {device!r}: must be one of {', '.join(DEVICES)}")
    outcome.use_threads()
    place = Device.choose(device)
    with lab.opened(model, text, window, max_tokens, place) as (rounded, windows):
        if formats is None:
            tried = {name: form for name, form in tried.items() if not rounded.rejects(form)}
        rows = lab.measure(rounded, windows, tried)
    lab.print_quality(rows, f"{model}, {windows.num_tokens} tokens of {text.name} in windows of {window}")
    outcome.plot_bars(f"KL from the unquantised model, {model}", "nats", {r["format"]: r["mean_kl"] for r in rows})
    outcome.facts |= {"hardware": f"{place.name}, {place.architecture}", "model": model, "dtype": "float32"}
    outcome.finish("quality", rows, text=text.name, window=window, num_tokens=windows.num_tokens)

"""The `nanovllm` command: generate, chat, serve, trace, bench, info, plan, compress.

torch is imported inside commands only, so that help and mistakes answer at once. An error raised on purpose is one
line on stderr and exit code 2; NANOVLLM_DEBUG=1 shows where it came from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.benches import bench
from nanovllm.cli.compress import compress
from nanovllm.cli.options import ENGINE, SAMPLING, Command, with_options
from nanovllm.cli.plan import PLAN, estimate_record, make_estimate, show_estimate
from nanovllm.cli.serve import serve
from nanovllm.cli.stream import InOrder, SpeedMeter, encode, note, run_requests
from nanovllm.cli.trace import check_trace, trace
from nanovllm.config import EngineConfig
from nanovllm.engine.interrupts import import_torch
from nanovllm.errors import ModelError, NanoVLLMError, RequestError
from nanovllm.memory.options import PlanOptions
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

app = typer.Typer(
    name="nanovllm",
    help="A small LLM engine. Try: nanovllm generate 'What is the capital of France?'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.add_typer(compress, short_help="Low-rank experts: a smaller mixture of experts.")
app.add_typer(trace)
app.command()(serve)


def print_version(wanted: bool) -> None:
    if wanted:
        from nanovllm.bench.report import versions

        print(", ".join(f"{name} {version or 'is not installed'}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


SystemOption = Annotated[
    str | None, typer.Option(help="An instruction that comes before the conversation.", metavar="TEXT")
]


@app.command()
@with_options(sampling=SAMPLING, config=ENGINE)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="- is standard input, less one newline at its end.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Read more prompts, one a line (- = standard input).", metavar="FILE")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the model's chat template; default: if it has one."),
    ] = None,
    system: SystemOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each prompt.")] = False,
    trace_file: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Record the engine for `nanovllm trace view`.")
    ] = None,
    *,
    config: EngineConfig,
    sampling: dict[str, Any],
) -> None:
    """Answer prompts; text streams to stdout, speed goes to stderr."""
    texts = read_prompts(prompts or [], file)
    check_trace(trace_file)
    with load(config) as engine:
        params = complete(sampling, engine, shows_logprobs=as_json)
        inputs = []
        for index, text in enumerate(texts, 1):
            try:
                inputs.append(engine.check(encode(engine, text, chat, system), params))  # type: ignore[arg-type]
            except RequestError as error:
                raise RequestError(f"prompt {index} of {len(texts)}: {error}" if len(texts) > 1 else error) from None
        ids = [f"cli-{index}" for index in range(len(texts))]
        printer = InOrder(ids, [" ".join(text.split())[:60] for text in texts], params.n)
        if trace_file is not None:
            record(engine, trace_file)
        speed = SpeedMeter(engine)
        outputs, interrupted = run_requests(engine, inputs, params, ids, None if as_json else printer.show)
        if as_json:
            for output in outputs:
                print(json.dumps(as_record(output), ensure_ascii=False), flush=True)
        else:
            printer.end()
        note(speed.line(outputs))
    if interrupted:
        raise typer.Exit(130)


@app.command()
@with_options(sampling=SAMPLING, config=ENGINE)
def chat(system: SystemOption = None, *, config: EngineConfig, sampling: dict[str, Any]) -> None:
    """Talk with a model. /help lists what you can do; Ctrl-C stops an answer, Ctrl-D leaves."""
    from nanovllm.cli.conversation import Chat

    if (count := sampling.get("n", 1)) != 1:
        raise RequestError(f"n={count}: a conversation has one answer; use `nanovllm generate`")
    with load(config) as engine:
        Chat(engine, complete(sampling, engine, shows_logprobs=False), system).run()


@app.command()
@with_options(config=ENGINE)
def info(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False, *, config: EngineConfig
) -> None:
    """Show hardware, versions, and what a model needs.

    Attention backends too, with reasons. Loads and downloads nothing; exit code 2: the model is not on disk."""
    import_torch()
    from nanovllm.cli import facts as page

    facts = page.collect(config)
    if as_json:
        print(json.dumps(facts), flush=True)
    else:
        page.show(facts)
    # The default model is fetched by the first command that runs it; that it is not here yet is no mistake.
    if "not_on_disk" in facts["model"] and config.model != EngineConfig.model:
        raise ModelError(facts["model"]["not_on_disk"])


@app.command(name="plan")
@with_options(options=PLAN)
def plan_command(
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write it as JSON (- = only that).")
    ] = None,
    *,
    options: PlanOptions,
) -> None:
    """Say what of a model goes where on a card, and how fast it is.

    Loads and downloads nothing. Exit code 1: the model cannot run there."""
    if json_file not in (None, "-"):
        from nanovllm.bench.report import check_file

        check_file("--json", Path(json_file), b'{"model": ')
    estimate = make_estimate(options)
    if json_file != "-":
        show_estimate(estimate)
    if json_file is not None:
        text = json.dumps(estimate_record(estimate))
        try:
            print(text) if json_file == "-" else Path(json_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--json {json_file}: cannot be written: {error}") from None
    if estimate.tiers is None and not options.table:
        raise typer.Exit(1)


def read_prompts(given: list[str], file: str | None) -> list[str]:
    if given.count("-") + (file == "-") > 1:
        raise RequestError("standard input can be read only once: give either - or --file -")
    # echo and here-documents end with a newline that is not meant to be part of the prompt
    texts = [read_text(text).removesuffix("\n") if text == "-" else text for text in given]
    if "-" in given and not texts[given.index("-")]:
        raise RequestError("standard input is empty: - reads a prompt from there")
    if file is not None:
        texts += [line for line in read_text(file).splitlines() if line.strip()]
    if not texts:
        raise RequestError("no prompt: give one, or --file, or - to read standard input")
    return texts


def read_text(file: str) -> str:
    try:
        return read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        name = "standard input" if file == "-" else f"--file {file}"
        raise RequestError(f"{name}: cannot be read: {error}") from None


def read_stdin() -> str:
    """Decoded in one piece: Python reads it in several, and counts from the beginning of each where it is wrong."""
    buffer: Any = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # some other object, put there by a program
        return sys.stdin.read()
    text: str = buffer.read().decode(sys.stdin.encoding or "utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def complete(given: dict[str, Any], engine: LLMEngine, shows_logprobs: bool) -> SamplingParams:
    """Options that were not given: the model's defaults, then the terminal's. Those that were given and change nothing
    are named; the engine does so for its own."""
    defaults = engine.sampling_defaults
    if defaults.values:
        note(f"sampling defaults: {defaults}")
    try:
        params = SamplingParams(**{**SAMPLING.defaults, **defaults.values, **given})
    except RequestError as error:
        if not str(error).startswith("min_tokens") or "max_tokens" in given:
            raise
        limit = {**SAMPLING.defaults, **defaults.values}["max_tokens"]
        source = defaults.source if "max_tokens" in defaults.values else "the default of this command"
        raise RequestError(f"{error}; max_tokens={limit} comes from {source}") from None
    found: dict[str, str] = {}
    if params.temperature == 0:
        found = dict.fromkeys(("top_p", "top_k", "min_p"), "--temperature 0 always takes the likeliest token")
    if not shows_logprobs:
        found |= dict.fromkeys(("logprobs", "prompt_logprobs"), "only `generate --json` shows them")
    for name, value in given.items():
        if name in found and value != getattr(SamplingParams, name):
            note(f"{name}={value!r} has no effect: {found[name]}")
    return params


def load(config: EngineConfig) -> LLMEngine:
    started = time.monotonic()
    if sys.stderr.isatty():
        note(f"loading {config.model} ...")
    import_torch()
    from nanovllm.engine.llm_engine import LLMEngine

    engine = LLMEngine(config)
    runs_on = engine.describe()["runs_on"]
    form = runs_on["dtype"] if runs_on["quantization"] == "none" else runs_on["quantization"]
    note(
        f"{config.model} on {runs_on['device']}, {form} ({runs_on['weight_bytes'] / 1e6:,.0f} MB), "
        f"attention {runs_on['attn_backend']}; ready in {time.monotonic() - started:.1f} s"
    )
    return engine


def record(engine: LLMEngine, path: str) -> None:
    from nanovllm.engine.info import engine_info
    from nanovllm.telemetry.readers import TraceFile

    model = engine.config.model
    name = Path(model).name if Path(model).exists() else model
    engine.watch.attach(TraceFile(path, engine_info(engine, name)), stays=True)


def as_record(output: RequestOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "time_to_first_token": output.metrics.time_to_first_token,
        "latency": output.metrics.latency,
        "outputs": [dataclasses.asdict(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            position and {token: dataclasses.asdict(score) for token, score in position.items()}
            for position in output.prompt_logprobs
        ]
    return record


for commands in (app, bench, compress, trace):
    for registered in commands.registered_commands:
        registered.cls = Command


def main() -> None:
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (closed by whoever started this)
    if sys.stdout is None:
        note("standard output is closed: what is printed there is lost")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that cannot show a character must not end the answer
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except NanoVLLMError as error:
        if os.environ.get("NANOVLLM_DEBUG") == "1":
            raise
        note(f"error: {' '.join(str(error).split())}")
        sys.exit(2)
    except OSError as error:  # of standard output, most likely: a full disk
        if os.environ.get("NANOVLLM_DEBUG") == "1":
            raise
        note(f"error: {error}")
        os._exit(2)  # not sys.exit: it would try to write what is left in the buffers

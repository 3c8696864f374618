"""How a command of `nanovllm bench` is declared, and the options that several of them have.

@bench_command("repeat", "plot", config=ENGINE)
def name(..., *, outcome: Outcome, config: EngineConfig) -> None:
    with outcome.engine(config) as engine: ...        # its facts go into the report
    outcome.finish("name", results)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.bench import report
from nanovllm.bench.eplb import SkewedTrace
from nanovllm.bench.serve import Load
from nanovllm.bench.workload import Lengths, WorkloadShape
from nanovllm.cli.options import OptionGroup, with_options
from nanovllm.config import EngineConfig
from nanovllm.engine.interrupts import import_torch

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

bench = typer.Typer(name="bench", help="Measure. Each command ends with one JSON line.", no_args_is_help=True)


@dataclass
class Outcome:
    """What a command leaves behind: a plot, a saved file, the JSON line. The fields with options are given by the user;
    `facts` collects what the report has beside the results."""

    repeat: Annotated[int, typer.Option(min=1, metavar="INT", help="Measure so often; the table has the median.")] = 3
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="CPU threads; default: what torch takes.")
    ] = None
    save: Annotated[bool, typer.Option("--save", help="Also write the JSON under benchmarks/results/.")] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the result into this file (needs 'nano-vllm[plot]').")
    ] = None
    facts: dict[str, Any] = field(default_factory=lambda: {"hardware": None})

    def __post_init__(self) -> None:
        report.check_plot(self.plot)

    def use_threads(self) -> None:
        import_torch()
        import torch

        if self.threads:
            torch.set_num_threads(self.threads)
        self.facts["threads"] = torch.get_num_threads()

    @contextlib.contextmanager
    def engine(self, config: EngineConfig, tokenizer: bool = False) -> Iterator[LLMEngine]:
        """Prompts of benchmarks are token ids: a tokenizer is loaded only where a grammar needs the tokens' texts."""
        import_torch()
        from nanovllm.bench.throughput import engine_facts
        from nanovllm.engine.llm_engine import LLMEngine

        with LLMEngine(replace(config, skip_tokenizer_init=not tokenizer)) as engine:
            self.facts |= engine_facts(engine)
            yield engine
        print(f"attention backend that ran: {self.facts['engine']['attn_backend']} on {self.facts['hardware']}")

    def plot_bars(self, title: str, unit: str, bars: dict[str, float]) -> None:
        if self.plot:
            report.plot_bars(self.plot, title, unit, bars)

    def finish(self, kind: str, results: Any, **facts: Any) -> None:
        report.finish(report.make_report(kind, **self.facts, **facts, results=results), self.save)


def bench_command(*kept: str, repeat: int = 3, **groups: OptionGroup) -> Callable[[Callable[..., None]], Any]:
    """Declares a command with `--save`, the `kept` options of Outcome, and those of `groups`."""
    left_out = {"repeat", "threads", "plot", "facts"} - set(kept)
    outcome = OptionGroup(
        title="Options",
        of=Outcome,
        help={},
        defaults={"repeat": repeat},
        skipped=frozenset(left_out),
    )
    return lambda function: bench.command()(with_options(outcome=outcome, **groups)(function))


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


TRACE = OptionGroup(
    title="Trace",
    of=SkewedTrace,
    help={
        "num_experts": "Experts in a layer.",
        "top_k": "Experts that a token takes.",
        "num_layers": "Layers; in each, others are popular.",
        "skew": "The r-th most popular expert is chosen in proportion to 1 / r to this power; 0 = all alike.",
        "num_steps": "Steps; experts are arranged by the first half, the second half is replayed.",
        "step_tokens": "Tokens in a step.",
        "num_ranks": "Ranks that experts are spread over.",
        "num_redundant_experts": "Places beside those that every expert has one of.",
        "num_nodes": "Machines; the groups of experts are placed on them first.",
        "num_groups": "Groups of experts that stay on one machine (DeepSeek-V3: 8).",
        "seed": "Decides the trace.",
    },
)


LOAD = OptionGroup(
    title="Load",
    of=Load,
    common=frozenset(
        {"url", "model", "num_requests", "rate", "clients", "input_len", "output_len", "prefix_len", "slo_ttft_ms"}
    ),
    help={
        "url": "The server, without /v1; a key is read from OPENAI_API_KEY.",
        "model": "Name in the requests; default: the first that the server lists.",
        "num_requests": "Requests to send.",
        "rate": "Requests a second, whatever the server does.",
        "arrivals": "When they leave: poisson (at random) or fixed (evenly).",
        "clients": "Instead of --rate: so many clients, each waits for its answer before its next request.",
        "input_len": "Tokens of a prompt after the shared prefix: a number or a range; with --text, words.",
        "output_len": "New tokens: a number or a range.",
        "prefix_len": "Tokens (words) that prompts share at their beginning.",
        "num_prefixes": "How many different shared beginnings.",
        "vocab_size": "Random token ids are below this.",
        "text": "Take words from this file instead of random token ids.",
        "ignore_eos": "Request exactly output_len tokens; not all servers have the field.",
        "slo_ttft_ms": "For goodput: longest time to the first token.",
        "slo_tpot_ms": "For goodput: longest mean time per token after it.",
        "slo_itl_ms": "For goodput: longest time between tokens, 99th percentile of a request.",
        "slo_e2e_ms": "For goodput: longest time to the last token.",
        "timeout": "Seconds to wait for one request.",
        "seed": "Decides prompts and times.",
    },
)

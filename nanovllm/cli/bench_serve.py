"""`nanovllm bench serve`: measures a running server, ours or another."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanovllm.bench.workload import LARGEST_TOKEN, Lengths
from nanovllm.cli.benches import Plot, Save
from nanovllm.cli.options import OptionGroup, with_options
from nanovllm.errors import ConfigError


@dataclass(frozen=True)
class ServeLoadOptions:
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    num_requests: int = 64
    rate: float = 4.0
    arrivals: str = "poisson"
    input_len: str = "64..256"
    output_len: str = "64"
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab_size: int = LARGEST_TOKEN + 1
    text: str | None = None
    ignore_eos: bool = True
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_itl_ms: float | None = None
    slo_e2e_ms: float | None = None
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "rate", "num_prefixes", "vocab_size", "timeout"):
            if not 0 < getattr(self, name) < 1e12:  # NaN fails too
                raise ConfigError(f"{name}={getattr(self, name)}: must be a positive number")
        if self.prefix_len < 0:
            raise ConfigError(f"prefix_len={self.prefix_len}: must be 0 or more")

    @property
    def slo(self) -> dict[str, float]:
        limits = {name: getattr(self, f"slo_{name}_ms") for name in ("ttft", "tpot", "itl", "e2e")}
        return {name: limit / 1000 for name, limit in limits.items() if limit is not None}


LOAD = OptionGroup(
    title="Load",
    of=ServeLoadOptions,
    build=lambda values: ServeLoadOptions(**values),
    common=frozenset({"url", "model", "num_requests", "rate", "input_len", "output_len", "prefix_len", "slo_ttft_ms"}),
    help={
        "url": "The server, without /v1; a key is read from OPENAI_API_KEY.",
        "model": "Name to ask for; default: the first that the server lists.",
        "num_requests": "Requests to send.",
        "rate": "Requests a second, whatever the server does.",
        "arrivals": "When they leave: poisson (at random) or fixed (evenly).",
        "input_len": "Tokens of a prompt after the shared prefix: a number or a range; with --text, words.",
        "output_len": "New tokens: a number or a range.",
        "prefix_len": "Tokens (words) that prompts share at their beginning.",
        "num_prefixes": "How many different shared beginnings.",
        "vocab_size": "Random token ids are below this.",
        "text": "Take words from this file instead of random token ids.",
        "ignore_eos": "Ask for exactly output_len tokens; not all servers know the field.",
        "slo_ttft_ms": "For goodput: longest time to the first token.",
        "slo_tpot_ms": "For goodput: longest mean time per token after it.",
        "slo_itl_ms": "For goodput: longest time between tokens, 99th percentile of a request.",
        "slo_e2e_ms": "For goodput: longest time to the last token.",
        "timeout": "Seconds to wait for one request.",
        "seed": "Decides prompts and times.",
    },
)


@with_options(load=LOAD)
def bench_serve(save: Save = False, plot: Plot = None, *, load: ServeLoadOptions) -> None:
    """Latency and goodput of a server under a load that does not wait for it; any OpenAI-compatible one."""
    from nanovllm.bench import report
    from nanovllm.bench import serve as lab

    if find_spec("httpx") is None:
        raise ConfigError("bench serve needs httpx: pip install 'nano-vllm[server]'")
    report.check_plot(plot)
    key = os.environ.get("OPENAI_API_KEY")
    url = load.url.rstrip("/").removesuffix("/v1")
    server = lab.ServerUnderTest(url, load.model or lab.find_model(url, key), key, load.ignore_eos, load.timeout)
    asked = lab.Load(
        load.num_requests,
        load.rate,
        load.arrivals,
        Lengths.parse(load.input_len),
        Lengths.parse(load.output_len),
        load.prefix_len,
        load.num_prefixes,
        load.vocab_size,
        None if load.text is None else Path(load.text),
    )
    found, good = lab.measure(server, asked, load.seed, load.slo)
    _print(found)
    if plot and good:
        curves = {name: {name: points} for name, points in lab.distributions(good).items()}
        report.plot_lines(plot, "milliseconds", {"share at or below": curves})
    report.finish(report.make_report("serve", None, model=server.model, load=asdict(load), results=found), save)


def _print(found: dict[str, Any]) -> None:
    from nanovllm.bench import report

    columns = ("mean", "p50", "p99", "max")
    rows = [
        [name.upper(), *(found[name][column] * 1000 for column in columns)]
        for name in ("ttft", "tpot", "itl", "e2e")
        if found[name]
    ]
    rows.append(["late to leave", *(found["send_delay"][column] * 1000 for column in columns)])
    report.print_table("milliseconds", ["", *columns], rows)
    print(
        f"{found['completed']} answered, {found['failed']} failed in {found['seconds']:.1f} s: "
        f"{found['requests_per_second']:.2f} requests/s, "
        f"{found['output_tokens_per_second']:.1f} output tokens/s"
    )
    for error, count in found["errors"].items():
        print(f"  {count} x {error}")
    if "goodput" in found:
        goodput = found["goodput"]
        print(f"goodput: {goodput['requests_per_second']:.2f} requests/s, {goodput['share']:.0%} of all sent")

"""`nanovllm bench sampling`: what sampling parameters cost."""

from __future__ import annotations

from typing import Annotated

import typer

from nanovllm.cli.benches import Repeat, Save, bench_engine
from nanovllm.cli.options import ENGINE, with_options
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError


@with_options(config=ENGINE)
def bench_sampling(
    cases: Annotated[str, typer.Option(metavar="NAMES", help="With commas; default: all but 64-schema.")] = "",
    repeat: Repeat = 3,
    save: Save = False,
    *,
    config: EngineConfig,
) -> None:
    """What filters, penalties, logprobs and grammars cost beside a temperature alone."""
    from nanovllm.bench import report
    from nanovllm.bench.sampling import CASES, measure_case
    from nanovllm.bench.throughput import engine_facts, warm_up

    names = [name.strip() for name in cases.split(",")] if cases else [name for name in CASES if name != "64-schema"]
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"--cases {unknown[0]}: must be of {', '.join(CASES)}")
    rows = []
    with bench_engine(config, None) as engine:
        warm_up(engine)
        for name in names:
            rows.append(measure_case(engine, CASES[name], repeat))
        facts = engine_facts(engine)
    shown = [[row["case"], row["tokens_per_second"], row["plain"], f"{row['share']:.3f}"] for row in rows]
    report.print_table("sampling", ["case", "tok/s", "plain tok/s", "share"], shown)
    report.finish(report.make_report("sampling", **facts, results=rows), save)

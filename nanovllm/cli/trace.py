"""`nanovllm trace`: look at what `--trace FILE` recorded. No torch: a trace is numbers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from nanovllm.cli.stream import note
from nanovllm.errors import ConfigError
from nanovllm.telemetry.trace import read_trace

trace = typer.Typer(name="trace", help="Look at a recorded run of the engine.", no_args_is_help=True)
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="What `nanovllm serve --trace FILE` wrote.")]
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def check_trace(file: str | None) -> None:
    """Before a model is loaded, which may take minutes. An old trace stays until the new one begins."""
    from nanovllm.bench.report import check_file
    from nanovllm.telemetry.readers import START

    if file is not None:
        check_file("--trace", Path(file), START)


@trace.command()
def view(
    file: FileArgument,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 0,
) -> None:
    """Step through a trace on the page, in a browser on this machine."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"trace view needs {', '.join(missing)}: pip install 'nano-vllm[server]'")
    from nanovllm.server.trace_app import view_trace

    view_trace(file, port, note)


@trace.command()
def info(file: FileArgument) -> None:
    """Say in a few lines what a trace holds."""
    recorded = read_trace(file)
    header, summary = recorded.header, recorded.summary()
    kinds, left = summary["events"], summary["left"]
    speed = summary["tokens"] / summary["seconds"] if summary["seconds"] else 0.0
    rows = {
        "model": f"{header['model']} on {header['device']}, {header['policy']}",
        "cache": f"{header['num_blocks']} blocks of {header['block_size']} tokens",
        "length": f"{summary['seconds']:.2f} s, {len(recorded.events)} events",
        "steps": f"{kinds.get('step', 0)}"
        + (f", {summary['step_ms']:.2f} ms each (median)" if summary["step_ms"] is not None else ""),
        "tokens": f"{summary['tokens']} generated, {speed:.1f} a second",
        "sequences": f"{kinds.get('add', 0)} came; left: "
        + (", ".join(f"{count} {reason}" for reason, count in sorted(left.items())) or "none"),
        "cache hits": "nothing was looked up" if summary["hit_rate"] is None else f"{100 * summary['hit_rate']:.1f} %",
    }
    for name, text in rows.items():
        print(f"{name:<11}{text}")

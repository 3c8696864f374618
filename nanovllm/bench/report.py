"""What every benchmark prints: a table for people, then one line of JSON for tools, with place and date.

No torch here: versions come from the installed packages' metadata.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.errors import ConfigError

RESULTS = Path("benchmarks/results")
PICTURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}  # and how such files begin


def versions() -> dict[str, str | None]:
    from importlib import metadata  # slow, and `nanovllm --help` must be instant

    found: dict[str, str | None] = {"nanovllm": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "uvloop", "httptools"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def make_report(kind: str, hardware: str | None, **facts: Any) -> dict[str, Any]:
    return {
        "benchmark": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware or f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        **facts,
    }


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " .. ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    # Into a pipe or a file there is no window to fit into, and 80 columns would break words.
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


Columns = list[tuple[Any, ...]]


def print_rows(title: str, rows: Iterable[Mapping[str, Any]], columns: Columns, missing: str = "-") -> None:
    """Columns: (heading, key) or (heading, key, how to show it: a factor or a format). "a.b" is a key of a key's
    value; a key may be a function of the row too. `missing` stands for None."""

    def cell(row: Mapping[str, Any], key: Any, how: Any = None) -> Any:
        value: Any = key(row) if callable(key) else row
        for part in () if callable(key) else key.split("."):
            value = value[part]
        if value is None:
            return missing
        return how.format(value) if isinstance(how, str) else value if how is None else value * how

    cells = [[cell(row, *column[1:]) for column in columns] for row in rows]
    print_table(title, [column[0] for column in columns], cells)


def print_values(title: str, values: Mapping[str, Any]) -> None:
    print_table(title, ["", "value"], [[name.replace("_", " "), value] for name, value in values.items()])


def print_milliseconds(title: str, summaries: Mapping[str, Mapping[str, float]]) -> None:
    columns = ("mean", "p50", "p99", "max")
    rows = [[name, *(found[column] * 1000 for column in columns)] for name, found in summaries.items()]
    print_table(title, ["", *columns], rows)


def finish(report: dict[str, Any], save: bool) -> None:
    """The last line of stdout is the JSON line, whatever else was printed."""
    if save:
        stamp = report["date"].replace(":", "").replace("+0000", "Z")
        path = RESULTS / f"{report['benchmark']}-{stamp}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        while path.exists():  # of another run that ended in the same second
            path = path.with_stem(path.stem + "-2")
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"saved {path}")
    print(json.dumps(report, allow_nan=False), flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values."""
    assert values
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": sum(values) / len(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values),
    }


def check_plot(path: Path | None) -> None:
    """Before anything is measured: a run of minutes should not end in a missing package."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: needs matplotlib, which is not installed; pip install 'nano-vllm[plot]'")
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot {path}: must end in one of {', '.join(PICTURES)}")
    check_file("--plot", path, PICTURES[path.suffix])


def check_file(option: str, path: Path, start: bytes) -> None:
    """`path` can be written without a loss: it is absent, empty, or begins as the file that will replace it."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written: name a file in a folder that exists and is yours")
    if not path.is_file():
        return
    with path.open("rb") as file:
        found = file.read(len(start))
    if found not in (b"", start):
        raise ConfigError(
            f"{option} {path}: is a file of another kind, and would be overwritten; move it away or name another file"
        )


def plot_bars(path: Path, title: str, unit: str, bars: dict[str, float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 1.2 * len(bars), 4), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.bar(list(bars), list(bars.values())), fmt="%.3g")
    axes.set_title(title)
    axes.set_ylabel(unit)
    figure.savefig(path)
    print(f"plotted {path}")


Series = dict[str, list[tuple[float, float]]]  # the line's name -> its points


def plot_lines(
    path: Path,
    x_name: str,
    rows: dict[str, dict[str, Series]],
    log_x: bool = True,
    log_y: Collection[str] = (),
    dashed: Mapping[str, str] = {},
) -> None:
    """A grid of charts: `rows` by what is measured (the y axis), in each row the charts by title. `log_y`: the rows
    with a logarithmic y axis. `dashed`: lines drawn so, each in the colour of the line it belongs to, which comes
    before it."""
    from matplotlib.figure import Figure

    width = max(map(len, rows.values()))
    figure = Figure(figsize=(1 + 4 * width, 3.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), width, squeeze=False)
    for charts_of_row, (unit, charts) in zip(grid, rows.items()):
        for axes, (title, series) in zip(charts_of_row, charts.items()):
            colours: dict[str, Any] = {}
            for name, points in series.items():
                style = {"marker": "o"} if name not in dashed else {"linestyle": "--", "color": colours[dashed[name]]}
                [line] = axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
                colours[name] = line.get_color()
            if log_x:
                axes.set_xscale("log", base=2)
            if unit in log_y:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set(title=title, xlabel=x_name, ylabel=unit)
            axes.legend()
    figure.savefig(path)
    print(f"plotted {path}")

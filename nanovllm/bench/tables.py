"""The tables of docs/benchmarks.md, made from the JSON files under benchmarks/results/: `nanovllm bench tables`.

A table stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; what is between is replaced. A figure that is
not in a result file cannot get onto that page this way.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError

Words = dict[str, str]
WORDS = {  # English, Chinese
    "workload": ("workload", "负载"),
    "ours": ("nano-vLLM tok/s", "nano-vLLM tok/s"),
    "limit": ("limit of the card", "该卡的极限"),
    "share": ("share of it", "占极限"),
    "ratio": ("ratio", "倍数"),
    "equal": ("equal tokens", "token 一致"),
    "slots": ("KV slots per token held", "每个 token 占用的 KV 槽位"),
    "measured": ("Measured on", "测于"),
    "hf": ("Hugging Face tok/s", "Hugging Face tok/s"),
}
PAGES = {
    page: {name: words[language] for name, words in WORDS.items()}
    for language, page in enumerate(("docs/benchmarks.md", "docs/benchmarks.zh-CN.md"))
}


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Oldest first, so that the newest of a kind wins."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted((f for f in found if isinstance(f, dict)), key=lambda f: str(f.get("date", "")))


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _where(report: dict[str, Any], words: Words) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if k in ("torch", "triton") and v)
    return f"{words['measured']} {report['hardware']}, {versions}, {report['date'][:10]}."


def cpu_table(results: list[dict[str, Any]], words: Words) -> str | None:
    report = next((r for r in reversed(results) if r.get("benchmark") == "throughput-compare-hf"), None)
    if report is None:
        return None
    columns = [words[key] for key in ("workload", "ours", "hf", "ratio", "equal", "slots")]
    rows = [
        [
            f"{name}, {row['input_len']} + {row['output_len']}",
            f"{row['ours_tokens_per_second']:.1f}",
            f"{row['hf_tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x ({row['ratio_spread'][0]:.2f}..{row['ratio_spread'][1]:.2f})",
            f"{row['equal_greedy_tokens']:.0%}",
            f"{row['kv_slots_per_token']:.3f}",
        ]
        for name, row in report["results"].items()
    ]
    return f"{_markdown(columns, rows)}\n\n{_where(report, words)}"


def _is_offloaded(report: dict[str, Any]) -> bool:
    """Bound by the link, not by the card: docs/moe.md has those."""
    return bool(report["engine"].get("experts", {}).get("placement") == "offload")


def gpu_tables(results: list[dict[str, Any]], words: Words) -> str | None:
    """A table for each model and way to compute it; of each workload the newest row."""
    peers = [r for r in results if "peer" in r]
    found: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}  # -> workload -> (row, its report)
    for report in results:
        if report.get("benchmark") == "workloads" and not _is_offloaded(report):
            rows = found.setdefault(_name(report), {})
            rows.update({row["workload"]: (row, report) for row in report["results"]})
    parts = []
    for model, measured in found.items():
        reports = [report for _, report in measured.values()]
        newest = max(reports, key=lambda report: report["date"])
        known = [p for p in peers if p["hardware"] == newest["hardware"] and model in p["results"]]
        columns = [f"{model}: {words['workload']}", words["ours"], *(p["peer"] for p in known)]
        columns += [words["limit"], words["share"]]
        lines = []
        for row, _ in measured.values():
            figures = [p["results"][model].get(row["workload"]) for p in known]
            ours = _bold_if_first(row["tokens_per_second"], figures)
            others = (f"{f:,.0f}" if f else "" for f in figures)
            lines.append([row["workload"], ours, *others, f"{row['limit']:,.0f}", f"{row['share_of_limit']:.0%}"])
        days = " - ".join(sorted({min(r["date"][:10] for r in reports), newest["date"][:10]}))
        where = _where(newest, words).replace(newest["date"][:10], days)
        parts.append(f"{_markdown(columns, lines)}\n\n{where}")
    return "\n\n".join(parts) or None


def _name(report: dict[str, Any]) -> str:
    """Of the model, with what makes figures incomparable: quantised weights, routers of zeros."""
    engine, name = report["engine"], Path(report["engine"]["model"]).name
    if engine.get("quantization", "none") != "none":
        name += f", {engine['quantization']}"
    return f"{name}, --tie-experts" if report.get("tie_experts") else name


def _bold_if_first(rate: float, others: list[float | None]) -> str:
    known = [other for other in others if other]
    return f"**{rate:,.0f}**" if known and rate >= max(known) else f"{rate:,.0f}"


def fill(page: Path, results: list[dict[str, Any]], words: Words) -> list[str]:
    """Replace every table that results exist for; the names of those replaced."""
    text = page.read_text(encoding="utf-8")
    done = []
    for name, make in (("cpu", cpu_table), ("gpu", gpu_tables)):
        table = make(results, words)
        pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        if table is None:
            continue
        if not pattern.search(text):
            raise ConfigError(f"{page}: no place for this table; add <!-- bench:{name} --> and <!-- /bench:{name} -->")
        [place] = pattern.finditer(text)
        text = f"{text[: place.end(1)]}{table}\n{text[place.start(2) :]}"
        done.append(name)
    page.write_text(text, encoding="utf-8")
    return done

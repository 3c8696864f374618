"""docs/img/moe-bound.png from the result files: offloaded decode against what the link allows.

python scripts/plot_moe_bound.py        (needs matplotlib)
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LAYER_BYTES = 2 * 3 * 4096 * 14336 * 2  # the two experts that a token takes in a layer of Mixtral 8x7B
COLOURS = {"none": "tab:gray", "lru": "tab:orange", "lfu": "tab:green", "lfu + prefetch": "tab:blue"}
ENGINE = {"kernel by kernel": "v", "captured, no prefetch": "D", "captured": "*"}


def read(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/2026-11-15-h200-{name}.json").read_text())


def engine_rows(rows: list[dict]) -> dict[str, dict]:
    def name(row: dict) -> str:
        if row.get("enforce_eager"):
            return "kernel by kernel"
        return "captured" if row.get("expert_prefetch", True) else "captured, no prefetch"

    return {name(row): row for row in rows if row["cached"] == 6}


def main() -> None:
    layers, relay = read("offload-layers")["results"], read("offload-relay")
    engine, full = engine_rows(relay["fast"]), LAYER_BYTES / relay["link"] * 1e3
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)

    left.plot([0, 1], [full, 0], "k-", label=f"bound: 704.6 MB x (1 - h) / {relay['link'] / 1e9:.1f} GB/s")
    left.axhline(0.164, color="k", ls=":", lw=1, label="both experts cached: 0.16 ms to read them")
    for variant, colour in COLOURS.items():
        rows = [row for row in layers if row["variant"] == variant][: 1 if variant == "none" else None]
        left.plot(
            [r["hit_rate"] for r in rows],
            [r["us_per_layer"] / 1e3 for r in rows],
            "o",
            color=colour,
            ms=6,
            label=f"layers: {variant}",
        )
    for name, row in engine.items():
        left.plot(
            row["hit_rate"],
            row["us_per_layer"] / 1e3,
            ENGINE[name],
            color="tab:red",
            mfc="none",
            ms=8,
            label=f"engine: {name}",
        )
    for cached, x, y in ((2, 0.16, 7.9), (4, 0.42, 4.7), (6, 0.59, 2.4)):
        left.annotate(f"{cached} of 8 cached", (x, y), fontsize=8)
    left.set(xlabel="hit rate h", ylabel="ms a layer, one token", xlim=(-0.03, 1.03), ylim=(0, 18.5))
    left.set_title("Time of a layer (below the line is impossible)", fontsize=10)
    left.legend(fontsize=8, loc="upper right")

    for i, (variant, colour) in enumerate(COLOURS.items()):
        shares = [row["share"] * 100 for row in layers if row["variant"] == variant]
        bars = right.bar([n + (i - 1.5) * 0.2 for n in range(3)], shares, 0.19, color=colour, label=variant)
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    bars = right.bar(
        [3 + (i - 1) * 0.25 for i in range(3)],
        [engine[n]["share"] * 100 for n in ENGINE],
        0.23,
        color=["mistyrose", "lightcoral", "tab:red"],
        edgecolor="tab:red",
    )
    right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.bar_label(bars, list(ENGINE), label_type="center", rotation=90, fontsize=8)
    right.axhline(100, color="k", lw=1)
    right.axhline(80, color="k", lw=0.8, ls="--")
    right.set_xticks(range(4), ["2 of 8", "4 of 8", "6 of 8", "6 of 8,\nwhole engine"])
    right.set(ylim=(0, 115), ylabel="share of the bound, %")
    right.set_title("How near (dashed: 80 %)", fontsize=10)
    right.legend(fontsize=8, ncols=4, loc="upper left")
    figure.suptitle("Mixtral 8x7B's shapes, 8 layers, H200, bf16, one sequence, made-up routing", fontsize=11)
    figure.savefig(ROOT / "docs/img/moe-bound.png", dpi=110)


if __name__ == "__main__":
    main()

"""By hand, on a GPU: one layer of Mixtral-8x7B's shapes (random weights) in closed form. The bound: 60 s and 24 GB.

    python tests/lowrank/check_gpu.py [--out DIR] [--rank 1024] [--rows 32768]

Both sides of w2 are fitted and measured on held-out rows, as `--w2-mode auto` does; `ok` counts all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from nanovllm.lowrank.compress.layer import LayerFit, held_out_errors
from nanovllm.lowrank.compress.model import Expert
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.predict import w2_svd_rank
from nanovllm.lowrank.compress.stream import Rows

HIDDEN, SIZE, EXPERTS = 4096, 14336, 8
MOST_SECONDS, MOST_GB = 60, 24


def check(svd_rank: int, num_rows: int, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device) / shape[1] ** 0.5

    experts = [Expert(matrix(SIZE, HIDDEN), matrix(HIDDEN, SIZE), matrix(SIZE, HIDDEN)) for _ in range(EXPERTS)]
    scales = 0.999 ** torch.arange(HIDDEN)
    ids = torch.rand(num_rows, EXPERTS).topk(2).indices
    rows = Rows(
        torch.randn(num_rows, HIDDEN) * scales,
        ids,
        torch.rand(num_rows, 2).softmax(-1),
        torch.arange(num_rows) % 10 == 9,
    )
    fit = LayerFit(rows, experts, Options(), torch.bfloat16)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    laps = {"": time.perf_counter()}

    def lap(name: str) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        laps[name] = time.perf_counter()
        print(f"{name}: {laps[name] - laps['']:.1f} s since the start", file=sys.stderr, flush=True)

    front = fit.front({"w1": svd_rank, "w3": svd_rank})
    lap("w1 and w3")
    errors = {}
    for side in ("output", "input"):
        factors = fit.with_w2(front, w2_svd_rank(svd_rank, side, HIDDEN, SIZE), side)
        lap(f"w2 {side}")
        errors[side] = held_out_errors(rows, experts, factors)["layer"]
        lap(f"w2 {side} measured")
    total = laps["w2 input measured"] - laps[""]
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    names = list(laps)
    return {
        "rank": svd_rank,
        "rows": num_rows,
        "seconds": total,
        "peak_gb": peak,
        "heldout_errors": errors,
        "parts": {name: laps[name] - laps[before] for before, name in pairwise(names)},
        "bound": {"seconds": MOST_SECONDS, "gb": MOST_GB},
        "ok": total < MOST_SECONDS and peak < MOST_GB,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    found = check(args.rank, args.rows, torch.device(args.device))
    found |= {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compress_layer.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(not found["ok"])


if __name__ == "__main__":
    main()

"""By hand, on a GPU: one layer of Mixtral-8x7B's shapes (random weights) in closed form. The bound: 60 s and 24 GB.

    python tests/compress/check_gpu.py [rank] [rows]
"""

from __future__ import annotations

import json
import sys
import time

import torch

from nanovllm.compress.layer import Fit, fit_front, fit_w2, held_out_errors
from nanovllm.compress.predict import w2_rank
from nanovllm.compress.stream import Rows
from nanovllm.compress.windows import Expert

HIDDEN, SIZE, EXPERTS = 4096, 14336, 8


def main(rank: int = 1024, num_rows: int = 32768) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device) / shape[1] ** 0.5

    experts = [Expert(matrix(SIZE, HIDDEN), matrix(HIDDEN, SIZE), matrix(SIZE, HIDDEN)) for _ in range(EXPERTS)]
    scales = 0.999 ** torch.arange(HIDDEN)
    ids = torch.rand(num_rows, EXPERTS).topk(2).indices
    rows = Rows(torch.randn(num_rows, HIDDEN) * scales, ids, torch.rand(num_rows, 2).softmax(-1),
                torch.arange(num_rows) % 10 == 9)  # fmt: skip
    how = Fit(dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = {}

    def lap(name: str) -> None:
        torch.cuda.synchronize()
        found[f"{name}_seconds"] = time.perf_counter() - started

    front = fit_front(rows, experts, {"w1": rank, "w3": rank}, how)
    lap("front")
    for side in ("output", "input"):
        factors = fit_w2(rows, experts, front, w2_rank(rank, side, HIDDEN, SIZE), side, how)
        lap(side)
        found[f"{side}_error"] = held_out_errors(rows, experts, factors)["layer"]
        lap(f"{side}_measured")
    found |= {"rank": rank, "rows": num_rows, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    found["ok"] = found["input_measured_seconds"] < 60 and found["peak_gb"] < 24
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

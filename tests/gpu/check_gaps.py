"""On a real GPU: greedy output in bf16 leaves the fp32 reference only where its two best logits nearly tie.

    python tests/gpu/check_gaps.py [--out DIR] [--device cuda] [--backends triton,flash,sdpa,sdpa.math]

Tiny random models of every family, each backend, batches of 1, 3 and 12, whole prompts and small chunks, with the
host's sampler (logprobs) and without it (captured graphs, where the backend allows them). What is measured and why it
proves something: tests/gaps.py. Prints a table, writes check_gaps.json, exits with 1 if anything cannot be rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm.errors import ConfigError  # noqa: E402
from tests.gaps import FAMILIES, Row, make_reference, measure, table  # noqa: E402

LABELS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 24},
    "no logprobs": {"logprobs": None},
    "block 16": {"kvcache_block_size": 16, "logprobs": None},
}
CASES = [(1, "whole"), (1, "no logprobs"), (3, "chunks"), (12, "whole"), (12, "no logprobs"), (12, "block 16")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends", default="triton,flash,sdpa,sdpa.math")
    parser.add_argument("--families", default=",".join(FAMILIES))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # tiny matrices gain nothing from threads
    rows: list[Row] = []
    faults: list[str] = []
    refused: dict[str, str] = {}
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            reference = make_reference(family, Path(folder))
            print(f"{family}: transformers in bf16 on the CPU is off by at most {reference.error:.4f}", flush=True)
            for backend in args.backends.split(","):
                if backend in refused:
                    continue
                try:
                    for batch, label in CASES:
                        row = measure(
                            family,
                            reference,
                            batch,
                            label,
                            attn_backend=backend,
                            device=args.device,
                            gpu_memory_utilization=0.3,
                            **LABELS[label],
                        )
                        rows.append(row)
                        faults += [f"{family} {backend} {batch} {label}: {fault}" for fault in row.faults(reference)]
                except ConfigError as error:
                    refused[backend] = str(error)
                    print(error, flush=True)
    print(table(rows))
    print("\n".join(faults) or "every difference is within rounding")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    facts = {"torch": torch.__version__, "gpu": gpu, "date": time.strftime("%Y-%m-%d"), "refused": refused}
    found = {**facts, "faults": faults, "rows": [asdict(row) for row in rows]}
    (args.out / "check_gaps.json").write_text(json.dumps(found, indent=1))
    sys.exit(1 if faults or not rows else 0)


if __name__ == "__main__":
    main()

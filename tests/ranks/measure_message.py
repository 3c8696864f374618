"""What it costs to send a plan to another process: write, send, receive, read. Not collected by pytest.

    python tests/ranks/measure_message.py [--out benchmarks/results/NAME.json]

A decode step of N sequences, of which one in `block_size` needs a new block. `write` and `read` are measured alone, and
`send and receive` between two processes: half of the time of a message there and back as it was, which is what the
socket pair costs with both ends awake or asleep as it comes. Trials of many rounds each, and of each trial the median:
the quietest trial is the cost of the code, the median trial has the other load of this machine in it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanovllm.bench.report import make_report, print_table  # noqa: E402
from nanovllm.hardware.host import cpu_name  # noqa: E402
from nanovllm.ranks.wire import decode_plan, encode_plan, receive, send  # noqa: E402
from nanovllm.scheduling.plan import PlanEntry, StepPlan  # noqa: E402

BLOCK_SIZE = 64
TRIALS, ROUNDS = 20, 200


def decode_step(num_seqs: int) -> StepPlan:
    entries = tuple(
        PlanEntry(5000 + i, 900 + i, 1, 14, (30_000 + 7 * i,) if i % BLOCK_SIZE == 0 else (), True)
        for i in range(num_seqs)
    )
    return StepPlan(900, entries)


def times(function: Callable[[], object]) -> tuple[float, float]:
    """Microseconds: (of the quietest trial, of the median trial)"""
    trials = []
    for _ in range(TRIALS):
        found = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            function()
            found.append(1e6 * (time.perf_counter() - began))
        trials.append(statistics.median(found))
    return min(trials), statistics.median(trials)


def measure_socket(data: bytes) -> tuple[float, float]:
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        while (message := receive(there)) is not None:
            send(there, *message)
        os._exit(0)
    there.close()

    def there_and_back() -> None:
        send(here, b"P", data)
        receive(here)

    quiet, usual = times(there_and_back)
    here.close()
    os.waitpid(child, 0)
    return quiet / 2, usual / 2


def measure(num_seqs: int) -> dict:
    plan = decode_step(num_seqs)
    data = encode_plan(plan)
    parts = {
        "write": times(lambda: encode_plan(plan)),
        "send_and_receive": measure_socket(data),
        "read": times(lambda: decode_plan(data)),
    }
    row: dict = {"num_seqs": num_seqs, "num_bytes": len(data)}
    for place, name in enumerate(("quietest_us", "median_us")):
        found = {part: round(value[place], 1) for part, value in parts.items()}
        row[name] = {**found, "total": round(sum(found.values()), 1)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    args = parser.parse_args()
    rows = [measure(num_seqs) for num_seqs in args.num_seqs]
    columns = ["sequences", "bytes", "write us", "send+receive us", "read us", "total us", "total us, median trial"]
    shown = [
        [row["num_seqs"], row["num_bytes"], *row["quietest_us"].values(), row["median_us"]["total"]] for row in rows
    ]
    print_table("A step's message", columns, shown)
    hardware = f"{cpu_name()}, {os.cpu_count()} cores"
    report = make_report("plan-message", hardware, trials=TRIALS, rounds=ROUNDS, rows=rows)
    report["load_average"] = os.getloadavg()[0]
    print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

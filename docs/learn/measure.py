"""Measure the three engines on the same requests, in turns: the table of README.md.

    python docs/learn/measure.py --rounds 3 --save

Speed on a shared machine drifts, so every round runs every engine once and the ratios are taken within a round. The
tokens of all engines must be equal, or nothing is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import engine1_plain
import engine2_paged
import engine3_nanovllm
import torch
from engine1_plain import Model, Request, Run

from nanovllm.bench.report import finish, make_report
from nanovllm.hardware.host import cpu_name

PLAIN = "1 plain loop"


def run_engine2(model: Model, requests: list[Request], max_num_seqs: int) -> Run:
    return engine2_paged.run(model, requests, engine2_paged.Scheduler(64, 64, max_num_seqs))


def measure(requests: list[Request], rounds: int) -> dict[str, Any]:
    model = engine1_plain.load()
    alone, batched = (engine3_nanovllm.make_engine(max_num_seqs=n) for n in (1, 8))
    engines = {
        PLAIN: lambda requests: engine1_plain.run(model, requests),
        "2 paged, one request at a time": lambda requests: run_engine2(model, requests, 1),
        "2 paged, batched": lambda requests: run_engine2(model, requests, 8),
        "3 nano-vLLM, one request at a time": lambda requests: engine3_nanovllm.run(alone, requests),
        "3 nano-vLLM, batched": lambda requests: engine3_nanovllm.run(batched, requests),
    }
    for engine in engines.values():
        engine([Request("Hello", 2)])  # the first call of everything pays for memory and for reading the weights
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in engines}
    loads = []
    for number in range(rounds):
        loads.append(round(os.getloadavg()[0], 2))  # what others do on this machine, and the round before
        for name, engine in engines.items():
            used = time.process_time()
            runs[name].append(done := engine(requests))
            cpu_seconds[name].append(time.process_time() - used)
            if done.outputs != runs[PLAIN][0].outputs:
                sys.exit(f"{name}: other tokens than the plain loop")
            print(f"round {number + 1}: {name}: {done.seconds:.1f} s, CPU {cpu_seconds[name][-1]:.1f} s", flush=True)
    results = {}
    for name, [first, *_] in runs.items():
        results[name] = {
            "passes": first.num_passes,
            "tokens_computed": first.num_rows,
            "new_tokens": first.num_new,
            **compare([run.seconds for run in runs[PLAIN]], [run.seconds for run in runs[name]], first.num_new),
            "cpu_time": compare(cpu_seconds[PLAIN], cpu_seconds[name], first.num_new),
        }
    return {"load_average_before_each_round": loads, "results": results}


def compare(plain: list[float], seconds: list[float], num_new: int) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(plain, seconds)]
    return {
        "seconds": [round(value, 2) for value in seconds],
        "tokens_per_second": num_new / statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The three engines in turns.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a file into benchmarks/results")
    arguments, requests = engine1_plain.read_arguments(parser)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")
    measured = measure(requests, arguments.rounds)
    facts = {"model": "smollm2", "dtype": "float32", "threads": torch.get_num_threads(), "rounds": arguments.rounds}
    finish(make_report("learn", cpu_name(), **facts, **measured), arguments.save)


if __name__ == "__main__":
    main()

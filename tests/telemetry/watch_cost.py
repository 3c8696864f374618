"""What watching costs: python -m tests.telemetry.watch_cost [--sequences 256] [--steps 200] [--step-ms 5]

A real scheduler decodes that many sequences (blocks of 16 tokens, 64 more wait); the device is a sleep of --step-ms.

    nobody watches   the calls into a Watcher without readers
    engine thread    the same with a reader: processor time that the engine cannot use for anything else
    feed thread      processor time of the JSON, which runs while the device computes
    longer steps     time of a whole step with a reader, less that without: what is really felt, the sharing of
                     Python's lock included. Needs an idle machine: it is a small difference of large numbers.

First deciles over the steps (the last: medians), best of five runs in turn. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule
from nanovllm.telemetry.feed import Watcher
from nanovllm.telemetry.readers import Event
from tests.simulation.simulator import PARAMS


class Sink:
    """A reader as cheap as a EventQueue."""

    def __init__(self) -> None:
        self.num_bytes = self.num_events = 0

    def put(self, event: Event) -> None:
        self.num_bytes += len(event.line)
        self.num_events += 1

    def end(self) -> None:
        pass


def make_scheduler(num_seqs: int, num_steps: int) -> Scheduler:
    prompt, size = 64, 16
    num_blocks = num_seqs * (-(-(prompt + num_steps) // size) + 2)
    limits = SchedulerLimits(num_seqs, max(num_seqs * prompt, 1024), 10**6)
    scheduler = Scheduler(limits, BlockManager(num_blocks, size), make_policy("fcfs"))
    for seq_id in range(num_seqs + 64):  # 64 wait all the time
        token_ids = [seq_id * 131 + i for i in range(prompt)]
        scheduler.add(Sequence(seq_id, token_ids, prompt, StopRule(10**6), PARAMS))
    return scheduler


def quiet(seconds: list[float]) -> float:
    """The first decile: what other processes do to the caches is not ours."""
    return statistics.quantiles(seconds, n=10)[0]


def run(num_seqs: int, num_steps: int, step_seconds: float, watched: bool) -> dict[str, float]:
    scheduler = make_scheduler(num_seqs, num_steps)
    watcher, sink = Watcher(scheduler, str), Sink()
    if watched:
        watcher.attach(sink)
    calls, feed, steps = [], [], []
    for number in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.schedule()
        before = time.thread_time()
        watcher.planned(plan, [])
        call = time.thread_time() - before
        whole, own = time.process_time(), time.thread_time()
        time.sleep(step_seconds)
        feed.append(time.process_time() - whole - (time.thread_time() - own))
        result = StepResult([[number] for entry in plan.entries if entry.samples])
        progress = scheduler.commit(plan, result)
        before = time.thread_time()
        watcher.committed(plan, progress, step_seconds)
        calls.append(call + time.thread_time() - before)
        steps.append(time.perf_counter() - began)
    watcher.close()
    return {
        "calls": quiet(calls),
        "feed": quiet(feed),
        "step": statistics.median(steps),
        "bytes": sink.num_bytes / num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=5.0)
    args = parser.parse_args()
    best: dict[bool, dict[str, float]] = {}
    for _ in range(5):  # in turn, and the best of each: other work of the machine only adds
        for watched in (False, True):
            new = run(args.sequences, args.steps, args.step_ms / 1e3, watched)
            old = best.get(watched, new)
            best[watched] = {name: min(old[name], new[name]) for name in new}
    off, on = best[False], best[True]
    micros = {
        "nobody watches": off["calls"],
        "engine thread": on["calls"],
        "feed thread": on["feed"],
        "longer steps": on["step"] - off["step"],
    }
    for name, seconds in micros.items():
        print(f"{name:<16}{1e6 * seconds:8.1f} us a step {100 * seconds / off['step']:8.3f} %")
    record = {name.replace(" ", "_") + "_us": round(1e6 * seconds, 2) for name, seconds in micros.items()}
    print(json.dumps({**vars(args), "step_us": round(1e6 * off["step"]), "bytes": round(on["bytes"]), **record}))


if __name__ == "__main__":
    main()

"""fcfs, sjf and sjf with aging on one trace: who waits how long for the first token.

The real Scheduler runs; only the model is replaced, by a cost model of a step, and the clock, by addition. So a trace
of minutes takes a second, needs no torch, and repeats exactly. `run_real` plays a small trace on the real engine.

The trace is the case that policies exist for: a few long prompts arrive, then many short ones (Poisson). First come,
first served lets everyone wait behind the long ones; shortest first lets the long ones wait for as long as short ones
keep coming; aging bounds that: nobody is passed over for more than max_wait_steps steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.bench.report import summary
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Job:
    arrives: float
    num_prompt: int
    num_output: int
    is_long: bool


@dataclass(frozen=True)
class TrafficShape:
    """Long prompts at the start, then short ones: the gaps between them are exponential."""

    num_long: int = 6
    num_short: int = 200
    long_len: tuple[int, int] = (1024, 2048)
    short_len: tuple[int, int] = (16, 96)
    output_len: tuple[int, int] = (4, 32)
    rate: float = 8.0  # short requests a second

    def jobs(self, seed: int) -> list[Job]:
        rng = random.Random(seed)
        jobs = [
            Job(0.0, rng.randint(*self.long_len), rng.randint(*self.output_len), True) for _ in range(self.num_long)
        ]
        clock = 0.0
        for _ in range(self.num_short):
            clock += rng.expovariate(self.rate)
            jobs.append(Job(clock, rng.randint(*self.short_len), rng.randint(*self.output_len), False))
        return jobs


@dataclass(frozen=True)
class SimulatedMachine:
    """The simulated machine: what a step may hold, and what it costs."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    num_blocks: int = 4096
    seconds_per_step: float = 0.010  # reading the weights, whatever the batch
    seconds_per_token: float = 0.0005

    def scheduler(self, policy: str, max_wait_steps: int | None) -> Scheduler:
        limits = SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.num_blocks * BLOCK_SIZE)
        # Prompts here have lengths and no content, so there is nothing to find again.
        blocks = BlockManager(self.num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
        return Scheduler(limits, blocks, make_policy(policy, max_wait_steps))

    def cost(self, plan: StepPlan) -> float:
        return self.seconds_per_step + self.seconds_per_token * plan.num_tokens


@dataclass
class Served:
    """What became of the jobs, by their place in the trace."""

    first_token: dict[int, float] = field(default_factory=dict)  # seconds after arrival
    finished: dict[int, float] = field(default_factory=dict)
    steps_passed: dict[int, int] = field(default_factory=dict)  # steps in which a later arrival was admitted instead


SIZES = (2048, 16)  # of the long and the short prompt of `served_first`
# For the real engine: prompts of a few hundred tokens (and a small budget) crowd it in seconds, on any machine.
REAL_TRACE = TrafficShape(3, 24, (192, 256), (8, 24), (2, 6))
REAL_SIZES = (256, 16)
VARIANTS: dict[str, tuple[str, bool]] = {"fcfs": ("fcfs", False), "sjf": ("sjf", False), "sjf + aging": ("sjf", True)}


def simulate(jobs: list[Job], server: SimulatedMachine, policy: str, max_wait_steps: int | None) -> Served:
    scheduler = server.scheduler(policy, max_wait_steps)
    served = Served(steps_passed=dict.fromkeys(range(len(jobs)), 0))
    sequences: dict[int, Sequence] = {}
    coming = _next_last(jobs)
    clock = 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            clock = max(clock, jobs[coming[-1]].arrives)
        while coming and jobs[coming[-1]].arrives <= clock:
            index = coming.pop()
            sequences[index] = _sequence(index, jobs[index])
            scheduler.add(sequences[index])
        plan = scheduler.schedule()
        assert plan.entries, "there is work and nothing runs"
        if plan.arrivals:
            latest = max(sequences[arrival.seq_id].arrival for arrival in plan.arrivals)
            for seq in scheduler.waiting:
                served.steps_passed[seq.seq_id] += seq.arrival < latest
        clock += server.cost(plan)
        result = StepResult([[0] for entry in plan.entries if entry.samples])
        for moved in scheduler.commit(plan, result):
            index = moved.seq.seq_id
            served.first_token.setdefault(index, clock - jobs[index].arrives)
            if moved.seq.finished:
                served.finished[index] = clock - jobs[index].arrives
    return served


def _next_last(jobs: list[Job]) -> list[int]:
    """Places in the trace, the next to arrive at the end; of those that arrive together, the first in the trace."""
    return sorted(range(len(jobs)), key=lambda index: (jobs[index].arrives, index), reverse=True)


def _sequence(index: int, job: Job) -> Sequence:
    return Sequence(index, [0] * job.num_prompt, job.num_prompt, StopRule(job.num_output), SamplingParams())


def describe(served: Served, jobs: list[Job]) -> dict[str, Any]:
    assert len(served.finished) == len(jobs), "a request was never finished"
    longs = [served.first_token[i] for i, job in enumerate(jobs) if job.is_long]
    found: dict[str, Any] = {
        "ttft": summary(list(served.first_token.values())),
        "e2e": summary(list(served.finished.values())),
        "ttft_of_long": summary(longs),
    }
    if served.steps_passed:
        found["most_steps_passed_over"] = max(served.steps_passed.values())
    return found


def compare_policies(
    jobs: list[Job], max_wait_steps: int, run: Callable[[list[Job], str, int | None], Served]
) -> dict[str, Any]:
    return {
        name: describe(run(jobs, policy, max_wait_steps if aging else None), jobs)
        for name, (policy, aging) in VARIANTS.items()
    }


def served_first(run: Callable[[list[Job], str, int | None], Served], long_len: int, short_len: int) -> dict[str, str]:
    """A long prompt is submitted, then a short one, before the first step. Whose first token comes first?"""
    jobs = [Job(0.0, long_len, 4, True), Job(0.0, short_len, 4, False)]
    winners = {}
    for policy in ("fcfs", "sjf"):
        first_token = run(jobs, policy, None).first_token
        winners[policy] = "long" if first_token[0] < first_token[1] else "short"
    return winners


def run_real(engine: Any, jobs: list[Job]) -> Served:
    """The same trace on a real engine, by the wall clock. All prompts differ, so none is found in the prefix cache."""
    rng = random.Random(0)
    served = Served()
    coming = _next_last(jobs)
    vocab_size = engine.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(job.num_prompt)] for job in jobs]
    started = time.monotonic()
    while coming or engine.has_unfinished_requests():
        now = time.monotonic() - started
        if not engine.has_unfinished_requests() and jobs[coming[-1]].arrives > now:
            time.sleep(jobs[coming[-1]].arrives - now)
        while coming and jobs[coming[-1]].arrives <= time.monotonic() - started:
            index = coming.pop()
            params = SamplingParams(temperature=0.0, max_tokens=jobs[index].num_output, ignore_eos=True)
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params)
        for delta in engine.step():
            index, now = int(delta.request_id), time.monotonic() - started
            if delta.outputs[0].token_ids:
                served.first_token.setdefault(index, now - jobs[index].arrives)
            if delta.finished:
                served.finished[index] = now - jobs[index].arrives
    return served

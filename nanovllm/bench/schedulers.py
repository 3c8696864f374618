"""fcfs, sjf and sjf with aging on one trace: how long each request waits for its first token.

SimulatedMachine: the real Scheduler runs; only the model is replaced, by a cost model of a step, and the clock, by
addition. So a trace of minutes takes a second, needs no torch, and repeats exactly. RealMachine: a small trace on the
real engine.

The trace is the case that policies exist for: a few long prompts arrive, then many short ones (Poisson). First come,
first served lets all wait behind the long ones; shortest first lets the long ones wait for as long as short ones keep
coming; aging bounds that: no request is passed over for more than max_wait_steps steps.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nanovllm.bench.report import Columns, print_rows, summary
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepResult
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


class TraceMachine(Protocol):
    """Runs a trace under a policy."""

    @property
    def facts(self) -> dict[str, Any]: ...  # for the report

    def run(self, jobs: list[Job], policy: str, max_wait_steps: int | None) -> Served: ...


@dataclass(frozen=True)
class SimulatedMachine:
    """What a step may hold, and what it costs."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    num_blocks: int = 4096
    seconds_per_step: float = 0.010  # reading the weights, whatever the batch
    seconds_per_token: float = 0.0005

    @property
    def facts(self) -> dict[str, Any]:
        return {"cost_model": {name: getattr(self, name) for name in ("seconds_per_step", "seconds_per_token")}}

    def run(self, jobs: list[Job], policy: str, max_wait_steps: int | None) -> Served:
        limits = SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.num_blocks * BLOCK_SIZE)
        # Prompts here have lengths and no content, so there is nothing to find again.
        blocks = BlockManager(self.num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
        scheduler = Scheduler(limits, blocks, make_policy(policy, max_wait_steps))
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
            clock += self.seconds_per_step + self.seconds_per_token * plan.num_tokens
            for moved in scheduler.commit(plan, StepResult([[0] for entry in plan.entries if entry.samples])):
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


class RealMachine:
    """An engine, by the wall clock; a new one for each run."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = replace(config, max_num_seqs=4, max_num_batched_tokens=64, skip_tokenizer_init=True)
        self.facts: dict[str, Any] = {}

    def run(self, jobs: list[Job], policy: str, max_wait_steps: int | None) -> Served:
        from nanovllm.bench.throughput import engine_facts, warm_up
        from nanovllm.engine.llm_engine import LLMEngine

        with LLMEngine(replace(self.config, scheduling_policy=policy, max_wait_steps=max_wait_steps)) as engine:
            self.facts = engine_facts(engine)
            warm_up(engine)
            return run_real(engine, jobs)


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


def compare_policies(machine: TraceMachine, jobs: list[Job], max_wait_steps: int) -> dict[str, Any]:
    return {
        name: describe(machine.run(jobs, policy, max_wait_steps if aging else None), jobs)
        for name, (policy, aging) in VARIANTS.items()
    }


def served_first(machine: TraceMachine, long_len: int, short_len: int) -> dict[str, str]:
    """A long prompt is submitted, then a short one, before the first step: which first token comes first."""
    jobs = [Job(0.0, long_len, 4, True), Job(0.0, short_len, 4, False)]
    winners = {}
    for policy in ("fcfs", "sjf"):
        first_token = machine.run(jobs, policy, None).first_token
        winners[policy] = "long" if first_token[0] < first_token[1] else "short"
    return winners


def print_policies(found: dict[str, Any], trace: TrafficShape) -> None:
    columns: Columns = [("seconds", "name"), ("TTFT mean", "ttft.mean"), ("p50", "ttft.p50"), ("p99", "ttft.p99")]
    columns += [("e2e mean", "e2e.mean"), ("p50", "e2e.p50"), ("p99", "e2e.p99")]
    columns += [("long: mean", "ttft_of_long.mean"), ("max", "ttft_of_long.max"), ("passed over", "passed")]
    rows = [{"name": name, "passed": row.get("most_steps_passed_over"), **row} for name, row in found.items()]
    print_rows(f"{trace.num_long} long prompts, then {trace.num_short} short ones", rows, columns)


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

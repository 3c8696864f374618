"""A scheduler and a fake device, driven one step at a time, for the directed tests."""

from __future__ import annotations

import pytest

from nanovllm.scheduling.plan import StepPlan
from nanovllm.scheduling.sequence import Sequence, StopRule
from tests.simulation.simulator import FakeDevice, Request, Setup, check_plan, check_scheduler, expected


class Engine:
    """One step at a time, keeping every plan."""

    def __init__(self, **setup: object) -> None:
        self.setup = Setup(**setup)  # type: ignore[arg-type]
        self.scheduler = self.setup.scheduler()
        self.device = FakeDevice(self.setup)
        self.plans: list[StepPlan] = []

    def add(self, seq_id: int, prompt: tuple[int, ...], max_tokens: int = 5, **request: object) -> Sequence:
        seq = Request(seq_id, prompt, StopRule(max_tokens), **request).sequence()  # type: ignore[arg-type]
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        if plan.entries:
            self.plans.append(plan)
            self.scheduler.commit(plan, self.device.execute(plan))
        check_scheduler(self.scheduler)
        return plan

    def run(self, limit: int = 300) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("livelock")

    def right(self, seq: Sequence) -> bool:
        request = Request(seq.seq_id, tuple(seq.token_ids[: seq.num_prompt]), seq.stop, salt=seq.cache_salt)
        return (seq.token_ids[seq.num_prompt :], seq.finish_reason) == expected(request, self.setup)


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(entry.seq_id, entry.start, entry.num_new, entry.samples) for entry in plan.entries]

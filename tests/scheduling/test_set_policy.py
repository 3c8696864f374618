"""Another policy while sequences run and wait: both queues have the order of the new one.

Random traffic with switches, overlap, failures and preemption runs in telemetry/test_feed.py.
"""

from __future__ import annotations

import pytest

from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence, StopRule
from tests.simulation.simulator import PARAMS, Setup


def add(scheduler: Scheduler, *num_prompts: int) -> list[Sequence]:
    seqs = [Sequence(i, [1] * n, n, StopRule(4), PARAMS, priority=-i) for i, n in enumerate(num_prompts)]
    for seq in seqs:
        scheduler.add(seq)
    return seqs


@pytest.mark.parametrize(("name", "order"), [("fcfs", [0, 1, 2, 3]), ("sjf", [2, 1, 3, 0]), ("priority", [3, 2, 1, 0])])
def test_the_line_is_sorted_anew(name: str, order: list[int]) -> None:
    scheduler = Setup(num_blocks=20).scheduler()
    add(scheduler, 9, 5, 3, 7)
    scheduler.set_policy(make_policy(name))
    assert [seq.seq_id for seq in scheduler.waiting] == order
    assert scheduler.policy.name == name
    plan = scheduler.schedule()
    assert [entry.seq_id for entry in plan.entries] == order[: len(plan.entries)]


def test_age_is_kept() -> None:
    """max_wait_steps counts from when it first began to wait, not from the switch."""
    scheduler = Setup(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=4).scheduler()
    add(scheduler, 4, 40, 3)
    for _ in range(3):
        scheduler.schedule()
    scheduler.set_policy(make_policy("sjf", max_wait_steps=3))
    assert scheduler.waiting.peek(scheduler.step).seq_id == 1
    scheduler.set_policy(make_policy("sjf", max_wait_steps=4))
    assert scheduler.waiting.peek(scheduler.step).seq_id == 2

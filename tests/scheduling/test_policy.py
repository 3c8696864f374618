"""Policies and the waiting line: order, aging, starvation, and that nothing of a request stays behind."""

from __future__ import annotations

import gc

import pytest

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.policy import WaitingQueue, make_policy
from nanovllm.scheduling.sequence import Sequence, StopRule
from tests.simulation.simulator import Request, Setup, Simulation


def make_seq(seq_id: int, num_prompt: int = 1, priority: int = 0, queued_step: int = 0) -> Sequence:
    return Sequence(
        seq_id,
        [1] * num_prompt,
        num_prompt,
        StopRule(1),
        SamplingParams(),
        arrival=seq_id,
        priority=priority,
        queued_step=queued_step,
    )


def drain(queue: WaitingQueue, step: int = 0) -> list[int]:
    order = []
    while queue:
        seq = queue.peek(step)
        assert queue.peek(step) is seq
        queue.remove(seq)
        order.append(seq.seq_id)
    return order


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("sjf", [1, 3, 0, 2]), ("priority", [2, 0, 3, 1])]
)
def test_order_of_admission(policy: str, order: list[int]) -> None:
    queue = WaitingQueue(make_policy(policy))
    for seq_id, (num_prompt, priority) in enumerate([(5, 0), (2, 7), (9, -1), (2, 0)]):
        queue.push(make_seq(seq_id, num_prompt, priority))
    assert [seq.seq_id for seq in queue] == order
    assert len(queue) == 4
    assert drain(queue) == order


def test_the_victim_is_the_last_in_order() -> None:
    running = [make_seq(0, priority=3), make_seq(1, priority=0), make_seq(2, priority=1)]
    assert max(running, key=make_policy("fcfs").order).seq_id == 2
    assert max(running, key=make_policy("sjf").order).seq_id == 2
    assert max(running, key=make_policy("priority").order).seq_id == 0


def test_a_preempted_sequence_keeps_its_place_and_its_age() -> None:
    queue = WaitingQueue(make_policy("sjf", max_wait_steps=10))
    old = make_seq(0, 50, queued_step=1)
    queue.push(old)
    queue.remove(old)
    for i in range(1, 4):
        queue.push(make_seq(i, 3, queued_step=i))
    queue.push(old)  # preempted
    assert queue.peek(10).seq_id == 1
    assert queue.peek(11) is old


@pytest.mark.parametrize(("step", "first"), [(9, 1), (10, 0), (11, 0)])
def test_aging_starts_exactly_at_the_limit(step: int, first: int) -> None:
    queue = WaitingQueue(make_policy("sjf", max_wait_steps=10))
    queue.push(make_seq(0, 50))
    queue.push(make_seq(1, 3))
    assert queue.peek(step).seq_id == first


def test_remove_from_the_middle_even_if_the_key_has_changed() -> None:
    """A token sampled by a step in flight may reach a sequence that waits, and end it."""
    queue = WaitingQueue(make_policy("sjf"))
    seqs = [make_seq(i, num_prompt) for i, num_prompt in enumerate([4, 6, 8])]
    for seq in seqs:
        queue.push(seq)
    seqs[1].token_ids += [1] * 50
    queue.remove(seqs[1])
    assert drain(queue) == [0, 2]


def test_nothing_stays_behind_of_a_sequence_that_left() -> None:
    """A line whose head starves must not keep every request that overtook it, or was aborted behind it, alive."""

    def num_alive() -> int:
        gc.collect()
        return sum(type(thing) is Sequence for thing in gc.get_objects())

    before = num_alive()
    queue = WaitingQueue(make_policy("sjf"))
    queue.push(make_seq(0, 1000))
    queue.push(make_seq(1, 1))
    for i in range(2, 500):  # overtakes the first, or is aborted behind the second
        seq = make_seq(i, 10)
        queue.push(seq)
        queue.remove(seq)
    assert num_alive() - before < 10


# ---- policies at work ------------------------------------------------------------------------------------------------


def steady_stream(max_wait_steps: int | None, num_short: int = 60) -> tuple[int, int]:
    """One long prompt, and a short one in every step: (steps until the long one is admitted, short ones before it)."""
    setup = Setup(
        num_blocks=100, max_num_seqs=1, max_num_batched_tokens=200, policy="sjf", max_wait_steps=max_wait_steps
    )
    requests = [Request(0, (1,) * 50, StopRule(1), arrives=1)]
    requests += [Request(1 + i, (2,) * 3, StopRule(1), arrives=i) for i in range(num_short)]
    simulation = Simulation(setup, requests)
    plans = []
    execute = simulation.device.execute
    simulation.device.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign, func-returns-value]
    simulation.run()
    simulation.check_outcomes()
    served = [plan.entries[0].seq_id for plan in plans]
    return plans[served.index(0)].step_id, served.index(0)


def test_sjf_without_aging_starves_the_long_one() -> None:
    step, passed = steady_stream(None)
    assert passed == 60
    assert step > 60


@pytest.mark.parametrize("max_wait_steps", [0, 1, 7, 30])
def test_with_aging_no_sequence_is_passed_over_for_more_than_the_limit(max_wait_steps: int) -> None:
    step, passed = steady_stream(max_wait_steps)
    waited = step - 1  # it was added after step 1
    assert waited == max(1, max_wait_steps)
    assert passed <= max_wait_steps + 1

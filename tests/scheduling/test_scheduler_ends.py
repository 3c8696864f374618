"""Scheduler: several decode steps at once, stops, aborts, and steps in flight."""

from __future__ import annotations

import pytest

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.plan import StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule
from tests.scheduling.harness import Engine, shape
from tests.simulation.simulator import Request, Setup, check_scheduler

# ---- decode steps ----------------------------------------------------------------------------------------------------


def test_several_steps_only_if_no_sequence_waits() -> None:
    engine = Engine(num_blocks=40, max_num_seqs=2, decode_steps=4)
    engine.add(0, (1, 2, 3), 30)
    assert engine.step().num_steps == 1  # a prompt
    assert engine.step().num_steps == 4
    engine.add(1, (1, 2, 3, 4), 6)
    assert engine.step().num_steps == 1  # a prompt and a decode
    assert engine.step().num_steps == 4
    engine.add(2, (5,), 1)  # must wait: both places are taken
    assert engine.step().num_steps == 1
    engine.run()
    assert max(plan.num_steps for plan in engine.plans) == 4


def test_no_more_steps_than_the_longest_output_needs() -> None:
    engine = Engine(num_blocks=40, decode_steps=8)
    engine.add(0, (1, 2, 3), 4)
    engine.add(1, (1, 2, 3), 6)
    engine.run()
    assert [plan.num_steps for plan in engine.plans] == [1, 5]


def test_one_step_if_blocks_for_several_are_short() -> None:
    engine = Engine(num_blocks=3, block_size=2, decode_steps=4)
    seq = engine.add(0, (1, 2), 9)
    engine.run()
    assert [plan.num_steps for plan in engine.plans] == [1, 4, 1][: len(engine.plans)]
    assert len(seq.token_ids) == 7
    assert engine.right(seq)


# ---- abort, stop, overlap --------------------------------------------------------------------------------------------


def test_abort_while_preempted_in_flight_finished_or_unknown() -> None:
    engine = Engine(num_blocks=10)
    scheduler = engine.scheduler
    seq = engine.add(0, (1, 2, 3))
    engine.step()
    scheduler._preempt(seq)
    assert scheduler.abort(0) is seq
    assert not scheduler.has_work

    seq = engine.add(1, (1, 2, 3))
    plan = scheduler.schedule()
    assert scheduler.abort(1) is seq
    assert scheduler.blocks.num_held == 1
    check_scheduler(scheduler)
    assert scheduler.commit(plan, engine.device.execute(plan)) == []
    assert scheduler.blocks.num_free == 10
    assert seq.num_output == 0

    assert scheduler.abort(1) is None  # finished
    assert scheduler.abort(12345) is None


def test_preempted_while_a_step_in_flight_samples_for_it() -> None:
    """It cannot run again before that token is known; the token counts, and may even end it."""
    for max_tokens in (2, 3):
        engine = Engine(num_blocks=10)
        scheduler = engine.scheduler
        seq = engine.add(0, (1, 2, 3), max_tokens)
        engine.step()
        plan = scheduler.schedule()
        scheduler._preempt(seq)
        assert not scheduler.schedule().entries
        (progress,) = scheduler.commit(plan, engine.device.execute(plan))
        assert len(progress.token_ids) == 1
        assert seq.finished == (max_tokens == 2)
        check_scheduler(scheduler)
        engine.run()
        assert engine.right(seq)


def test_nothing_is_planned_beyond_what_a_sequence_may_sample() -> None:
    """With steps in flight the last token is not known, but that it is the last one is."""
    scheduler = Setup(num_blocks=10).scheduler()
    scheduler.add(Request(0, (1, 2, 3), StopRule(2)).sequence())
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert shape(first) == [(0, 0, 3, True)]
    assert shape(second) == [(0, 3, 1, True)]
    assert not third.entries
    scheduler.commit(first, StepResult([[7]]))
    (progress,) = scheduler.commit(second, StepResult([[8]]))
    assert progress.seq.finish_reason == "length"
    assert not scheduler.has_work


def test_plans_are_committed_in_order() -> None:
    scheduler = Setup(num_blocks=10).scheduler()
    scheduler.add(Request(0, (1, 2, 3), StopRule(5)).sequence())
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.commit(second, StepResult([[7]]))


def test_a_stop_string_is_found_by_the_caller_and_logprobs_are_cut_with_it() -> None:
    setup = Setup(num_blocks=10, decode_steps=4)
    limits = SchedulerLimits(4, 16, 1000, 4)
    searched: list[int] = []

    def text_stop(seq: Sequence) -> str | None:
        searched.append(seq.num_output)
        return "END" if seq.num_output == 3 else None

    scheduler = Scheduler(limits, setup.scheduler().blocks, make_policy("fcfs"), text_stop)
    seq = Request(0, (1, 2), StopRule(10, stop_token_ids=frozenset({9}))).sequence()
    seq.params = SamplingParams(stop=["END"])
    scheduler.add(seq)
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult([[5]], logprobs=[["a"]]))
    plan = scheduler.schedule()
    (progress,) = scheduler.commit(plan, StepResult([[6, 7, 9, 8]], logprobs=[["b", "c", "d", "e"]]))
    assert progress.token_ids == [6, 7]
    assert progress.logprobs == ["b", "c"]
    assert (progress.seq.finish_reason, progress.seq.stop_reason) == ("stop", "END")
    assert searched == [1, 2, 3]


def test_stop_rule() -> None:
    rule = StopRule(4, min_tokens=2, eos_token_ids=frozenset({1}), stop_token_ids=frozenset({2}))
    assert rule.ends(1, 1) is None
    assert rule.ends(2, 1) is None
    assert rule.ends(1, 2) == ("stop", None)
    assert rule.ends(2, 2) == ("stop", 2)
    assert rule.ends(3, 3) is None
    assert rule.ends(3, 4) == ("length", None)
    assert rule.ends(2, 4) == ("stop", 2)


def test_a_plan_holds_only_what_is_new() -> None:
    engine = Engine(num_blocks=10, block_size=2)
    engine.add(0, (1, 2, 3), 6)
    engine.run()
    planned = [(entry.first_block, len(entry.block_ids)) for plan in engine.plans for entry in plan.entries]
    assert planned == [(0, 2), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)]
    assert [len(plan.arrivals) for plan in engine.plans] == [1, 0, 0, 0, 0, 0]

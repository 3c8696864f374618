"""Scheduler: what fits, budgets, prefix cache, preemption."""

from __future__ import annotations

import pytest

from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Status
from tests.scheduling.harness import Engine, shape
from tests.simulation.simulator import Setup, check_scheduler

# ---- what can never fit ----------------------------------------------------------------------------------------------


def test_one_sequence_that_outgrows_the_cache_ends_with_a_reason() -> None:
    """Preempting itself would repeat for ever."""
    engine = Engine(num_blocks=4, block_size=4)
    large, small = engine.add(0, (1, 2, 3), max_tokens=1000), engine.add(1, (4, 5), max_tokens=6)
    ended = []
    for _ in range(100):
        engine.step()
        ended += engine.scheduler.take_ended()
    assert not engine.scheduler.has_work
    assert ended == [large]
    assert engine.scheduler.take_ended() == []
    assert large.finish_reason == "length"
    assert "16 tokens" in str(large.stop_reason)
    assert len(large.token_ids) == 17
    assert engine.right(large)
    assert engine.right(small)


def test_a_preempted_sequence_that_no_longer_fits_ends_too() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    seq = engine.add(0, (1, 2, 3), max_tokens=1000)
    while len(seq.token_ids) < 17:
        engine.step()
    engine.scheduler._preempt(seq)
    plan = engine.step()
    assert not plan.entries
    assert engine.scheduler.take_ended() == [seq]
    assert seq.finish_reason == "length"


# ---- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 7, 8, 9])
def test_max_num_seqs_bounds_the_running_set(max_num_seqs: int) -> None:
    engine = Engine(num_blocks=200, max_num_seqs=max_num_seqs, max_num_batched_tokens=300)
    seqs = [engine.add(i, (i, 1, 2), max_tokens=3 + i % 4) for i in range(21)]
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most <= max_num_seqs
    assert max(len(plan.entries) for plan in engine.plans) == max_num_seqs
    assert all(engine.right(seq) for seq in seqs)


def test_a_long_prompt_does_not_stop_the_decodes() -> None:
    """Every decode gets its token in every step, however long the prompts beside it."""
    engine = Engine(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=8)
    first, second = engine.add(0, (1, 2, 3), 30), engine.add(1, (4, 5), 30)
    engine.step()
    engine.add(2, tuple(range(60)), 3)
    engine.step()
    for _ in range(6):
        plan = engine.step()
        assert [entry.num_new for entry in plan.entries] == [1, 1, 6]
    assert (first.num_output, second.num_output) == (8, 8)


def test_a_decode_behind_an_unfinished_prompt_keeps_its_token_of_the_budget() -> None:
    """An urgent prompt ranks before running decodes and would take the whole budget."""
    engine = Engine(num_blocks=200, max_num_seqs=3, max_num_batched_tokens=8, policy="priority")
    decode = engine.add(0, (1, 2), 30, priority=9)
    engine.step()
    engine.add(1, tuple(range(40)), 3, priority=0)
    engine.step()
    assert shape(engine.step()) == [(1, 7, 7, False), (0, 3, 1, True)]
    assert decode.num_output == 3


def test_a_budget_below_max_num_seqs_is_our_mistake() -> None:
    limits = SchedulerLimits(max_num_seqs=9, max_num_batched_tokens=8, max_model_len=100)
    with pytest.raises(AssertionError):
        Scheduler(limits, Setup().scheduler().blocks, make_policy("fcfs"))


@pytest.mark.parametrize("num_prompt", [7, 8, 9, 16, 17])
def test_a_prompt_is_computed_in_chunks_of_the_budget(num_prompt: int) -> None:
    engine = Engine(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=8)
    seq = engine.add(0, tuple(range(num_prompt)), 2)
    engine.run()
    chunks = [engine.plans[i].entries[0] for i in range(-(-num_prompt // 8))]
    assert [c.start for c in chunks] == list(range(0, num_prompt, 8))
    assert sum(c.num_new for c in chunks) == num_prompt
    assert [c.samples for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert engine.right(seq)


# ---- prefix cache and preemption -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9])
def test_a_full_hit_still_computes_one_token(num_prompt: int) -> None:
    """The same prompt twice, at k*block-1, k*block and k*block+1, and down to one token."""
    engine = Engine(num_blocks=20)
    first = engine.add(0, tuple(range(num_prompt)), 3)
    engine.run()
    again = engine.add(1, tuple(range(num_prompt)), 3)
    plan = engine.step()
    cached = (num_prompt - 1) // 4 * 4
    assert shape(plan) == [(1, cached, num_prompt - cached, True)]
    engine.run()
    assert again.num_cached_tokens == cached
    assert again.token_ids == first.token_ids
    assert engine.right(again)


def test_identical_prompts_of_one_step_are_computed_once() -> None:
    """n completions of one prompt, or two clients with one system prompt, arriving together."""
    engine = Engine(num_blocks=20, max_num_batched_tokens=100)
    seqs = [engine.add(i, tuple(range(9)), 4) for i in range(3)]
    plan = engine.step()
    assert shape(plan) == [(0, 0, 9, True), (1, 8, 1, True), (2, 8, 1, True)]
    assert seqs[0].block_table[:2] == seqs[1].block_table[:2] == seqs[2].block_table[:2]
    assert engine.scheduler.blocks.num_used == 5
    engine.run()
    assert all(engine.right(seq) for seq in seqs)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("when", [0, 1, 2, 3, 4, 5, 6])
def test_a_preempted_sequence_goes_on_where_it_was(caching: bool, when: int) -> None:
    """Preempted with output tokens, and with its prefix in the cache, it computes exactly what is missing,
    on both sides of a block's edge."""
    engine = Engine(num_blocks=20, caching=caching)
    seq = engine.add(0, tuple(range(6)), 12)
    for _ in range(when):
        engine.step()
    if when:
        engine.scheduler._preempt(seq)
        check_scheduler(engine.scheduler)
        assert seq.status is Status.WAITING
        length = len(seq.token_ids)
        cached = (length - 1) // 4 * 4 if caching else 0
        plan = engine.step()
        assert shape(plan) == [(0, cached, length - cached, True)]
        assert plan.departures == (0,)
        assert plan.arrivals[0].token_ids == tuple(seq.token_ids[:length])
        assert seq.num_cached_tokens == 0  # of the prompt, when it first ran
    engine.run()
    assert engine.right(seq)
    assert seq.num_preemptions == (when > 0)


def test_preempted_in_the_middle_of_its_prompt() -> None:
    """No output token yet, part of the prompt computed."""
    engine = Engine(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=5)
    seq = engine.add(0, tuple(range(12)), 3)
    engine.step()
    engine.scheduler._preempt(seq)
    assert shape(engine.step()) == [(0, 4, 5, False)]
    engine.run()
    assert engine.right(seq)


def test_the_last_in_line_gives_way_and_the_first_never_does() -> None:
    engine = Engine(num_blocks=5, block_size=4, max_num_seqs=3, max_num_batched_tokens=30)
    seqs = [engine.add(i, (i + 1,) * 3, 9) for i in range(3)]
    engine.run()
    assert seqs[0].num_preemptions == 0
    assert sum(seq.num_preemptions for seq in seqs) > 0
    assert engine.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)
    assert all(engine.right(seq) for seq in seqs)


@pytest.mark.parametrize(("num_blocks", "together"), [(3, False), (4, True)])
def test_admission_leaves_a_block_to_grow_for_each_running_sequence(num_blocks: int, together: bool) -> None:
    """Sequence 0 is about to need its second block: admitting 1 into the last two would preempt it in the next step."""
    engine = Engine(num_blocks=num_blocks, block_size=4)
    seqs = [engine.add(0, (1, 2, 3), 3)]
    engine.step()
    seqs.append(engine.add(1, (5,) * 5, 2))
    engine.step()
    assert (seqs[1].status is Status.RUNNING) == together
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert all(engine.right(seq) for seq in seqs)


def test_no_sequence_is_preempted_for_blocks_that_a_step_in_flight_holds() -> None:
    """Blocks of an aborted sequence are held for the step in flight; waiting one step for them costs nothing."""
    engine = Engine(num_blocks=3, block_size=4, max_num_seqs=3)
    scheduler = engine.scheduler
    seqs = [engine.add(i, (i + 1,) * 3, 9) for i in range(3)]
    scheduler.blocks.num_free_without = lambda matched: 99  # type: ignore[method-assign]  # all three at once
    engine.step()
    del scheduler.blocks.num_free_without
    assert scheduler.blocks.num_free == 0
    plan = scheduler.schedule()  # fills the blocks of all three
    scheduler.abort(1)
    assert not scheduler.schedule().entries  # 0 needs a block: held, not taken from 2
    assert scheduler.num_preemptions == 0
    assert seqs[2].status is Status.RUNNING
    scheduler.commit(plan, engine.device.execute(plan))
    assert [entry.seq_id for entry in scheduler.schedule().entries] == [0]

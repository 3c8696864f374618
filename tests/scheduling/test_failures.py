"""Steps that fail, and steps in flight: published blocks are unpublished, and departures are repeated."""

from __future__ import annotations

from nanovllm.scheduling.plan import StepResult
from nanovllm.scheduling.sequence import StopRule
from tests.simulation.simulator import FakeDevice, Request, Setup, check_scheduler


def test_blocks_held_for_a_failed_step_come_back_when_nothing_is_in_flight() -> None:
    """An abort holds blocks until step 2 ends; step 2 fails, step 1 is committed: they become free."""
    setup = Setup(num_blocks=4, block_size=4, max_num_seqs=2)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    scheduler.add(Request(0, tuple(range(8)), StopRule(9)).sequence())
    first = scheduler.schedule()
    result = device.execute(first)
    second = scheduler.schedule()
    assert [entry.seq_id for entry in second.entries] == [0]
    scheduler.abort(0)
    scheduler.add(Request(1, tuple(range(20, 35)), StopRule(1)).sequence())  # needs the whole cache
    assert not scheduler.schedule().entries
    scheduler.fail(second, "lost")
    assert scheduler.blocks.num_held == 3  # step 1 may still read them
    scheduler.commit(first, result)
    check_scheduler(scheduler)
    assert [entry.seq_id for entry in scheduler.schedule().entries] == [1]


def test_a_block_that_a_failed_step_should_have_completed_is_not_found() -> None:
    """Tokens of a decode become known (and their block findable) while the step that writes its last slot still runs.
    If the sequence is aborted and then that step fails, the block must not stay behind in the prefix cache."""
    setup = Setup(num_blocks=8, block_size=4)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    seq = Request(0, (1, 2, 3), StopRule(9)).sequence()
    scheduler.add(seq)
    first = scheduler.schedule()  # samples token 3
    result = device.execute(first)
    second = scheduler.schedule()  # feeds token 3 and so fills block 0
    scheduler.commit(first, result)
    copy = [*seq.token_ids, 5]
    assert len(copy) == 5
    scheduler.abort(0)
    scheduler.fail(second, "lost")
    again = Request(1, tuple(copy), StopRule(1)).sequence()
    assert scheduler.blocks.match(again) == []
    check_scheduler(scheduler)


def test_a_block_is_found_while_the_step_that_fills_it_is_in_flight() -> None:
    setup = Setup(num_blocks=8, block_size=4)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    seq = Request(0, (1, 2, 3), StopRule(9)).sequence()
    scheduler.add(seq)
    first = scheduler.schedule()
    result = device.execute(first)
    scheduler.schedule()
    scheduler.commit(first, result)
    again = Request(1, (*seq.token_ids, 5), StopRule(1)).sequence()
    assert scheduler.blocks.match(again) == seq.block_table[:1]


def test_departures_of_a_failed_plan_are_in_the_next() -> None:
    """The runner may not have seen the plan: a row it never drops would be lost to every later sequence."""
    setup = Setup(num_blocks=8, max_num_seqs=2)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    for seq_id in range(2):
        scheduler.add(Request(seq_id, (1, 2), StopRule(9)).sequence())
    plan = scheduler.schedule()
    scheduler.commit(plan, device.execute(plan))
    scheduler.abort(0)
    lost = scheduler.schedule()
    assert lost.departures == (0,)
    scheduler.fail(lost, "lost")
    for seq_id in (2, 3):
        scheduler.add(Request(seq_id, (1, 2), StopRule(9)).sequence())
    plan = scheduler.schedule()
    assert set(plan.departures) == {0, 1}
    device.execute(plan)
    assert set(device.rows) == {2, 3}


def test_an_empty_plan_keeps_its_departures_for_the_next() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(Request(0, (1, 2), StopRule(9)).sequence())
    plan = scheduler.schedule()
    scheduler.abort(0)
    assert not scheduler.schedule().entries
    scheduler.commit(plan, StepResult([[1]]))
    scheduler.add(Request(1, (1, 2), StopRule(9)).sequence())
    assert scheduler.schedule().departures == (0,)
    assert scheduler.schedule().departures == ()


def test_a_failed_step_ends_its_sequences_and_those_of_later_plans() -> None:
    setup = Setup(num_blocks=20, max_num_seqs=3, max_num_batched_tokens=8)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    for seq_id in range(2):
        scheduler.add(Request(seq_id, tuple(range(seq_id, seq_id + 8)), StopRule(9)).sequence())
    waiting = Request(2, (7, 8, 9), StopRule(2)).sequence()
    plan = scheduler.schedule()  # the budget is spent on sequence 0
    later = scheduler.schedule()
    scheduler.add(waiting)
    failed = scheduler.fail(plan, "boom")
    assert {seq.seq_id for seq in failed} == {0, 1}
    assert all((seq.finish_reason, seq.stop_reason) == ("error", "boom") for seq in failed)
    assert later.step_id > plan.step_id
    assert not scheduler._flights
    assert not scheduler.blocks._found
    while scheduler.has_work:  # the engine and the other request go on
        plan = scheduler.schedule()
        scheduler.commit(plan, device.execute(plan))
    assert waiting.finish_reason == "length"
    assert scheduler.blocks.num_free == 20


def test_a_sequence_of_the_same_step_shares_blocks_and_fails_with_it() -> None:
    setup = Setup(num_blocks=20, max_num_batched_tokens=40)
    scheduler = setup.scheduler()
    for seq_id in range(2):
        scheduler.add(Request(seq_id, (*range(8), seq_id), StopRule(9)).sequence())
    plan = scheduler.schedule()
    assert [(e.start, e.num_new) for e in plan.entries] == [(0, 9), (8, 1)]
    assert len(scheduler.fail(plan, "boom")) == 2
    assert scheduler.blocks.match(Request(3, tuple(range(9)), StopRule(9)).sequence()) == []
    check_scheduler(scheduler)


def test_held_blocks_can_be_shared_but_not_taken() -> None:
    """Sequence 0 ends while step 2 may read its blocks. They may be read by others, not overwritten."""
    setup = Setup(num_blocks=3, block_size=4, max_num_batched_tokens=40)
    scheduler, device = setup.scheduler(), FakeDevice(setup)
    scheduler.add(Request(0, (1, 2, 3, 4, 5), StopRule(9)).sequence())
    first = scheduler.schedule()
    result = device.execute(first)
    second = scheduler.schedule()
    second_result = device.execute(second)
    scheduler.abort(0)
    assert (scheduler.blocks.num_free, scheduler.blocks.num_held) == (1, 2)
    scheduler.add(Request(1, (9,) * 5, StopRule(1)).sequence())  # two new blocks: must wait
    assert not scheduler.schedule().entries
    scheduler.abort(1)
    scheduler.add(Request(2, (1, 2, 3, 4, 6), StopRule(1)).sequence())  # one shared, one new
    third = scheduler.schedule()
    assert third.entries[0].start == 4
    assert scheduler.blocks.num_held == 1
    scheduler.commit(first, result)
    assert scheduler.blocks.num_held == 1  # step 2 has not ended
    scheduler.commit(second, second_result)
    assert scheduler.blocks.num_held == 0
    scheduler.commit(third, device.execute(third))
    assert scheduler.blocks.num_free == 3
    check_scheduler(scheduler)

"""The number of guesses follows what they gain."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.drafts import RETRY, RETRY_NEW, DraftLength, Drafts
from nanovllm.scheduling.plan import StepPlan
from nanovllm.scheduling.sequence import Sequence, StopRule


def play(
    lengths: DraftLength,
    num_plans: int,
    seconds: Callable[[int], float],
    right: Callable[[int], int],
    num_seqs: int = 1,
) -> list[int]:
    """What was chosen, if a step takes `seconds(length)` and `right(length)` guesses are accepted."""
    chosen = []
    for _ in range(num_plans):
        chosen.append(length := lengths.choose(num_seqs))
        lengths.record(num_seqs, length, 2, 2 * num_seqs * (1 + right(length)), 2 * seconds(length))
    return chosen


def cost(length: int) -> float:
    return 1 + 0.2 * length


def test_guesses_that_are_right_are_made() -> None:
    chosen = play(DraftLength(8), 200, cost, lambda length: length)
    assert chosen[0] == 8
    assert chosen[20:].count(8) >= 0.9 * 180


def test_guesses_that_are_wrong_cost_little() -> None:
    """The promise is 0.95 of the speed without them."""
    chosen = play(DraftLength(4), 400, cost, lambda length: 0)
    assert sum(map(cost, chosen[12:])) <= 1.05 * len(chosen[12:])
    assert set(chosen[12:]) == {0, 2, 4}  # text may change


def test_text_that_begins_to_repeat_itself_is_noticed() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, lambda length: 0)
    chosen = play(lengths, 6 * RETRY, cost, lambda length: length)
    assert chosen[-RETRY + 2 :].count(4) >= RETRY - 4
    chosen = play(lengths, 3 * RETRY, cost, lambda length: 0)
    assert chosen[-RETRY:].count(0) >= RETRY - 2


def test_a_sequence_that_begins_brings_a_try_forward() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, lambda length: 0)
    while lengths.choose(1) == 0:
        pass
    for _ in range(RETRY_NEW - 1):
        assert lengths.next(1, is_new=True) == 0
        lengths.skip(1)
    assert lengths.next(1) == 0
    assert lengths.next(1, is_new=True) == lengths.choose(1, is_new=True) > 0


def test_plans_overlap_while_nothing_is_guessed() -> None:
    """On a GPU a plan that waits for the one before costs time, also one that guesses nothing."""
    drafts = Drafts(4)
    running = [make_sequence(i) for i in range(2)]
    plans = [StepPlan(1, (), num_steps=8)]
    assert drafts.need_tokens(running, plans)  # lengths that were never tried
    play(drafts.length, 100, cost, lambda length: 0, num_seqs=2)
    while drafts.length.choose(2) == 0:
        pass
    for _ in range(RETRY - 1):
        assert not drafts.need_tokens(running, plans)
        drafts.length.skip(2)
    assert drafts.need_tokens(running, plans)
    assert drafts.need_tokens([], [StepPlan(1, (), num_drafts=3)])
    assert not drafts.need_tokens([make_sequence(i) for i in range(17)], plans)
    assert not Drafts(0).need_tokens(running, plans)


def make_sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1, 2, 3, 4, 5], 3, StopRule(max_tokens=9), SamplingParams())


def test_the_length_between_wins_where_it_is_best() -> None:
    chosen = play(DraftLength(8), 200, lambda length: 1 + 0.05 * length**2, lambda length: min(length, 4))
    assert chosen[20:].count(4) >= 0.9 * 180


def test_a_single_slow_step_does_not_decide() -> None:
    lengths = DraftLength(4)
    play(lengths, 40, cost, lambda length: length)
    lengths.record(1, 4, 1, 5, 1000.0)
    assert play(lengths, 4, cost, lambda length: length).count(4) >= 3


def test_batch_sizes_are_apart() -> None:
    """Many sequences fill the machine: there a guess costs what it takes, and does not pay."""
    lengths = DraftLength(4)
    few = play(lengths, 100, cost, lambda length: 2 * (length > 1))
    many = play(lengths, 100, lambda length: 1.0 + 2 * length, lambda length: 2 * (length > 1), num_seqs=100)
    assert few[20:].count(2) >= 70
    assert many[20:].count(0) >= 70
    assert lengths.choose(1) in (0, 2, 4)


def test_one_guess_at_most() -> None:
    assert set(play(DraftLength(1), 50, cost, lambda length: 0)) == {0, 1}


def test_none() -> None:
    assert set(play(DraftLength(0), 50, cost, lambda length: 0)) == {0}


def test_a_length_that_was_not_offered_is_not_counted() -> None:
    """Memory may allow fewer guesses than were chosen."""
    lengths = DraftLength(4)
    lengths.choose(1)
    lengths.record(1, 3, 1, 4, 1e-9)
    assert 3 not in play(lengths, 50, cost, lambda length: 0)

"""The number of guesses follows what they gain."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.drafts import (
    MAX_STEPS,
    RETRY,
    RETRY_YOUNG,
    TRY_STEPS,
    DraftLength,
    Drafts,
    share_of,
    tokens_of,
)
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
        lengths.record(num_seqs, length, 1, num_seqs * (1 + right(length)), seconds(length))
    return chosen


def cost(length: int) -> float:
    return 1 + 0.2 * length


def test_guesses_that_are_right_are_made() -> None:
    chosen = play(DraftLength(8), 200, cost, lambda length: length)
    assert chosen[0] == 8
    assert chosen[40:].count(8) >= 0.9 * 160


def test_guesses_that_are_wrong_cost_little() -> None:
    """The promise is 0.95 of the speed without them."""
    chosen = play(DraftLength(4), 800, cost, lambda length: 0)
    assert sum(map(cost, chosen[12:])) <= 1.05 * len(chosen[12:])
    assert set(chosen[12:]) == {0, 4}  # text may change


def test_text_that_begins_to_repeat_itself_is_noticed() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, lambda length: 0)
    chosen = play(lengths, 3 * RETRY, cost, lambda length: length)
    assert chosen.index(4) <= RETRY
    assert chosen[-RETRY:].count(4) >= RETRY - TRY_STEPS
    chosen = play(lengths, 3 * RETRY, cost, lambda length: 0)
    assert chosen[-RETRY:].count(0) >= RETRY - TRY_STEPS


def test_a_young_sequence_brings_a_try_forward() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, lambda length: 0)
    while lengths.choose(1) == 0:
        pass
    assert [lengths.choose(1) for _ in range(TRY_STEPS)] == [4] * (TRY_STEPS - 1) + [0]
    lengths.skip(1, RETRY_YOUNG - 1)
    assert lengths.next(1) == (0, False)
    assert lengths.next(1, youngest=4 * RETRY_YOUNG) == (0, False)
    assert lengths.next(1, youngest=RETRY_YOUNG) == (4, True)
    lengths.skip(1, RETRY - RETRY_YOUNG)
    assert lengths.choose(1, num_steps=TRY_STEPS) == 4
    assert lengths.next(1, youngest=1) == (0, False)


def test_plans_overlap_while_nothing_is_guessed() -> None:
    """On a GPU a plan that waits for the one before costs time, also one that guesses nothing. Tries are short."""
    drafts = Drafts(4)
    running = [make_sequence(i) for i in range(2)]
    chosen, plans = [(seq, 1) for seq in running], [StepPlan(1, (), num_steps=8)]
    assert drafts.need_tokens(running, plans)  # lengths that were never tried
    play(drafts.length, 100, cost, lambda length: 0, num_seqs=2)
    while drafts.length.choose(2, num_steps=TRY_STEPS) == 0:
        pass
    drafts.length.skip(2, RETRY_YOUNG - 1)
    assert not drafts.need_tokens(running, plans)
    assert drafts.most_steps(chosen) == MAX_STEPS
    drafts.length.skip(2, 1)
    assert drafts.need_tokens(running, plans)
    assert drafts.most_steps(chosen) == TRY_STEPS
    running[0].num_pending = 8
    assert drafts.most_steps(chosen) == MAX_STEPS
    assert drafts.need_tokens([], [StepPlan(1, (), num_drafts=3)])
    many = [make_sequence(i) for i in range(17)]
    assert not drafts.need_tokens(many, plans)
    assert drafts.most_steps([(seq, 1) for seq in many]) == MAX_STEPS
    assert not Drafts(0).need_tokens(running, plans)


def test_a_try_of_none_ends_also_while_plans_overlap() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, lambda length: length)
    while lengths.choose(1) != 0:
        lengths.record(1, 4, 1, 5, cost(4))
    lengths.skip(1, TRY_STEPS)
    assert lengths.next(1) == (4, False)


def test_the_share_of_right_guesses() -> None:
    for length in (1, 2, 4, 16):
        assert share_of(1, length) < 1e-5
        assert share_of(1 + length, length) == 1.0
        for share in (0.1, 0.5, 0.9):
            assert abs(share_of(tokens_of(share, length), length) - share) < 1e-5


def test_one_number_of_guesses_tells_of_the_others() -> None:
    """Two in the lead while few are right; once all are, four are made without having been tried again."""
    price = [1.0, 1.0, 1.05, 0.0, 1.4]
    lengths = DraftLength(4)
    chosen = play(lengths, 60, price.__getitem__, lambda length: min(length, 1))
    assert chosen[-1] == 2
    assert 4 in play(lengths, 40, price.__getitem__, lambda length: length)


def make_sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1, 2, 3, 4, 5], 3, StopRule(max_tokens=9), SamplingParams())


def test_the_length_between_wins_where_it_is_best() -> None:
    chosen = play(DraftLength(8), 200, lambda length: 1 + 0.05 * length**2, lambda length: min(length, 4))
    assert chosen[40:].count(4) >= 0.9 * 160


def test_a_single_slow_step_does_not_decide() -> None:
    lengths = DraftLength(4)
    play(lengths, 40, cost, lambda length: length)
    lengths.record(1, 4, 1, 5, 1000.0)
    assert play(lengths, 4, cost, lambda length: length).count(4) >= 3


def test_steps_that_rarely_guess_are_priced_by_their_mean() -> None:
    """Every fourth step finds something, takes three times as long for it, and is right about half of it. A median sees
    only the others, and what is gained."""
    lengths, chosen = DraftLength(4), []
    for step in range(400):
        chosen.append(length := lengths.choose(1))
        finds = bool(length) and step % 4 == 0
        lengths.record(1, length, 1, 3 if finds else 1, 3.5 if finds else 1.0)
    assert chosen[100:].count(0) >= 0.9 * 300


def test_batch_sizes_are_apart() -> None:
    """Many sequences fill the machine: there a guess costs what it takes, and does not pay."""
    lengths = DraftLength(4)
    few = play(lengths, 100, cost, lambda length: length // 2)
    many = play(lengths, 100, lambda length: 1.0 + 2 * length, lambda length: length // 2, num_seqs=100)
    assert few[20:].count(0) <= 2 * TRY_STEPS
    assert many[20:].count(0) >= 70
    assert lengths.choose(1) in (0, 2, 4)


def test_a_small_gain_is_not_worth_tries() -> None:
    """Measured times vary by some percent, so 2 % may be nothing; 10 % are something."""
    for gain, usual in ((1.02, 0), (1.1, 4)):
        price = [1.0, 9.0, 9.0, 9.0, 5 / gain]  # of a step that writes 1 to 5 tokens
        assert play(DraftLength(4), 200, price.__getitem__, lambda n: n)[20:].count(usual) >= 0.8 * 180


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

"""The number of guesses follows what they gain."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import pytest

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.drafts import (
    MAX_ROWS,
    MAX_STEPS,
    MOST_SAVING,
    RETRY,
    SAVED,
    TRY_STEPS,
    YOUNG,
    DraftLength,
    Drafts,
    draft_lengths,
    share_of,
    tokens_of,
)
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, StopRule

MANY = 99  # of guesses that a plan has room for
LIMITS = SchedulerLimits(64, 8192, 4096, 8, 4)


def play(
    lengths: DraftLength,
    num_plans: int,
    seconds: Callable[[int], float],
    right: Callable[[int], int],
    num_seqs: int = 1,
    youngest: int = RETRY,
    most: int = MANY,
) -> list[int]:
    """What was chosen, if a step takes `seconds(length)` and `right(length)` guesses are accepted."""
    chosen = []
    for _ in range(num_plans):
        chosen.append(length := lengths.choose(num_seqs, most, youngest, 1))
        lengths.record(num_seqs, length, 1, num_seqs * (1 + right(length)), seconds(length))
    return chosen


def cost(length: int) -> float:
    return 1 + 0.2 * length


def all_right(length: int) -> int:
    return length


def none_right(length: int) -> int:
    return 0


def test_guesses_that_are_right_are_made() -> None:
    chosen = play(DraftLength(8), 200, cost, all_right)
    assert chosen[0] == 8
    assert chosen[40:].count(8) >= 0.9 * 160


@pytest.mark.parametrize("price", [0.01, 0.2, 2.0])
@pytest.mark.parametrize("youngest", [0, 1000])
def test_guesses_that_are_wrong_cost_what_was_saved(price: float, youngest: int) -> None:
    """The promise is 0.95 of the speed without them, whatever they cost; also where all sequences are young, as in a
    server with short answers."""

    def seconds(length: int) -> float:
        return 1 + price * length

    lengths = DraftLength(4)
    play(lengths, 12, seconds, none_right)
    chosen = play(lengths, 6000, seconds, none_right, youngest=youngest)
    assert sum(map(seconds, chosen)) <= (1 + 1.1 * SAVED) * len(chosen)
    assert set(chosen) == {0, 4}  # text may change
    gaps = "".join(map(str, chosen)).split("4" * TRY_STEPS)
    assert max(map(len, gaps)) <= 2 * MOST_SAVING + 1


def test_text_that_begins_to_repeat_itself_is_noticed() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, none_right)
    chosen = play(lengths, 3 * RETRY, cost, all_right)
    assert chosen.index(4) <= RETRY
    assert chosen[-RETRY:].count(4) >= RETRY - TRY_STEPS
    chosen = play(lengths, 3 * RETRY, cost, none_right)
    assert chosen[-RETRY:].count(0) >= RETRY - 3 * TRY_STEPS


def test_a_young_sequence_brings_a_try_forward() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, none_right)
    while lengths.next(1, MANY, YOUNG) == (0, False):
        play(lengths, 1, cost, none_right)
    play(lengths, TRY_STEPS, cost, none_right)
    num_old = num_young = 0
    while lengths.next(1, MANY, YOUNG - 1) == (0, False):
        num_young += len(play(lengths, 1, cost, none_right, youngest=YOUNG))
    while lengths.next(1, MANY, YOUNG) == (0, False):
        num_old += len(play(lengths, 1, cost, none_right, youngest=YOUNG))
    assert num_young == pytest.approx(num_old, rel=0.1)
    assert play(lengths, TRY_STEPS + 1, cost, none_right) == [4] * TRY_STEPS + [0]


def test_what_follows_a_try_is_part_of_its_price() -> None:
    """A plan behind one with guesses begins late on a GPU. A try costs two steps at least, on top."""
    found = []
    for late in (0.0, 5.0):
        lengths = DraftLength(4)
        play(lengths, 400, lambda n: 1.0, none_right)
        while lengths.choose(1, MANY, RETRY, TRY_STEPS) == 0:
            lengths.record(1, 0, TRY_STEPS, TRY_STEPS, TRY_STEPS)
        lengths.record(1, 4, TRY_STEPS, TRY_STEPS, TRY_STEPS + 3.0)
        lengths.record(1, 0, 1, 1, 1.0 + late)
        found.append(lengths._size(1).price)
    assert found == pytest.approx([5.0, 10.0], rel=0.01)


def test_plans_overlap_while_nothing_is_guessed() -> None:
    """On a GPU a plan that waits for the one before costs time, also one that guesses nothing. Tries are short."""
    drafts = Drafts(LIMITS)
    running = [make_sequence(i) for i in range(2)]
    chosen, plans = [(seq, 1) for seq in running], [StepPlan(1, (), num_steps=8)]
    assert drafts.need_tokens(running, plans)  # lengths that were never tried
    play(drafts.length, 100, cost, none_right, num_seqs=2)
    while drafts.length.choose(2, MANY, 0, TRY_STEPS) == 0:
        drafts.length.record(2, 0, TRY_STEPS, 2 * TRY_STEPS, TRY_STEPS * 1.0)
    drafts.length.record(2, 4, TRY_STEPS, 2 * TRY_STEPS, TRY_STEPS * 1.8)
    assert not drafts.need_tokens(running, plans)
    assert drafts.most_steps(chosen) == MAX_STEPS
    play(drafts.length, RETRY, cost, none_right, num_seqs=2, most=0)
    assert drafts.need_tokens(running, plans)
    assert drafts.most_steps(chosen) == TRY_STEPS
    reading = Sequence(9, [1] * 9, 9, StopRule(max_tokens=99), SamplingParams())
    assert not drafts.need_tokens([*running[:1], reading], plans), "nothing is guessed beside a prompt"
    running[0].num_pending = 8
    assert drafts.most_steps(chosen) == MAX_STEPS
    assert drafts.need_tokens([], [StepPlan(1, (), num_drafts=3)])
    many = [make_sequence(i) for i in range(17)]
    assert not drafts.need_tokens(many, plans)
    assert drafts.most_steps([(seq, 1) for seq in many]) == MAX_STEPS
    assert not Drafts(SchedulerLimits(64, 8192, 4096, 8, 0)).need_tokens(running, plans)


def test_a_try_of_none_begins_and_ends_also_while_plans_overlap() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, all_right)
    while lengths.next(1, MANY, RETRY) != (0, True):
        lengths.choose(1, MANY, RETRY, 1)
        lengths.record(1, 4, 1, 5, cost(4))
    for _ in range(2):  # the first begins late
        lengths.skip(1, MANY, RETRY, TRY_STEPS)
    assert lengths.next(1, MANY, RETRY) == (4, False)


def serve(drafts: int, max_tokens: int, num_requests: int, right: bool, at_once: int = 1) -> tuple[Counter, Counter]:
    """Requests one after another on a device with two plans in flight: (steps of plans by the number of guesses, plans
    by how many were in flight). A step takes 1 ms, with guesses 1.3."""
    scheduler = Scheduler(
        SchedulerLimits(64, 8192, 4096, 8, drafts), BlockManager(4000, 16, False), make_policy("fcfs", None)
    )
    flights: deque[StepPlan] = deque()
    steps, depths, now, next_id = Counter[int](), Counter[int](), 0.0, 0
    while next_id < num_requests or scheduler.has_work:
        while next_id < num_requests and len(scheduler.running) + len(scheduler.waiting) < at_once:
            scheduler.add(Sequence(next_id, [1] * 20, 20, StopRule(max_tokens), SamplingParams()))
            next_id += 1
        while len(flights) < 1 + (not scheduler.drafts.need_tokens(scheduler.running, list(flights))):
            plan = scheduler.schedule()
            scheduler.take_ended()
            if not plan.entries:
                break
            flights.append(plan)
        depths[len(flights)] += 1
        plan = flights.popleft()
        now += 0.001 * plan.num_steps * (1.3 if plan.num_drafts else 1.0)
        count = plan.num_steps * (1 + plan.num_drafts * right)
        tokens = [[5] * (count if plan.is_decode_only else 1) for entry in plan.entries if entry.samples]
        if plan.is_decode_only and not plan.arrivals:
            steps[plan.num_drafts] += plan.num_steps
        guessed = [plan.num_drafts * plan.num_steps] * len(tokens)
        scheduler.commit(plan, StepResult(tokens, num_drafted=guessed), now)
    return steps, depths


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("max_tokens", [16, 33, 64, 200, 512])
def test_guesses_that_pay_are_made_in_answers_of_every_length(drafts: int, max_tokens: int) -> None:
    """Also where each answer is too short for a visit full of guesses, and where another number is due to be tried
    while a sequence begins."""
    steps, _ = serve(drafts, max_tokens, 40_000 // max_tokens, right=True)
    assert set(steps) <= {0, 1, 2, 4}
    assert steps[0] <= 0.3 * sum(steps.values())  # the last two tokens, say
    if max_tokens > 16:
        assert steps[drafts] >= 0.7 * sum(steps.values())


@pytest.mark.parametrize("at_once", [1, 3, 16])
@pytest.mark.parametrize("max_tokens", [8, 16, 64, 512])
def test_plans_overlap_where_guesses_do_not_pay(max_tokens: int, at_once: int) -> None:
    num_requests = 40_000 * at_once // max_tokens
    steps, depths = serve(4, max_tokens, num_requests, right=False, at_once=at_once)
    assert steps[0] >= 0.9 * sum(steps.values())
    _, usual = serve(0, max_tokens, num_requests, right=False, at_once=at_once)
    assert depths[2] >= 0.85 * usual[2]


def test_rows_are_limited() -> None:
    """Sixteen sequences have no room for four guesses each."""
    steps, _ = serve(4, 200, 200, right=True, at_once=16)
    assert steps[4] < steps[2]
    assert 16 * (1 + 4) > MAX_ROWS >= 16 * (1 + 2)


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (0, (0,)),
        (1, (1, 0)),
        (2, (2, 1, 0)),
        (4, (4, 2, 0)),
        (5, (5, 3, 0)),
        (7, (7, 4, 2, 0)),
        (8, (8, 4, 2, 0)),
        (16, (16, 8, 4, 2, 0)),
    ],
)
def test_many_guesses_are_tried_in_halves(most: int, lengths: tuple[int, ...]) -> None:
    assert draft_lengths(most) == lengths


@pytest.mark.parametrize("most", [4, 7, 8, 12, 16])
@pytest.mark.parametrize("at_once", [1, 2, 5, 8, 9, 16])
def test_a_larger_number_guesses_also_with_many_sequences(most: int, at_once: int) -> None:
    """Where there is no room for all of them, fewer are made."""
    steps, _ = serve(most, 400, 20 * at_once, right=True, at_once=at_once)
    assert steps[0] <= 0.3 * sum(steps.values())
    made = max(steps, key=steps.__getitem__)
    assert 2 * at_once <= at_once * (1 + made) <= MAX_ROWS


@pytest.mark.parametrize(
    ("num_steps", "num_tokens", "num_kept", "counted"),
    [(1, 5, 5, (4, 4, 1)), (1, 5, 4, (3, 3, 1)), (1, 3, 2, (2, 1, 1)), (1, 5, 1, (0, 0, 1)), (4, 10, 5, (8, 3, 2))],
)
def test_what_a_stop_cuts_counts_less(num_steps: int, num_tokens: int, num_kept: int, counted: tuple) -> None:
    plan = StepPlan(1, (), num_steps=num_steps, num_drafts=4)
    result = StepResult([[5] * num_tokens], num_drafted=[4 * num_steps], num_drafts=[num_steps])
    assert Drafts(LIMITS).count(plan, result, 0, num_kept) == counted


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
    assert 4 in play(lengths, 40, price.__getitem__, all_right)


def make_sequence(seq_id: int) -> Sequence:
    return Sequence(seq_id, [1, 2, 3, 4, 5], 3, StopRule(max_tokens=99), SamplingParams(), num_computed=4)


def test_the_length_between_wins_where_it_is_best() -> None:
    chosen = play(DraftLength(8), 200, lambda length: 1 + 0.05 * length**2, lambda length: min(length, 4))
    assert chosen[40:].count(4) >= 0.9 * 160


def test_a_single_slow_step_does_not_decide() -> None:
    lengths = DraftLength(4)
    play(lengths, 40, cost, all_right)
    lengths.record(1, 4, 1, 5, 1000.0)
    assert play(lengths, 4, cost, all_right).count(4) >= 3


def test_slow_steps_without_guesses_do_not_make_guesses_look_good() -> None:
    """The first three were 15 % slower than later ones, a guess costs 5 %, and none is right."""
    lengths, chosen = DraftLength(4), []
    for step in range(600):
        chosen.append(length := lengths.choose(1, MANY, RETRY, 1))
        lengths.record(1, length, 1, 1, 1.0 + 0.05 * length if length or step > 20 else 1.15)
    assert chosen[12:].count(0) >= 0.9 * len(chosen[12:])


@pytest.mark.parametrize("num_steps", [1, 3, TRY_STEPS])
def test_what_guesses_are_compared_with_is_measured_again(num_steps: int) -> None:
    """Also where a whole try is one plan. Steps without guesses were slow at first; a third of the guesses is right,
    and four cost half a step."""
    lengths, chosen = DraftLength(4), []
    for plan in range(4000):
        chosen.append(length := lengths.choose(1, MANY, RETRY, num_steps))
        seconds = 1.5 if length else 1.5 if plan < 12 else 1.0
        lengths.record(1, length, num_steps, round(num_steps * tokens_of(0.3, length)), seconds * num_steps)
    assert chosen[-1000:].count(0) >= 700


def test_a_try_that_was_held_up_does_not_end_tries() -> None:
    lengths = DraftLength(4)
    play(lengths, 100, cost, none_right)
    while lengths.choose(1, MANY, RETRY, 1) == 0:
        lengths.record(1, 0, 1, 1, 1.0)
    lengths.record(1, 4, 1, 1, 1000.0)
    assert play(lengths, 2 * MOST_SAVING + 2 * TRY_STEPS, cost, none_right).count(4) > TRY_STEPS


def test_steps_that_rarely_guess_are_priced_by_their_mean() -> None:
    """Every fourth step finds something, takes three times as long for it, and is right about half of it. A median sees
    only the others, and what is gained."""
    lengths, chosen = DraftLength(4), []
    for step in range(400):
        chosen.append(length := lengths.choose(1, MANY, RETRY, 1))
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
    assert lengths.choose(1, MANY, RETRY, 1) in (0, 2, 4)


def test_a_small_gain_is_not_worth_tries() -> None:
    """Measured times vary by some percent, so 2 % may be nothing; 10 % are something."""
    for gain, usual in ((1.02, 0), (1.1, 4)):
        price = [1.0, 9.0, 9.0, 9.0, 5 / gain]  # of a step that writes 1 to 5 tokens
        assert play(DraftLength(4), 200, price.__getitem__, all_right)[20:].count(usual) >= 0.8 * 180


def test_one_guess_at_most() -> None:
    assert set(play(DraftLength(1), 200, cost, none_right)) == {0, 1}


def test_none() -> None:
    assert set(play(DraftLength(0), 50, cost, none_right)) == {0}


def test_only_what_a_plan_has_room_for() -> None:
    """Numbers are tried and made only up to that; what is made is always one of those that are measured."""
    lengths = DraftLength(4)
    assert set(play(lengths, 50, cost, all_right, most=1)) == {0}
    assert 2 in play(lengths, 50, cost, all_right, most=3)
    assert 4 in play(lengths, 50, cost, all_right)
    assert lengths.next(1, 3, RETRY)[0] == 2

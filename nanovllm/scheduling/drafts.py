"""Drafts: the scheduler's part of speculation. How many tokens each step of a plan may guess, room for them, and what
became of them. The runner makes the guesses and verifies them (runner/verify.py).

A guessed token costs time whether or not it is accepted: how much depends on the machine, the model and the number of
sequences. How many are accepted depends on the text. So both are measured, by the size of the batch: the time of a step
for a few numbers of guesses, and the share of guesses that are right. With a share a, a step of n guesses writes

    1 + a + a^2 + ... + a^n        tokens of each sequence: guess j counts only if those before it are right

and the number that promises most tokens a second is used, if it promises clearly more than none.

Where none is best, guesses are tried now and then for `TRY_STEPS`, because text changes. What a try costs is measured,
and tries may take `SAVED` of the time: they are paid from savings, to which all other plans contribute. A sequence that
begins may spend them as soon as they are enough for one try, others when they are enough for two, because most texts
that repeat something do so from the beginning. On a GPU a try costs some milliseconds, most of them because plans
before and behind it do not overlap.

While the best length is 0, plans overlap as in an engine that does not guess; a plan that tries a guess waits for those
before it. What such a plan takes is counted from the end of the one before, so that this wait is part of its price.

The output does not depend on it. There is no clock here: `record` is told when a plan ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean, median
from typing import TYPE_CHECKING

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.scheduling.scheduler import SchedulerLimits

MAX_STEPS = 64  # of a plan (EngineConfig.decode_steps is bounded by it)
MAX_SEQS = 16  # of a plan with guesses: with more a machine is busy, and a row that is dropped costs what a row costs
MAX_ROWS = 64  # of a step with guesses: beyond, products take longer with every row
TRIALS = 3  # plans of each number before numbers are compared
TRY_STEPS = 8  # of a try, in one plan or in several; twice as many of a try without guesses, which begins late
SAVED, LEAST_PRICE = 0.03, 2.0  # of the time; steps that are added to what a try costs
YOUNG = 32  # tokens of a sequence that begins
RETRY = 512  # steps after which another number is tried while guesses pay
MOST_SAVING = 2048  # steps that save for one try, however long it took: it may have waited for something else
NEWEST = 0.08  # weight of a step in the share: half of it comes from the last 8 steps
NUM_TIMES = 16  # their mean is the time: steps of the same number differ, as there is not always something to guess
LEAST_GAIN = 1.04  # of a length over none: what is measured varies by some percent, and tries cost three
MOST_TIMES = 4.0  # of the median; slower steps have waited for something else, and do not count


def draft_lengths(most: int) -> tuple[int, ...]:
    """In the order in which they are first tried: each half of the one before, until one is small enough for as many
    sequences as may guess."""
    found = [most, -(-most // 2)]
    while found[-1] > MAX_ROWS // MAX_SEQS - 1:
        found.append(-(-found[-1] // 2))
    return tuple(sorted({0, *found}, reverse=True))


def tokens_of(share: float, length: int) -> float:
    """Of a step, if this share of its guesses is right."""
    return sum(share**n for n in range(length + 1))


def share_of(tokens: float, length: int) -> float:
    """The share with which a step of so many guesses writes so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, length) < tokens else (low, middle)
    return high


class _Size:
    """What is known of the batches of one size, rounded."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.times: dict[int, deque[float]] = {length: deque(maxlen=NUM_TIMES) for length in lengths}
        self.typical: dict[int, float] = {}  # of each of these: asked for several times a plan
        self.is_known = False  # the time of every length
        self.share: float | None = None  # of guesses that are right
        self.best = 0  # length, once all are known
        self.tried, self.num_left = 0, 0  # the length of the newest try, and how many of its steps are left
        self.num_tries, self.num_since = 0, 0  # steps since the newest
        self.savings, self._price = 0.0, 0.0  # seconds; the latter: what the newest try has cost so far
        self.is_priced = False  # it has guessed, and is not over
        self.guessed = False  # the newest plan

    def measured(self, length: int, seconds: float) -> None:
        times = self.times[length]
        times.append(seconds)
        most = MOST_TIMES * median(times)
        self.typical[length] = fmean([time for time in times if time <= most])
        self.is_known = self.is_known or all(len(times) >= TRIALS for times in self.times.values())

    def unknown(self, most: int) -> int | None:
        if self.is_known:
            return None
        return next((n for n, times in self.times.items() if n <= most and len(times) < TRIALS), None)

    @property
    def price(self) -> float:
        step = self.typical[0]
        return min(max(self._price, LEAST_PRICE * step), MOST_SAVING * SAVED * step)

    def can_try(self, youngest: int) -> bool:
        return self.savings >= self.price * (1 if youngest < YOUNG else 2)

    def begin_try(self, length: int) -> None:
        self.tried, self.num_left, self.num_since = length, TRY_STEPS if length else 2 * TRY_STEPS, 0
        self._price, self.is_priced = LEAST_PRICE * self.typical[0], length > 0
        self.savings -= 0.0 if self.best else self._price
        self.num_tries += 1

    def pay(self, length: int, num_tokens: float, seconds: float) -> None:
        """A plan took so long to write so many tokens of each sequence. A try costs what it took longer than steps
        without guesses, and so does the plan right behind it."""
        if length or self.is_priced:
            cost = max(0.0, seconds - num_tokens * self.typical[0])
            self.savings -= cost
            self._price += cost * self.is_priced
        if not length:
            self.is_priced = False
            self.savings = min(max(0.0, self.savings) + SAVED * seconds, 2 * self.price)

    def find_best(self) -> None:
        without = self.typical[0]

        def speed(length: int) -> float:
            # More rows make no step faster: if it was, the steps without guesses were slow, and are not measured again.
            return tokens_of(self.share or 0.0, length) / max(self.typical[length], without, 1e-9)

        fastest = max((length for length in self.times if length in self.typical), key=speed)
        self.best = fastest if speed(fastest) >= LEAST_GAIN * speed(0) else 0


class DraftLength:
    """How many tokens to guess for each sequence, by what was measured. `most`: of this plan. `youngest`: tokens of its
    youngest sequence so far."""

    def __init__(self, most: int) -> None:
        self.lengths = draft_lengths(most)
        self._sizes: dict[int, _Size] = {}

    def rests(self, num_seqs: int, youngest: int) -> bool:
        """Nothing is to be guessed now, whatever there is room for. Mostly so where guesses do not pay, and cheap: a
        plan of one step asks several times, and has a millisecond in all."""
        size = self._size(num_seqs)
        return size.is_known and not size.best and size.num_left <= 0 and not size.can_try(youngest)

    def wait(self, num_seqs: int, num_steps: int) -> None:
        self._size(num_seqs).num_since += num_steps

    def next(self, num_seqs: int, most: int, youngest: int) -> tuple[int, bool]:
        """(of the next plan, whether it is a try)."""
        size = self._size(num_seqs)
        if (unknown := size.unknown(most)) is not None:
            return unknown, True
        others = [length for length in self.lengths if length != size.best]
        is_try = True
        if size.num_left > 0:
            wanted = size.tried
        elif size.best and others and size.num_since >= RETRY:
            wanted = others[size.num_tries % len(others)]
        elif not size.best and size.can_try(youngest):
            wanted = self.lengths[0]
        else:
            wanted, is_try = size.best, False
        length = max(length for length in self.lengths if length <= min(wanted, most))
        return length, is_try and (length > 0 or wanted == 0)

    def choose(self, num_seqs: int, most: int, youngest: int, num_steps: int) -> int:
        (length, is_try), size = self.next(num_seqs, most, youngest), self._size(num_seqs)
        size.num_since += num_steps
        if is_try and size.unknown(most) is None:
            if size.num_left <= 0:
                size.begin_try(length)
            size.num_left -= num_steps
        return length

    def skip(self, num_seqs: int, most: int, youngest: int, num_steps: int) -> None:
        """A plan that cannot guess, because another was in flight."""
        if self.next(num_seqs, most, youngest) == (0, True):  # nor does it want to
            self.choose(num_seqs, most, youngest, num_steps)
        else:
            self.wait(num_seqs, num_steps)

    def record(self, num_seqs: int, length: int, num_steps: int, num_tokens: int, seconds: float) -> None:
        """A plan of decodes ended: so many steps, tokens of all sequences together, seconds."""
        size, written = self._size(num_seqs), num_tokens / num_seqs
        if 0 in size.typical:
            size.pay(length, written, seconds)
        if length or not size.guessed:  # right behind guesses a plan begins late
            size.measured(length, seconds / num_steps)
        size.guessed = length > 0
        if length:
            weight = 1.0 if size.share is None else 1 - (1 - NEWEST) ** num_steps
            size.share = (1 - weight) * (size.share or 0.0) + weight * share_of(written / num_steps, length)
        if size.unknown(length) is None:
            size.find_best()

    def _size(self, num_seqs: int) -> _Size:
        rounded = _rounded(num_seqs)
        if rounded not in self._sizes:
            self._sizes[rounded] = _Size(self.lengths)
        return self._sizes[rounded]


class Drafts:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.most, self.max_seqs = limits.num_drafts, MAX_SEQS
        self.length, self.length_with_grammar = DraftLength(self.most), DraftLength(self.most)
        self._limits = limits
        self._ended = 0.0  # the newest plan

    def reserve(self, chosen: list[tuple[Sequence, int]], num_steps: int, blocks: BlockManager) -> int:
        """StepPlan.num_drafts for these sequences (and tokens to feed). Each gets blocks as if all guesses were right.
        0 beside prompts, behind a plan in flight, and where there are too few free blocks: no sequence is preempted for
        a guess."""
        if not self.most or not 0 < len(chosen) <= self.max_seqs:
            return 0
        if num_steps == 1 and any(num_new > 1 or seq.num_remaining for seq, num_new in chosen):
            return 0
        seqs = [seq for seq, _ in chosen]
        length, youngest = self._length_for(seqs), _youngest(seqs)
        if length.rests(len(seqs), youngest):
            length.wait(len(seqs), num_steps)
            return 0
        facts = (len(seqs), self._room_for(seqs, num_steps), youngest, num_steps)
        if any(seq.num_pending for seq in seqs):
            length.skip(*facts)
            return 0
        num_drafts = length.choose(*facts)
        extra = num_steps * num_drafts
        if sum(blocks.num_missing(seq, extra) for seq in seqs) > blocks.num_free:
            return 0
        for seq in seqs:
            reserved = blocks.reserve(seq, extra)
            assert reserved
        return num_drafts

    def most_steps(self, chosen: list[tuple[Sequence, int]]) -> int:
        """Of a plan of these sequences: few where a length is tried, which may be slow, and no more than may be needed
        with guesses."""
        if not self.most or len(chosen) > self.max_seqs or any(seq.num_pending for seq, _ in chosen):
            return MAX_STEPS
        seqs = [seq for seq, _ in chosen]
        length, is_try = self._length_for(seqs).next(len(seqs), self._room_for(seqs), _youngest(seqs))
        needed = min(self._tokens_left(seqs)) // (1 + length) if length else MAX_STEPS
        return min(TRY_STEPS if is_try else MAX_STEPS, max(1, needed))

    def need_tokens(self, running: list[Sequence], plans: list[StepPlan]) -> bool:
        """Whether the next plan must wait for the tokens of those in flight: it may guess, or one of them does, so that
        nobody knows yet where its sequences will stand."""
        if any(plan.num_drafts for plan in plans):
            return True
        if not self.most or not 0 < len(running) <= self.max_seqs:
            return False
        if any(seq.num_remaining > 1 for seq in running):  # it reads a prompt
            return False
        length, youngest = self._length_for(running), _youngest(running)
        if length.rests(len(running), youngest):
            return False
        return length.next(len(running), self._room_for(running), youngest)[0] > 0

    def count(self, plan: StepPlan, result: StepResult, row: int, num_kept: int) -> tuple[int, int, int]:
        """Progress.drafts of a row of the result. Where a stop has cut its tokens, the same share of all."""
        num_drafted = result.num_drafted[row] if result.num_drafted else 0
        if not num_drafted:
            return 0, 0, 0
        num_tokens, num_steps = len(result.token_ids[row]), result.num_drafts[row] if result.num_drafts else 0
        guessed, right = (n * num_kept // num_tokens for n in (num_drafted, num_tokens - plan.num_steps))
        return guessed, right, -(-num_steps * num_kept // num_tokens)  # a step that was cut is one

    def record(self, plan: StepPlan, result: StepResult, seqs: Iterable[Sequence], now: float) -> None:
        """`seqs`: of the plan. `now`: its end. One that only goes on with its sequences took all the time since the one
        before."""
        before, self._ended = self._ended, now
        if self.most and plan.is_decode_only and not plan.arrivals:
            num_tokens = sum(map(len, result.token_ids))
            self._length_for(seqs).record(len(plan.entries), plan.num_drafts, plan.num_steps, num_tokens, now - before)

    def _length_for(self, seqs: Iterable[Sequence]) -> DraftLength:
        """Beside a grammar each step waits for the host, so its times are others, and so is the text."""
        has_grammar = any(seq.params.structured_outputs is not None for seq in seqs)
        return self.length_with_grammar if has_grammar else self.length

    def _tokens_left(self, seqs: list[Sequence]) -> tuple[int, int]:
        """(that each of them can still hold, that one of them may still want)."""
        room = min(self._limits.max_model_len - len(seq.token_ids) - seq.num_pending for seq in seqs)
        return room, max(seq.stop.max_tokens - seq.num_output - seq.num_pending for seq in seqs)

    def _room_for(self, seqs: list[Sequence], num_steps: int = 1) -> int:
        """How many guesses for each of them in each step."""
        room, wanted = self._tokens_left(seqs)
        rows = min(self._limits.max_num_batched_tokens // len(seqs), MAX_ROWS // _rounded(len(seqs)))
        return max(0, min(room // num_steps, -(-wanted // num_steps), rows) - 1)


def _rounded(num_seqs: int) -> int:
    return 1 << (num_seqs - 1).bit_length()


def _youngest(seqs: Iterable[Sequence]) -> int:
    return min(seq.num_output + seq.num_pending for seq in seqs)

"""Drafts: the scheduler's part of speculation. How many tokens each step of a plan may guess, room for them, and what
became of them. The runner makes the guesses and verifies them (runner/verify.py).

A guessed token costs time whether or not it is accepted: how much depends on the machine, the model and the number of
sequences. How many are accepted depends on the text. So both are measured, by the size of the batch: the time of a step
for a few numbers of guesses, and the share of guesses that are right. With a share a, a step of n guesses writes

    1 + a + a^2 + ... + a^n        tokens of each sequence: guess j counts only if those before it are right

and the number that promises most tokens a second is used, if it promises clearly more than none. Where none is best,
guesses are tried now and then for `TRY_STEPS`, because text changes: with each sequence that begins, and then four
times as far into it as before. On a GPU a try costs some milliseconds, most of them because plans before and behind it
do not overlap.

While the best length is 0, plans overlap as in an engine that does not guess; a plan that tries a guess waits for those
before it. What such a plan takes is counted from the end of the one before, so that this wait is part of its price.

The output does not depend on it. There is no clock here: `record` is told when a plan ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from statistics import fmean, median
from typing import TYPE_CHECKING

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.scheduling.scheduler import SchedulerLimits

MAX_STEPS = 64  # of a plan (EngineConfig.decode_steps is bounded by it)
MAX_SEQS = 16  # of a plan with guesses: with more a machine is busy, and a row that is dropped costs what a row costs
TRIALS = 3  # plans of each number before numbers are compared
RETRY, RETRY_YOUNG = 512, 32  # steps between two tries: at most; at least, while a sequence is young
TRY_STEPS = 8  # of a try, in one plan or in several
NEWEST = 0.08  # weight of a step in the share: half of it comes from the last 8 steps
NUM_TIMES = (
    16  # their mean is the time: steps of the same number differ, because there is not always something to guess
)
LEAST_GAIN = 1.04  # of a length over none: what is measured varies by some percent, and tries cost one
MOST_TIMES = 4.0  # of the median; slower steps have waited for something else, and do not count


def draft_lengths(most: int) -> tuple[int, ...]:
    """In the order in which they are first tried."""
    return tuple(sorted({0, -(-most // 2), most}, reverse=True))


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
        self.share: float | None = None  # of guesses that are right
        self.best = 0  # length, once all are known
        self.num_since = 0  # steps since the last try
        self.num_tries = 0
        self.tried, self.num_left = 0, 0  # the length of the newest try, and how many of its steps are left

    @property
    def unknown(self) -> int | None:
        return next((length for length, times in self.times.items() if len(times) < TRIALS), None)

    def find_best(self) -> None:
        def speed(length: int) -> float:
            return tokens_of(self.share or 0.0, length) / max(_typical(self.times[length]), 1e-9)

        fastest = max(self.times, key=speed)
        self.best = fastest if speed(fastest) >= LEAST_GAIN * speed(0) else 0


def _typical(times: Collection[float]) -> float:
    most = MOST_TIMES * median(times)
    return fmean(time for time in times if time <= most)


class DraftLength:
    """How many tokens to guess for each sequence, by what was measured. `youngest`: tokens of the plan's youngest
    sequence so far."""

    def __init__(self, most: int) -> None:
        self.lengths = draft_lengths(most)
        self._sizes: dict[int, _Size] = {}

    def next(self, num_seqs: int, youngest: int = RETRY) -> tuple[int, bool]:
        """(of the next plan, whether it is a try)."""
        size = self._size(num_seqs)
        if (unknown := size.unknown) is not None:
            return unknown, True
        if size.num_left > 0:
            return size.tried, True
        best = size.best
        others = [length for length in self.lengths if length != best]
        wait = RETRY if best else min(RETRY, max(RETRY_YOUNG, youngest * 3 // 4))  # at tokens 1, 33, 132, 528, ...
        if others and size.num_since >= wait:
            return others[size.num_tries % len(others)] if best else self.lengths[0], True
        return best, False

    def choose(self, num_seqs: int, youngest: int = RETRY, num_steps: int = 1) -> int:
        (length, is_try), size = self.next(num_seqs, youngest), self._size(num_seqs)
        if is_try and size.unknown is None:
            begins = size.num_left <= 0
            size.num_since, size.num_tries, size.tried = 0, size.num_tries + begins, length
            size.num_left = (TRY_STEPS if begins else size.num_left) - num_steps
        else:
            size.num_since += num_steps
        return length

    def skip(self, num_seqs: int, num_steps: int) -> None:
        """A plan without a choice, because another was in flight."""
        size = self._size(num_seqs)
        size.num_since += num_steps
        size.num_left -= num_steps  # of a try of 0

    def record(self, num_seqs: int, length: int, num_steps: int, num_tokens: int, seconds: float) -> None:
        """A plan of decodes ended: so many steps, tokens of all sequences together, seconds."""
        size = self._size(num_seqs)
        if length not in size.times:  # memory allowed fewer than were chosen
            return
        size.times[length].append(seconds / num_steps)
        if length:
            found = share_of(num_tokens / (num_seqs * num_steps), length)
            weight = 1.0 if size.share is None else 1 - (1 - NEWEST) ** num_steps
            size.share = (1 - weight) * (size.share or 0.0) + weight * found
        if size.unknown is None:
            size.find_best()

    def _size(self, num_seqs: int) -> _Size:
        rounded = 1 << (num_seqs - 1).bit_length()
        return self._sizes.setdefault(rounded, _Size(self.lengths))


class Drafts:
    def __init__(self, most: int) -> None:
        self.most, self.max_seqs = most, MAX_SEQS
        self.length, self.length_with_grammar = DraftLength(most), DraftLength(most)
        self._ended = 0.0  # the newest plan

    def reserve(
        self, chosen: list[tuple[Sequence, int]], num_steps: int, limits: SchedulerLimits, blocks: BlockManager
    ) -> int:
        """StepPlan.num_drafts for these sequences (and tokens to feed). Each gets blocks as if all guesses were right.
        0 beside prompts, behind a plan in flight, and where there are too few free blocks: no sequence is preempted for
        a guess."""
        if not self.most or not 0 < len(chosen) <= self.max_seqs:
            return 0
        if num_steps == 1 and any(num_new > 1 or seq.num_remaining for seq, num_new in chosen):
            return 0
        seqs = [seq for seq, _ in chosen]
        length = self._length_for(seqs)
        if any(seq.num_pending for seq in seqs):
            length.skip(len(seqs), num_steps)
            return 0
        room = min(limits.max_model_len - len(seq.token_ids) for seq, _ in chosen)
        wanted = max(seq.stop.max_tokens - seq.num_output for seq, _ in chosen)
        most = min(room // num_steps, -(-wanted // num_steps), limits.max_num_batched_tokens // len(chosen)) - 1
        num_drafts = min(length.choose(len(seqs), _youngest(seqs), num_steps), max(0, most))
        extra = num_steps * num_drafts
        if sum(blocks.num_missing(seq, extra) for seq, _ in chosen) > blocks.num_free:
            return 0
        for seq, _ in chosen:
            reserved = blocks.reserve(seq, extra)
            assert reserved
        return num_drafts

    def most_steps(self, chosen: list[tuple[Sequence, int]]) -> int:
        """Of a plan of these sequences: few where a length is tried, which may be slow."""
        if not self.most or len(chosen) > self.max_seqs or any(seq.num_pending for seq, _ in chosen):
            return MAX_STEPS
        seqs = [seq for seq, _ in chosen]
        is_try = self._length_for(seqs).next(len(seqs), _youngest(seqs))[1]
        return TRY_STEPS if is_try else MAX_STEPS

    def need_tokens(self, running: list[Sequence], plans: list[StepPlan]) -> bool:
        """Whether the next plan must wait for the tokens of those in flight: it may guess, or one of them does, so that
        nobody knows yet where its sequences will stand."""
        if any(plan.num_drafts for plan in plans):
            return True
        if not self.most or not 0 < len(running) <= self.max_seqs:
            return False
        return self._length_for(running).next(len(running), _youngest(running))[0] > 0

    def count(self, plan: StepPlan, result: StepResult, row: int, num_kept: int) -> tuple[int, int]:
        """(guesses that were verified, those that were right) of a row of the result. Where a stop has cut its tokens,
        the same share of both."""
        num_drafted = result.num_drafted[row] if result.num_drafted else 0
        if not num_drafted:
            return 0, 0
        num_tokens = len(result.token_ids[row])
        num_right = num_tokens - plan.num_steps
        return num_drafted * num_kept // num_tokens, num_right * num_kept // num_tokens

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


def _youngest(seqs: Iterable[Sequence]) -> int:
    return min(seq.num_output + seq.num_pending for seq in seqs)

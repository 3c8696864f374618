"""Drafts: the scheduler's part of speculation. How many tokens each step of a plan may guess, room for them, and what
became of them. The runner makes the guesses and verifies them (runner/verify.py).

A guessed token costs time whether or not it is accepted: how much depends on the machine, the model and the number of
sequences. How many are accepted depends on the text. So both are measured, for a few lengths and by the size of the
batch, and the length that has lately written most tokens a second is used. Another length is tried once every `RETRY`
plans, because text changes, and sooner when a sequence begins.

While the best length is 0, plans overlap as in an engine that does not guess; a plan that tries a guess waits for those
before it. What such a plan takes is counted from the end of the one before, so that this wait is part of its price.

The output does not depend on it. There is no clock here: `record` is told how long a plan took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.scheduling.scheduler import SchedulerLimits

MAX_SEQS = 16  # of a plan with guesses: with more a machine is busy, and a row that is dropped costs what a row costs
TRIALS = 3  # plans of each length before lengths are compared
RETRY, RETRY_NEW = 32, 8  # plans between two tries; if a sequence has just begun
NEWEST = 0.4  # weight of the newest plan in the mean of tokens: a text that begins to repeat itself counts at once
NUM_TIMES = 9  # their median is the time: single steps may wait for something else


@dataclass
class _Speed:
    """Of the steps of one batch size with one length."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    tokens: float = 0.0  # mean for each sequence and step

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += (NEWEST if self.times else 1.0) * (tokens - self.tokens)
        self.times.append(seconds)

    @property
    def value(self) -> float:
        return self.tokens / max(median(self.times), 1e-9) if self.times else 0.0


def draft_lengths(most: int) -> tuple[int, ...]:
    """In the order in which they are first tried."""
    return tuple(sorted({0, -(-most // 2), most}, reverse=True))


@dataclass
class _Size:
    """What is known of the batches of one size, rounded."""

    speeds: dict[int, _Speed]
    num_since: int = 0  # plans since a length was tried that was not the best
    num_tries: int = 0


class DraftLength:
    """How many tokens to guess for each sequence, by what was measured."""

    def __init__(self, most: int) -> None:
        self.lengths = draft_lengths(most)
        self._sizes: dict[int, _Size] = {}

    def next(self, num_seqs: int, is_new: bool = False) -> int:
        """Of the next plan. `is_new`: a sequence has just begun."""
        size = self._size(num_seqs)
        for length, speed in size.speeds.items():
            if len(speed.times) < TRIALS:
                return length
        best = self._best(size)
        others = [length for length in self.lengths if length != best]
        is_due = size.num_since >= (RETRY_NEW if is_new else RETRY) - 1
        return others[size.num_tries % len(others)] if others and is_due else best

    def choose(self, num_seqs: int, is_new: bool = False) -> int:
        length, size = self.next(num_seqs, is_new), self._size(num_seqs)
        if length == self._best(size):
            size.num_since += 1
        else:
            size.num_since, size.num_tries = 0, size.num_tries + 1
        return length

    def skip(self, num_seqs: int) -> None:
        """A plan without a choice, because another was in flight."""
        self._size(num_seqs).num_since += 1

    def record(self, num_seqs: int, length: int, num_steps: int, num_tokens: int, seconds: float) -> None:
        """A plan of decodes ended: so many steps, tokens of all sequences together, seconds."""
        speeds = self._size(num_seqs).speeds
        if length in speeds:  # not if memory allowed fewer than were chosen
            speeds[length].add(num_tokens / (num_seqs * num_steps), seconds / num_steps)

    def _size(self, num_seqs: int) -> _Size:
        rounded = 1 << (num_seqs - 1).bit_length()
        return self._sizes.setdefault(rounded, _Size({length: _Speed() for length in self.lengths}))

    def _best(self, size: _Size) -> int:
        return max(self.lengths, key=lambda length: size.speeds[length].value)


class Drafts:
    def __init__(self, most: int) -> None:
        self.most, self.length, self.max_seqs = most, DraftLength(most), MAX_SEQS

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
        if any(seq.num_pending for seq, _ in chosen):
            self.length.skip(len(chosen))
            return 0
        room = min(limits.max_model_len - len(seq.token_ids) for seq, _ in chosen)
        wanted = max(seq.stop.max_tokens - seq.num_output for seq, _ in chosen)
        most = min(room // num_steps, -(-wanted // num_steps), limits.max_num_batched_tokens // len(chosen)) - 1
        num_drafts = min(self.length.choose(len(chosen), any(_has_begun(seq) for seq, _ in chosen)), max(0, most))
        extra = num_steps * num_drafts
        if sum(blocks.num_missing(seq, extra) for seq, _ in chosen) > blocks.num_free:
            return 0
        for seq, _ in chosen:
            reserved = blocks.reserve(seq, extra)
            assert reserved
        return num_drafts

    def need_tokens(self, running: list[Sequence], plans: list[StepPlan]) -> bool:
        """Whether the next plan must wait for the tokens of those in flight: it may guess, or one of them does, so that
        nobody knows yet where its sequences will stand."""
        if any(plan.num_drafts for plan in plans):
            return True
        if not self.most or not 0 < len(running) <= self.max_seqs:
            return False
        return self.length.next(len(running), any(map(_has_begun, running))) > 0

    def count(self, plan: StepPlan, result: StepResult, row: int, num_kept: int) -> tuple[int, int]:
        """(guesses that were verified, those that were right) of a row of the result. Where a stop has cut its tokens,
        the same share of both."""
        num_drafted = result.num_drafted[row] if result.num_drafted else 0
        if not num_drafted:
            return 0, 0
        num_tokens = len(result.token_ids[row])
        num_right = num_tokens - plan.num_steps
        return num_drafted * num_kept // num_tokens, num_right * num_kept // num_tokens

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if self.most and plan.is_decode_only:
            num_tokens = sum(map(len, result.token_ids))
            self.length.record(len(plan.entries), plan.num_drafts, plan.num_steps, num_tokens, seconds)


def _has_begun(seq: Sequence) -> bool:
    """Its next plan is the first that can guess."""
    return seq.num_output + seq.num_pending == 1

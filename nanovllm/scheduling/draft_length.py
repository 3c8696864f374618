"""DraftLength: how many tokens to draft for each sequence of a step (speculation).

A drafted token costs time whether or not it is accepted: how much depends on the machine, the model and the number of
sequences. How many are accepted depends on the text. So both are measured, for a few lengths and by the size of the
batch, and the length that has lately written most tokens a second is used. Every `RETRY` plans another length is tried
once, because text changes: at most one plan in 16 pays for a guess that does not help.

The output does not depend on it. Pure Python without a clock: `record` is told how long a plan took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

TRIALS = 3  # plans of each length before lengths are compared
RETRY = 16
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
        return self.tokens / max(median(self.times), 1e-9)


class DraftLength:
    def __init__(self, most: int) -> None:
        self.lengths = sorted({0, -(-most // 2), most}, reverse=True)  # in the order in which they are first tried
        self._speeds: dict[int, dict[int, _Speed]] = {}  # size of the batch, rounded -> length -> speed
        self._num_plans: dict[int, int] = {}

    def choose(self, num_seqs: int) -> int:
        size = _rounded(num_seqs)
        speeds = self._speeds.setdefault(size, {length: _Speed() for length in self.lengths})
        for length, speed in speeds.items():
            if len(speed.times) < TRIALS:
                return length
        count = self._num_plans[size] = self._num_plans.get(size, 0) + 1
        best = max(self.lengths, key=lambda length: speeds[length].value)
        others = [length for length in self.lengths if length != best]
        return others[count // RETRY % len(others)] if others and count % RETRY == 0 else best

    def record(self, num_seqs: int, length: int, num_steps: int, num_tokens: int, seconds: float) -> None:
        """A plan of decodes ended: so many steps, tokens of all sequences together, seconds."""
        speeds = self._speeds.get(_rounded(num_seqs), {})
        if length in speeds:  # not if memory allowed fewer than were chosen
            speeds[length].add(num_tokens / (num_seqs * num_steps), seconds / num_steps)


def _rounded(num_seqs: int) -> int:
    return 1 << (num_seqs - 1).bit_length()

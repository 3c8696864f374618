"""Scheduling policies: which sequence is served next, and which one is preempted when blocks run out.

    fcfs      first come, first served
    sjf       shortest remaining prompt first; `max_wait_steps` bounds how long a sequence is passed over
    priority  smallest `priority` first, then first come

A policy is two small functions. Both keys are tuples that end in the arrival number, so that every order is total.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from nanovllm.scheduling.sequence import Sequence, Status

Key = tuple[int, ...]


@dataclass(frozen=True)
class Policy:
    name: str
    admission_key: Callable[[Sequence], Key]  # smallest is admitted first
    order: Callable[[Sequence], Key]  # running sequences are served in this order; the largest is preempted
    max_wait_steps: int | None = None  # aging: a sequence that has waited so many steps is admitted next


def make_policy(name: str, max_wait_steps: int | None = None) -> Policy:
    def by_arrival(seq: Sequence) -> Key:
        return (seq.arrival,)

    def by_length(seq: Sequence) -> Key:
        return (seq.num_remaining, seq.arrival)

    def by_priority(seq: Sequence) -> Key:
        return (seq.priority, seq.arrival)

    # Preempting the latest arrival means that the earliest running sequence always advances: no livelock.
    if name == "fcfs":
        return Policy(name, by_arrival, by_arrival)
    if name == "sjf":
        return Policy(name, by_length, by_arrival, max_wait_steps)
    assert name == "priority", name
    return Policy(name, by_priority, by_priority)


class WaitingQueue:
    """Waiting sequences in admission order, with aging: two sorted lists, by key and by arrival.

    Inserting into or deleting from a list moves the pointers behind it: some 50 us in a queue of 100,000. A heap would
    keep entries of sequences that left.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: dict[int, Key] = {}  # seq_id -> the key it was pushed with; its own may change while it waits
        self._by_key: list[tuple[Key, Sequence]] = []
        self._by_arrival: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._by_key)

    def push(self, seq: Sequence) -> None:
        """seq.queued_step is when it *first* began to wait: a preempted sequence keeps its age, so that arrival order
        is also order of age and the oldest is the only one to look at."""
        assert seq.status is Status.WAITING
        key = self._keys[seq.seq_id] = self._policy.admission_key(seq)
        insort(self._by_key, (key, seq), key=itemgetter(0))
        insort(self._by_arrival, (seq.arrival, seq), key=itemgetter(0))

    def peek(self, step: int) -> Sequence:
        oldest = self._by_arrival[0][1]
        limit = self._policy.max_wait_steps
        if limit is not None and step - oldest.queued_step >= limit:
            return oldest
        return self._by_key[0][1]

    def remove(self, seq: Sequence) -> None:
        del self._by_key[bisect_left(self._by_key, self._keys.pop(seq.seq_id), key=itemgetter(0))]
        del self._by_arrival[bisect_left(self._by_arrival, seq.arrival, key=itemgetter(0))]

"""Scheduling policies: who is served next, and who gives way when blocks run out.

    fcfs      first come, first served
    sjf       shortest remaining prompt first; `max_wait_steps` bounds how long anyone is passed over
    priority  smallest `priority` first, then first come

A policy is two small functions. Both keys are compared as tuples and end in the arrival number, so order is total and
runs are repeatable.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nanovllm.scheduling.sequence import Sequence, Status

Key = tuple[int, ...]


@dataclass(frozen=True)
class Policy:
    name: str
    admission_key: Callable[[Sequence], Key]  # smallest is admitted first
    rank: Callable[[Sequence], Key]  # running sequences are served in this order; the largest is preempted
    max_wait_steps: int | None = None  # aging: after so many steps in the queue nobody may overtake

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        return max(candidates, key=self.rank)


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
    """Waiting sequences in admission order, with aging: two heaps (by key, by arrival) and lazy deletion."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._by_key: list[tuple[Key, int, Sequence]] = []
        self._by_arrival: list[tuple[int, int, Sequence]] = []
        self._ticket = 0
        self._tickets: dict[int, int] = {}  # seq_id -> the ticket under which it waits now; older ones are stale

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, ticket, seq in sorted(self._by_key, key=lambda e: e[:2]) if self._live(ticket, seq))

    def push(self, seq: Sequence) -> None:
        """seq.queued_step is when it *first* began to wait: a preempted sequence keeps its age, so that arrival order
        is also order of age and the oldest is the only one to look at."""
        assert seq.status is Status.WAITING
        self._ticket += 1
        self._tickets[seq.seq_id] = self._ticket
        heapq.heappush(self._by_key, (self._policy.admission_key(seq), self._ticket, seq))
        heapq.heappush(self._by_arrival, (seq.arrival, self._ticket, seq))

    def peek(self, step: int) -> Sequence:
        while not self._live(self._by_arrival[0][1], self._by_arrival[0][2]):
            heapq.heappop(self._by_arrival)
        while not self._live(self._by_key[0][1], self._by_key[0][2]):
            heapq.heappop(self._by_key)
        oldest = self._by_arrival[0][2]
        patience = self._policy.max_wait_steps
        if patience is not None and step - oldest.queued_step >= patience:
            return oldest
        return self._by_key[0][2]

    def remove(self, seq: Sequence) -> None:
        del self._tickets[seq.seq_id]

    def _live(self, ticket: int, seq: Sequence) -> bool:
        return self._tickets.get(seq.seq_id) == ticket

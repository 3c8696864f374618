"""Watcher and Feed: the events of an engine, for the page, a trace file or a test.

Most events are plans: which sequence computes which tokens and which blocks it owns follows from them (`trace.py`
derives it). The work is split, so that watching does not slow the engine:

    engine thread   `planned`, `committed`, ... put a few numbers and a reference to the plan into a queue
    feed thread     makes one line of JSON of each, once, and passes it to every reader
    readers         an EventQueue for an event loop, a TraceFile for a disk (readers.py)

The engine never waits for a reader. If the feed is too slow, or an EventQueue is full, events are dropped and a
snapshot of the whole state follows. Without readers nothing is queued. Events hold only numbers, sequence ids, request
names and reasons: no text, no token ids, no sampling parameters.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from nanovllm.scheduling.block_manager import Journal
from nanovllm.scheduling.plan import StepPlan
from nanovllm.scheduling.scheduler import Progress, Scheduler
from nanovllm.scheduling.sequence import Sequence
from nanovllm.telemetry.readers import Event, Reader
from nanovllm.telemetry.trace import MAX_TEXT

logger = logging.getLogger("nanovllm")

MAX_QUEUED = 1024  # events between the engine and the feed; a plan of 256 sequences is some 40 kB
MAX_WAITING = 64  # ids of waiting sequences in an event


class Watcher:
    """Its methods are called on the engine's thread, between two steps or inside one."""

    def __init__(self, scheduler: Scheduler, request_of: Callable[[int], str]) -> None:
        self._scheduler = scheduler
        self._request_of = request_of
        self._readers: dict[Reader, bool] = {}  # reader -> whether it stays until the engine is closed
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._feed = Feed(self._queue)
        self._started = time.monotonic()
        self._behind = False  # events were dropped; a snapshot must come before the next
        self._closing = False
        self.is_paused = False

    # ---- readers -----------------------------------------------------------------------------------------------

    def attach(self, reader: Reader, stays: bool = False) -> None:
        """A snapshot comes first. `stays`: `dismiss` does not detach it, only `close` does."""
        if self._closing:
            reader.end()
            return
        self._feed.start()
        self._readers[reader] = stays
        self._scheduler.blocks.journal = self._scheduler.blocks.journal or Journal()
        self._queue.put(("attach", reader))
        self._queue_snapshot(reader)

    def refresh(self, reader: Reader) -> None:
        """A snapshot for a reader that has lost events."""
        if reader in self._readers:
            self._queue_snapshot(reader)

    def detach(self, reader: Reader) -> None:
        if self._readers.pop(reader, None) is not None:
            self._queue.put(("detach", reader))
        if not self._readers:
            self._scheduler.blocks.journal = None

    def dismiss(self) -> None:
        """Detach all readers that do not stay, and accept no new ones."""
        self._closing = True
        for reader in [reader for reader, stays in self._readers.items() if not stays]:
            self.detach(reader)

    def close(self) -> None:
        self.dismiss()
        for reader in list(self._readers):
            self.detach(reader)
        self._feed.stop()

    # ---- events, called by the engine --------------------------------------------------------------------------

    def added(self, seq: Sequence, request_id: str) -> None:
        if self._readers:
            facts = {"id": seq.seq_id, "request": request_id[:MAX_TEXT], "prompt": seq.num_prompt}
            self._queue_event("add", {**facts, "max_tokens": seq.stop.max_tokens})

    def left(self, aborted: list[Sequence]) -> None:
        """Those that had ended before the abort are in an earlier event."""
        if self._readers:
            pairs = [(seq.seq_id, "abort") for seq in aborted if seq.finish_reason == "abort"]
            self._queue_event("left", pairs, self._scheduler.blocks.num_free)

    def planned(self, plan: StepPlan, ended: list[Sequence]) -> None:
        """Also after an empty plan: making it may have preempted or ended sequences."""
        if not self._readers:
            return
        published, evicted = self._take_journal()
        pairs = [(seq.seq_id, seq.finish_reason) for seq in ended]
        self._queue_event("step", plan, pairs, published, evicted, {**self._waiting_line(), **self._counts()})

    def committed(self, plan: StepPlan, progress: list[Progress], seconds: float) -> None:
        if not self._readers:
            return
        published, _ = self._take_journal()
        # Read here: before the feed thread gets the event, the next commit may end more of them.
        pairs = [(moved.seq.seq_id, moved.seq.finish_reason) for moved in progress if moved.seq.finish_reason]
        self._queue_event("done", plan.step_id, seconds, progress, pairs, published, self._scheduler.blocks.num_free)

    def failed(self, step_id: int, why: str) -> None:
        if self._readers:
            self._take_journal()
            self._queue_event("failed", {"step": step_id, "why": why})
            self._queue_snapshot()

    def forgot_prefixes(self) -> None:
        if self._readers:
            self._queue_snapshot()

    def policy_changed(self) -> None:
        if self._readers:
            self._queue_event("policy", {"policy": self._scheduler.policy.name, **self._waiting_line()})

    def paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        if self._readers:
            self._queue_event("pause", {"paused": is_paused})

    # ---- into the queue ----------------------------------------------------------------------------------------

    def _queue_event(self, kind: str, *facts: Any) -> None:
        num_queued = self._queue.qsize()
        if self._behind:
            if num_queued <= MAX_QUEUED // 2:
                self._behind = False
                self._queue_snapshot()  # of the state after this event, which it replaces
        elif num_queued >= MAX_QUEUED:
            self._behind = True
        else:
            self._queue.put((kind, time.monotonic() - self._started, None, facts))

    def _queue_snapshot(self, reader: Reader | None = None) -> None:
        """For one reader, or for all."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        waiting = self._waiting(None)
        cached, published = blocks.findable()
        held = blocks.held()
        state = {
            "step": scheduler.step,
            "policy": scheduler.policy.name,
            "paused": self.is_paused,
            "flights": scheduler.flights,
            "num_waiting": len(waiting),
            "seqs": [self._describe(seq) for seq in (*scheduler.running, *waiting)],
            "cached": cached,
            "published": published,
            "held": list(held),
            "until": list(held.values()),
            **self._counts(),
        }
        self._queue.put(("snapshot", time.monotonic() - self._started, reader, (state,)))

    def _describe(self, seq: Sequence) -> dict[str, Any]:
        return {
            "id": seq.seq_id,
            "request": self._request_of(seq.seq_id)[:MAX_TEXT],
            "status": seq.status.value,
            "prompt": seq.num_prompt,
            "max_tokens": seq.stop.max_tokens,
            "tokens": len(seq.token_ids),
            "computed": seq.num_computed,
            "preemptions": seq.num_preemptions,
            "cached": seq.num_cached_tokens,
            "blocks": list(seq.block_table),
        }

    def _waiting(self, limit: int | None) -> list[Sequence]:
        """In the order of admission: the sequence that is next because of its age comes first."""
        waiting = self._scheduler.waiting
        seqs = list(islice(waiting, limit))
        if seqs and (head := waiting.peek(self._scheduler.step)) is not seqs[0]:
            seqs = [head, *(seq for seq in seqs if seq is not head)][:limit]
        return seqs

    def _waiting_line(self) -> dict[str, Any]:
        ids = [seq.seq_id for seq in self._waiting(MAX_WAITING)]
        return {"waiting": ids, "num_waiting": len(self._scheduler.waiting)}

    def _counts(self) -> dict[str, int]:
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        counts = (blocks.num_free, blocks.num_hits, blocks.num_queries, scheduler.num_preemptions)
        return dict(zip(("free", "hits", "queries", "preemptions"), counts))

    def _take_journal(self) -> tuple[list[int], list[int]]:
        journal = self._scheduler.blocks.journal
        assert journal is not None
        self._scheduler.blocks.journal = Journal()
        return journal.published, journal.evicted


class Feed:
    """The thread that turns queued events into lines of JSON."""

    def __init__(self, events: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
        self._queue = events
        self._thread: threading.Thread | None = None
        self._readers: dict[Reader, None] = {}  # and all below: used by the thread only
        self._running: set[int] = set()
        self._number = 0

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nanovllm-feed", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10)  # not for ever: a disk may hang

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if item[0] == "attach":
                self._readers[item[1]] = None
            elif item[0] == "detach":
                self._readers.pop(item[1], None)
                item[1].end()
            else:
                self._publish(*item)
        for reader in self._readers:
            reader.end()

    def _publish(self, kind: str, t: float, only: Reader | None, facts: tuple[Any, ...]) -> None:
        try:
            make = getattr(self, f"_{kind}", dict)  # the facts of a kind without a method are its fields
            body = make(*facts)
        except Exception:  # a fault of this file must not end the feed
            logger.exception("an event of kind %s could not be written", kind)
            return
        if body is None:
            return
        body = {"type": body.pop("type", kind), "t": round(t, 6), **body}
        self._number += 1
        event = Event(self._number, body["type"], json.dumps(body, separators=(",", ":")).encode())
        for reader in self._readers if only is None else [only]:
            reader.put(event)

    def _snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        self._running = {seq["id"] for seq in state["seqs"] if seq["status"] == "running"}
        return state

    def _left(self, pairs: list[tuple[int, str]], num_free: int) -> dict[str, Any]:
        self._running.difference_update(seq_id for seq_id, _ in pairs)
        return {"left": pairs, "free": num_free}

    def _step(
        self,
        plan: StepPlan,
        ended: list[tuple[int, str]],
        published: list[int],
        evicted: list[int],
        counts: dict[str, Any],
    ) -> dict[str, Any] | None:
        # A departure without another reason is a preemption. Earlier departures are no longer in _running.
        known = {seq_id for seq_id, _ in ended}
        pairs = ended + [(d, "preempted") for d in plan.departures if d in self._running and d not in known]
        self._running.difference_update(seq_id for seq_id, _ in pairs)
        if not plan.entries:
            return {"type": "left", "left": pairs, "free": counts["free"]} if pairs else None
        arrived = {arrival.seq_id for arrival in plan.arrivals}
        self._running |= arrived
        # For most entries the id is enough: one more token, behind the last, no new block. Written out, 256 of them
        # made steps 2 % longer on an H200's host.
        entries, decodes = [], []
        for seq_id, start, num_new, first_block, block_ids, samples in plan.entries:
            if block_ids or num_new != 1 or not samples or seq_id in arrived:
                entries.append((seq_id, start, num_new, first_block, block_ids, int(samples)))
            else:
                decodes.append(seq_id)
        return {
            "step": plan.step_id,
            "k": plan.num_steps,
            "entries": entries,
            "decodes": decodes,
            # An arriving sequence starts behind its cached tokens.
            "arrivals": [(seq_id, start) for seq_id, start, *_ in entries if seq_id in arrived] if arrived else [],
            "left": pairs,
            "published": published,
            "evicted": evicted,
            **counts,
        }

    def _done(
        self,
        step_id: int,
        seconds: float,
        progress: list[Progress],
        pairs: list[tuple[int, str]],
        published: list[int],
        num_free: int,
    ) -> dict[str, Any]:
        self._running.difference_update(seq_id for seq_id, _ in pairs)
        drafts = [(moved.seq.seq_id, *moved.drafts[:2]) for moved in progress if moved.drafts[0]]
        return {
            "step": step_id,
            "ms": round(1e3 * seconds, 3),
            "tokens": sum(len(moved.token_ids) for moved in progress),
            **({"drafts": drafts} if drafts else {}),
            "left": pairs,
            "published": published,
            "free": num_free,
        }

"""Replay: from the events of `feed.py` back to block owners and queues. No torch, no engine.

    trace = read_trace("run.jsonl")
    replay = Replay(trace.header["num_blocks"])
    for event in trace.events:
        replay.apply(event)             # replay.owners, replay.cached(), replay.seqs, ...

After every event its owners, held, cached and free blocks are those of the engine's BlockManager; a test compares them.
A block may be shared, so owners are counted. Steps overlap: the event of a plan may come before earlier steps are done,
so a block given up meanwhile is *held*, neither owned nor free, until the newest step in flight at that time has ended.

A trace is untrusted input: every line is checked (kind, fields, ranges) and then applied, so that one that contradicts
those before it is refused with the number of its line.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.errors import RequestError

FORMAT = 1
MAX_TRACE_BYTES = 64 * 2**20  # written and read, so that what was written can be viewed: a browser loads this much
MAX_BLOCKS = 2**22
MAX_NUMBER = 2**53  # what JSON readers agree on
MAX_TEXT = 1024
REASONS = ("stop", "length", "abort", "error", "preempted")

Check = Callable[[Any, int], bool]  # (value, num_blocks) -> is sound


# ---- what a line may hold ------------------------------------------------------------------------------------------


def _count(value: Any, num_blocks: int = 0) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _seconds(value: Any, num_blocks: int) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < MAX_NUMBER


def _flag(value: Any, num_blocks: int) -> bool:
    return type(value) is bool


def _text(value: Any, num_blocks: int) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _block(value: Any, num_blocks: int) -> bool:
    return type(value) is int and 0 <= value < num_blocks


def _one_of(*names: str) -> Check:
    return lambda value, num_blocks: type(value) is str and value in names


def _list_of(check: Check) -> Check:
    return lambda value, num_blocks: type(value) is list and all(check(item, num_blocks) for item in value)


def _row(*checks: Check) -> Check:
    def sound(value: Any, num_blocks: int) -> bool:
        if type(value) is not list or len(value) != len(checks):
            return False
        return all(check(item, num_blocks) for check, item in zip(checks, value))

    return sound


def _object(checks: dict[str, Check]) -> Check:
    def sound(value: Any, num_blocks: int) -> bool:
        if type(value) is not dict or value.keys() != checks.keys():
            return False
        return all(check(value[name], num_blocks) for name, check in checks.items())

    return sound


_BLOCKS = _list_of(_block)
_IDS = _list_of(_count)
_LEFT = _list_of(_row(_count, _one_of(*REASONS)))
_COUNTS: dict[str, Check] = {"free": _count, "hits": _count, "queries": _count, "preemptions": _count}
_SEQ_COUNTS = ("id", "prompt", "max_tokens", "tokens", "computed", "preemptions", "cached")
_SEQ = _object(
    {
        **dict.fromkeys(_SEQ_COUNTS, _count),
        "request": _text,
        "status": _one_of("waiting", "running"),
        "blocks": _BLOCKS,
    }
)
_HEADER_COUNTS = ("format", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
HEADER: dict[str, Check] = {
    "type": _one_of("header"),
    "num_blocks": lambda value, _: _count(value) and 0 < value <= MAX_BLOCKS,
    **dict.fromkeys(_HEADER_COUNTS, _count),
    **dict.fromkeys(("version", "model", "policy", "device"), _text),
    **dict.fromkeys(("prefix_caching", "paused"), _flag),
}
FIELDS: dict[str, dict[str, Check]] = {
    "snapshot": {
        "step": _count, "policy": _text, "paused": _flag, "flights": _IDS, "num_waiting": _count,
        "seqs": _list_of(_SEQ), "cached": _BLOCKS, "published": _BLOCKS, "held": _BLOCKS, "until": _IDS, **_COUNTS,
    },
    "add": {"id": _count, "request": _text, "prompt": _count, "max_tokens": _count},
    "left": {"left": _LEFT, "free": _count},
    "step": {
        "step": _count, "k": _count,
        "entries": _list_of(_row(_count, _count, _count, _count, _BLOCKS, lambda value, _: value in (0, 1))),
        "decodes": _IDS,
        "arrivals": _list_of(_row(_count, _count)), "left": _LEFT, "published": _BLOCKS, "evicted": _BLOCKS,
        "waiting": _IDS, "num_waiting": _count, **_COUNTS,
    },
    "done": {"step": _count, "ms": _seconds, "tokens": _count, "left": _LEFT, "published": _BLOCKS, "free": _count},
    "failed": {"step": _count, "why": _text},
    "policy": {"policy": _text, "waiting": _IDS, "num_waiting": _count},
    "pause": {"paused": _flag},
}  # fmt: skip
# Of done: sequences with guessed tokens, how many, and how many were right. Only where there were any.
OPTIONAL: dict[str, Check] = {"drafts": _list_of(_row(_count, _count, _count))}


def check_event(event: Any, num_blocks: int) -> None:
    kind = event.get("type") if isinstance(event, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise RequestError(f"not an event: its type is {str(kind)[:40]!r}, known are {', '.join(FIELDS)}")
    more = {name: check for name, check in OPTIONAL.items() if kind == "done" and name in event}
    _check_fields(event, {"type": _text, "t": _seconds, **FIELDS[kind], **more}, num_blocks)


def _check_fields(event: dict[str, Any], checks: dict[str, Check], num_blocks: int) -> None:
    if missing := checks.keys() - event.keys():
        raise RequestError(f"{event['type']}: {min(missing)} is missing")
    if unknown := event.keys() - checks.keys():
        raise RequestError(f"{event['type']}: unknown field {min(unknown)[:40]!r}")
    for name, check in checks.items():
        if not check(event[name], num_blocks):
            raise RequestError(f"{event['type']}: {name}={str(event[name])[:60]} is not what it should be")


# ---- the state that follows ----------------------------------------------------------------------------------------


@dataclass
class SeqState:
    id: int
    request: str
    prompt: int
    max_tokens: int
    status: str = "waiting"
    tokens: int = 0  # known, or sampled by the steps so far
    computed: int = 0
    preemptions: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Replay:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._forget()

    def _forget(self) -> None:
        self.owners: dict[int, int] = {}  # only of blocks that have any
        self.published: set[int] = set()  # findable: cached if it has no owner
        self.held: dict[int, int] = {}  # block -> the step that must end first
        self.flights: deque[int] = deque()
        self.seqs: dict[int, SeqState] = {}
        self.waiting: list[int] = []  # the first ones, in the order of admission

    def cached(self) -> set[int]:
        return {block for block in self.published if block not in self.owners and block not in self.held}

    def num_free(self) -> int:
        return self.num_blocks - len(self.owners) - len(self.held)

    def apply(self, event: dict[str, Any]) -> None:
        """Raises RequestError if the event cannot follow those before it."""
        act = getattr(self, f"_{event['type']}", None)
        if act is not None:  # failed and pause change nothing here
            act(event)
        if "free" in event:
            found = self.num_free()
            _expect(event["free"] == found, f"free={event['free']}, but {found} are")

    def _snapshot(self, event: dict[str, Any]) -> None:
        self._forget()
        for fields in event["seqs"]:
            seq = self.seqs[fields["id"]] = SeqState(**{**fields, "blocks": []})
            self._own(seq, fields["blocks"])
        self.waiting = [seq["id"] for seq in event["seqs"] if seq["status"] == "waiting"]
        self.published = {*event["cached"], *event["published"]}
        _expect(len(event["held"]) == len(event["until"]), "until: not one number for each held block")
        self.held = dict(zip(event["held"], event["until"]))
        self.flights = deque(event["flights"])

    def _add(self, event: dict[str, Any]) -> None:
        _expect(event["id"] not in self.seqs, f"sequence {event['id']} is added twice")
        seq = SeqState(event["id"], event["request"], event["prompt"], event["max_tokens"], tokens=event["prompt"])
        self.seqs[seq.id] = seq
        self.waiting.append(seq.id)

    def _left(self, event: dict[str, Any]) -> None:
        for seq_id, reason in event["left"]:
            self._release(seq_id, reason)

    def _step(self, event: dict[str, Any]) -> None:
        self._left(event)
        self.published.difference_update(event["evicted"])
        for seq_id, num_cached in event["arrivals"]:
            seq = self._seq(seq_id)
            _expect(seq.status == "waiting", f"sequence {seq_id} arrives but runs already")
            seq.status = "running"
            seq.cached = seq.cached if seq.preemptions else num_cached
        more = event["k"] - 1
        entries: list[Any] = [*event["entries"]]
        entries += ((i, self._seq(i).computed, 1, len(self._seq(i).blocks), [], 1) for i in event["decodes"])
        for seq_id, start, num_new, first_block, blocks, samples in entries:
            seq = self._seq(seq_id)
            _expect(seq.status == "running", f"sequence {seq_id} computes but does not run")
            _expect(first_block == len(seq.blocks), f"sequence {seq_id}: its block table has a gap")
            self._own(seq, blocks)
            seq.computed = start + num_new + more
            if samples:
                seq.tokens = seq.computed + 1
        self.published.update(event["published"])
        self.waiting = list(event["waiting"])
        _expect(not self.flights or event["step"] > self.flights[-1], f"step {event['step']} is not the newest")
        self.flights.append(event["step"])

    def _done(self, event: dict[str, Any]) -> None:
        step = event["step"]
        _expect(bool(self.flights) and self.flights[0] == step, f"step {step} is done but was not the oldest")
        self.flights.popleft()
        oldest = self.flights[0] if self.flights else math.inf
        self.held = {block: until for block, until in self.held.items() if until >= oldest}
        for seq_id, _, num_right in event.get("drafts", ()):
            if (seq := self.seqs.get(seq_id)) is not None:
                seq.computed, seq.tokens = seq.computed + num_right, seq.tokens + num_right
        self._left(event)
        self.published.update(event["published"])

    def _policy(self, event: dict[str, Any]) -> None:
        self.waiting = list(event["waiting"])

    def _seq(self, seq_id: int) -> SeqState:
        _expect(seq_id in self.seqs, f"sequence {seq_id} was never added")
        return self.seqs[seq_id]

    def _own(self, seq: SeqState, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] = self.owners.get(block, 0) + 1
            self.held.pop(block, None)
        seq.blocks += blocks

    def _release(self, seq_id: int, reason: str) -> None:
        seq = self._seq(seq_id)
        for block in seq.blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                if self.flights:
                    self.held[block] = self.flights[-1]
        if reason == "preempted":
            seq.blocks, seq.computed, seq.status = [], 0, "waiting"
            seq.preemptions += 1
        else:
            del self.seqs[seq_id]


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RequestError(otherwise)


# ---- a trace -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    name: str
    header: dict[str, Any]
    events: list[dict[str, Any]]
    raw: bytes  # the lines that were checked

    def summary(self) -> dict[str, Any]:
        """Figures of the whole trace."""
        kinds = Counter(event["type"] for event in self.events)
        left = Counter(reason for event in self.events for _, reason in event.get("left", ()))
        last = next((e for e in reversed(self.events) if "hits" in e), {"hits": 0, "queries": 0})
        done = [event for event in self.events if event["type"] == "done"]
        return {
            "seconds": self.events[-1]["t"],
            "events": dict(kinds),
            "left": dict(left),
            "tokens": sum(event["tokens"] for event in done),
            "step_ms": sorted(event["ms"] for event in done)[len(done) // 2] if done else None,
            "hit_rate": last["hits"] / last["queries"] if last["queries"] else None,
        }


def read_trace(path: str | Path) -> Trace:
    """Raises RequestError with the number of the first line that is wrong. A last line without its end is left out: the
    engine was killed while it wrote."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_TRACE_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error}") from None
    if len(raw) > MAX_TRACE_BYTES:
        raise RequestError(f"{path}: larger than {MAX_TRACE_BYTES >> 20} MB: record a shorter run")
    raw = raw[: raw.rfind(b"\n") + 1]
    number = 1
    try:
        lines = raw.split(b"\n")[:-1]
        if len(lines) < 2:
            raise RequestError("a trace has a header and a snapshot at least")
        header = _parse(lines[0])
        if not isinstance(header, dict) or header.get("type") != "header" or header.get("format") != FORMAT:
            raise RequestError(f"not the header of a trace of format {FORMAT}")
        _check_fields(header, HEADER, 0)
        replay, events = Replay(header["num_blocks"]), []
        for number, line in enumerate(lines[1:], 2):
            event = _parse(line)
            check_event(event, header["num_blocks"])
            _expect(number > 2 or event["type"] == "snapshot", "the first event must be a snapshot")
            replay.apply(event)
            events.append(event)
    except RequestError as error:
        raise RequestError(f"{path}, line {number}: {error}") from None
    return Trace(Path(path).name, header, events, raw)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({type(error).__name__})") from None

"""The event feed: a replay of the events agrees with the BlockManager, and the engine never waits for a reader."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError, RequestError
from nanovllm.scheduling.plan import StepPlan
from nanovllm.scheduling.policy import Policy, make_policy
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence, StopRule
from nanovllm.telemetry import feed as feed_module
from nanovllm.telemetry import readers
from nanovllm.telemetry.feed import Feed, Watcher
from nanovllm.telemetry.readers import Event, EventQueue, TraceFile
from nanovllm.telemetry.trace import FIELDS, Replay, check_event, read_trace
from tests.simulation.simulator import PARAMS, Request, Setup, Simulation
from tests.simulation.test_simulation import random_requests, random_setup

HEADER = {
    "version": "0",
    "model": "m",
    "policy": "fcfs",
    "num_blocks": 8,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "prefix_caching": True,
    "paused": False,
    "device": "cpu",
}


class Truth:
    """Compares a replay with the BlockManager after every event: a Reader that is called at once, on this thread."""

    def __init__(self, simulation: Watched) -> None:
        self.simulation = simulation
        self.replay = Replay(simulation.setup.num_blocks)
        self.kinds: dict[str, int] = {}
        self.num_held = self.num_shared = self.num_evicted = 0

    def put(self, event: Event) -> None:
        state = json.loads(event.line)
        check_event(state, self.replay.num_blocks)
        if state["type"] == "failed":  # a snapshot of the new state follows
            return
        self.replay.apply(state)
        self.kinds[event.kind] = self.kinds.get(event.kind, 0) + 1
        self.num_evicted += len(state.get("evicted", ()))
        self.compare()

    def end(self) -> None:
        pass

    def compare(self) -> None:
        replay, scheduler = self.replay, self.simulation.scheduler
        blocks = scheduler.blocks
        assert replay.owners == {b: n for b, n in enumerate(blocks._ref_counts) if n}
        assert replay.held == blocks._held_until
        assert replay.cached() == {b for b in blocks._free if blocks._keys[b] is not None}
        assert replay.published == {b for b, key in enumerate(blocks._keys) if key is not None}
        assert replay.num_free() == blocks.num_free
        assert list(replay.flights) == scheduler.flights
        assert {s.id for s in replay.seqs.values() if s.status == "running"} == {s.seq_id for s in scheduler.running}
        assert {s.id for s in replay.seqs.values() if s.status == "waiting"} == {s.seq_id for s in scheduler.waiting}
        for seq in scheduler.running:
            state = replay.seqs[seq.seq_id]
            assert (state.blocks, state.computed) == (seq.block_table, seq.num_computed)
            assert state.preemptions == seq.num_preemptions
            assert (state.prompt, state.cached) == (seq.num_prompt, max(state.cached, seq.num_cached_tokens))
        self.num_held += len(replay.held)
        self.num_shared += sum(n > 1 for n in replay.owners.values())


class AtOnce:
    """A queue for a Watcher that passes each item to the feed at once."""

    def __init__(self) -> None:
        self.feed = Feed(self)  # type: ignore[arg-type]
        self.feed.start = lambda: None  # type: ignore[method-assign]

    def qsize(self) -> int:
        return 0

    def put(self, item: Any) -> None:
        if item[0] == "attach":
            self.feed._readers[item[1]] = None
        elif item[0] != "detach":
            self.feed._publish(*item)


class Watched(Simulation):
    """Calls a watcher where the engine calls it, and switches policies at random."""

    def __init__(self, setup: Setup, requests: list[Request]) -> None:
        super().__init__(setup, requests)
        self.watcher = Watcher(self.scheduler, lambda seq_id: f"r{seq_id}")
        self.watcher._queue = AtOnce()  # type: ignore[assignment]
        self.watcher._feed = self.watcher._queue.feed  # type: ignore[attr-defined]
        self.truth = Truth(self)
        self.watcher.attach(self.truth)
        self._choices = random.Random(setup.seed)
        self._listen()

    def _listen(self) -> None:
        scheduler, watcher = self.scheduler, self.watcher
        schedule, take_ended, commit, fail, abort = (
            scheduler.schedule,
            scheduler.take_ended,
            scheduler.commit,
            scheduler.fail,
            scheduler.abort,
        )

        def schedule_and_tell() -> Any:
            plan, ended = schedule(), take_ended()
            watcher.planned(plan, ended)
            scheduler._ended = ended  # for the simulation to take
            return plan

        def commit_and_tell(plan: Any, result: Any, seconds: float) -> Any:
            progress = commit(plan, result, seconds)
            watcher.committed(plan, progress, 0.001)
            return progress

        def fail_and_tell(plan: Any, *why: Any) -> Any:
            failed = fail(plan, *why)
            watcher.failed(plan.step_id, "Broken")
            return failed

        def abort_and_tell(seq_id: int) -> Any:
            seq = abort(seq_id)
            watcher.left([seq] if seq else [])
            return seq

        scheduler.schedule, scheduler.commit = schedule_and_tell, commit_and_tell  # type: ignore[method-assign]
        scheduler.fail, scheduler.abort = fail_and_tell, abort_and_tell  # type: ignore[method-assign, assignment]

    def _add(self, request: Request) -> None:
        super()._add(request)
        if request.seq_id in self._sequences:
            self.watcher.added(self._sequences[request.seq_id], f"r{request.seq_id}")

    def _advance(self, idle_ok: bool) -> None:
        if self._choices.random() < 0.1:
            self.scheduler.set_policy(make_policy(self._choices.choice(["fcfs", "sjf", "priority"]), 5))
            self.watcher.policy_changed()
            orders = [self.scheduler.policy.order(seq) for seq in self.scheduler.running]
            assert orders == sorted(orders)  # the last is preempted first
        super()._advance(idle_ok)


def test_a_replay_agrees_with_the_block_manager_after_every_event() -> None:
    kinds: dict[str, int] = {}
    held = shared = evicted = overlapped = preempted = 0
    for seed in range(250):
        rng = random.Random(seed)
        setup = random_setup(rng, depth=seed % 3)
        simulation = Watched(setup, random_requests(rng, setup, rng.randrange(1, 14)))
        simulation.run()
        simulation.check_outcomes()  # being watched, and switching policies, changes no answer
        truth = simulation.truth
        for kind, count in truth.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + count
        held += truth.num_held
        shared += truth.num_shared
        evicted += truth.num_evicted
        overlapped += setup.depth > 0
        preempted += simulation.scheduler.num_preemptions
    assert kinds.keys() == FIELDS.keys() - {"failed", "pause"}
    assert min(kinds.values()) > 50, kinds
    assert min(held, shared, evicted, overlapped, preempted) > 100


def forget_evictions(patch: pytest.MonkeyPatch) -> None:
    take = Watcher._take_journal
    patch.setattr(Watcher, "_take_journal", lambda self: (take(self)[0], []))


def forget_preemptions(patch: pytest.MonkeyPatch) -> None:
    def step(self: Feed, plan: StepPlan, *facts: Any) -> Any:
        return plain(self, replace(plan, departures=()), *facts)

    plain = Feed._step
    patch.setattr(Feed, "_step", step)


def free_at_once(patch: pytest.MonkeyPatch) -> None:
    plain = Replay._release

    def release(self: Replay, seq_id: int, reason: str) -> None:
        plain(self, seq_id, reason)
        self.held.clear()

    patch.setattr(Replay, "_release", release)


def no_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watcher, "left", lambda self, aborted: None)


def no_published_at_commit(patch: pytest.MonkeyPatch) -> None:
    plain = Feed._done
    patch.setattr(Feed, "_done", lambda self, *a: {**plain(self, *a), "published": []})


def keep_the_order_of_the_old_policy(patch: pytest.MonkeyPatch) -> None:
    def set_policy(self: Scheduler, policy: Policy) -> None:
        running = list(self.running)
        plain(self, policy)
        self.running = running

    plain = Scheduler.set_policy
    patch.setattr(Scheduler, "set_policy", set_policy)


@pytest.mark.parametrize(
    "damage",
    [
        forget_evictions,
        forget_preemptions,
        free_at_once,
        no_aborts,
        no_published_at_commit,
        keep_the_order_of_the_old_policy,
    ],
)
def test_the_comparison_can_fail(damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)
    with pytest.raises((AssertionError, RequestError)):
        test_a_replay_agrees_with_the_block_manager_after_every_event()


def test_a_reader_may_come_at_any_time() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        setup = random_setup(rng, depth=seed % 3)
        simulation = Watched(setup, random_requests(rng, setup, 10))
        simulation.watcher.detach(simulation.truth)
        assert simulation.scheduler.blocks.journal is None
        advance, watcher = simulation._advance, simulation.watcher

        def join(
            idle_ok: bool,
            advance: Any = advance,
            watcher: Watcher = watcher,
            s: Watched = simulation,
            rng: random.Random = rng,
        ) -> None:
            if rng.random() < 0.2:
                s.truth = Truth(s)
                watcher._queue.feed._readers.clear()  # type: ignore[attr-defined]
                watcher.attach(s.truth)
            advance(idle_ok)

        simulation._advance = join  # type: ignore[method-assign]
        simulation.run()


def sequence(seq_id: int, num_prompt: int = 8) -> Sequence:
    return Sequence(seq_id, [1] * num_prompt, num_prompt, StopRule(4), PARAMS)


class Collect:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def put(self, event: Event) -> None:
        self.events.append(event)

    def end(self) -> None:
        self.ended.set()


def test_nothing_is_queued_without_readers() -> None:
    scheduler = Setup().scheduler()
    watcher = Watcher(scheduler, str)
    seq = sequence(0)
    scheduler.add(seq)
    watcher.added(seq, "r")
    watcher.planned(scheduler.schedule(), [])
    assert watcher._queue.qsize() == 0
    assert scheduler.blocks.journal is None
    assert watcher._feed._thread is None
    reader = Collect()
    watcher.attach(reader)
    watcher.detach(reader)
    assert reader.ended.wait(5)
    assert [event.kind for event in reader.events] == ["snapshot"]
    watcher.paused(True)
    watcher.close()
    assert len(reader.events) == 1


def test_a_feed_that_falls_behind_drops_events_and_then_sends_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_QUEUED", 10)
    blocked, entered = threading.Event(), threading.Event()

    class Slow(Collect):
        def put(self, event: Event) -> None:
            entered.set()
            blocked.wait(20)
            super().put(event)

    reader = Slow()
    scheduler = Setup().scheduler()
    watcher = Watcher(scheduler, str)
    watcher.attach(reader)
    assert entered.wait(5)
    started = time.monotonic()
    for _ in range(1000):
        watcher.paused(True)
    assert time.monotonic() - started < 5  # the engine did not wait for the reader
    assert watcher._queue.qsize() == 10
    blocked.set()
    while watcher._queue.qsize():
        time.sleep(0.001)
    watcher.paused(False)  # stands in a snapshot
    watcher.paused(True)
    watcher.close()
    assert reader.ended.is_set()
    assert [event.kind for event in reader.events] == ["snapshot", *["pause"] * 10, "snapshot", "pause"]
    assert json.loads(reader.events[-2].line)["paused"] is False


def test_a_full_mailbox_is_emptied_and_waits_for_a_snapshot() -> None:
    async def scenario() -> None:
        box = EventQueue(limit=3)
        for number in range(3):
            box.put(Event(number, "pause", b"{}"))
        assert [event.number for event in await box.take(1) or []] == [0, 1, 2]
        assert not box.lost
        for number in range(4):
            box.put(Event(number, "pause", b"{}"))
        assert box.lost
        assert await box.take(1) == []
        box.put(Event(5, "pause", b"{}"))
        box.put(Event(6, "snapshot", b"{}"))
        box.put(Event(7, "pause", b"{}"))
        assert [event.number for event in await box.take(1) or []] == [6, 7]
        await asyncio.sleep(0)
        assert await box.take(0.01) == []
        thread = threading.Thread(target=lambda: (time.sleep(0.02), box.end()))
        thread.start()
        while (events := await box.take(5)) is not None:
            assert events == []
        thread.join()

    asyncio.run(scenario())


def test_an_event_has_nothing_of_the_text() -> None:
    """A token id that no count can be mistaken for must not appear anywhere."""
    setup = Setup(num_blocks=16, block_size=4)
    scheduler = setup.scheduler()
    watcher = Watcher(scheduler, lambda seq_id: "r")
    reader = Collect()
    watcher.attach(reader)
    seq = Sequence(0, [987654] * 9, 9, StopRule(4, stop_token_ids=frozenset({876543})), PARAMS, seed=765432)
    seq.cache_salt = "secret"
    scheduler.add(seq)
    watcher.added(seq, "r")
    watcher.planned(scheduler.schedule(), [])
    watcher.refresh(reader)
    watcher.close()
    assert [event.kind for event in reader.events] == ["snapshot", "add", "step", "snapshot"]
    everything = b"".join(event.line for event in reader.events)
    for secret in (b"987654", b"876543", b"765432", b"secret"):
        assert secret not in everything


def test_a_long_name_is_cut() -> None:
    scheduler, reader = Setup().scheduler(), Collect()
    watcher = Watcher(scheduler, lambda seq_id: "x" * 5000)
    watcher.attach(reader)
    seq = sequence(0)
    scheduler.add(seq)
    watcher.added(seq, "x" * 5000)
    watcher.refresh(reader)
    watcher.close()
    assert [event.kind for event in reader.events] == ["snapshot", "add", "snapshot"]
    for event in reader.events:
        check_event(json.loads(event.line), scheduler.blocks.num_blocks)


# ---- traces ----------------------------------------------------------------------------------------------------------


def record(path: Path, **header: Any) -> None:
    setup = Setup()
    scheduler = setup.scheduler()
    watcher = Watcher(scheduler, lambda seq_id: f"r{seq_id}")
    watcher.attach(TraceFile(path, {**HEADER, **header}), stays=True)
    seq = sequence(0)
    scheduler.add(seq)
    watcher.added(seq, "r0")
    watcher.planned(scheduler.schedule(), [])
    watcher.dismiss()  # a trace stays
    scheduler.abort(0)
    watcher.left([seq])
    watcher.close()


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    trace = read_trace(path)
    assert trace.header == {"type": "header", "format": 1, **HEADER}
    assert [event["type"] for event in trace.events] == ["snapshot", "add", "step", "left"]
    assert trace.raw == path.read_bytes()
    assert trace.summary()["left"] == {"abort": 1}
    path.write_bytes(path.read_bytes() + b'{"type":"pau')  # killed while it wrote
    assert len(read_trace(path).events) == 4


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceFile(tmp_path / "no" / "folder.jsonl", HEADER)


def test_a_trace_overwrites_nothing_but_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt': is no trace; it is not overwritten, name another file"):
        TraceFile(path, HEADER)
    assert path.read_text() == "years of work"
    path.write_text("")
    for _ in range(2):  # an empty file, then a trace
        TraceFile(path, HEADER).end()
        assert path.read_text().startswith('{"type": "header"')


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    caplog.set_level("WARNING", logger="nanovllm")
    trace = TraceFile(path, HEADER)
    file = trace._file

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def write(self, data: bytes) -> None:
            file.write(data[:5])
            raise OSError(28, "No space left on device")

    trace.put(Event(1, "pause", b'{"type":"pause"}'))
    trace._file = Full()
    for number in range(3):
        trace.put(Event(number, "pause", b'{"type":"pause"}'))
    trace.end()
    assert [r.message for r in caplog.records if "No space" in r.message] == [caplog.records[0].message]
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 3  # header, one event, nothing after the last end of line
    assert lines[2] == b""


def test_a_trace_ends_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(readers, "MAX_TRACE_BYTES", 1000)
    caplog.set_level("WARNING", logger="nanovllm")
    trace = TraceFile(path, HEADER)
    for number in range(100):
        trace.put(Event(number, "pause", b"x" * 99))
    assert 900 < path.stat().st_size <= 1000
    assert sum("ends here" in r.message for r in caplog.records) == 1
    trace.end()


STEP = {
    "type": "step", "t": 1, "step": 2, "k": 1, "entries": [], "decodes": [], "arrivals": [], "left": [],
    "published": [], "evicted": [], "waiting": [], "num_waiting": 0, "free": 6, "hits": 0, "queries": 8,
    "preemptions": 0,
}  # fmt: skip
WRONG = [
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"3", "not an event"),
    (b'{"type":"header"}', "not an event"),
    (b'{"type":["step"]}', "not an event"),
    (b'{"type":"pause","t":1}', "paused is missing"),
    (b'{"type":"pause","t":NaN,"paused":true}', "t=nan"),
    (b'{"type":"pause","t":1e999,"paused":true}', "t=inf"),
    (b'{"type":"pause","t":-1,"paused":true}', "t=-1"),
    (b'{"type":"pause","t":1,"paused":1}', "paused=1"),
    (b'{"type":"pause","t":1,"paused":true,"x":1}', "unknown field 'x'"),
    (json.dumps({**STEP, "free": True}).encode(), "free=True"),
    (json.dumps({**STEP, "free": 2.0}).encode(), "free"),
    (json.dumps({**STEP, "published": [8]}).encode(), "published"),
    (json.dumps({**STEP, "published": [-1]}).encode(), "published"),
    (json.dumps({**STEP, "step": 2**53}).encode(), "step="),
    (json.dumps({**STEP, "free": 5}).encode(), "6 are"),
    (json.dumps({**STEP, "left": [[0, "bored"]]}).encode(), "left"),
    (json.dumps({**STEP, "left": [[7, "stop"]]}).encode(), "sequence 7 was never added"),
    (json.dumps({**STEP, "arrivals": [[0, 0]]}).encode(), "runs already"),
    (json.dumps({**STEP, "entries": [[0, 8, 1, 0, [5], 1]]}).encode(), "gap"),
    (json.dumps({**STEP, "entries": [[0, 8, 1, 2, [8], 1]]}).encode(), "entries"),
    (json.dumps({**STEP, "entries": [[0, 8, 1, 2, [], 1, 1]]}).encode(), "entries"),
    (json.dumps({**STEP, "decodes": [7]}).encode(), "sequence 7 was never added"),
    (json.dumps({**STEP, "decodes": [True]}).encode(), "decodes"),
    (json.dumps({**STEP, "step": 1}).encode(), "not the newest"),
    (b'{"type":"done","t":1,"step":7,"ms":1,"tokens":1,"left":[],"published":[],"free":6}', "not the oldest"),
    (b'{"type":"add","t":1,"id":0,"request":"r","prompt":1,"max_tokens":1}', "added twice"),
    (b'{"type":"add","t":1,"id":1,"request":"' + b"x" * 2000 + b'","prompt":1,"max_tokens":1}', "request="),
    (b"\xff", "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    sound = path.read_bytes().split(b"\n")[:4]  # header, snapshot, add, step
    path.write_bytes(b"\n".join([*sound, line, b""]))
    with pytest.raises(RequestError, match=f"line 5: .*{message}") as refused:
        read_trace(path)
    assert len(str(refused.value)) < 400
    path.write_bytes(b"\n".join([*sound, json.dumps(STEP).encode(), b""]))
    assert len(read_trace(path).events) == 4  # so it was that line


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 2**40}, "num_blocks"),
        ({"model": 3}, "model"),
        ({"format": 2}, "format 1"),
        ({"secret": 1}, "unknown field"),
    ],
)
def test_a_wrong_header(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, **header)
    with pytest.raises(RequestError, match=f"line 1: .*{message}"):
        read_trace(path)


def test_what_is_no_trace_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(b"")
    with pytest.raises(RequestError, match="a header and a snapshot"):
        read_trace(path)
    record(path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[2], b""]))
    with pytest.raises(RequestError, match="line 2: the first event must be a snapshot"):
        read_trace(path)
    monkeypatch.setattr("nanovllm.telemetry.trace.MAX_TRACE_BYTES", 100)
    path.write_bytes(b"x" * 101)
    with pytest.raises(RequestError, match="larger than"):
        read_trace(path)

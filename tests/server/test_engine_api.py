"""Watching a server: the page's files, the feed, pause and single steps, the policy switch, traces."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from nanovllm.server import engine_api
from nanovllm.server.files import MEDIA_TYPES, PAGE
from nanovllm.server.trace_app import make_trace_app
from nanovllm.telemetry.readers import EventQueue
from nanovllm.telemetry.trace import Replay, check_event, read_trace
from tests.cli.runner import SMALL, Run
from tests.server.rig import Running, command, running, until
from tests.tiny_models import TinyModel

PROMPT = "the rain in the rain of the rain in the rain of the"  # longer than a block
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared_watched(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, events=True, max_watchers=2) as server:
        yield server


@pytest.fixture
def watched(shared_watched: Running) -> Iterator[Running]:
    yield shared_watched
    shared_watched.post("/engine/control", {"action": "resume"})
    shared_watched.post("/engine/policy", {"policy": "fcfs"})
    until(shared_watched.is_empty)
    until(lambda: not shared_watched.engine.watch._readers)


class Feed:
    """One reader of /engine/events, in a thread; replays and checks what it gets."""

    def __init__(self, server: Running, **headers: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.comments = 0
        self.replay = Replay(server.engine.scheduler.blocks.num_blocks)
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        self._connection.request("GET", "/engine/events", headers=headers)
        self.answer = self._connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self.answer.status == 200:
            self._thread.start()
            until(lambda: self.events)

    def _read(self) -> None:
        fields: dict[str, str] = {}
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            while line := self.answer.readline().decode():
                name, _, value = line.rstrip("\n").partition(": ")
                self.comments += line.startswith(":")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    self._take(fields)
                    fields = {}

    def _take(self, fields: dict[str, str]) -> None:
        event = json.loads(fields["data"])
        assert fields["event"] == event["type"]
        assert int(fields["id"]) > 0
        check_event(event, self.replay.num_blocks)
        self.replay.apply(event)
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def wait_for(self, kind: str, count: int = 1) -> None:
        until(lambda: self.kinds().count(kind) >= count)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(10)
            assert not self._thread.is_alive()
        self._connection.close()


def control(server: Running, action: str) -> bool:
    answer = server.post("/engine/control", {"action": action})
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["paused"])


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files(server: Running) -> None:
    with server.http() as client:
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for path in PAGE.rglob("*"):
            answer = client.get(f"/static/{path.relative_to(PAGE).as_posix()}")
            if path.suffix not in MEDIA_TYPES:  # the folder of libraries, their licences and versions
                assert path.is_dir() or path.parent.name == "vendor"
                assert answer.status_code == 404
                continue
            assert answer.status_code == 200
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/nothing.js",
        "/static/..%2fapp.py",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/..%5capp.py",
        "/page/index.html",
        "/static/INDEX.HTML",
    ],
)
def test_only_the_files_of_the_page(server: Running, path: str) -> None:
    # httpx would tidy the path up
    answer = server.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404")
    assert b'"error"' in answer


def test_the_page_has_no_folder_that_would_need_a_key() -> None:
    assert {path.parent for path in PAGE.rglob("*")} == {PAGE, PAGE / "vendor"}


def test_a_key_guards_the_engine_but_not_the_page(llama: TinyModel) -> None:
    with running(llama.path, events=True, api_key="k") as server, server.http() as client:
        assert client.get("/").status_code == 200
        assert client.get("/static/index.html").status_code == 200
        assert client.get("/static/vendor/markdown-it.min.js").status_code == 200
        for path in ("/engine/info", "/engine/events", "/static/x/y", "/v1/models", "/static"):
            assert client.get(path).status_code == 401, path
        assert client.post("/engine/control", json={"action": "pause"}).status_code == 401
        assert not server.service.engine.paused
        client.headers["authorization"] = "Bearer k"
        assert client.get("/engine/info").json()["events"] is True
        with Feed(server, authorization="Bearer k") as feed:
            assert feed.kinds() == ["snapshot"]


# ---- off by default --------------------------------------------------------------------------------------------------


def test_without_events_only_the_facts_are_told(server: Running) -> None:
    with server.http() as client:
        info = client.get("/engine/info").json()
        answers = [
            client.get("/engine/events"),
            client.post("/engine/control", json={"action": "pause"}),
            client.post("/engine/policy", json={"policy": "sjf"}),
        ]
        assert client.get("/engine/trace").status_code == 404
    assert info == {
        "events": False,
        "replay": False,
        "version": info["version"],
        "model": server.model,
        "policy": "fcfs",
        "num_blocks": 128,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": server.engine.max_model_len,
        "prefix_caching": True,
        "paused": False,
        "device": server.engine.executor.device.name,
        "sampling_defaults": {},
    }
    for answer in answers:
        assert answer.status_code == 404
        assert "--events" in answer.json()["error"]["message"]
    server.post("/v1/completions", SHORT)
    assert server.engine.watch._feed._thread is None  # there is no reader, so nothing runs
    assert server.engine.scheduler.blocks.journal is None


# ---- the feed --------------------------------------------------------------------------------------------------------


def test_a_feed_replays_into_the_engine(watched: Running) -> None:
    with Feed(watched) as feed:
        assert feed.kinds() == ["snapshot"]
        assert feed.events[0]["seqs"] == []
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda i: watched.post("/v1/completions", {**SHORT, "n": 2}), range(6)))
        assert {answer.status_code for answer in answers} == {200}
        until(lambda: sum(len(e.get("left", ())) for e in feed.events) >= 12)
        assert set(feed.kinds()) == {"snapshot", "add", "step", "done"}
        assert feed.kinds().count("step") == feed.kinds().count("done")
        names = {event["request"] for event in feed.events if event["type"] == "add"}
        assert {name.rsplit("-", 2)[0] for name in names} == {answer.headers["x-request-id"] for answer in answers}
        replay, blocks = feed.replay, watched.engine.scheduler.blocks
        assert not replay.seqs
        assert not replay.owners
        assert replay.num_free() == blocks.num_free
        assert replay.cached() == {b for b in blocks._free if blocks._keys[b] is not None} != set()
        tokens = sum(event.get("tokens", 0) for event in feed.events)
        assert tokens == 6 * 2 * 8
        assert any(event["arrivals"] and event["arrivals"][-1][1] for event in feed.events if "arrivals" in event)
        assert "rain" not in json.dumps(feed.events)


def test_a_client_that_leaves_is_told_at_once(watched: Running) -> None:
    with Feed(watched) as feed:
        control(watched, "pause")
        with pytest.raises(httpx.ReadTimeout), watched.http() as client:
            client.post("/v1/completions", json=SHORT, timeout=0.3)
        feed.wait_for("left")
        assert feed.kinds() == ["snapshot", "pause", "add", "left"]
        assert feed.events[-1]["left"] == [[feed.events[-2]["id"], "abort"]]


def test_a_silent_feed_is_kept_alive(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_api, "KEEP_ALIVE_SECONDS", 0.05)
    with Feed(watched) as feed:
        until(lambda: feed.comments >= 3)
        assert feed.kinds() == ["snapshot"]


def test_no_more_than_max_watchers_and_who_leaves_makes_room(watched: Running) -> None:
    with Feed(watched), Feed(watched):
        assert len(watched.engine.watch._readers) == 2
        assert watched.engine.scheduler.blocks.journal is not None
        with Feed(watched) as refused:
            assert refused.answer.status == 429
            assert json.loads(refused.answer.read())["error"]["code"] == "too_many_watchers"
    until(lambda: not watched.engine.watch._readers)
    until(lambda: not watched.engine.watch._feed._readers)
    assert watched.engine.scheduler.blocks.journal is None
    with Feed(watched) as feed:
        assert feed.answer.status == 200


def test_a_slow_reader_loses_events_and_gets_a_snapshot(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[EventQueue] = []

    class Small(EventQueue):
        def __init__(self) -> None:
            super().__init__(limit=4)
            boxes.append(self)

    monkeypatch.setattr(engine_api, "EventQueue", Small)
    host, port = watched.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects
        connection.connect((host, int(port)))
        connection.sendall(b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: boxes)
        big, queue = b"x" * 100_000, watched.engine.watch._feed._queue
        seen_lost = 0  # in a row: until the socket's buffers are full, it catches up again
        while seen_lost < 20:
            for _ in range(3):  # fewer than the mailbox takes: what is dropped there fills no buffer
                queue.put(("pad", 0.0, None, (big,)))
            time.sleep(0.03)
            seen_lost = seen_lost + 1 if boxes[0].lost else 0
        assert watched.post("/v1/completions", SHORT).status_code == 200  # as if there were no reader
        events: list[tuple[int, bytes]] = []
        rest = b""
        connection.settimeout(10)
        while not (gaps := after_gaps(events)) or boxes[0].lost:
            rest += connection.recv(2**20)
            # Megabytes of padding: what was searched is not searched again, but for a beginning that was cut off.
            events += [(int(number), kind) for number, kind in re.findall(HEAD, rest)]
            rest = HEAD.split(rest)[-1][-60:]
        assert set(gaps) == {b"snapshot"}


HEAD = re.compile(rb"id: (\d+)\nevent: (\w+)\n")


def after_gaps(events: list[tuple[int, bytes]]) -> list[bytes]:
    """The kinds of the events whose number does not follow the one before."""
    return [kind for (before, _), (number, kind) in pairwise(events) if number != before + 1]


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of event for the test above: as large as it likes."""
    monkeypatch.setattr("nanovllm.telemetry.feed.Feed._pad", lambda self, data: {"pad": data.decode()}, raising=False)


# ---- controls --------------------------------------------------------------------------------------------------------


def test_pause_step_resume(watched: Running) -> None:
    with Feed(watched) as feed, ThreadPoolExecutor(1) as pool, watched.http() as client:
        assert control(watched, "pause") is True
        assert control(watched, "pause") is True  # once more changes nothing
        answer = pool.submit(watched.post, "/v1/completions", SHORT)
        feed.wait_for("add")
        assert client.get("/health").status_code == 200
        assert client.get("/engine/info").json()["paused"] is True
        time.sleep(0.05)
        assert feed.kinds() == ["snapshot", "pause", "add"]
        for number in range(1, 4):
            assert control(watched, "step") is True
            feed.wait_for("done", number)
            time.sleep(0.02)
            assert feed.kinds().count("step") == feed.kinds().count("done") == number
        assert not answer.done()
        (seq,) = watched.engine.scheduler.running
        assert feed.replay.seqs[seq.seq_id].blocks == seq.block_table
        assert control(watched, "resume") is False
        assert answer.result(20).json()["usage"]["completion_tokens"] == 8
        feed.wait_for("pause", 2)


def test_a_step_of_nothing(watched: Running) -> None:
    control(watched, "pause")
    with Feed(watched) as feed:
        assert feed.events[0]["paused"] is True
        assert control(watched, "step") is True
        time.sleep(0.05)
        assert feed.kinds() == ["snapshot"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("control", {"action": "stop"}, "action"),
        ("control", {"action": 3}, "action"),
        ("control", {}, "action"),
        ("control", {"action": "pause", "for": 3}, "for"),
        ("control", {"action": "step"}, "action"),
        ("policy", {"policy": "priority"}, "policy"),
        ("policy", {"policy": None}, "policy"),
        ("policy", [], None),
    ],
)
def test_bad_controls_are_named(watched: Running, path: str, body: Any, field: str | None) -> None:
    answer = watched.post(f"/engine/{path}", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not watched.service.engine.paused
    assert watched.engine.scheduler.policy.name == "fcfs"
    with watched.http() as client:  # as a form of another site could post it
        assert client.post(f"/engine/{path}", content=json.dumps(body)).status_code == 415


def test_another_policy_sorts_the_line(watched: Running) -> None:
    with Feed(watched) as feed, ThreadPoolExecutor(3) as pool:
        control(watched, "pause")
        answers = []
        for count, words in enumerate((30, 3, 10), 1):
            body = {**SHORT, "prompt": [5 + count] * words, "max_tokens": 2}
            answers.append(pool.submit(watched.post, "/v1/completions", body))
            feed.wait_for("add", count)
        ids = [event["id"] for event in feed.events if event["type"] == "add"]
        answer = watched.post("/engine/policy", {"policy": "sjf"})
        assert answer.json() == {"policy": "sjf"}
        feed.wait_for("policy")
        assert feed.events[-1]["waiting"] == [ids[1], ids[2], ids[0]]
        assert feed.replay.waiting == [ids[1], ids[2], ids[0]]
        control(watched, "step")
        feed.wait_for("step")
        (step,) = [event for event in feed.events if event["type"] == "step"]
        assert [entry[0] for entry in step["entries"]] == [ids[1], ids[2], ids[0]]
        control(watched, "resume")
        assert all(answer.result(20).status_code == 200 for answer in answers)


def test_pausing_finishes_what_is_in_flight(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps in flight: after a pause there is none, and a single step is exactly one."""
    launch = watched.engine.executor.launch
    monkeypatch.setattr(watched.engine.executor.runner, "overlap", 2)
    monkeypatch.setattr(watched.engine.executor, "launch", lambda plan: (time.sleep(0.02), launch(plan))[1])
    with Feed(watched) as feed, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(watched.post, "/v1/completions", {**SHORT, "max_tokens": 100})
        feed.wait_for("done", 3)
        control(watched, "pause")
        feed.wait_for("pause")
        assert feed.kinds().count("step") == feed.kinds().count("done")
        before = feed.kinds().count("step")
        control(watched, "step")
        feed.wait_for("done", before + 1)
        assert feed.kinds().count("step") == before + 1
        assert not answer.done()
        steps = [kind for kind in feed.kinds() if kind in ("step", "done")]
        assert "step step" in " ".join(steps)  # they did overlap
        control(watched, "resume")
        assert answer.result(20).json()["usage"]["completion_tokens"] == 100


def test_a_failed_step_is_told_and_then_everything(watched: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = watched.engine.executor.launch
    monkeypatch.setattr(watched.engine.executor, "launch", lambda plan: (_ for _ in ()).throw(ValueError("secret")))
    with Feed(watched) as feed:
        assert watched.post("/v1/completions", SHORT).status_code == 500
        feed.wait_for("snapshot", 2)
        assert feed.kinds() == ["snapshot", "add", "step", "failed", "snapshot"]
        assert feed.events[3]["why"] == "ValueError"
        assert feed.events[4]["seqs"] == []
        assert "secret" not in json.dumps(feed.events)
        monkeypatch.setattr(watched.engine.executor, "launch", launch)
        assert watched.post("/v1/completions", SHORT).status_code == 200
        until(lambda: feed.events[-1]["type"] == "done" and feed.events[-1]["left"])


def test_sigterm_while_paused_finishes_what_waits(llama: TinyModel, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with command(llama.path, "--num-kvcache-blocks", "64", "--events", "--trace", str(trace)) as (process, url):
        with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=url, timeout=30) as client:
            watcher = pool.submit(lambda: client.get("/engine/events").text)  # ends when the server sends it away
            until(lambda: client.post("/engine/control", json={"action": "pause"}).json()["paused"])
            answer = pool.submit(lambda: httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30))
            waits = re.compile(r"^vllm:num_requests_waiting\{.*\} 1\.0$", re.MULTILINE)
            until(lambda: waits.search(client.get("/metrics").text))
            process.send_signal(signal.SIGTERM)
            assert answer.result(20).json()["usage"]["completion_tokens"] == 8
            assert watcher.result(20).startswith("id: ")
        assert process.wait(20) == 0
    events = read_trace(trace).events  # closed, and sound to the last line
    kinds = [event["type"] for event in events]
    assert [kind for kind in kinds if kind not in ("step", "done")] == ["snapshot", "pause", "add", "pause"]
    assert events[-1]["left"] == [[0, "length"]]


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with running(llama.path, trace=str(path)) as server:
        for _ in range(2):
            assert server.post("/v1/completions", {**SHORT, "prompt": [7] * 40, "n": 2}).status_code == 200
        with server.http() as client:
            assert client.get("/engine/events").status_code == 404  # a trace is not leave to watch
    return path


def test_a_server_records_a_trace(trace: Path) -> None:
    recorded = read_trace(trace)
    assert {event["type"] for event in recorded.events} == {"snapshot", "add", "step", "done"}
    summary = recorded.summary()
    assert summary["tokens"] == 32
    assert summary["left"] == {"length": 4}
    assert summary["hit_rate"] > 0.5


def test_a_trace_is_served_to_the_page(trace: Path) -> None:
    with TestClient(make_trace_app(read_trace(trace)), base_url="http://localhost") as client:
        info = client.get("/engine/info").json()
        assert (info["events"], info["replay"], info["file"], info["num_blocks"]) == (False, True, "run.jsonl", 128)
        lines = client.get("/engine/trace")
        assert lines.headers["content-type"] == "application/x-ndjson"
        assert lines.content == trace.read_bytes()
        assert client.get("/").headers["content-security-policy"]
        for path in ("/engine/events", "/v1/models", "/openapi.json"):
            assert "error" in client.get(path).json()


def test_trace_info(trace: Path, run: Run) -> None:
    result = run("trace", "info", trace)
    assert result.code == 0
    assert "128 blocks of 16 tokens" in result.out
    assert "4 came; left: 4 length" in result.out
    assert "32 generated" in result.out
    assert run("trace", "info", trace.parent / "nothing.jsonl").code == 2


def test_generate_records_a_trace(llama: TinyModel, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "run.jsonl"
    options = ("--model", llama.path, *SMALL, "--max-tokens", 4, "--no-chat", "--trace", path)
    assert run("generate", "the rain", *options).code == 0
    assert read_trace(path).summary()["tokens"] == 4
    assert run("generate", "the rain", *options[:-1], tmp_path / "no" / "x").code == 2


def test_trace_view(trace: Path, tmp_path: Path, run: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", "trace", "view", str(trace)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr
        line = process.stderr.readline()
        assert "run.jsonl at http://127.0.0.1:" in line
        url = line.split(" at ")[1].split("/ ")[0]
        assert httpx.get(f"{url}/engine/info").json()["replay"] is True
        assert httpx.get(f"{url}/engine/trace").content == trace.read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n{}\n")
    result = run("trace", "view", bad)
    assert result.code == 2
    assert "line 1" in result.err
    monkey = run("trace", "view", trace, "--port", 70000)
    assert monkey.code == 2
    assert "port" in monkey.err


def test_a_trace_needs_no_torch(trace: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['nanovllm', 'trace', 'info', {str(trace)!r}]\n"
        "import nanovllm.server.trace_app\n"
        "from nanovllm.cli import main; main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

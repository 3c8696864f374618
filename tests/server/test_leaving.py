"""Clients that leave at every moment of a request: no cancellation is lost, so no sequence and no block stays behind.

The engine is paused where that matters: a request that was not aborted then stays for ever, and the test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

import nanovllm
from nanovllm.server import guard
from nanovllm.server.app import make_app
from nanovllm.server.options import ServerOptions
from nanovllm.server.service import Service
from tests.server.rig import Running, raw_post, running, until
from tests.tiny_models import TinyModel

BODY = {"prompt": "the rain", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "n": 2}
ORDERS = [(done, cancelled) for done in range(1, 8) for cancelled in range(1, 8)]  # iterations of the event loop


async def in_this_order(task: asyncio.Task[Any], finish: Callable[[], Any], done: int, cancelled: int) -> bool:
    """Whether the task was cancelled, if cancel() found it running; True as well if it was too late for that."""
    taken = False
    for iteration in range(max(done, cancelled) + 1):
        if iteration == done:
            finish()
        if iteration == cancelled:
            taken = task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    return task.cancelled() or not taken


def encoding() -> tuple[Any, Callable[[], Any]]:
    future: Future[Any] = Future()
    service: Any = SimpleNamespace(options=ServerOptions(), _encoders=SimpleNamespace(submit=lambda *_: future))
    finish = lambda: future.set_running_or_notify_cancel() and future.set_result(1)  # noqa: E731
    return Service.encode(service, lambda: None), finish


def reading() -> tuple[Any, Callable[[], Any]]:
    body: asyncio.Queue[Any] = asyncio.Queue()
    message = {"type": "http.request", "body": b"x", "more_body": False}
    request = Request({"type": "http", "headers": []}, body.get)
    return guard.read_bytes(request, 100), lambda: body.put_nowait(message)


@pytest.mark.parametrize("work", [encoding, reading])
def test_no_cancellation_is_lost(work: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    """asyncio.wait_for did, on Python 3.10 and 3.11, where the result came in the same iteration of the loop."""

    async def once(done: int, cancelled: int) -> bool:
        waits, finish = work()
        return await in_this_order(asyncio.ensure_future(waits), finish, done, cancelled)

    assert [order for order in ORDERS if not asyncio.run(once(*order))] == []


@pytest.mark.parametrize("num_swallowed", [0, 1, 3])
def test_a_guard_ends_its_block_in_any_order(num_swallowed: int) -> None:
    """And leaves no cancellation behind for what comes after the block."""

    async def once(done: int, left: int) -> list[str]:
        gone, result, seen = asyncio.Event(), asyncio.get_running_loop().create_future(), []

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def request() -> None:
            with contextlib.suppress(guard.ClientGone):
                async with guard.Guard(receive, 600):
                    for _ in range(num_swallowed):
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.sleep(600)
                    await result
                    await asyncio.sleep(600)
                    seen.append("a ghost")
                seen.append("an end without ClientGone")
            await asyncio.sleep(0)
            seen.append("the next")

        task = asyncio.ensure_future(request())
        for iteration in range(max(done, left) + 1):
            if iteration == done and not result.done():
                result.set_result(1)
            if iteration == left:
                gone.set()
            await asyncio.sleep(0)
        await asyncio.wait_for(task, 20)
        return seen

    assert [order for order in ORDERS if asyncio.run(once(*order)) != ["the next"]] == []


def test_wait_for_is_not_used() -> None:
    sources = Path(nanovllm.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "asyncio.wait_for(" in path.read_text()] == []


@pytest.fixture(scope="module")
def paused(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, events=True, max_waiting=4000) as server:
        yield server


@pytest.fixture
def server(paused: Running) -> Iterator[Running]:
    assert paused.post("/engine/control", {"action": "pause"}).json() == {"paused": True}
    yield paused
    # An honest request after all of them
    paused.post("/engine/control", {"action": "resume"})
    assert paused.post("/v1/completions", BODY).json()["usage"]["completion_tokens"] == 24
    until(paused.is_empty)


@pytest.mark.parametrize("reason", ["the client leaves", "the time is up"])
def test_a_cancellation_that_is_swallowed_is_repeated(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Whatever a library does with it."""
    waits = []

    async def swallowing(service: Service, work: Callable[[], Any]) -> Any:
        try:
            waits.append(work)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return work()

    monkeypatch.setattr(Service, "encode", swallowing)
    with running(llama.path, events=True, request_timeout=600 if "client" in reason else 0.2) as server:
        server.post("/engine/control", {"action": "pause"})
        with server.connect() as connection:
            connection.sendall(raw_post(BODY))
            until(lambda: waits)
            if reason == "the time is up":
                assert connection.recv(100).startswith(b"HTTP/1.1 408")
                until(server.is_empty)
        until(server.is_empty)


# ---- one request, at every place where its task waits --------------------------------------------------------------


class Stops:
    """Awaits a coroutine and calls `at_stop(number, future)` whenever it waits for a future."""

    def __init__(self, work: Any, at_stop: Callable[[int, Any], None]) -> None:
        self._work = work
        self._at_stop = at_stop

    def __await__(self) -> Generator[Any, Any, Any]:
        number, steps = 0, self._work.__await__()
        give: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                future = give()
            except StopIteration as end:
                return end.value
            self._at_stop(number, future)
            number += 1
            try:
                value = yield future
                give = lambda value=value: steps.send(value)  # noqa: E731
            except BaseException as error:
                give = lambda error=error: steps.throw(error)  # noqa: E731


def ask(server: Running, app: Any, body: dict[str, Any], leave_at: int, with_result: bool) -> int:
    """One request to the ASGI application, whose client leaves at that stop: before what is awaited is there, or in the
    iteration of the loop in which it comes. The engine is paused then. Returns the number of stops."""
    stops = 0

    async def run() -> None:
        gone = asyncio.Event()
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            await asyncio.sleep(0)

        def leave(_: Any = None) -> None:
            gone.set()
            server.service.engine._submit(server.service.engine._pause)

        def at_stop(number: int, future: Any) -> None:
            nonlocal stops
            stops = number + 1
            if number == leave_at and with_result and future is not None:
                future.add_done_callback(leave)
            elif number == leave_at:
                leave()

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        await Stops(app(scope, receive, send), at_stop)

    asyncio.run(asyncio.wait_for(run(), 30))
    return stops


@pytest.mark.parametrize("with_result", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": ["the", "rain"], "stream": True}])
def test_leaving_wherever_the_request_waits(llama: TinyModel, fields: dict[str, Any], with_result: bool) -> None:
    with running(llama.path) as server:
        app = make_app(server.service)
        body = {**BODY, **fields}
        whole = ask(server, app, body, -1, False)
        assert whole >= 4, "it waits for the encoding, the engine's thread, an output, the sending"
        reached = 0
        for place in range(whole + 2):
            reached += ask(server, app, body, place, with_result) > place
            until(server.is_empty)
            asyncio.run(server.service.engine.resume())
        assert reached >= 4


# ---- sockets -------------------------------------------------------------------------------------------------------


def close(connection: socket.socket, hard: bool) -> None:
    if hard:  # a reset instead of an orderly end
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_crowd_that_leaves_at_once(server: Running, stream: bool, hard: bool) -> None:
    """150 requests of 16 sequences each, closed as soon as they are sent."""
    request = raw_post({**BODY, "n": 16, "stream": stream})
    for _ in range(150):
        connection = server.connect()
        connection.sendall(request)
        close(connection, hard)
    with server.http() as http:  # its connection was opened last, so it is served last
        assert http.get("/health").status_code == 200
    until(server.is_empty)


@pytest.mark.parametrize("hard", [False, True])
def test_leaving_after_every_part_of_the_request(server: Running, hard: bool) -> None:
    request = raw_post({**BODY, "n": 4, "stream": True})
    for size in range(0, len(request) + 1, 3):
        connection = server.connect()
        connection.sendall(request[:size])
        close(connection, hard)
    until(server.is_empty)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_after_every_step_of_the_engine(server: Running, stream: bool, many: bool) -> None:
    """Waiting, prefilled in parts, decoding, and with the last token out."""
    body = {**BODY, "prompt": ["the rain " * 9, "men"] if many else "the rain " * 9, "stream": stream}
    count = 4 if many else 2
    for steps in range(20):
        with server.connect() as connection:
            connection.sendall(raw_post(body))
            until(lambda: num_seqs(server) == count)
            for _ in range(steps):
                server.post("/engine/control", {"action": "step"})
        until(server.is_empty)


def num_seqs(server: Running) -> int:
    scheduler = server.engine.scheduler
    return len(scheduler.running) + len(scheduler.waiting)

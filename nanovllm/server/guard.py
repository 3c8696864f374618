"""What surrounds a request: whose it is (Gate), how much it may send (read_bytes), when its work ends early (Guard)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import uuid
from types import TracebackType
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError, timed_out
from nanovllm.server.options import ServerOptions

BODY_SECONDS = 30.0  # to send a body: who sends a byte a minute would hold a connection for ever
SMALL_BODY = 2**16  # bytes parsed at once, in about a millisecond; larger ones in a thread
NEEDS_NO_KEY = re.compile(r"/health|/|/static/[^/]*|/source/.*")  # and the page, which asks for the key itself


class ClientGone(Exception):
    """Nobody is left to answer."""


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body, if it is not too large and comes in time."""
    try:
        return await asyncio.wait_for(_collect(request, limit), BODY_SECONDS)
    except (asyncio.TimeoutError, TimeoutError):
        raise timed_out("sending the body", BODY_SECONDS) from None


async def _collect(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(announced) if announced.isdecimal() else 0
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    return b"".join(parts)


class Gate:
    """ASGI: gives the request an id (the client's X-Request-Id, if it sent one) and asks for the key."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else _digest(options.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        asked = headers.get(b"x-request-id", b"").decode("latin-1")
        sound = re.fullmatch(r"[!-~]{1,128}", asked) is not None
        request_id = asked if sound else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        error = None
        if asked and not sound:
            error = ApiError(400, "X-Request-Id: 1 to 128 visible ASCII characters", param="X-Request-Id")
        elif not self._may_enter(scope["path"], headers):
            error = ApiError(
                401, "a valid API key is needed, as 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        await (self._app if error is None else error.response())(scope, receive, named_send)

    def _may_enter(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self._key is None or NEEDS_NO_KEY.fullmatch(path):
            return True
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(given.strip()), self._key)


def _digest(key: bytes) -> bytes:
    """Equal lengths: compare_digest hides where two strings differ, but not how long they are."""
    return hashlib.sha256(key).digest()


class Guard:
    """`async with Guard(receive, seconds):` the task inside is cancelled when the client leaves or the time is up, and
    the block then ends with ClientGone or a 408. To be entered after the body was read: from then on all that can
    come from the client is its departure."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._reason: Exception | None = None

    async def __aenter__(self) -> Guard:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._timer = asyncio.get_running_loop().call_later(
            self._seconds, self._end, timed_out("the request", self._seconds)
        )
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._watcher.cancel()
        if self._reason is None:
            return
        if hasattr(self._task, "uncancel"):  # Python 3.11: this cancellation ends here
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise self._reason
        with contextlib.suppress(asyncio.CancelledError):  # the work ended first, the cancellation is still to come
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGone())

    def _end(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

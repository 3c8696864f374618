"""What surrounds a request: whose it is (Gate), how much it may send (read_bytes), when its work ends early (Guard).

Time limits are cancel scopes of anyio, here and in service.py. asyncio.wait_for loses a cancellation that comes in the
same iteration of the event loop as the result (before Python 3.12), and the request of a client that left would run on;
asyncio.timeout does not exist before 3.11.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import uuid
from types import TracebackType

import anyio
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
    with anyio.move_on_after(BODY_SECONDS):
        return await _collect(request, limit)
    raise timed_out("sending the body", BODY_SECONDS)


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
    """`async with Guard(receive, seconds):` what runs inside is cancelled when the client leaves or the time is up, and
    the block then ends with ClientGone or a 408. The cancel scope repeats the cancellation in every iteration of the
    event loop until the block has ended, so code inside that swallows one only delays the end. To be entered after the
    body was read: from then on all that can come from the client is its departure."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._gone = False

    async def __aenter__(self) -> Guard:
        self._scope = anyio.move_on_after(self._seconds)
        self._scope.__enter__()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._scope.__exit__(kind, error, trace):  # what ended the block was this scope's cancellation
            raise ClientGone() if self._gone else timed_out("the request", self._seconds)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._scope.cancel()

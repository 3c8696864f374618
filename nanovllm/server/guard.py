"""What surrounds a request: who may send it (Gate), how large it may be (read_bytes), when its work ends early (Guard).

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
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError, bad_field, headers_too_large, timed_out
from nanovllm.server.hosts import PORTS, is_address, split_host, split_origin
from nanovllm.server.options import ServerOptions

BODY_SECONDS = 30.0  # to send a body: a client that sends a byte a minute would hold a connection for ever
SMALL_BODY = 2**16  # bytes parsed at once, in about a millisecond; larger ones in a thread
NEEDS_NO_KEY = re.compile(r"/health|/ping|/|/static/(vendor/)?[^/]*|/source/.*")  # the page has a field for the key


class ClientGone(Exception):
    """The client has closed its connection."""


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body, if it is not too large and comes in time."""
    with anyio.move_on_after(BODY_SECONDS):
        return await _collect(request, limit)
    raise timed_out("sending the body", BODY_SECONDS)


async def _collect(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    message, close = f"the body is larger than {limit} bytes", {"Connection": "close"}
    too_large = ApiError(413, message, code="body_too_large", headers=close)
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


class Gate:
    """ASGI: refuses clients that may not use this server, and gives the request an id (the client's X-Request-Id, if it
    sent one).

    A browser sends requests to this server for any web page that it shows. Two checks keep such pages out:
    - Host. A page can have the name of its own site resolve to this machine once it is loaded (DNS rebinding), and the
      browser then takes this server for that site. It cannot do so under an IP address or a name of ours.
    - Origin. A page of another site is named there, and refused unless it was allowed (CORS). Other clients (curl, the
      openai package) send no Origin. Nor do browsers for a picture or a script of another page, but most of them say
      Sec-Fetch-Site.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else _digest(options.api_key.encode())
        self._max_headers, self._max_header_kb = options.max_headers, options.max_header_kb
        self._any_host, self._any_origin = "*" in options.allowed_hosts, "*" in options.allowed_origins
        names = map(split_host, ("localhost", options.host, *options.allowed_hosts))
        self._hosts = {found[0] for found in names if found is not None}
        self._origins = {split_origin(origin.removesuffix("/")) for origin in options.allowed_origins if origin != "*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        sound = re.fullmatch(r"[!-~]{1,128}", asked) is not None
        scope["request_id"] = asked if sound else uuid.uuid4().hex
        added = {"X-Request-Id": scope["request_id"]}

        is_head = scope["method"] == "HEAD"
        if is_head:  # what GET would say, without its body
            scope = {**scope, "method": "GET"}

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *Headers(added).raw]
            elif is_head:
                return
            await send(message)
            if is_head:  # the end, also of a stream that has none
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        app = self._app
        try:
            self._check_framing(scope, headers)
            self._check_host(headers)
            added |= self._check_origin(scope["path"], headers)
            if "Access-Control-Allow-Origin" in added and scope["method"] == "OPTIONS":
                app = preflight(headers)  # browsers send no key with it
            elif asked and not sound:
                raise bad_field("X-Request-Id", "1 to 128 visible ASCII characters")
            elif not self._has_key(scope["path"], headers):
                message = "a valid API key is needed, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        except ApiError as error:
            app = error.response(scope["path"])
        await app(scope, receive, named_send)

    def _check_framing(self, scope: Scope, headers: Headers) -> None:
        """The connection ends with these errors: a proxy may take what follows for a body, and this server for another
        request."""
        close = {"Connection": "close"}
        if len(headers) > self._max_headers:
            message = f"{len(headers)} headers: at most {self._max_headers} are read (--max-headers)"
            raise ApiError(431, message, code="too_many_headers", headers=close)
        line = f"{scope['method']} ?HTTP/1.1\r\n\r\n", scope.get("raw_path", b""), scope["query_string"]
        size = sum(map(len, line)) + sum(len(name) + len(value) + 4 for name, value in headers.raw)
        if size > self._max_header_kb * 1024:
            raise headers_too_large(self._max_header_kb)
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            message = "Transfer-Encoding: not beside Content-Length nor in HTTP/1.0: where the body ends is unclear"
            raise ApiError(400, message, param="Transfer-Encoding", code="ambiguous_length", headers=close)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if self._any_host or not given:  # browsers always send one
            return
        found = split_host(given[0]) if len(given) == 1 else None
        if found is None or not (found[0] in self._hosts or is_address(found[0])):
            message = "this server answers to IP addresses, localhost and the names given by --allowed-hosts"
            raise ApiError(421, f"Host {', '.join(given)!r:.200}: {message}", param="Host", code="host_not_allowed")

    def _check_origin(self, path: str, headers: Headers) -> dict[str, str]:
        """Headers for the answer."""
        vary = {"Vary": "Origin"} if self._origins or self._any_origin else {}
        if not (given := headers.getlist("origin")):
            self._check_site(path, headers)
            return vary
        origin = split_origin(given[0]) if len(given) == 1 else None
        # Of this server itself: with the page's scheme, since a proxy may have taken the TLS off
        if origin and origin[0] in PORTS and origin == split_origin(f"{origin[0]}://{headers.get('host', '')}"):
            return vary
        if not self._any_origin and (origin is None or origin not in self._origins):
            message = "web pages from there may not use this server, only those given by --allowed-origins"
            raise _other_site("Origin", ", ".join(given), message)
        exposed = {"Access-Control-Expose-Headers": "X-Request-Id, Retry-After"}
        return {**vary, **exposed, "Access-Control-Allow-Origin": given[0]}

    def _check_site(self, path: str, headers: Headers) -> None:
        """A user may follow a link from another site to this one, but no page may show or load parts of it."""
        site = headers.get("sec-fetch-site", "none")
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if self._any_origin or site in ("none", "same-origin") or (is_link and not path.startswith("/engine/")):
            return
        message = "a web page of another site may not load this; one given by --allowed-origins may fetch it"
        raise _other_site("Sec-Fetch-Site", site, message)

    def _has_key(self, path: str, headers: Headers) -> bool:
        if self._key is None or NEEDS_NO_KEY.fullmatch(path):
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        keys = [given] if kind.lower() == "bearer" else []
        keys += headers.getlist("x-api-key")  # the name in Anthropic's API
        return any(hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key) for key in keys)


def _other_site(header: str, value: str, message: str) -> ApiError:
    return ApiError(403, f"{header} {value!r:.200}: {message}", param=header, code="origin_not_allowed")


def preflight(headers: Headers) -> Response:
    """The answer to a browser's question whether a page may send what it wants to send."""
    wanted = headers.get("access-control-request-headers", "Authorization, Content-Type")
    granted = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Allow-Headers": wanted}
    return Response(status_code=204, headers={**granted, "Access-Control-Max-Age": "600"})


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

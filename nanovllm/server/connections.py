"""Connections of clients: how many there may be, how large their headers may be, how long they may be silent.

    acceptor = Acceptor(listener, limit, make_connection, server_state.connections)

uvicorn waits without limit for headers that never end and for clients that do not read, reads any number of headers,
and accepts connections until no file is left. Requests are read by httptools where it is installed, else by h11.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import anyio
import h11
import uvicorn
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.errors import ConfigError
from nanovllm.server.errors import ApiError, headers_too_large, timed_out
from nanovllm.server.options import ServerOptions

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    HttpToolsProtocol = None  # type: ignore[assignment,misc]

logger = logging.getLogger("nanovllm")
MOST_CONNECTIONS = 4096  # without --max-connections: each takes some 20 KB of memory
SPARE_FILES = 16  # for what is opened while requests run: a trace, files of the page, connections that are refused
MAX_REFUSING = 8  # connections that get a 503 at the same time; beyond it they may lose it
LINGER_SECONDS = 0.5  # without a byte of a client that is refused: it has finished sending

HEAD_END = b"\r\n\r\n"
BEGINNING = re.compile(rb"[!-~]+ [!-~]+ HTTP/1\.[01]\r\n|[!-~][^\n]*\Z")  # of a head: a request line, or a part of one
AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")  # in a head: lines that end without CR, or that go on in the next one
UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)


def connection_limit(options: ServerOptions) -> int:
    """Connections and all other files of this process count against `ulimit -n`. It is respected, not raised."""
    wanted = options.max_connections
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted or MOST_CONNECTIONS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted or MOST_CONNECTIONS
    needed = len(os.listdir("/dev/fd")) + SPARE_FILES
    room = limit - needed
    if room < (wanted or 1):
        raise ConfigError(
            f"max_connections={wanted}: `ulimit -n` is {limit} and {needed} files are needed beside connections, so "
            f"there can be at most {max(0, room)}; raise it with `ulimit -n {needed + (wanted or MOST_CONNECTIONS)}`"
        )
    return wanted or min(room, MOST_CONNECTIONS)


class LimitedConnection(asyncio.Protocol):
    """The limits, for both of uvicorn's protocols, which come behind it in the order of the bases.

    The parser gets whole heads (request line and headers) that were measured first, one request at a time: h11 compares
    with its limit only while a head is incomplete, httptools has none and reads all requests that were sent ahead at
    once. The same text is a head, or is none, with both of them.

    A timer runs while the server waits for the client, that is, from the end of an answer (or the beginning of the
    connection) to the end of the next head, and while the client does not read an answer. Bytes that come meanwhile
    do not start it anew, or a client could send one now and then for ever.
    """

    parser_name: str
    config: uvicorn.Config
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    flow: Any
    cycle: Any  # the request that was read last, and its answer
    headers: list[tuple[bytes, bytes]]  # of that request

    _timer: asyncio.TimerHandle | None = None
    _unsent: int | None = None  # bytes, when the timer last ran out
    _unread = b""  # what came and the parser did not get yet
    _in_head = True  # what comes next is a head, not a body
    _body_left: int | None = 0  # bytes; None: it comes in chunks, and the parser finds its end
    _reads_on = True
    _lingers = False  # it is closed but for what the client still sends
    _is_silent = True  # nothing has come for a while

    @property
    def _options(self) -> ServerOptions:
        return self.config.nanovllm_options  # type: ignore[attr-defined]

    @property
    def _max_head(self) -> int:
        return self._options.max_header_kb * 1024

    @property
    def _works(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> bool:
        """Whether the request has ended with it."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        super().connection_made(cast(Any, OwnClose(self._transport, self._close)))
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.transport.close = self._transport.close  # type: ignore[method-assign]  # breaks a cycle of references
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        if self._reads_on:
            self._unread += data
            self._read()

    def on_response_complete(self) -> None:
        if not self._reads_on:
            self.transport.close()
        super().on_response_complete()  # type: ignore[misc]
        self._read()  # a request that was sent ahead

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_timer()

    def _read(self) -> None:
        while self._unread and self._reads_on and not self.transport.is_closing():
            if not self._in_head:
                self._read_body()
            elif self._works:
                if len(self._unread) > self._max_head:
                    self._read_no_more()
                break
            elif not self._read_head():
                break
        self._set_timer()

    def _read_head(self) -> bool:
        self._unread = self._unread.lstrip(b"\r\n")  # RFC 9112, 2.2: empty lines before a request are ignored
        if not self._unread:
            return False
        end = self._unread.find(HEAD_END)
        size = len(self._unread) if end < 0 else end + len(HEAD_END)
        head = self._unread[:size]
        if not BEGINNING.match(head):
            self.send_400_response("")
        elif size > self._max_head:
            self._refuse(headers_too_large(self._options.max_header_kb))
        elif end >= 0 and AMBIGUOUS.search(head):
            self.send_400_response("")
        elif end >= 0:
            self._unread = self._unread[size:]
            # No other protocol is spoken here. httptools skips the body of a request that proposes one, as every first
            # request of Java's client does, and would read it as the next request.
            has_ended = self._parse(UPGRADE.sub(b"\nIgnored:", head))
            if self._reads_on:
                fields = dict(self.headers)
                self._body_left = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))
                self._in_head = has_ended
            return True
        return False

    def _read_body(self) -> None:
        size = self._max_head if self._body_left is None else self._body_left
        data, self._unread = self._unread[:size], self._unread[size:]
        if self._body_left is not None:
            self._body_left -= len(data)
        self._in_head = self._parse(data)

    def _read_no_more(self) -> None:
        """The connection ends with the answer."""
        self._reads_on, self._unread = False, b""
        if self._works:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _set_timer(self) -> None:
        waits = not self._works or self.flow.write_paused
        if waits == (self._timer is not None):
            return
        if waits:  # also while it closes, which waits until all is sent
            self._unsent = None
            self._timer = self.loop.call_later(self._options.idle_timeout, self._waited)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self) -> None:
        self._timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self._unsent is None or unsent < self._unsent):  # the client reads, if slowly
            self._unsent = unsent
            self._timer = self.loop.call_later(self._options.idle_timeout, self._waited)
        elif unsent:
            self.transport.abort()  # close() would wait until all is sent
        elif self._in_head and self._unread:
            self._refuse(timed_out("sending the headers", self._options.idle_timeout))
        else:
            self._transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._reads_on:
            self._refuse(ApiError(400, "what was sent cannot be read as a request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        self._reads_on, self._unread = False, b""
        if self._in_head or not self.cycle.response_started:
            self.transport.write(whole_answer(error))
        if self._works:
            self.cycle.disconnected = True  # the application is at work and must not answer as well
            self.cycle.message_event.set()
        self._close()

    def _close(self) -> None:
        """Closing a socket with unread data resets the connection, and the client could lose the answer. So what the
        client still sends after an early answer is thrown away: until it stops, at most for idle_timeout."""
        if self._in_head and self._reads_on:
            self._transport.close()
        elif not self._lingers:
            self._reads_on, self._unread, self._lingers, self._is_silent = False, b"", True, False
            if self._transport.can_write_eof() and not self._transport.is_closing():
                self._transport.write_eof()
            self._linger(self.loop.time() + self._options.idle_timeout)

    def _linger(self, end: float) -> None:
        if self._is_silent or self.loop.time() > end:
            self._transport.close()
        else:
            self._is_silent = True
            self.loop.call_later(LINGER_SECONDS, self._linger, end)


class OwnClose:
    """A transport with another close()."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.write = transport.write  # called for each event of a stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class H11Connection(LimitedConnection, H11Protocol):
    parser_name = "h11"

    def _parse(self, data: bytes) -> bool:
        H11Protocol.data_received(self, data)
        has_ended = self.conn.their_state is not h11.SEND_BODY
        if has_ended and self.conn.trailing_data[0]:
            self._read_no_more()  # another request, in the packet that ends a body in chunks: it was not measured
        return has_ended


Connection: type[LimitedConnection] = H11Connection

if HttpToolsProtocol is not None:

    class HttpToolsConnection(LimitedConnection, HttpToolsProtocol):
        """12 us less for each event of a stream than h11. Its parser, llhttp, is as strict as h11 with the lengths of
        bodies; what it lets through is checked here."""

        parser_name = "httptools"
        _has_ended = True
        _without_body = 0  # bytes in chunks that gave none of the body: extensions, trailers, zeros before a size

        def _parse(self, data: bytes) -> bool:
            self._without_body = 0 if self._in_head else self._without_body + len(data)
            HttpToolsProtocol.data_received(self, data)
            if self._without_body > self._max_head:
                self.send_400_response("")
            return self._has_ended

        def on_message_begin(self) -> None:
            if not self._in_head:  # see H11Connection
                self._read_no_more()
                raise ValueError("so that nothing of it is read")
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # not trailers, which uvicorn would add to the headers of the running request
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
            num_hosts = sum(name == b"host" for name, _ in self.headers)
            is_old = self.parser.get_http_version() == "1.0"
            if codings not in ([], [b"chunked"]) or not 1 - is_old <= num_hosts <= 1 or self.parser.should_upgrade():
                raise ValueError("uvicorn answers 400")
            super().on_headers_complete()
            self._has_ended = False
            if is_old:
                self.cycle.chunked_encoding = False
                self.cycle.send = functools.partial(send_unchunked, self.cycle)

        def on_body(self, body: bytes) -> None:
            self._without_body = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._has_ended = True
            super().on_message_complete()

    Connection = HttpToolsConnection


async def send_unchunked(cycle: Any, message: Message) -> None:
    """HTTP/1.0 has no chunks: a body without Content-Length ends with the connection. uvicorn's protocol for httptools
    sends chunks nevertheless, unless it expects exactly the bytes that come."""
    cycle.expected_content_length = len(message.get("body", b""))
    await type(cycle).send(cycle, message)


def whole_answer(error: ApiError) -> bytes:
    response = error.response()
    response.headers["connection"] = "close"
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


class Acceptor:
    """Accepts connections one by one, so that there are never more than `limit`. asyncio's own server accepts all that
    wait before the first of them is counted. A connection beyond the limit gets 503."""

    def __init__(
        self, listener: socket.socket, limit: int, make: Callable[[], asyncio.Protocol], connections: set[Any]
    ) -> None:
        self._listener = listener
        self._limit = limit
        self._make = make
        self._connections = connections  # all there are; each leaves this set when it is lost
        self._coming: set[asyncio.Task[Any]] = set()
        self._refusing: set[asyncio.Task[Any]] = set()
        message = f"all {limit} connections are taken (--max-connections): try again later"
        error = ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
        self._busy = whole_answer(error)
        self._task = asyncio.create_task(self._accept())

    async def close(self) -> None:
        self._task.cancel()
        for task in self._refusing:
            task.cancel()
        await asyncio.gather(self._task, *self._coming, *self._refusing, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionError:  # it left before it was accepted
                continue
            except OSError as error:  # no file is left: other parts of this process took them
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(1)
                continue
            if len(self._connections) < self._limit:
                made = self._make()
                self._connections.add(made)  # now: the next one may be accepted before this task begins
                self._start(self._coming, self._establish(made, connection))
            elif len(self._refusing) < MAX_REFUSING:
                self._start(self._refusing, self._refuse(connection))
            else:
                with connection, contextlib.suppress(OSError):
                    connection.send(self._busy)

    def _start(self, tasks: set[asyncio.Task[Any]], work: Any) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _establish(self, made: asyncio.Protocol, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: made, connection)
        except BaseException:
            self._connections.discard(made)
            connection.close()
            raise

    async def _refuse(self, connection: socket.socket) -> None:
        """After its request has come, and closed by the client if it does so soon: see `LimitedConnection._refuse`."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            with anyio.move_on_after(LINGER_SECONDS):
                await loop.sock_recv(connection, 65536)
            connection.send(self._busy)
            connection.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(LINGER_SECONDS):
                await loop.sock_recv(connection, 65536)

"""Connections of clients: how many there may be, what they may send before a request is known, how long they may wait.

    acceptor = Acceptor(listener, limit, make_connection, server_state.connections)

uvicorn waits without limit for headers that never end and for clients that do not read, reads any number of headers,
and accepts connections until no file is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import anyio
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.errors import ConfigError
from nanovllm.server.errors import ApiError, headers_too_large, timed_out
from nanovllm.server.options import ServerOptions

logger = logging.getLogger("nanovllm")
MOST_CONNECTIONS = 4096  # unless --max-connections says so: each takes some 20 KB of memory
SPARE_FILES = 16  # for what is opened while requests run: a trace, files of the page, connections that are refused
MAX_REFUSING = 8  # connections that are refused politely at the same time
LINGER_SECONDS = 0.5  # in which a client that is refused may finish sending


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


class Connection(H11Protocol):
    """h11 is used whatever is installed: httptools bounds neither the size nor the number of headers.

    A timer runs while the server waits for the client, that is, from the end of an answer (or the beginning of the
    connection) to the end of the next headers, and while the client does not read an answer. Bytes that come meanwhile
    do not start it anew, or a client could send one now and then for ever.
    """

    _timer: asyncio.TimerHandle | None = None
    _unsent: int | None = None  # bytes, when the timer last ran out
    _refused = False

    @property
    def _options(self) -> ServerOptions:
        return self.config.nanovllm_options  # type: ignore[attr-defined,no-any-return]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # h11 compares with its limit only while headers are incomplete, and needs 5 us for each: 256 KB of them, which
        # may come at once, would pass and take 240 ms.
        limit = self._options.max_header_kb * 1024
        while self.conn.their_state is h11.IDLE and len(data) > limit // 4 and not self._refused:
            super().data_received(data[: limit // 4])
            data = data[limit // 4 :]
        if not self._refused:
            super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > limit:
            self.cycle.keep_alive = False  # requests that were sent ahead: h11 would read them at once

    def handle_events(self) -> None:
        super().handle_events()
        self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_timer()

    def _set_timer(self) -> None:
        works = self.cycle is not None and not self.cycle.response_complete
        waits = not works or self.flow.write_paused
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
        elif self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(timed_out("sending the headers", self._options.idle_timeout))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        size = self._options.max_header_kb
        if len(self.conn.trailing_data[0]) > size * 1024:
            self._refuse(headers_too_large(size))
        else:
            self._refuse(ApiError(400, "what was sent cannot be read as a request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """What the client still sends is thrown away for a moment: closing at once would reset the connection, and the
        client could lose the answer."""
        self._refused = True
        state = self.conn.our_state
        if state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(whole_answer(error))
        if state is not h11.IDLE:  # the application is at work and must not answer as well
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def whole_answer(error: ApiError) -> bytes:
    response = error.response()
    response.headers["connection"] = "close"
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


class Acceptor:
    """Accepts connections one by one, so that there are never more than `limit`. asyncio's own server accepts all that
    wait before the first of them is counted. Who comes beyond the limit gets 503."""

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
            except OSError as error:  # no file is left: others of this process took them
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
        """After its request has come, and closed by the client if it does so soon: see `Connection._refuse`."""
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            with anyio.move_on_after(LINGER_SECONDS):
                await loop.sock_recv(connection, 65536)
            connection.send(self._busy)
            connection.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(LINGER_SECONDS):
                await loop.sock_recv(connection, 65536)

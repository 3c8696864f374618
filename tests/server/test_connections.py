"""What a client can do with a connection before, beside and instead of a request: real sockets, nothing simulated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest

from nanovllm.errors import ConfigError
from nanovllm.server.connections import Connection, connection_limit
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import Server, address_of, listen, uvicorn_config
from tests.server.rig import Running, command, running, until
from tests.tiny_models import TinyModel

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SOON = 1.0  # --idle-timeout of the server here
LATE = 15.0  # a connection that is open for so long is not closed: generous, for a loaded machine


@pytest.fixture(scope="module")
def server(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, idle_timeout=SOON, max_header_kb=16, max_headers=100) as found:
        yield found


@contextlib.contextmanager
def connected(server: Running | str) -> Iterator[socket.socket]:
    url = server if isinstance(server, str) else server.url
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LATE) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All until the server closes. A reset is an end too: it comes when the server did not read what was sent."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def is_well(connection: socket.socket) -> bool:
    """Asks for /health and leaves the connection open."""
    connection.sendall(HEAD + b"\r\n")
    answer = b""
    while not answer.endswith(b'{"status":"ok"}') and (part := connection.recv(65536)):
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


def exchange(server: Running, data: bytes) -> bytes:
    with connected(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        return rest(connection)


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# ---- the size and the number of headers ----------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"a" * 1_000_000, b"\r\n".join(b"h%d: x" % number for number in range(10_000))])
def test_headers_that_are_too_large(server: Running, line: bytes) -> None:
    """In one write: h11 looks at its limit only while headers are incomplete, and one read may bring 256 KB."""
    for size in (None, 200_000, 20_000):
        status, error = error_of(exchange(server, HEAD + b"A: " + line[:size] + b"\r\n\r\n"))
        assert status == 431
        if size == 20_000 and b":" in line:
            assert error["code"] == "too_many_headers"
        else:
            assert error["code"] == "headers_too_large"
            assert "16 KB" in error["message"]
            assert "--max-header-kb" in error["message"]


def test_the_size_is_exact(server: Running) -> None:
    room = 16 * 1024 - len(HEAD + b"Connection: close\r\nA: \r\n\r\n")
    for extra, status in ((0, b"200"), (1, b"431")):
        head = HEAD + b"Connection: close\r\nA: " + b"a" * (room + extra) + b"\r\n\r\n"
        assert exchange(server, head).split()[1] == status


def test_headers_that_are_too_many(server: Running) -> None:
    for count, status in ((100, 200), (101, 431)):  # with Host and Connection
        lines = b"".join(b"h%d: x\r\n" % number for number in range(count - 2))
        answer = exchange(server, HEAD + b"Connection: close\r\n" + lines + b"\r\n")
        assert int(answer.split()[1]) == status
    code, error = error_of(answer)
    assert (code, error["code"]) == (431, "too_many_headers")
    assert "101" in error["message"]
    assert "--max-headers" in error["message"]


def test_no_read_of_headers_is_long(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """h11 needs 5 us a header, so what it is given to read is bounded, for a second request in the same packet too."""
    lengths = []
    plain = h11.Connection.next_event

    def seen(self: h11.Connection) -> Any:
        if self.our_role is h11.SERVER and self.their_state is h11.IDLE:
            lengths.append(len(self.trailing_data[0]))
        return plain(self)

    monkeypatch.setattr(h11.Connection, "next_event", seen)
    many = HEAD + b"a:b\r\n" * 50_000 + b"\r\n"
    for data in (many, HEAD + b"\r\n" + many):
        answer = exchange(server, data)
        assert answer.split()[1] in (b"200", b"431")
    assert 16 * 1024 < max(lengths) <= 2 * 16 * 1024


# ---- slow, silent and half of a client -----------------------------------------------------------------------------


def test_a_client_that_says_nothing(server: Running) -> None:
    with connected(server) as connection:
        assert rest(connection) == b""


def test_headers_that_never_end(server: Running) -> None:
    """A byte now and then does not start the time anew."""
    with connected(server) as connection:
        connection.sendall(HEAD)
        connection.settimeout(SOON / 8)
        started, found = time.monotonic(), b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - started < LATE:
                connection.sendall(b"a")
                try:
                    if not (part := connection.recv(65536)):
                        break
                    found += part
                except TimeoutError:
                    pass
        assert time.monotonic() - started < LATE
    status, error = error_of(found)
    assert (status, error["code"]) == (408, "timeout")


def test_an_idle_connection_is_kept_and_then_closed(server: Running) -> None:
    with connected(server) as connection:
        for _ in range(2):
            assert is_well(connection)
            time.sleep(SOON / 4)
        assert rest(connection) == b""


def test_a_body_that_goes_on_after_the_answer(server: Running) -> None:
    """The answer (415) is complete, the request is not: bytes of its body must not keep the connection."""
    with connected(server) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 415")
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - started < LATE:
                connection.sendall(b"a")
                time.sleep(SOON / 8)
        assert time.monotonic() - started < LATE


@pytest.mark.parametrize("sent", [b"", HEAD, b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"])
def test_half_closed(server: Running, sent: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        rest(connection)


def test_a_request_in_the_making_is_not_idle(llama: TinyModel) -> None:
    """A paused engine lets it wait for longer than the idle time."""
    with running(llama.path, idle_timeout=SOON, events=True) as server, connected(server) as connection:
        assert server.post("/engine/control", {"action": "pause"}).status_code == 200
        body = b'{"prompt": "the", "max_tokens": 1}'
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        time.sleep(3 * SOON)
        assert server.post("/engine/control", {"action": "resume"}).status_code == 200
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read(tmp_path: Path) -> None:
    """An answer larger than what the kernel holds. While something of it is taken the connection stays."""
    size = 64 * 2**20
    done = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(size // 2**16):
                await send({"type": "http.response.body", "body": b"a" * 2**16, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            done.append(scope["path"])

    options = ServerOptions(port=0, idle_timeout=SOON)
    with serving(app, options) as (server, url), connected(url) as silent, connected(url) as slow:
        silent.sendall(b"GET /silent HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slow.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        received, last = 0, 0.0
        while part := slow.recv(2**18):  # some every SOON/4, all of it in some 3 s
            received += len(part)
            if received - last > 2**23:
                last = received
                time.sleep(SOON / 4)
        assert received > size
        until(lambda: not server.server_state.connections)
        assert sorted(done) == ["/silent", "/slow"]


def test_peers_that_vanish_are_found_by_the_kernel() -> None:
    with contextlib.closing(listen(ServerOptions(port=0))) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


# ---- two readings of one request -----------------------------------------------------------------------------------

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("headers", [
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: 5\r\nContent-Length: 0\r\n",
    b"Content-Length: 5, 0\r\n", b"Content-Length: +5\r\n", b"Content-Length: 5\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding: xchunked\r\n",
])  # fmt: skip
def test_two_lengths_of_a_body_are_refused(server: Running, headers: bytes) -> None:
    """Whatever follows is not read as a request: a proxy in front may take it for a body."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = exchange(server, head + headers + b"\r\n0\r\n\r\n" + SMUGGLED)
    status, error = error_of(answer)
    assert status in (400, 501)
    assert answer.count(b"HTTP/1.1") == 1
    assert error["type"] == "invalid_request_error"


def test_chunks_need_http_1_1(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.0\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(server, head + b"0\r\n\r\n" + SMUGGLED)
    assert error_of(answer)[0] == 400
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_body_that_goes_wrong_while_it_is_read(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connected(server) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        time.sleep(SOON / 4)  # the application waits for more
        connection.sendall(b"no chunk\r\n")
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert answer == b"" or error_of(answer)[0] == 400
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_chunks_alone_are_fine(server: Running) -> None:
    with server.http() as http:
        parts = (part for part in (b'{"prompt"', b': "the"}'))
        assert http.post("/tokenize", content=parts, headers={"content-type": "application/json"}).status_code == 200


def test_what_is_no_http(server: Running) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"hello\r\n\r\n", b"GET\r\n\r\n"):
        status, error = error_of(exchange(server, data + b"\r\n\r\n"))
        assert (status, error["code"]) == (400, "invalid_http")


# ---- as many connections as there are files ------------------------------------------------------------------------


@contextlib.contextmanager
def serving(app: Any, options: ServerOptions, loop: Any = "auto") -> Iterator[tuple[Server, str]]:
    """An application without an engine."""
    listener = listen(options)
    server = Server(uvicorn_config(app, options))
    server.config.loop = loop
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield server, address_of(listener)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_more_connections_than_the_limit_get_503(llama: TinyModel) -> None:
    with running(llama.path, max_connections=8, idle_timeout=120) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(8)]
        for connection in held:
            assert is_well(connection)
        for _ in range(40):  # more than are refused at the same time
            connection = stack.enter_context(connected(server))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(HEAD + b"\r\n")
            status, error = error_of(rest(connection))
            assert (status, error["code"]) == (503, "too_many_connections")
            assert "8" in error["message"]
            assert "--max-connections" in error["message"]
        assert is_well(held[0])  # one that is there goes on
        held[1].close()
        held[2].close()

        def is_let_in() -> bool:
            with server.http() as http:
                return http.get("/health").status_code == 200

        until(is_let_in)


def test_silent_connections_beyond_the_limit_hold_nothing(llama: TinyModel) -> None:
    with running(llama.path, max_connections=4) as server, contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(server)) for _ in range(60)]
        for connection in many[4:]:
            rest(connection)


def files_of(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_flood_leaves_files_for_the_rest(llama: TinyModel) -> None:
    """`ulimit -n 64`: 300 connections at once, and the server neither runs out of files nor says so in its log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        started = command(llama.path, "--num-kvcache-blocks", "64", "--max-num-seqs", "4", "--idle-timeout", "120")
        process, url = started.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        stack.push(started.__exit__)
        existing = stack.enter_context(connected(url))
        assert is_well(existing)
        crowd = [stack.enter_context(connected(url)) for _ in range(300)]
        most = 0
        for connection in crowd:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(HEAD)
            most = max(most, files_of(process))
        assert most < 64
        assert is_well(existing)
        refused = [rest(connection) for connection in crowd[100:]]
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 503") for answer in refused)
        assert any(refused)
        for connection in crowd:
            connection.close()

        def answers() -> bool:
            with connected(url) as connection:
                connection.sendall(HEAD + b"Connection: close\r\n\r\n")
                return rest(connection).startswith(b"HTTP/1.1 200")

        until(answers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_the_limit_is_below_that_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft in (200, 1024):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        found = connection_limit(ServerOptions())
        assert 0 < found < soft - len(os.listdir("/proc/self/fd"))
        assert connection_limit(ServerOptions(max_connections=50)) == 50
        with pytest.raises(ConfigError, match=rf"max_connections={soft}: .*`ulimit -n` is {soft}.* at most \d+"):
            connection_limit(ServerOptions(max_connections=soft))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    with pytest.raises(ConfigError, match="`ulimit -n` is 8"):
        listen(ServerOptions(port=0))  # before a model is loaded
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limit(ServerOptions()) >= 1024
    assert connection_limit(ServerOptions(max_connections=10_000)) == 10_000


def test_it_is_h11_whatever_is_installed() -> None:
    """httptools bounds neither the size nor the number of headers; uvicorn takes it where it is installed."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    config = uvicorn_config(lambda *_: None, ServerOptions())  # type: ignore[arg-type,return-value]
    config.load()
    assert issubclass(config.http_protocol_class, H11Protocol)
    assert config.http_protocol_class is Connection


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_with_every_event_loop(loop: str) -> None:
    pytest.importorskip(loop)
    loops = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"15")]})
        await send({"type": "http.response.body", "body": b'{"status":"ok"}'})

    options = ServerOptions(port=0, idle_timeout=SOON, max_connections=2)
    with serving(app, options, loop) as (_, url), contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(connected(url)) for _ in range(3))
        for connection in (first, second):
            assert is_well(connection)
        third.sendall(HEAD + b"\r\n")
        assert rest(third).startswith(b"HTTP/1.1 503")
        second.sendall(HEAD)
        assert rest(first) == b""
        assert rest(second).startswith(b"HTTP/1.1 408")
    assert loops[0].startswith(loop)


def test_the_module_needs_no_engine() -> None:
    code = "import sys, nanovllm.server.connections; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

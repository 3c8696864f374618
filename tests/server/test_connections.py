"""What a client can do with a connection before, beside and instead of a request, over real sockets."""

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
import time
from collections.abc import Iterator
from typing import Any

import h11
import pytest

from nanovllm.errors import ConfigError
from nanovllm.server import connections
from nanovllm.server import run as server_run
from nanovllm.server.connections import connection_limit
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import DrainingServer, listen
from tests.server.rig import Running, command, connect, in_thread, raw_post, running, until
from tests.tiny_models import TinyModel

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SOON = 1.0  # --idle-timeout of the server here
LATE = 15.0  # a connection that is open for so long is not closed: generous, for a loaded machine


@pytest.fixture(scope="module", autouse=True, params=["h11", "httptools"])
def parser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Everything here holds with both. Other processes do not find httptools if it is h11's turn."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "httptools":
            pytest.importorskip("httptools")
            patch.setattr(server_run, "Connection", connections.HttpToolsConnection)
        else:
            hidden = tmp_path_factory.mktemp("hidden")
            (hidden / "httptools.py").write_text("raise ImportError\n")
            patch.setenv("PYTHONPATH", str(hidden), prepend=os.pathsep)
            patch.setattr(server_run, "Connection", connections.H11Connection)
        yield request.param


@pytest.fixture(scope="module")
def server(llama: TinyModel, parser: str) -> Iterator[Running]:
    with running(llama.path, idle_timeout=SOON, max_header_kb=16, max_headers=100) as found:
        yield found


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


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# ---- the size and the number of headers ----------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"a" * 1_000_000, b"\r\n".join(b"h%d: x" % number for number in range(10_000))])
def test_headers_that_are_too_large(server: Running, line: bytes) -> None:
    """In one write: h11 looks at its limit only while headers are incomplete, and one read may bring 256 KB."""
    heads = [HEAD + b"A: " + line[:size] + b"\r\n\r\n" for size in (None, 200_000, 20_000)]
    for head in (*heads, b"\r\nGET /" + b"a" * 20_000, b"a" * 20_000):  # also a request line, which has no end yet
        status, error = error_of(server.raw(head))
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "16 KB" in error["message"]
        assert "--max-header-kb" in error["message"]


@pytest.mark.parametrize("before", [b"", b"\r\n", b"Content-Length: 20000\r\n\r\n" + b"a" * 20_000])
def test_the_size_is_exact(server: Running, before: bytes) -> None:
    """Also behind another request in the same packet; then the connection may end instead of an answer."""
    room = 16 * 1024 - len(HEAD + b"Connection: close\r\nA: \r\n\r\n")
    for extra, status in ((0, b"200"), (1, b"431")):
        head = HEAD + b"Connection: close\r\nA: " + b"a" * (room + extra) + b"\r\n\r\n"
        found = server.raw((HEAD + before if before else b"") + head).split(b"HTTP/1.1 ")[1:]
        statuses = [answer[:3] for answer in found]
        assert statuses in ([b"200", status], [b"200"] * (2 - extra)) if before else statuses == [status]


def test_headers_that_are_too_many(server: Running) -> None:
    for count, status in ((100, 200), (101, 431)):  # with Host and Connection
        lines = b"".join(b"h%d: x\r\n" % number for number in range(count - 2))
        answer = server.raw(HEAD + b"Connection: close\r\n" + lines + b"\r\n")
        assert int(answer.split()[1]) == status
    code, error = error_of(answer)
    assert (code, error["code"]) == (431, "too_many_headers")
    assert "101" in error["message"]
    assert "--max-headers" in error["message"]


def test_no_read_of_headers_is_long(server: Running, parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """h11 needs 5 us a header, so what it is given to read is bounded, for a second request in the same packet too."""
    if parser != "h11":
        pytest.skip("looks into h11")
    lengths = []
    plain = h11.Connection.next_event

    def seen(self: h11.Connection) -> Any:
        if self.our_role is h11.SERVER and self.their_state is h11.IDLE:
            lengths.append(len(self.trailing_data[0]))
        return plain(self)

    monkeypatch.setattr(h11.Connection, "next_event", seen)
    many = HEAD + b"a:b\r\n" * 50_000 + b"\r\n"
    for data in (many, HEAD + b"\r\n" + many):
        answer = server.raw(data)
        assert answer.split()[1] in (b"200", b"431")
    assert 0 < max(lengths) <= 16 * 1024


# ---- slow, silent and half of a client -----------------------------------------------------------------------------


def test_headers_that_never_end(server: Running) -> None:
    """A byte now and then does not start the time anew."""
    with server.connect(LATE) as connection:
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
    with server.connect(LATE) as connection:
        for _ in range(2):
            assert is_well(connection)
            time.sleep(SOON / 4)
        assert rest(connection) == b""
    assert server.raw(b"") == b""  # a client that sends nothing


def test_a_body_that_goes_on_after_the_answer(server: Running) -> None:
    """The answer (415) is complete, the request is not: bytes of its body must not keep the connection."""
    with server.connect(LATE) as connection:
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
    with server.connect(LATE) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        rest(connection)


def test_a_request_in_the_making_is_not_idle(llama: TinyModel) -> None:
    """A paused engine lets it wait for longer than the idle time."""
    with running(llama.path, idle_timeout=SOON, events=True) as server, server.connect(LATE) as connection:
        assert server.post("/engine/control", {"action": "pause"}).status_code == 200
        connection.sendall(raw_post({"prompt": "the", "max_tokens": 1}))
        time.sleep(3 * SOON)
        assert server.post("/engine/control", {"action": "resume"}).status_code == 200
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read() -> None:
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

    with serving(app) as (server, url), connect(url, LATE) as silent, connect(url, LATE) as slow:
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
        until(lambda: sorted(done) == ["/silent", "/slow"])  # a task ends a moment after its connection


def test_options_of_the_socket() -> None:
    """Peers that vanish are found by the kernel. With the protocol named, asyncio sets TCP_NODELAY: else Nagle's
    algorithm and delayed acknowledgements together cost 40 ms for each answer of two writes."""
    with contextlib.closing(listen(ServerOptions(port=0))) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


# ---- two readings of one request -----------------------------------------------------------------------------------

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n"  # refused in HTTP/1.0
CHUNKED = POST + CHUNKS + b"\r\n"
BODY = b'{"prompt": "the"}'


@pytest.mark.parametrize(
    "headers",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 0\r\n",
        b"Content-Length: 5, 0\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding:\r\n",
        CHUNKS,
    ],
)
def test_two_lengths_of_a_body_are_refused(server: Running, headers: bytes) -> None:
    """What follows is not read as a request: a proxy in front may take it for a body."""
    head = POST.replace(b"1.1", b"1.0") if headers == CHUNKS else POST
    answer = server.raw(head + headers + b"\r\n0\r\n\r\n" + SMUGGLED)
    status, error = error_of(answer)
    assert status in (400, 501)
    assert answer.count(b"HTTP/1.1") == 1
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_http", "ambiguous_length")


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\nB: c\r\n\r\n",  # LF alone
    b"GET / HTTP/1.1\r\nHost: a\r\n\n\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\rB: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nB: c\r\n d\r\n\r\n", b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",  # folded lines
    b"GET / HTTP/1.1\r\nHost: a\r\nB: c\0d\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nB\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /\r\n\r\n", b"GET / HTTP/0.9\r\n\r\n", b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"OPTIONS / RTSP/1.0\r\nHost: a\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", b"hello\r\n\r\n", b"GET\r\n\r\n",  # no HTTP
])  # fmt: skip
def test_what_others_may_read_in_another_way_is_refused(server: Running, data: bytes) -> None:
    answer = server.raw(data + SMUGGLED)
    status, error = error_of(answer)
    assert (status, error["code"]) == (400, "invalid_http")
    assert answer.count(b"HTTP/1.1 ") == 1


CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "chunks",
    [
        CHUNK.replace(b"\r", b"") + b"0\n\n",
        b"0;a\nb\r\n" + CHUNK + b"0\r\n\r\n",
        CHUNK[:-2] + b"X0\r\n\r\n",
        b"0x" + CHUNK + b"0\r\n\r\n",
        CHUNK + b"f" * 30 + b"\r\n",
        CHUNK + b"-1\r\n{\r\n0\r\n\r\n",
        CHUNK + b"0;a=" + b"x" * 10**6 + b"\r\n\r\n",
        CHUNK + b"0" * 10**6 + b"\r\n\r\n",
        CHUNK + b"0\r\nA: " + b"x" * 10**6 + b"\r\n\r\n",
        CHUNK + b"0\r\n" + b"a: b\r\n" * 10**5 + b"\r\n",
    ],
)
def test_chunks_that_are_wrong_or_have_too_much_around_them(server: Running, chunks: bytes) -> None:
    answer = server.raw(CHUNKED + chunks + SMUGGLED)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert answer == b"" or error_of(answer)[0] == 400


def test_trailers_are_no_headers() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with serving(app) as (_, url), connect(url, LATE) as connection:
        connection.sendall(CHUNKED + b"1\r\n{\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 200")
    assert len(seen) == 1
    assert b"authorization" not in seen[0]


# ---- requests that are sent before the answer to the last one ------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_requests_in_one_packet_or_in_many(server: Running, size: int) -> None:
    post = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    chunks = CHUNKED + CHUNK + b"0\r\n\r\n"
    data = HEAD + b"\r\n" + post + b"\r\n" + post + HEAD + b"\r\n" + chunks
    with server.connect(LATE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        answers = rest(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 5
    assert [b"tokens" in answer for answer in answers] == [False, True, True, False, True]


def test_one_request_of_a_connection_runs_at_a_time() -> None:
    running, most, served = 0, 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running, most, served
        running, served = running + 1, served + 1
        most = max(most, running, len(asyncio.all_tasks()))
        await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        running -= 1

    small = b"GET / HTTP/1.1\r\nHost:a\r\n\r\n"
    with serving(app) as (_, url):
        for data in (small * 20, small * 10_000, CHUNKED + b"0\r\n\r\n" + small * 500):
            served = 0
            with connect(url, LATE) as connection:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(data)
                found = rest(connection).count(b"HTTP/1.1 200")
            assert served == (20 if data == small * 20 else 1)
            assert found in (0, served)  # too many ahead: the connection ends with the first answer, or is reset
        assert most < 10


def test_a_request_in_the_packet_that_ends_a_body_in_chunks(server: Running) -> None:
    """Its place in the packet is not known, so it is not read, and the client sees that the connection ends."""
    answer = server.raw(CHUNKED + CHUNK + b"0\r\n\r\n" + HEAD + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 ") == 1
    with server.connect(LATE) as connection:  # answered (415) before its end
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 415")
        connection.sendall(b"0\r\n\r\n" + b"a" * 20_000)
        assert b"HTTP/1.1 200" not in rest(connection)


@pytest.mark.parametrize("gap", [0, SOON / 8])
def test_a_body_beside_the_proposal_of_another_protocol(server: Running, gap: float) -> None:
    """Java's client proposes HTTP/2 with its first request, and curl --http2 with each."""
    head = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    with server.connect(LATE) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(BODY))
        time.sleep(gap)
        connection.sendall(BODY)
        assert b'"tokens"' in connection.recv(65536)
        assert is_well(connection)


@pytest.mark.parametrize("target", [b"localhost:1", b"/"])
def test_no_tunnels(server: Running, target: bytes) -> None:
    head = b"CONNECT %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (target, len(SMUGGLED))
    answer = server.raw(head + SMUGGLED)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.split()[1][:1] == b"4"


def test_a_body_that_goes_wrong_while_it_is_read(server: Running) -> None:
    with server.connect(LATE) as connection:
        connection.sendall(CHUNKED + b"1\r\n{\r\n")
        time.sleep(SOON / 4)  # the application waits for more
        connection.sendall(b"no chunk\r\n")
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert answer == b"" or error_of(answer)[0] == 400
    with server.http() as http:
        assert http.get("/health").status_code == 200


# ---- as many connections as there are files ------------------------------------------------------------------------


@contextlib.contextmanager
def serving(app: Any, loop: Any = "auto", **options: Any) -> Iterator[tuple[DrainingServer, str]]:
    """An application without an engine."""
    settings = ServerOptions(port=0, idle_timeout=SOON, **options)
    server = DrainingServer(app, settings)
    server.config.loop = loop
    with in_thread(server, settings) as url:
        yield server, url


def test_more_connections_than_the_limit_get_503(llama: TinyModel) -> None:
    with running(llama.path, max_connections=8, idle_timeout=120) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect(LATE)) for _ in range(8)]
        for connection in held:
            assert is_well(connection)
        for _ in range(40):  # more than are refused at the same time
            connection = stack.enter_context(server.connect(LATE))
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
        many = [stack.enter_context(server.connect(LATE)) for _ in range(60)]
        for connection in many[4:]:
            rest(connection)


def files_of(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_flood_leaves_files_for_the_rest(llama: TinyModel) -> None:
    """`ulimit -n 64`: 300 connections at once, and the server neither runs out of files nor says so in its log."""
    options = ("--num-kvcache-blocks", "64", "--max-num-seqs", "4", "--idle-timeout", "120")
    with command(llama.path, *options, files=64) as (process, url), contextlib.ExitStack() as stack:
        existing = stack.enter_context(connect(url, LATE))
        assert is_well(existing)
        crowd = [stack.enter_context(connect(url, LATE)) for _ in range(300)]
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
            with connect(url, LATE) as connection:
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


def test_httptools_where_it_is_installed(parser: str) -> None:
    """The fixture hides it from other processes for h11."""
    code = "from nanovllm.server.connections import Connection; print(Connection.parser_name)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == parser


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_with_every_event_loop(loop: str, parser: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(loop)
    loops = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"15")]})
        await send({"type": "http.response.body", "body": b'{"status":"ok"}'})

    caplog.set_level("INFO", logger="nanovllm")
    with serving(app, loop, max_connections=2) as (_, url), contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(connect(url, LATE)) for _ in range(3))
        for connection in (first, second):
            assert is_well(connection)
        third.sendall(HEAD + b"\r\n")
        assert rest(third).startswith(b"HTTP/1.1 503")
        second.sendall(HEAD)
        assert rest(first) == b""
        assert rest(second).startswith(b"HTTP/1.1 408")
    assert loops[0].startswith(loop)
    assert f"event loop: {loop}, HTTP parser: {parser}" in caplog.messages


def test_the_module_needs_no_engine() -> None:
    code = "import sys, nanovllm.server.connections; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_http_1_0_has_no_chunks(server: Running) -> None:
    request = raw_post({"prompt": "the", "max_tokens": 3, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, events = server.raw(request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    whole = server.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert whole.endswith(b'{"status":"ok"}')
    assert b"content-length: 15" in whole.lower()


@pytest.mark.parametrize("length", [b"Content-Length: 99000000", b"Transfer-Encoding: chunked"])
def test_a_413_ends_the_connection_soon(llama: TinyModel, length: bytes) -> None:
    """The client gets the answer although it has not read while it sent."""
    with running(llama.path, max_body_mb=0.1, idle_timeout=60) as server, server.connect(LATE) as connection:
        connection.sendall(POST + length + b"\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(8):
                connection.sendall(b"8000\r\n%b\r\n" % (b" " * 2**15))
        assert error_of(rest(connection))[1]["code"] == "body_too_large"

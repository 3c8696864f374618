"""Run the server until SIGTERM or Ctrl-C: then it takes no new connection, running requests finish, and the process
exits with 0.

The engine is imported where it is started: `nanovllm trace view` runs a server without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import anyio
import uvicorn
from starlette.types import ASGIApp

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.server.connections import Acceptor, Connection, connection_limit
from nanovllm.server.options import ServerOptions

if TYPE_CHECKING:
    from nanovllm.server.service import Service

logger = logging.getLogger("nanovllm")
# Seconds of silence before the first probe, seconds between two, their number; milliseconds for data without an answer
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}

CUT_SECONDS = 5  # for requests that are cut off to send their error; then their tasks are cancelled


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a limit of connections, a drain that has an end, and exit code 0: uvicorn's own handler
    raises the signal once more after the drain, and the process would die of it.

    `before_drain` is called before the drain, so that running requests can end. `cut_off` ends those that have not,
    after drain_timeout or at a second signal; a third signal does not wait for that either."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        before_drain: Callable[[], None] = lambda: None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            h11_max_incomplete_event_size=options.max_header_kb * 1024,
            timeout_keep_alive=math.ceil(options.idle_timeout) + 1,  # Connection's own timer comes first
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(options.drain_timeout) + CUT_SECONDS,
        )
        config.nanovllm_options = options  # type: ignore[attr-defined]  # for Connection
        super().__init__(config)
        self._options = options
        self._before_drain, self._cut_off = before_drain, cut_off
        self._cut_now = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for one socket, but with a limit of connections."""
        assert sockets is not None
        assert len(sockets) == 1
        await self.lifespan.startup()
        state, protocol = self.server_state, cast(Any, self.config.http_protocol_class)

        def make_connection() -> asyncio.Protocol:
            return protocol(self.config, state, self.lifespan.state)

        self.servers = []
        limit = connection_limit(self._options)
        self._acceptor = Acceptor(sockets[0], limit, make_connection, state.connections)
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        logger.info("event loop: %s, HTTP parser: %s", loop, protocol.parser_name)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        self._before_drain()
        cutting = asyncio.create_task(self._cut_in_time())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_in_time(self) -> None:
        with anyio.move_on_after(self._options.drain_timeout):
            await self._cut_now.wait()
        self._cut_off()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self._cut_now.is_set():
            self._cut_now.set()
        else:
            super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def listen(options: ServerOptions) -> socket.socket:
    """Before the model is loaded: that the port is taken should not become known a minute later."""
    connection_limit(options)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on every connection. Without it, headers and body of an answer
    # leave in two packets and the second waits for the client's delayed acknowledgement: 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        # All connections inherit these: a client whose machine has vanished is found within a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not all systems have all
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.setblocking(False)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {options.host}:{options.port} ({error}): try another --port") from None
    listener.set_inheritable(False)
    return listener


def make_server(service: Service) -> DrainingServer:
    from nanovllm.server.app import make_app

    return DrainingServer(make_app(service), service.options, service.engine.drain, service.cut_off)


def freeze_gc() -> None:
    """What was built at start-up stays, so the collector need not visit its 370,000 objects again: that takes some
    0.3 s each time, in which no token is sent."""
    gc.collect()
    gc.freeze()


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(options: ServerOptions, say: Callable[[str], None]) -> Iterator[socket.socket]:
    """The listener, and the log on stderr."""
    with contextlib.closing(listen(options)) as listener:
        if options.is_open:
            say(f"warning: anyone who can reach {options.host} can use this server; set --api-key")
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        yield listener


def serve(config: EngineConfig, options: ServerOptions, say: Callable[[str], None]) -> None:
    with listening(options, say) as listener:
        logger.setLevel(logging.INFO)
        from nanovllm.engine.async_engine import AsyncLLMEngine
        from nanovllm.server.service import Service

        with contextlib.closing(Service(AsyncLLMEngine(config), options)) as service:
            server = make_server(service)  # a trace file that cannot be written is an error before the next lines
            freeze_gc()
            url = address_of(listener)
            say(f"{service.model_name} at {url}/v1 (Ctrl-C ends)")
            say(f"sampling defaults: {service.engine.engine.sampling_defaults}")
            say(f"page: {url}/{'' if options.events else ' (--events lets it show the engine at work)'}")
            server.run(sockets=[listener])
            has_failed = service.engine.failure is not None  # closing it is a reason, too
    answered = f"{service.num_cut} requests were cut off" if service.num_cut else "all requests are answered"
    if has_failed:
        answered = "the engine had failed: requests that ran then got an error"
    say(f"{answered}, the engine is closed")

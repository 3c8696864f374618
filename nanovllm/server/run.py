"""Run the server until SIGTERM or Ctrl-C: then nobody is let in, whoever runs may finish, and the process exits 0.

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
from typing import TYPE_CHECKING

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
# Seconds of silence before the first question, seconds between two, their number; milliseconds for data that was sent
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}

CUT_SECONDS = 5  # for requests that are cut off to say so; then their tasks are cancelled


class DrainingServer(uvicorn.Server):
    """uvicorn's own handler raises the signal once more after the drain, so the process would die of it.

    `before_drain`: what must happen so that the requests that run can end. `cut_off`: ends those that did not, after
    drain_timeout or at a second signal; a third does not wait for that either."""

    def __init__(
        self,
        config: uvicorn.Config,
        before_drain: Callable[[], None] = lambda: None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._before_drain, self._cut_off = before_drain, cut_off
        self._cut_now = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for one socket, but with a limit of connections."""
        config, state = self.config, self.server_state
        assert sockets is not None
        assert len(sockets) == 1
        await self.lifespan.startup()

        def make_connection() -> asyncio.Protocol:
            return config.http_protocol_class(config, state, self.lifespan.state)

        limit = connection_limit(config.nanovllm_options)  # type: ignore[attr-defined]
        self.servers = []
        self._acceptor = Acceptor(sockets[0], limit, make_connection, state.connections)
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        logger.info("event loop: %s, HTTP parser: %s", loop, config.http_protocol_class.parser_name)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        self._before_drain()
        cutting = asyncio.create_task(self._cut_in_time())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_in_time(self) -> None:
        seconds = self.config.nanovllm_options.drain_timeout  # type: ignore[attr-defined]
        with anyio.move_on_after(seconds):
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
    """Before the model is loaded: a port that is taken should not be found out a minute later."""
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

    return DrainingServer(uvicorn_config(make_app(service), service.options), service.engine.drain, service.cut_off)


def uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
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
    return config


def freeze_gc() -> None:
    """What was built at start-up stays, so the collector need not look at its 370,000 objects again: some 0.3 s each
    time, in which no token leaves."""
    gc.collect()
    gc.freeze()


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(config: EngineConfig, options: ServerOptions, say: Callable[[str], None]) -> None:
    listener = listen(options)
    if options.is_open:
        say(f"warning: anyone who can reach {options.host} can use this server; set --api-key")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(logging.INFO)
    try:
        from nanovllm.engine.async_engine import AsyncLLMEngine
        from nanovllm.server.service import Service

        service = Service(AsyncLLMEngine(config), options)
    except BaseException:
        listener.close()
        raise
    try:
        server = make_server(service)  # a trace that cannot be written is said before anyone is invited
        freeze_gc()
        say(f"{service.model_name} at {address_of(listener)}/v1 (Ctrl-C ends)")
        say(f"sampling defaults: {service.engine.engine.sampling_defaults}")
        say(f"page: {address_of(listener)}/{'' if options.events else ' (--events lets it show the engine at work)'}")
        server.run(sockets=[listener])
    finally:
        service.close()
    answered = f"{service.num_cut} requests were cut off" if service.num_cut else "all requests are answered"
    say(f"{answered}, the engine is closed")

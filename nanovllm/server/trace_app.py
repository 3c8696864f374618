"""The page with a recorded trace instead of an engine: `nanovllm trace view FILE`. On the loopback, no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp

from nanovllm import __version__
from nanovllm.server.errors import ApiError
from nanovllm.server.files import add_page
from nanovllm.server.guard import Gate
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import DrainingServer, address_of, listen
from nanovllm.telemetry.trace import Trace, read_trace


def make_trace_app(trace: Trace) -> ASGIApp:
    app = FastAPI(title="Nano-vLLM", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, lambda _, error: error.response())
    app.add_exception_handler(404, lambda *_: ApiError(404, "there is only a trace here, no engine").response())
    add_page(app)
    facts = {name: value for name, value in trace.header.items() if name not in ("type", "format")}

    @app.get("/engine/info")
    async def info() -> dict[str, Any]:
        return {"events": False, "replay": True, "file": trace.name, **facts}

    @app.get("/engine/trace", response_class=Response)
    async def lines() -> Response:
        # The bytes that were checked; the file may have changed since
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return Response(trace.raw, headers=headers, media_type="application/x-ndjson")

    return Gate(app, ServerOptions())


def view_trace(path: str | Path, port: int, say: Callable[[str], None]) -> None:
    trace = read_trace(path)
    options = ServerOptions(port=port)
    listener = listen(options)
    say(f"{trace.name} at {address_of(listener)}/ (Ctrl-C ends)")
    DrainingServer(make_trace_app(trace), options).run(sockets=[listener])

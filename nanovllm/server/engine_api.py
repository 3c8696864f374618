"""What the page needs beside OpenAI's API: the feed of events and the controls of the engine.

    GET  /, /static/FILE       the page (files.py)
    GET  /engine/info          what runs, and whether it may be watched
    GET  /engine/events        server-sent events of telemetry/feed.py, a snapshot first
    GET  /engine/experts       tokens that chose each expert, by layer; counted while it is read (moe/load.py)
    POST /engine/control       {"action": "pause" | "resume" | "step"}
    POST /engine/policy        {"policy": "fcfs" | "sjf"}
    POST /reset_prefix_cache   forget all cached prefixes; as in vLLM

Without --events only the first two answer, and the last one if there is a key. A reader that is slow loses events and
gets a snapshot instead; the engine waits for no reader.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanovllm.engine.info import engine_info
from nanovllm.server.answers import EVENT_HEADERS
from nanovllm.server.body import Body
from nanovllm.server.errors import ApiError, bad_field
from nanovllm.server.files import add_page
from nanovllm.server.guard import ClientGone, Guard
from nanovllm.server.service import Service
from nanovllm.telemetry.readers import Event, EventQueue, TraceFile

KEEP_ALIVE_SECONDS = 15.0  # a comment, before a proxy takes the silence for the end
PACE_SECONDS = 0.02  # between two packets: a browser draws no more often, and each costs the event loop some 50 us


class ControlBody(Body):
    action: Literal["pause", "resume", "step"]


class PolicyBody(Body):
    policy: Literal["fcfs", "sjf"]


def add_engine_routes(app: FastAPI, service: Service) -> None:
    """Not in the OpenAPI document: they are for the page of this server."""
    add_page(app)
    engine, options = service.engine, service.options
    if options.trace is not None:
        trace = TraceFile(options.trace, engine_info(engine.engine, service.model_name))
        engine.attach(trace, stays=True).result()
    watchers: set[EventQueue] = set()

    def check_events() -> None:
        if not options.events:
            raise ApiError(404, "this server may not be watched: start it with --events", code="events_off")

    @app.get("/engine/info", include_in_schema=False)
    async def info() -> dict[str, Any]:
        facts = engine_info(engine.engine, service.model_name)
        defaults = engine.engine.sampling_defaults.values
        return {"events": options.events, "replay": False, "sampling_defaults": defaults, **facts}

    @app.get("/engine/events", include_in_schema=False, response_class=Response)
    async def events() -> Response:
        check_events()
        service.check_alive()
        return EventStream(service, watchers)

    @app.get("/engine/experts", include_in_schema=False)
    async def experts() -> dict[str, Any]:
        check_events()
        service.check_alive()
        load = await service.expert_load()
        if load is None:
            return {"layers": None, "tokens": None}
        return {"layers": list(load), "tokens": list(load.values())}

    @app.post("/engine/control", include_in_schema=False)
    async def control(request: Request) -> Response:
        check_events()
        body = await service.read(request, ControlBody)
        if body.action == "step" and not engine.paused:
            raise bad_field("action", "step needs a paused engine; pause it first")
        await {"pause": engine.pause, "resume": engine.resume, "step": engine.step_once}[body.action]()
        return JSONResponse({"paused": engine.paused})

    @app.post("/engine/policy", include_in_schema=False)
    async def policy(request: Request) -> Response:
        check_events()
        body = await service.read(request, PolicyBody)
        await engine.set_policy(body.policy)
        return JSONResponse({"policy": engine.engine.scheduler.policy.name})

    @app.post("/reset_prefix_cache", include_in_schema=False)
    async def reset_prefix_cache() -> Response:
        if not options.events and options.api_key is None:
            message = "reset_prefix_cache: off without a key: start the server with --api-key or --events"
            raise ApiError(404, message, code="events_off")
        if not await engine.reset_prefix_cache():
            message = "reset_prefix_cache: requests run or wait, and their prefixes are in use: try again when none do"
            raise ApiError(409, message, code="requests_running")
        return JSONResponse({"reset": True})


class EventStream(Response):
    """One reader of the feed, from its first snapshot until it leaves or the server does."""

    def __init__(self, service: Service, watchers: set[EventQueue]) -> None:
        super().__init__()
        self._service = service
        self._watchers = watchers  # of all streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._service.options.max_watchers
        if len(self._watchers) >= limit:
            message = f"{limit} watch already (--max-watchers): close another page"
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": "10"})
        box = EventQueue()
        self._watchers.add(box)
        try:
            async with Guard(receive, float("inf")):
                await self._stream(box, send)
        except ClientGone:
            pass
        finally:
            self._watchers.discard(box)
            self._service.engine.detach(box)

    async def _stream(self, box: EventQueue, send: Send) -> None:
        engine = self._service.engine
        await asyncio.wrap_future(engine.attach(box))  # an engine that has failed: 503
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        while (events := await box.take(KEEP_ALIVE_SECONDS)) is not None:
            body = b"".join(map(as_sse, events)) or b": keep-alive\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(PACE_SECONDS)
            if box.lost:  # only now that this reader has taken what was sent
                await asyncio.wrap_future(engine.refresh(box))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def as_sse(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind.encode(), event.line)

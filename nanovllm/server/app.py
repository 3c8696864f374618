"""The HTTP application: routes, and errors in one shape.

    app = make_app(Service(engine, options))        # an ASGI application, for uvicorn or for a test

Service.read reads bodies, not the framework: within a size and a time, large ones off the event loop, and with errors
that name the field. The framework's own documentation pages load scripts from elsewhere, so they are off; /openapi.json
is there.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from nanovllm import __version__
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.server.answers import ChatAnswer, CompletionAnswer
from nanovllm.server.body import Body
from nanovllm.server.engine_api import add_engine_routes
from nanovllm.server.errors import ApiError, as_api_error, bad_field
from nanovllm.server.guard import Gate
from nanovllm.server.messages import CountBody, MessagesBody, add_message_routes
from nanovllm.server.metrics import CONTENT_TYPE
from nanovllm.server.openapi import describe_bodies
from nanovllm.server.prompts import detokenize, tokenize
from nanovllm.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from nanovllm.server.responses import ResponseBody, add_response_routes
from nanovllm.server.service import Service

logger = logging.getLogger("nanovllm")
BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
}


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(title="Nano-vLLM", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_generation(app, service)
    _add_facts(app, service)
    add_response_routes(app, service)
    add_message_routes(app, service)
    add_engine_routes(app, service)
    describe_bodies(app, BODIES)
    return Gate(app, service.options)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        body = await service.read(request, CompletionBody)
        return CompletionAnswer(service, body, request.scope["request_id"])

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        body = await service.read(request, ChatBody)
        return ChatAnswer(service, body, request.scope["request_id"])

    @app.post("/tokenize", response_class=Response)
    async def to_tokens(request: Request) -> Response:
        body = await service.read(request, TokenizeBody)
        service.check_model(body.model)
        engine, form = service.engine.engine, service.tool_form
        return await service.encode(lambda: JSONResponse(tokenize(engine, body, form)))

    @app.post("/detokenize", response_class=Response)
    async def to_text(request: Request) -> Response:
        body = await service.read(request, DetokenizeBody)
        service.check_model(body.model)
        return await service.encode(lambda: JSONResponse(detokenize(service.engine.engine, body)))


def _add_facts(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started,
            "owned_by": "nanovllm",
            "max_model_len": service.engine.engine.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card()

    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # the name in Amazon SageMaker
    async def health() -> Response:
        reason = service.trouble
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": reason}, 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.num_requests}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    document = functools.cache(lambda: JSONResponse(app.openapi()).body)

    @app.get("/openapi.json", include_in_schema=False, response_class=Response)
    async def openapi() -> Response:
        # The first time it takes 240 ms
        return Response(await service.encode(document), media_type=JSONResponse.media_type)

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        experts = request.query_params.get("experts", "0")
        if experts not in ("0", "1"):
            raise bad_field("experts", f"{experts!r:.80}: must be 1, or 0 to leave the load of experts out")
        load = await service.expert_load() if experts == "1" else None
        return Response(service.metrics.text(load), headers={"content-type": CONTENT_TYPE})


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # the client has left and reads no answer
        if isinstance(error, HTTPException):
            headers = {"Allow": _allowed(app, request)} if error.status_code == 405 else dict(error.headers or {})
            return ApiError(error.status_code, str(error.detail), headers=headers).response(path)
        problem = as_api_error(error, BODIES[path].fields() if path in BODIES else frozenset())
        if problem.status == 500 and not isinstance(error, ApiError):
            logger.error("request %s failed", request.scope.get("request_id"), exc_info=error)
        return problem.response(path)

    kinds = (ApiError, ValidationError, RequestError, EngineDeadError, ClientDisconnect, HTTPException, Exception)
    for kind in kinds:
        app.add_exception_handler(kind, answer)


def _allowed(app: FastAPI, request: Request) -> str:
    """The methods of all routes of this path; the framework's own answer has only those of the first one."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = {m for r in routes if r.matches(request.scope)[0] is not Match.NONE for m in r.methods or ()}
    return ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))  # the Gate turns HEAD into GET

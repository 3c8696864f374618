"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}.

A message is either one that was written for the user (RequestError) or a fixed sentence. The text of any other
exception stays in the log: it may hold paths, other people's prompts or a hint for an attacker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from nanovllm.errors import ContextLengthError, EngineDeadError, RequestError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}  # every other status: invalid_request_error
ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}  # where they differ
CODES = {
    "extra_forbidden": "unknown_field",
    "missing": "missing_field",
    "unsupported": "unsupported_field",
    "json_invalid": "invalid_json",
}  # by the type of a pydantic fault
MAX_MESSAGE = 500  # characters: a client that sends a megabyte of nonsense does not get it back
ENGINE_FAILED = "the engine has failed and cannot serve requests until it is started anew; /health says more"
ENGINE_STUCK = "the engine has not finished its step for too long and takes no requests until it has; /health says more"
INTERNAL = "the server failed to answer this request; its log says why, under the request id"


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """`path`: of the request. Anthropic's clients look for a type outside, and ignore param and code."""
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {**error, "type": ANTHROPIC_TYPES.get(self.status, kind)}}
        return {"error": error}

    def renamed(self, names: Mapping[str, str], places: Sequence[str]) -> ApiError:
        """In the client's words. `names`: {our field: the client's field}; one that is also an English word is replaced
        only at the start of the message. `places`: the client's name of each chat message."""
        found = re.match(r"messages[.\[](\d+)\]?", self.message)
        if found is not None and int(found[1]) < len(places):
            place = places[int(found[1])]
            param: str | None = place.partition("[")[0]
            if "." in found[0]:  # of a validation: messages.3.role
                place = place.replace("[", ".").rstrip("]")
            text = place + self.message[found.end() :]
        else:
            sure = "|".join(name for name in names if "_" in name)
            pattern = rf"^({'|'.join(names)})(?!\w)|(?<![\w-])({sure})(?!\w)"
            text = re.sub(pattern, lambda found: names[found[0]], self.message)
            param = names.get(self.param or "") or self.param
        return ApiError(self.status, text, param=param, code=self.code, headers=self.headers)

    def response(self, path: str = "") -> Response:
        # ASCII: a message may quote half a surrogate pair, which has no UTF-8
        body = json.dumps(self.body(path), ensure_ascii=True).encode()
        return Response(body, self.status, self.headers, media_type=JSONResponse.media_type)


def bad_field(name: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name, code=code)


def timed_out(what: str, seconds: float) -> ApiError:
    # The openai client repeats a 408 twice without this header, which would treble the load that caused it.
    return ApiError(408, f"{what} took longer than {seconds:g} s", code="timeout", headers={"x-should-retry": "false"})


def headers_too_large(limit_kb: int) -> ApiError:
    message = f"the headers are larger than {limit_kb} KB (--max-header-kb)"
    return ApiError(431, message, code="headers_too_large", headers={"Connection": "close"})


def as_api_error(error: BaseException, fields: frozenset[str] = frozenset()) -> ApiError:
    """What the client may learn of an exception. `fields`: names that may be the `param`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, RequestError):
        # Our messages begin with what is wrong: "top_p=3: ...", "logit_bias[7]=...", "stop: ...", "the prompt has ..."
        found = re.match(r"(?:the )?(\w+)", str(error))
        name = found[1] if found else ""
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        if name == "prompt" and "messages" in fields and "prompt" not in fields:
            return bad_field("messages", str(error), code)
        return ApiError(400, str(error), param=name if name in fields else None, code=code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, ENGINE_FAILED, code="engine_failed")
    return ApiError(500, INTERNAL, code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first fault, by the name of its field."""
    # Without the input and the context: a body of megabytes is not repeated in a message.
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # In a union, the branch that got furthest is the one meant, or the one that only finds too much or too little.
    fault = max(faults, key=lambda f: (sum(type(part) is int for part in f["loc"]), not f["type"].endswith("_type")))
    place = [str(part) for part in fault["loc"] if isinstance(part, int) or re.fullmatch(r"[\w.-]{1,64}", str(part))]
    place = [part for part in place if not part.startswith(("list[", "function-", "constrained-"))]
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "unknown field: this server neither honours nor ignores it; leave it out"
    where = ".".join(place)
    param = place[0] if place else None
    return ApiError(400, f"{where}: {message}" if where else message, param=param, code=CODES.get(fault["type"]))

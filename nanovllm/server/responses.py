"""OpenAI's Responses API: /v1/responses, as a dialect of a chat (blocks.py), and the answers that it remembers."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from nanovllm.server.answers import dump, named_event
from nanovllm.server.blocks import Block, BlockAnswer, Content, DialectBody, Event, Typed, text_parts
from nanovllm.server.body import Body, ShortText, parse_object
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import MAX_TOOLS, ChatBody, Message
from nanovllm.server.service import Service

PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}  # of ids
PARTS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}

# ---- what is remembered ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    record: bytes  # as it was sent
    messages: Sequence[Message]  # the conversation up to and with this answer; its answers share the messages
    num_bytes: int  # of the messages

    @property
    def size(self) -> int:
        return len(self.record) + self.num_bytes


class ResponseStore:
    """The answers that were used last, within a count and a number of bytes. A conversation counts in full for each of
    its answers, since each can be the only one of them that is still there."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # the oldest use first
        self._size = 0

    def get(self, name: str, param: str | None = None) -> Kept:
        if name not in self._kept:
            raise ApiError(
                404,
                f"response {name!r:.80} is not kept here: it was made with store=false, deleted, made before the "
                f"last start, or pushed out by newer ones (--max-responses {self._max_count}, --max-responses-mb): "
                "send the conversation as input",
                param=param,
                code="response_not_found",
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def put(self, name: str, kept: Kept) -> None:
        self._kept[name] = kept
        self._size += kept.size
        while len(self._kept) > self._max_count or self._size > self._max_bytes:
            self._size -= self._kept.popitem(last=False)[1].size

    def delete(self, name: str) -> None:
        self._size -= self.get(name).size
        del self._kept[name]


# ---- bodies ----------------------------------------------------------------------------------------------------------


ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Typed, place="input", needed=ITEMS):
    type: str = "message"
    role: ShortText | None = None
    content: Content | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: str | None = None
    output: Content | None = None


class FlatTool(Typed, place="tools", needed={"function": ("name",)}):
    name: ShortText | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class FlatChoice(Typed, place="tool_choice", needed={"function": ("name",)}):
    name: ShortText | None = None


class TextFormat(Typed, place="text", needed={"text": (), "json_object": (), "json_schema": ("name", "schema_")}):
    name: ShortText | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.model_dump(by_alias=True, exclude={"type"})}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Any = None  # a hint


class ResponseBody(DialectBody):
    NAMES: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "access_programs": (),
    }

    input: str | Annotated[list[InputItem], Field(max_length=2048, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    store: bool = True
    max_output_tokens: int | None = None
    tools: Annotated[list[FlatTool], Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)]
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    metadata: Annotated[dict[ShortText, ShortText], Field(default_factory=dict, max_length=16)]
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none
    stream_options: dict[str, Any] | None = None  # type: ignore[assignment]  # about padding, which is never sent
    # Nothing in the answer depends on these here
    reasoning: Any = None
    max_tool_calls: Any = None  # of OpenAI's own tools
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None

    def chat(self, before: Sequence[Message]) -> ChatBody:
        """`before`: the conversation that this goes on with. Instructions hold for one answer only."""
        fields: dict[str, Any] = {"max_tokens": self.max_output_tokens, "tool_choice": self.tool_choice}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        if isinstance(self.tool_choice, FlatChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        fields["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        system = {"role": "system", "content": self.instructions}
        placed: list[tuple[str, Any]] = [] if self.instructions is None else [("instructions", system)]
        placed += [("previous_response_id", message) for message in before]
        return self.as_chat([*placed, *self._messages()], parallel_tool_calls=self.parallel_tool_calls, **fields)

    def _messages(self) -> list[tuple[str, dict[str, Any]]]:
        if isinstance(self.input, str):
            return [("input", {"role": "user", "content": self.input})]
        found: list[tuple[str, dict[str, Any]]] = []
        for number, item in enumerate(self.input):
            row: dict[str, Any] = {"role": item.role, "content": text_parts(item.content or "")}
            if item.type == "function_call_output":
                row = {"role": "tool", "tool_call_id": item.call_id, "content": text_parts(item.output or "")}
            elif item.type == "function_call":  # in a chat, part of the message of the assistant
                function = {"name": item.name, "arguments": item.arguments}
                calls = [{"id": item.call_id, "function": function}]
                row = {"role": "assistant", "tool_calls": calls}
                if found and found[-1][1]["role"] == "assistant":
                    found[-1][1].setdefault("tool_calls", []).extend(calls)
                    continue
            if item.type != "reasoning":
                found.append((f"input[{number}]", row))
        return found


# ---- answers ---------------------------------------------------------------------------------------------------------


class ResponseAnswer(BlockAnswer[ResponseBody]):
    def __init__(
        self, service: Service, asked: ResponseBody, chat: ChatBody, request_id: str, store: ResponseStore, before: Kept
    ) -> None:
        super().__init__(service, asked, chat, request_id)
        self._store, self._before = store, before
        self._final: dict[str, Any] = {}
        # Not the client's request id, which others may guess: the id is all it takes to read the answer. Its end is the
        # name of this replica, for the router.
        self._id = f"resp_{uuid.uuid4().hex}" + (f"_{service.replica}" if service.replica else "")
        self._numbers = itertools.count()

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def started(self) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Event]:
        yield self._event("output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
        if block.kind != "call":
            yield self._event("content_part.added", **_place(block), part=_part(block))

    def grown(self, block: Block, text: str) -> Event:
        return self._event(f"{PARTS[block.kind]}.delta", **_place(block), delta=text, **_scores(block))

    def closed(self, block: Block) -> Iterator[Event]:
        fields = {"name": block.name, "arguments": block.text} if block.kind == "call" else {"text": block.text}
        yield self._event(f"{PARTS[block.kind]}.done", **_place(block), **fields, **_scores(block))
        if block.kind != "call":
            yield self._event("content_part.done", **_place(block), part=_part(block))
        yield self._event("output_item.done", output_index=block.index, item=self._item(block))

    def ended(self) -> Iterator[Event]:
        self._final = self._response(self._status)
        if self.asked.store:
            self._keep()
        yield self._event(self._status, response=self._final)

    def whole(self) -> dict[str, Any]:
        return self._final

    def failure(self, problem: ApiError, path: str) -> bytes:
        error = {"code": problem.code or "server_error", "message": problem.message}
        return named_event(self._event("failed", response={**self._response("failed"), "error": error}))

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason in ("length", "abort") else "completed"

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        if status is None:  # only the last one can be cut off
            status = self._status if block is self.blocks[-1] else "completed"
        content = [] if status == "in_progress" else [_part(block)]
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
        if block.kind == "thought":
            item = {"type": "reasoning", "summary": [], "content": content}
        elif block.kind == "call":
            item = {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
        return {"id": _place(block)["item_id"], **item, "status": status}

    def _response(self, status: str) -> dict[str, Any]:
        asked, ended = self.asked, status in ("completed", "incomplete")
        counts = self.counts.record()
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        choice = asked.tool_choice
        wanted = (asked.text and asked.text.format) or TextFormat.model_validate({"type": "text"})
        return {
            "id": self._id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.reason == "length" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata, "model": self.service.model_name,
            "output": [self._item(block) for block in self.blocks] if ended else [],
            "parallel_tool_calls": asked.parallel_tool_calls, "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None}, "store": asked.store,
            "temperature": self.params.temperature,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools], "top_p": self.params.top_p,
            "truncation": "disabled", "usage": usage if ended else None, "user": asked.user,
        }  # fmt: skip

    def _keep(self) -> None:
        text = "\n".join(block.text for block in self.blocks if block.kind == "text")
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": block.text}}
            for block in self.blocks
            if block.kind == "call" and isinstance(parse_object(block.text), dict)
        ]
        answer = Message(role="assistant", content=text, tool_calls=calls or None)  # type: ignore[arg-type]
        first = len(self._before.messages) + (self.asked.instructions is not None)
        new = [*self.body_model.messages[first:], answer]
        num_bytes = self._before.num_bytes + sum(len(message.model_dump_json()) for message in new)
        self._store.put(self._id, Kept(dump(self._final), [*self._before.messages, *new], num_bytes))


def _place(block: Block) -> dict[str, Any]:
    place = {"item_id": f"{PREFIXES[block.kind]}_{block.id}", "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _part(block: Block) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": PARTS[block.kind], "text": block.text, **more}


def _scores(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}


def add_response_routes(app: FastAPI, service: Service) -> None:
    store = ResponseStore(service.options.max_responses, int(service.options.max_responses_mb * 2**20))

    @app.post("/v1/responses", response_class=Response)
    async def create(request: Request) -> Response:
        asked = await service.read(request, ResponseBody)
        before = asked.previous_response_id
        kept = Kept(b"", (), 0) if before is None else store.get(before, "previous_response_id")
        chat = await service.encode(lambda: asked.chat(kept.messages))
        return ResponseAnswer(service, asked, chat, request.scope["request_id"], store, kept)

    @app.get("/v1/responses/{name}")
    async def retrieve(name: str) -> Response:
        return Response(store.get(name).record, media_type=JSONResponse.media_type)

    @app.delete("/v1/responses/{name}")
    async def delete(name: str) -> Response:
        store.delete(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

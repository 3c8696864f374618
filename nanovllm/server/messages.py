"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens, as a dialect of a chat (blocks.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from nanovllm.server.blocks import Block, BlockAnswer, Content, DialectBody, Event, Typed, text_parts
from nanovllm.server.body import FEW, Body, SentBack, ShortText, parse_object
from nanovllm.server.prompts import tokenize
from nanovllm.server.protocol import MAX_STOPS, MAX_TOOLS, ChatBody, TokenizeBody
from nanovllm.server.service import Service

DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}

# ---- bodies ----------------------------------------------------------------------------------------------------------


BLOCKS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": (),
    "redacted_thinking": (),
}


class InputBlock(Typed, place="messages", needed=BLOCKS):
    text: str | None = None
    id: ShortText | None = None
    name: ShortText | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortText | None = None
    content: Content = ""  # of a result
    is_error: bool = False


class SystemBlock(Typed, place="system", needed={"text": ("text",)}):
    text: str | None = None


class InputMessage(SentBack):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], FEW]

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """One message, or several: results of functions have a role of their own in a chat."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "text":
                texts.append({"type": "text", "text": block.text})
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "function": function})
            elif block.type == "tool_result":
                if texts:
                    yield {"role": self.role, "content": texts}
                    texts = []
                content = text_parts(block.content)
                if block.is_error:
                    said = content if isinstance(content, str) else "\n".join(str(part.get("text")) for part in content)
                    content = f"error: {said}"
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if calls:
            yield {"role": self.role, "content": texts or None, "tool_calls": calls}
        elif texts or not any(block.type == "tool_result" for block in self.content):
            yield {"role": self.role, "content": texts}


class InputTool(Typed, place="tools", needed={"custom": ("name", "input_schema")}):
    type: str = "custom"
    name: ShortText | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"})
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class InputChoice(Typed, place="tool_choice", needed={"auto": (), "any": (), "none": (), "tool": ("name",)}):
    name: ShortText | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Typed, place="output_config", needed={"json_schema": ("schema_",)}):
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(SentBack):  # beside the format there are only hints
    format: OutputFormat | None = None


class MessagesMetadata(Body):
    user_id: ShortText | None = None


class CountBody(DialectBody):
    """What decides how long the prompt is; /v1/messages needs max_tokens too."""

    NAMES: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "max_completion_tokens": "max_tokens",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "container": (),
        "mcp_servers": ([],),
        "stream_options": (),
    }

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=2048, fail_fast=True)]
    system: str | Annotated[list[SystemBlock], FEW] | None = None
    stop_sequences: Annotated[list[ShortText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: InputChoice | None = None
    output_config: OutputConfig | None = None
    metadata: MessagesMetadata | None = None
    # Nothing in the answer depends on these here
    thinking: Any = None
    context_management: Any = None  # when to shorten the conversation; it is never shortened here
    cache_control: Any = None
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def chat(self) -> ChatBody:
        fields: dict[str, Any] = {"tools": [tool.for_chat() for tool in self.tools or ()]}
        if self.metadata is not None and self.metadata.user_id is not None:
            fields["user"] = self.metadata.user_id
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        if (choice := self.tool_choice) is not None:
            fields.update(tool_choice=choice.for_chat(), parallel_tool_calls=not choice.disable_parallel_tool_use)
        if self.output_config is not None and (wanted := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": wanted.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(self, MessagesBody):
            fields["max_tokens"] = self.max_tokens
        if self.messages[-1].role == "assistant":  # the answer begins with the text of this message
            fields.update(continue_final_message=True, add_generation_prompt=False)
        return self.as_chat(self._messages(), **fields)

    def _messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if system := self.system:
            text = system if isinstance(system, str) else "\n".join(block.text or "" for block in system)
            yield "system", {"role": "system", "content": text}
        for number, message in enumerate(self.messages):
            for row in message.for_chat():
                yield f"messages[{number}]", row


class MessagesBody(CountBody):
    max_tokens: int


# ---- answers ---------------------------------------------------------------------------------------------------------


class MessagesAnswer(BlockAnswer[CountBody]):
    def started(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": {**self._message([]), "stop_reason": None}}

    def opened(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _block(block)}

    def grown(self, block: Block, text: str) -> Event:
        kind, name = DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": block.index}

    def ended(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        return self._message([_block(block, parse_object(block.text)) for block in self.blocks])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.service.model_name,
            "content": content,
            **self._end(),
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        stop = self.stop_reason if self.reason == "stop" and isinstance(self.stop_reason, str) else None
        reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": STOP_REASONS.get(self.reason or "", reason), "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """In Anthropic's API input_tokens leaves the cached tokens of the prompt out."""
        counts = self.counts.record()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }


def _block(block: Block, value: Any = None) -> dict[str, Any]:
    """Empty, or with all its text. A call that was cut off has no arguments: half an object is none."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": value if isinstance(value, dict) else {}}


def add_message_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", response_class=Response)
    async def messages(request: Request) -> Response:
        body = await service.read(request, MessagesBody)
        return MessagesAnswer(service, body, await service.encode(body.chat), request.scope["request_id"])

    @app.post("/v1/messages/count_tokens", response_class=Response)
    async def count_tokens(request: Request) -> Response:
        body = await service.read(request, CountBody)
        service.check_model(body.model)

        def count() -> Response:
            chat = body.chat()
            wanted = TokenizeBody.model_construct(messages=chat.messages, tools=chat.offered)
            with body.own_names():
                found = tokenize(service.engine.engine, wanted, service.tool_form)
            return JSONResponse({"input_tokens": found["count"]})

        return await service.encode(count)

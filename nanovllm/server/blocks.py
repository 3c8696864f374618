"""What the Responses API of OpenAI and the Messages API of Anthropic have in common. Both are dialects of a chat.

    chat = as_chat(fields, names)            # their body as a ChatBody; an error has the names of their fields
    ResponseAnswer(service, ..., chat, ...)  # a BlockAnswer: only the shape of the answer and of its events is theirs

Their answers are lists of blocks, each a thought, a text or a call of a function. In a stream a block is opened, grows,
and is closed before the next one is opened. A dialect says what these moments look like. An answer in one go takes the
same way: its text comes as one delta, and the events are not sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from starlette.types import Receive, Scope, Send

from nanovllm.engine.inputs import EngineInput
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestDelta
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.answers import ChatAnswer, named_event
from nanovllm.server.errors import ApiError, as_api_error
from nanovllm.server.pieces import Choice
from nanovllm.server.protocol import Body, ChatBody, Sampling
from nanovllm.server.service import Service
from nanovllm.server.tools import new_call

Event = dict[str, Any]
Kind = Literal["thought", "text", "call"]
Content = str | Annotated[list[dict[str, Any]], Field(max_length=2048, fail_fast=True)]
TEXT_PARTS = ("text", "input_text", "output_text")

# ---- bodies ----------------------------------------------------------------------------------------------------------


class Typed(Body):
    """A part of a body whose type says which fields it needs. Clients send back what they received, so fields that mean
    nothing here (ids, statuses, citations, hints for a cache) are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)
    NEEDED: ClassVar[dict[str, tuple[str, ...]]]  # type -> fields
    PLACE: ClassVar[str]  # in the body

    type: str

    @model_validator(mode="after")
    def _is_complete(self) -> Typed:
        fault = None
        if self.type not in self.NEEDED:
            fault = f"is not supported, only {', '.join(self.NEEDED)}"
        elif missing := [name for name in self.NEEDED[self.type] if getattr(self, name) is None]:
            fault = f"needs {missing[0].rstrip('_')}"
        if fault is not None:
            code = "unsupported_content" if self.type not in self.NEEDED else "missing_field"
            raise ApiError(400, f"{self.PLACE}: type {self.type!r:.60} {fault}", param=self.PLACE, code=code)
        return self


def text_parts(content: Content) -> Content:
    """As parts of a chat message, which refuses those that are no text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.get("text")} if part.get("type") in TEXT_PARTS else part for part in content]


def sampling_fields(body: Sampling) -> dict[str, Any]:
    """Those that the client gave and that a chat has under the same name."""
    return {name: getattr(body, name) for name in Sampling.model_fields if name in body.model_fields_set}


def as_chat(fields: dict[str, Any], names: Mapping[str, str]) -> ChatBody:
    try:
        return ChatBody(**fields)
    except (ApiError, ValidationError) as error:
        raise as_api_error(error).renamed(names) from error


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    index: int
    kind: Kind
    name: str = ""  # of the function that is called
    id: str = field(default_factory=lambda: new_call("", "")["id"])
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        return "".join(self.parts)


class BlockAnswer(ChatAnswer):
    done = b""
    names: dict[str, str]  # fields of a chat -> fields of the dialect

    def __init__(self, service: Service, body: ChatBody, request_id: str) -> None:
        super().__init__(service, body, request_id)
        if body.response_format is not None:  # which is what the engine calls structured_outputs
            self.names = {**self.names, "structured_outputs": self.names["response_format"]}
        self.blocks: list[Block] = []
        self.counts = self.usage()
        self.reason: str | None = None  # why the answer has ended
        self.stop_reason: int | str | None = None
        self.params = SamplingParams()  # those of the request, once it is encoded
        self._choice = Choice(0)

    # ---- what the dialects differ in ---------------------------------------------------------------------------

    def started(self) -> Iterator[Event]:
        raise NotImplementedError

    def opened(self, block: Block) -> Iterator[Event]:
        raise NotImplementedError

    def grown(self, block: Block, text: str) -> Event:
        raise NotImplementedError

    def closed(self, block: Block) -> Iterator[Event]:
        raise NotImplementedError

    def ended(self) -> Iterator[Event]:
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer in one go, of all blocks."""
        raise NotImplementedError

    # ---- what they have in common ------------------------------------------------------------------------------

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        inputs, self.params = super().encode()
        return inputs, self.params

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super()._work(scope, receive, send)
        except (ApiError, RequestError) as error:
            raise as_api_error(error, ChatBody.fields()).renamed(self.names) from error

    def _whole(self, wholes: dict[int, RequestDelta]) -> dict[str, Any]:
        for _ in self._tell(wholes[0]):
            pass
        return self.whole()

    async def _events(self, deltas: AsyncIterator[tuple[int, RequestDelta]]) -> AsyncIterator[bytes]:
        async for _, delta in deltas:
            if data := b"".join(map(named_event, self._tell(delta))):
                yield data

    def _tell(self, delta: RequestDelta) -> Iterator[Event]:
        self.counts.add(0, delta)
        if self._choice.is_first:
            self._choice.is_first = False
            yield from self.started()
        for new in delta.outputs:
            said, self.reason = self.read(self._choice, new)
            pieces = list(takewhile(lambda piece: piece.name is None, said.calls))  # of the call that is open
            for piece in pieces:
                yield from self._write("call", piece.arguments)
            yield from self._write("thought", said.thought)
            yield from self._write("text", said.content)
            for piece in said.calls[len(pieces) :]:
                if piece.name is not None:
                    yield from self._open("call", piece.name)
                yield from self._write("call", piece.arguments)
            if self.reason is not None:
                self.stop_reason = new.stop_reason
                if not self.blocks:  # an answer has one, even without a word
                    yield from self._open("text")
                yield from self.closed(self.blocks[-1])
                yield from self.ended()

    def _open(self, kind: Kind, name: str = "") -> Iterator[Event]:
        if self.blocks:
            yield from self.closed(self.blocks[-1])
        self.blocks.append(Block(len(self.blocks), kind, name))
        yield from self.opened(self.blocks[-1])

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._open(kind)
        self.blocks[-1].parts.append(text)
        yield self.grown(self.blocks[-1], text)

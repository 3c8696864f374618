"""What the Responses API of OpenAI and the Messages API of Anthropic have in common. Both are dialects of a chat.

    chat = body.as_chat(messages, ...)          # a DialectBody as a ChatBody; errors have the names of its fields
    ResponseAnswer(service, body, chat, ...)    # a BlockAnswer: each dialect has its own shape of answers and events

Their answers are lists of blocks, each a thought, a text or a call of a function. In a stream a block is opened, grows,
and is closed before the next one is opened. A dialect defines the events of these moments. An answer in one go takes
the same way: its text comes as one delta, and the events are not sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from starlette.types import Receive, Scope, Send

from nanovllm.engine.inputs import EngineInput
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestDelta
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.answers import ChatAnswer, named_event
from nanovllm.server.body import SentBack
from nanovllm.server.errors import ApiError, as_api_error, bad_field
from nanovllm.server.pieces import Choice
from nanovllm.server.protocol import ChatBody, Message, Sampling
from nanovllm.server.service import Service
from nanovllm.server.tools import new_call

Event = dict[str, Any]
Kind = Literal["thought", "text", "call"]
Content = str | Annotated[list[dict[str, Any]], Field(max_length=2048, fail_fast=True)]
TEXT_PARTS = ("text", "input_text", "output_text")

# ---- bodies ----------------------------------------------------------------------------------------------------------


class Typed(SentBack):
    """A part of a body that needs other fields for each type. Clients send back what they received, so fields without a
    meaning here (ids, statuses, citations, hints for a cache) are ignored."""

    PLACE: ClassVar[str]  # the field of the body
    NEEDED: ClassVar[dict[str, tuple[str, ...]]]  # type -> fields

    type: str

    def __init_subclass__(cls, place: str, needed: dict[str, tuple[str, ...]]) -> None:
        super().__init_subclass__()
        cls.PLACE, cls.NEEDED = place, needed

    @model_validator(mode="after")
    def _is_complete(self) -> Typed:
        said = f"type {self.type!r:.60}"
        if self.type not in self.NEEDED:
            known = ", ".join(self.NEEDED)
            raise bad_field(self.PLACE, f"{said} is not supported, only {known}", "unsupported_content")
        for name in self.NEEDED[self.type]:
            if getattr(self, name) is None:
                raise bad_field(self.PLACE, f"{said} needs {name.rstrip('_')}", "missing_field")
        return self


def text_parts(content: Content) -> Content:
    """As parts of a chat message, which refuses those that are no text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.get("text")} if part.get("type") in TEXT_PARTS else part for part in content]


class DialectBody(Sampling):
    NAMES: ClassVar[dict[str, str]]  # fields of a chat -> fields of this body
    _names: dict[str, str] = PrivateAttr(default_factory=dict)  # those that hold for this one
    _places: list[str] = PrivateAttr(default_factory=list)  # where in this body each message of the chat stands

    def as_chat(self, messages: Iterable[tuple[str, Message | dict[str, Any]]], **fields: Any) -> ChatBody:
        """`messages`: each with its place in this body. The given fields of Sampling are passed on."""
        placed = list(messages)
        self._places = [place for place, _ in placed]
        same = Sampling.model_fields.keys() & self.model_fields_set - {"stream_options"}
        fields = {**{name: getattr(self, name) for name in same}, **fields}
        self._names = dict(self.NAMES)
        if fields.get("response_format") is not None:  # the engine's name of it
            self._names["structured_outputs"] = self.NAMES["response_format"]
        with self.own_names():
            return ChatBody(**fields, messages=[message for _, message in placed])  # type: ignore[misc]

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors of the chat that are raised inside name the fields and places of this body."""
        try:
            yield
        except (ApiError, ValidationError, RequestError) as error:
            raise as_api_error(error, ChatBody.fields()).renamed(self._names, self._places) from error


DialectT = TypeVar("DialectT", bound=DialectBody)

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


class BlockAnswer(ChatAnswer, Generic[DialectT]):
    done = b""

    def __init__(self, service: Service, asked: DialectT, chat: ChatBody, request_id: str) -> None:
        super().__init__(service, chat, request_id)
        self.asked = asked
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
        with self.asked.own_names():
            await super()._work(scope, receive, send)

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
                if not self.blocks:  # an answer without text has one that is empty
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

"""Answers: a body in, JSON or server-sent events out, for completions and for chat.

An answer does its work when the framework sends it, in one task: encode, admit, generate, send. The first output is
awaited before the status line goes out, so what fails before the first token has a real status (400, 429, 503, ...);
after that an error is one more event. If the client leaves, the task is cancelled, and with it the engine's request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanovllm.engine.inputs import EngineInput
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, as_api_error
from nanovllm.server.guard import ClientGone, Guard
from nanovllm.server.pieces import Follower, Piece, chat_logprobs, completion_logprobs, usage
from nanovllm.server.prompts import encode_chat, encode_prompts
from nanovllm.server.protocol import ChatBody, CompletionBody, Sampling
from nanovllm.server.service import Job, Service
from nanovllm.server.tools import CallReader, Said

logger = logging.getLogger("nanovllm")
BodyT = TypeVar("BodyT", bound=Sampling)
DONE = b"data: [DONE]\n\n"
SMALL_ANSWER = 256  # positions with log probabilities; more take longer than the event loop should be held
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events defeats streaming
]  # fmt: skip


class Answer(Response, Generic[BodyT]):
    prefix: str
    object: str
    chunk_object: str

    def __init__(self, service: Service, body: BodyT, request_id: str) -> None:
        super().__init__()
        self.service = service
        self.body_model = body
        self.request_id = request_id
        self.created = int(time.time())
        self.arrival = time.monotonic()
        self._started = False  # an event stream whose status line is out

    # ---- what the two kinds differ in --------------------------------------------------------------------------

    def num_prompts(self) -> int:
        return 1

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        """In another thread: everything that can be refused is refused here."""
        raise NotImplementedError

    def choice(self, index: int, piece: Piece, output: RequestOutput) -> dict[str, Any] | None:
        """Of an event (None: nothing to tell yet), or of an answer in one go."""
        raise NotImplementedError

    def opening(self, index: int, piece: Piece, output: RequestOutput) -> dict[str, Any] | None:
        """An event before the first of a choice."""
        return None

    def usage(self, outputs: dict[int, RequestOutput]) -> dict[str, Any]:
        return usage(outputs)

    # ---- what they have in common ------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Guard(receive, self.service.options.request_timeout):
                await self._work(scope, receive, send)
        except ClientGone:
            logger.info("request %s: the client left", self.request_id)
        except Exception as error:
            if not self._started:
                raise
            # The status line is out: the client learns of it by an event.
            if not isinstance(error, ApiError):
                logger.error("request %s failed in its stream", self.request_id, exc_info=error)
            data = event(as_api_error(error).body()) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, options = self.body_model, self.service.options
        self.service.check_model(body.model)
        if body.user is not None:
            logger.info("request %s is of user %r", self.request_id, body.user)
        if not 1 <= body.n <= options.max_n:
            raise ApiError(400, f"n={body.n}: must be in [1, {options.max_n}]", param="n")
        with self.service.admit(self.num_prompts() * body.n):
            inputs, params = await self.service.encode(self.encode)
            job = Job(self.request_id, inputs, params, body.priority, self.arrival)
            async with aclosing(self.service.stream(job)) as outputs:
                if body.stream:
                    await self._send_events(outputs, send)
                else:
                    newest = {index: output async for index, output in outputs}
                    await (await self._respond(newest))(scope, receive, send)

    async def _respond(self, outputs: dict[int, RequestOutput]) -> Response:
        size = sum(num_positions(output) for output in outputs.values())
        if size <= SMALL_ANSWER:
            return JSONResponse(self._whole(outputs))
        data = await asyncio.to_thread(lambda: dump_slowly(self._whole(outputs)))
        return Response(data, media_type=JSONResponse.media_type)

    def _whole(self, outputs: dict[int, RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in sorted(outputs.items()):
            for completion in output.outputs:
                piece = Follower().next(completion)
                assert piece is not None
                choice = self.choice(self._index(index, completion), piece, output)
                assert choice is not None
                choices.append(choice)
        return self._envelope(self.object, choices, usage=self.usage(outputs))

    def _index(self, prompt: int, completion: CompletionOutput) -> int:
        return prompt * self.body_model.n + completion.index

    def _envelope(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.request_id}", "object": kind, "created": self.created,
            "model": self.service.model_name, "choices": choices, **more,
        }  # fmt: skip

    async def _send_events(self, outputs: AsyncIterator[tuple[int, RequestOutput]], send: Send) -> None:
        async for data in self._events(outputs):
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _events(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]:
        asked = self.body_model.stream_options
        followers: dict[int, Follower] = {}
        newest: dict[int, RequestOutput] = {}
        async for prompt, output in outputs:
            newest[prompt] = output
            choices = []
            is_large = False
            for completion in output.outputs:
                index = self._index(prompt, completion)
                piece = followers.setdefault(index, Follower()).next(completion)
                if piece is None:
                    continue
                if piece.is_first and (opening := self.opening(index, piece, output)):
                    choices.append(opening)
                echoed = output.prompt_logprobs if piece.is_first else None
                if len(piece.positions or ()) + len(echoed or ()) > SMALL_ANSWER:
                    is_large, choice = True, await asyncio.to_thread(self.choice, index, piece, output)
                else:
                    choice = self.choice(index, piece, output)
                if choice is not None:
                    choices.append(choice)
            more: dict[str, Any] = {}
            if asked is not None and asked.include_usage:
                more["usage"] = self.usage(newest) if asked.continuous_usage_stats else None
            for choice in choices:
                chunk = self._envelope(self.chunk_object, [choice], **more)
                yield await asyncio.to_thread(event, chunk, dump_slowly) if is_large else event(chunk)
        if asked is not None and asked.include_usage:
            yield event(self._envelope(self.chunk_object, [], usage=self.usage(newest)))


def num_positions(output: RequestOutput) -> int:
    """With log probabilities, which are most of the work."""
    return len(output.prompt_logprobs or ()) + sum(len(completion.logprobs or ()) for completion in output.outputs)


def dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def dump_slowly(data: dict[str, Any]) -> bytes:
    """For other threads. json.dumps is one call of C that holds the interpreter's lock, and the event loop waits for
    it as if it were its own; in pieces Python's own encoder writes, which lets others in between."""
    parts = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(data)
    return "".join(parts).encode(errors="replace")


def event(data: dict[str, Any], write: Callable[[dict[str, Any]], bytes] = dump) -> bytes:
    return b"data: " + write(data) + b"\n\n"


class CompletionAnswer(Answer[CompletionBody]):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def num_prompts(self) -> int:
        count, limit = len(self.body_model.prompts), self.service.options.max_prompts
        if not 1 <= count <= limit:
            raise ApiError(400, f"prompt: {count} prompts, must be 1 to {limit}", param="prompt")
        return count

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        engine, body = self.service.engine.engine, self.body_model
        params = body.params(engine.sampling_defaults.values)
        return encode_prompts(engine, body, params), engine.grammars.compiled(params)

    def choice(self, index: int, piece: Piece, output: RequestOutput) -> dict[str, Any]:
        body = self.body_model
        text, num_top = piece.text, body.logprobs or 0
        positions, offset, first_token = piece.positions, piece.offset, None
        if body.only_scores:
            text, positions = "", positions and []
        if body.echo and output.prompt is not None:
            if piece.is_first:
                text = output.prompt + text
                if positions is not None and output.prompt_logprobs is not None:
                    positions = [position for position in output.prompt_logprobs if position] + positions
                    first_token = self.service.engine.engine.tokenizer.decode(output.prompt_token_ids[:1])
            else:
                offset += len(output.prompt)
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(positions, num_top, offset, first_token),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def usage(self, outputs: dict[int, RequestOutput]) -> dict[str, Any]:
        return usage(outputs, drop_new=self.body_model.only_scores)


class ChatAnswer(Answer[ChatBody]):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, request_id: str) -> None:
        super().__init__(service, body, request_id)
        self._readers: dict[int, CallReader] = {}  # of each choice

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        parsed, params = encode_chat(self.service.engine.engine, self.body_model, self.service.tool_form)
        return [parsed], params

    def _reader(self) -> CallReader:
        body = self.body_model
        names = [tool.function.name for tool in body.offered]
        return CallReader(
            self.service.tool_form, names, must_call=body.must_call, has_grammar=body.binds_calls,
            one_call=body.one_call,
        )  # fmt: skip

    def opening(self, index: int, piece: Piece, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, piece: Piece, output: RequestOutput) -> dict[str, Any] | None:
        body, said, reason = self.body_model, Said(piece.text), piece.finish_reason
        if body.offered:
            reader = self._readers.get(index) or self._readers.setdefault(index, self._reader())
            said = reader.feed(piece.text, reason is not None)
            if body.stream and not (said.content or said.calls or piece.positions or reason):
                return None
            reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
        content: dict[str, Any] = {"content": said.content}
        if body.stream and said.calls:
            content = {"tool_calls": [call.as_delta() for call in said.calls]}
            if said.content:
                content["content"] = said.content
        elif not body.stream:
            content = {"role": "assistant", "content": said.content, "refusal": None}
            if calls := said.whole_calls():
                content.update(content=said.content or None, tool_calls=calls)
        return {
            "index": index,
            "delta" if body.stream else "message": content,
            "logprobs": chat_logprobs(piece.positions, body.top_logprobs),
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }

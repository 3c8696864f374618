"""Answers: a body in, JSON or server-sent events out, for completions and for chat.

An answer does its work when the framework sends it, in one task: encode, admit, generate, send. The first delta is
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
from dataclasses import replace
from typing import Any, Generic, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanovllm.engine.inputs import EngineInput
from nanovllm.outputs import CompletionDelta, RequestDelta
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, as_api_error, bad_field
from nanovllm.server.guard import ClientGone, Guard
from nanovllm.server.pieces import Choice, Usage, chat_logprobs, completion_logprobs, prompt_facts, token_ids
from nanovllm.server.prompts import compiled, encode_chat, encode_prompts, free_thoughts, tokenizer_of
from nanovllm.server.protocol import ChatBody, CompletionBody, Sampling, StreamOptions
from nanovllm.server.reasoning import Start, ThoughtReader, where
from nanovllm.server.service import ClientRequest, Service, server_left
from nanovllm.server.tools import AnswerPart, CallReader

logger = logging.getLogger("nanovllm")
BodyT = TypeVar("BodyT", bound=Sampling)
DONE = b"data: [DONE]\n\n"
SMALL_ANSWER = 256  # positions with log probabilities; more take longer than the event loop should be held
MARK = "text"  # stands for the text while the frame of an event is made
quote = json.JSONEncoder(ensure_ascii=False).encode
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects events defeats streaming
]
Write = Callable[[dict[str, Any]], bytes]
NAMED_EVENTS = ("/v1/responses", "/v1/messages")  # their streams have a name for each event, and no DONE


def num_positions(delta: RequestDelta) -> int:
    """With log probabilities, which are most of the work."""
    return len(delta.prompt_logprobs or ()) + sum(len(new.logprobs or ()) for new in delta.outputs)


def dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def dump_slowly(data: dict[str, Any]) -> bytes:
    """For other threads. json.dumps is one call of C that holds the interpreter's lock, so the event loop would wait
    for its end; iterencode writes in Python, piece by piece, and other threads run in between."""
    parts = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(data)
    return "".join(parts).encode(errors="replace")


def event(data: dict[str, Any], write: Write = dump) -> bytes:
    return b"data: " + write(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + event(data)


def failure(problem: ApiError, path: str = "") -> bytes:
    """The end of a stream that cannot go on."""
    if path.startswith(NAMED_EVENTS):
        return named_event({"type": "error", **problem.body(path)})
    return event(problem.body()) + DONE


class Answer(Response, Generic[BodyT]):
    prefix: str
    object: str
    chunk_object: str
    done = DONE  # after the last event

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

    def record(self, choice: Choice, new: CompletionDelta, delta: RequestDelta) -> dict[str, Any] | None:
        """A choice of an event (None: nothing to send yet), or of an answer in one go."""
        raise NotImplementedError

    def about_prompt(self, delta: RequestDelta) -> dict[str, Any]:
        """Beside the choices of the whole answer, or of the first event; completions have it inside their choices."""
        return {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """An event before the first of a choice."""
        return None

    def usage(self) -> Usage:
        return Usage()

    def failure(self, problem: ApiError, path: str) -> bytes:
        """The last event, of an answer that has begun and cannot go on."""
        return failure(problem, path)

    @property
    def has_frames(self) -> bool:
        """Events in the middle of an answer differ in their text only."""
        raise NotImplementedError

    # ---- what they have in common ------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with Guard(receive, self.service.options.request_timeout):
                await self._work(scope, receive, send)
        except ClientGone:
            logger.info("request %s: the client left", self.request_id)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                if not self.service.num_cut:
                    raise
                error = server_left()  # the engine is in a long step and has not taken the request yet
            if not self._started:
                raise error
            # The status line is out: the error is one more event.
            if not isinstance(error, ApiError):
                logger.error("request %s failed in its stream", self.request_id, exc_info=error)
            data = self.failure(as_api_error(error), scope["path"])
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, options = self.body_model, self.service.options
        self.service.check_model(body.model)
        if body.user is not None:
            logger.info("request %s is of user %r", self.request_id, body.user)
        if not 1 <= body.n <= options.max_n:
            raise bad_field("n", f"{body.n} is not in [1, {options.max_n}]")
        with self.service.admit(self.num_prompts() * body.n):
            inputs, params = await self.service.encode(self.encode)
            job = ClientRequest(self.request_id, inputs, params, body.priority, self.arrival, not body.stream)
            async with aclosing(self.service.stream(job)) as deltas:
                if body.stream:
                    await self._send_events(deltas, send)
                else:
                    wholes = {prompt: delta async for prompt, delta in deltas}
                    await (await self._respond(wholes))(scope, receive, send)

    async def _respond(self, wholes: dict[int, RequestDelta]) -> Response:
        if sum(num_positions(delta) for delta in wholes.values()) <= SMALL_ANSWER:
            return JSONResponse(self._whole(wholes))
        data = await asyncio.to_thread(lambda: dump_slowly(self._whole(wholes)))
        return Response(data, media_type=JSONResponse.media_type)

    def _whole(self, wholes: dict[int, RequestDelta]) -> dict[str, Any]:
        choices, usage = [], self.usage()
        for prompt, delta in sorted(wholes.items()):
            usage.add(prompt, delta)
            choices += [self.record(Choice(self._index(prompt, new)), new, delta) for new in delta.outputs]
        return self._envelope(self.object, choices, usage=usage.record(), **self.about_prompt(wholes[0]))

    def _index(self, prompt: int, new: CompletionDelta) -> int:
        return prompt * self.body_model.n + new.index

    def _envelope(self, kind: str, choices: list[dict[str, Any] | None], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
            **more,
        }

    async def _send_events(self, deltas: AsyncIterator[tuple[int, RequestDelta]], send: Send) -> None:
        async for data in self._events(deltas):
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self.done, "more_body": False})

    async def _events(self, deltas: AsyncIterator[tuple[int, RequestDelta]]) -> AsyncIterator[bytes]:
        asked = self.body_model.stream_options or StreamOptions()
        counts = asked.include_usage
        choices: dict[int, Choice] = {}
        usage = self.usage()
        more: dict[str, Any] = {"usage": None} if counts else {}
        async for prompt, delta in deltas:
            if counts:
                usage.add(prompt, delta)
                more["usage"] = usage.record() if asked.continuous_usage_stats else None
            parts = []
            for new in delta.outputs:
                index = self._index(prompt, new)
                choice = choices.get(index) or choices.setdefault(index, Choice(index))
                echoed = len(delta.prompt_logprobs or ()) if choice.is_first else 0
                if len(new.logprobs or ()) + echoed > SMALL_ANSWER:
                    parts += await asyncio.to_thread(self._parts, choice, new, delta, more, dump_slowly)
                else:
                    parts += self._parts(choice, new, delta, more)
            if parts:
                yield b"".join(parts)
        if counts:
            yield event(self._envelope(self.chunk_object, [], usage=usage.record()))

    def _parts(
        self, choice: Choice, new: CompletionDelta, delta: RequestDelta, more: dict[str, Any], write: Write = dump
    ) -> list[bytes]:
        """The events of what is new; none for half a character, or text that may become a stop string."""
        text, is_last = new.text, new.finish_reason is not None
        if not (text or new.logprobs or is_last or self.body_model.return_token_ids):
            return []
        if choice.frame is not None and not is_last:
            return [choice.frame[0], quote(text).encode(errors="replace"), choice.frame[1]]
        is_first = choice.is_first
        records = [self.opening(choice)] if is_first else []
        records.append(self.record(choice, new, delta))
        choice.is_first = False
        if self.has_frames and not is_last and not more.get("usage"):
            sample = self.record(choice, CompletionDelta(new.index, 0, [], [MARK]), delta)
            # The last occurrence is the text: nothing that a client has sent comes after it.
            whole = event(self._envelope(self.chunk_object, [sample], **more))
            choice.frame = whole.rpartition(quote(MARK).encode())[::2]
        if is_first:
            more = {**more, **self.about_prompt(delta)}
        return [event(self._envelope(self.chunk_object, [one], **more), write) for one in records if one is not None]


class CompletionAnswer(Answer[CompletionBody]):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def num_prompts(self) -> int:
        count, limit = len(self.body_model.prompts), self.service.options.max_prompts
        if not 1 <= count <= limit:
            raise bad_field("prompt", f"{count} prompts, must be 1 to {limit}")
        return count

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        engine, body = self.service.engine.engine, self.body_model
        params = body.params(engine.sampling_defaults.values)
        return encode_prompts(engine, body, params), compiled(engine, body, params)

    def record(self, choice: Choice, new: CompletionDelta, delta: RequestDelta) -> dict[str, Any]:
        body = self.body_model
        text, num_top = new.text, body.logprobs or 0
        positions, first_token = new.logprobs, None
        if body.only_scores:
            text, positions = "", positions and []
        if body.echo and delta.prompt is not None and choice.is_first:
            text = delta.prompt + text
            if positions is not None and delta.prompt_logprobs is not None:
                positions = [position for position in delta.prompt_logprobs if position] + positions
                begin = tokenizer_of(self.service.engine.engine).decode(delta.prompt_token_ids[:1])
                # a token that the tokenizer puts before a text is not in it
                first_token = begin, begin.encode() if delta.prompt.startswith(begin) else b""
        return {
            "index": choice.index,
            "text": text,
            "logprobs": completion_logprobs(positions, num_top, choice.place, first_token, self.service.to_bytes),
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
            **token_ids(body, new),
            **(prompt_facts(body, delta) if choice.is_first else {}),
        }

    def usage(self) -> Usage:
        return Usage(drop_new=self.body_model.only_scores)

    @property
    def has_frames(self) -> bool:
        body = self.body_model
        return body.logprobs is None and not body.only_scores and not body.return_token_ids


class ChatAnswer(Answer[ChatBody]):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, request_id: str) -> None:
        super().__init__(service, body, request_id)
        self._readers: dict[int, CallReader] = {}  # of each choice; so the next
        self._thoughts: dict[int, ThoughtReader] = {}
        self._start = Start.OUTSIDE  # of a <think>

    def encode(self) -> tuple[list[EngineInput], SamplingParams]:
        engine, parser = self.service.engine.engine, self.service.options.reasoning_parser
        parsed, params = encode_chat(engine, self.body_model, self.service.tool_form)
        if parser is not None:
            body, tail = self.body_model, tokenizer_of(engine).decode(parsed.token_ids[-32:])
            last = body.messages[-1].for_template()["content"] if body.continue_final_message else None
            self._start = where(parser, tail, last)
            params = free_thoughts(engine, params, self._start)
        return [parsed], params

    def about_prompt(self, delta: RequestDelta) -> dict[str, Any]:
        return prompt_facts(self.body_model, delta)

    @property
    def has_frames(self) -> bool:
        body = self.body_model
        return not (body.logprobs or body.offered or body.return_token_ids or self.service.options.reasoning_parser)

    def opening(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def read(self, choice: Choice, new: CompletionDelta) -> tuple[AnswerPart, str | None]:
        """What is new as thoughts, content and calls, and why the choice has ended, if it has."""
        text, thought, reason = new.text, "", new.finish_reason
        if self.service.options.reasoning_parser is not None:
            if choice.index not in self._thoughts:
                self._thoughts[choice.index] = ThoughtReader(self._start)
            thought, text = self._thoughts[choice.index].feed(text, reason is not None)
        if not self.body_model.offered:
            return AnswerPart(text, thought=thought), reason
        if choice.index not in self._readers:
            self._readers[choice.index] = CallReader(self.service.tool_form, self.body_model)
        reader = self._readers[choice.index]
        part = replace(reader.feed(text, reason is not None), thought=thought)
        return part, "tool_calls" if reason == "stop" and reader.num_calls else reason

    def record(self, choice: Choice, new: CompletionDelta, delta: RequestDelta) -> dict[str, Any] | None:
        body, (part, reason) = self.body_model, self.read(choice, new)
        calls, thought = part.calls, part.thought
        if body.stream:
            if not (part.content or calls or thought or new.logprobs or body.return_token_ids or reason):
                return None
            content: dict[str, Any] = {"content": part.content}
            if calls or thought:
                content = {"content": part.content} if part.content else {}
            if calls:
                content["tool_calls"] = [call.as_delta() for call in calls]
        else:
            text = part.content or None if calls or thought else part.content
            content = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                content["tool_calls"] = part.whole_calls()
        if thought:
            content["reasoning_content"] = thought
        return {
            "index": choice.index,
            "delta" if body.stream else "message": content,
            "logprobs": chat_logprobs(new.logprobs, body.top_logprobs, self.service.to_bytes),
            "finish_reason": reason,
            "stop_reason": new.stop_reason,
            **token_ids(body, new),
        }

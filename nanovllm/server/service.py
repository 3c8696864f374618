"""Service: what stands between HTTP and the engine. Reads bodies, admits or refuses, encodes off the event loop,
streams deltas.

    body = await service.read(request, ChatBody)
    with service.admit(num_seqs):
        inputs = await service.encode(lambda: ...)
        async for index, delta in service.stream(job): ...

Everything here runs on the event loop, except what is handed to `encode`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
from starlette.requests import Request

from nanovllm.engine.async_engine import AsyncLLMEngine
from nanovllm.engine.inputs import EngineInput
from nanovllm.engine.token_bytes import TokenBytes
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestDelta, gather
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.body import Body
from nanovllm.server.errors import ENGINE_FAILED, ENGINE_STUCK, INTERNAL, ApiError, bad_field, timed_out
from nanovllm.server.guard import SMALL_BODY, read_bytes
from nanovllm.server.metrics import ExpertCounts, Metrics, RequestClock
from nanovllm.server.options import ServerOptions
from nanovllm.server.tools import FORMS
from nanovllm.weights.light_tokenizer import transformers_tokenizer

logger = logging.getLogger("nanovllm")
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)
LOAD_SECONDS = 5.0  # a reader of the experts' load waits at most so long for the step that runs
ENCODERS = 4  # threads; a tokenizer releases the interpreter's lock, a template does not
MAX_RETRY_SECONDS = 60


@dataclass(frozen=True)
class ClientRequest:
    """One request of a client: some prompts, each sampled params.n times."""

    request_id: str
    inputs: list[EngineInput]
    params: SamplingParams
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    final_only: bool = False  # one delta for each prompt, at its end


def server_left() -> ApiError:
    return ApiError(503, "the server leaves before this request has ended: try again later", code="server_left")


class Service:
    def __init__(self, engine: AsyncLLMEngine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        model = engine.engine.config.model
        self.model_name = options.served_model_name or (Path(model).name if Path(model).exists() else model)
        self.started = int(time.time())
        self.replica = ""  # which one of several this is
        self.metrics = Metrics(engine, self.model_name)
        # Makes it now: transformers takes seconds to import, and the first request that needs it would wait for them.
        self.to_bytes = TokenBytes(transformers_tokenizer(engine.engine.tokenizer))
        self.tool_form = FORMS[options.tool_call_parser]
        self.capacity = engine.engine.scheduler.limits.max_num_seqs + options.max_waiting
        self.num_admitted = 0  # sequences from admission to their last token
        self.num_requests = 0  # the same in requests
        self.num_cut = 0  # requests that did not end before the server did
        self._seconds_per_request = 1.0  # a moving mean, for Retry-After
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="nanovllm-encode")
        self._numbers = itertools.count()

    def cut_off(self) -> None:
        """The drain is over: a request that still runs gets an error, or an event with one, not a broken connection."""
        if self.num_requests:
            self.num_cut += self.num_requests
            logger.warning("%d requests are cut off: the server leaves", self.num_requests)
            self.engine.cut_off(server_left)

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)
        if self.is_stuck:
            logger.error("%s; leaving without it", self.trouble)  # joining its thread would take for ever
        else:
            self.engine.close()

    @property
    def is_stuck(self) -> bool:
        return self.engine.seconds_in_step > self.options.step_timeout

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served now, or None. Costs a step nothing: the clock is read here, not in the step."""
        if self.engine.failure is None and self.is_stuck:
            return f"a step has not ended for more than {self.options.step_timeout:g} s; the device may hang"
        return self.engine.failure

    def check_alive(self) -> None:
        if self.engine.failure is not None:
            raise ApiError(503, ENGINE_FAILED, code="engine_failed")
        if self.is_stuck:
            raise ApiError(503, ENGINE_STUCK, code="engine_stuck", headers={"Retry-After": str(MAX_RETRY_SECONDS)})

    async def expert_load(self) -> ExpertCounts | None:
        """Counting begins with the first call (moe/load.py). Empty: the model has no experts.
        None: the engine is in a step that takes long, or dead."""
        moe = self.engine.engine.model_config.moe
        if moe is None:
            return {}
        with contextlib.suppress(EngineDeadError):
            waiting = asyncio.wrap_future(self.engine.expert_load())
            await asyncio.wait({waiting}, timeout=LOAD_SECONDS)
            if waiting.done():
                layers = (layer for layer, is_sparse in enumerate(moe.layers) if is_sparse)
                return dict(zip(layers, waiting.result() or ()))
            waiting.cancel()
        return None

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"model {name!r:.80}: this server has only {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        # Only JSON that is declared as such: a page of another site can make a browser post plain text, but not JSON.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(415, "Content-Type: must be application/json", param="Content-Type")
        raw = await read_bytes(request, self.options.max_body_bytes)
        body, ignored = kind.read(raw) if len(raw) <= SMALL_BODY else await self.encode(lambda: kind.read(raw))
        if ignored:
            logger.info("request %s: ignored %s", request.scope["request_id"], ignored)
        return body

    @contextlib.contextmanager
    def admit(self, num_seqs: int) -> Iterator[None]:
        """Count these sequences as admitted, or raise 429: a queue without end only hides that the server is too
        slow."""
        self.check_alive()
        if num_seqs > self.capacity:
            raise bad_field("n", f"{num_seqs} completions at once, this server takes at most {self.capacity}")
        if self.num_admitted + num_seqs > self.capacity:
            message = f"{self.num_admitted} completions run or wait, the limit is {self.capacity}: try again later"
            seconds = min(MAX_RETRY_SECONDS, max(1, math.ceil(self._seconds_per_request)))
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})
        self.num_admitted += num_seqs
        self.num_requests += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.num_admitted -= num_seqs
            self.num_requests -= 1
            self._seconds_per_request += 0.1 * (time.monotonic() - started - self._seconds_per_request)

    async def encode(self, work: Callable[[], T]) -> T:
        """Run in another thread, for at most encode_timeout. A thread cannot be stopped: past its time only the client
        is released, so what is given here must be bounded by other limits (characters, tokens) as well."""
        seconds = self.options.encode_timeout
        future = asyncio.get_running_loop().run_in_executor(self._encoders, work)
        with anyio.move_on_after(seconds):  # not asyncio.wait_for: see guard.py
            return await future
        raise timed_out("tokenising or templating", seconds)

    async def stream(self, job: ClientRequest) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """(index of the prompt, what is new of it), until all are finished. Leaving early aborts what still runs."""
        if len(job.inputs) == 1:
            async with aclosing(self._one(job, 0)) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        async with aclosing(self._many(job)) as pairs:
            async for pair in pairs:
                yield pair

    async def _one(self, job: ClientRequest, index: int) -> AsyncGenerator[RequestDelta, None]:
        # Two requests of a client may have the same id; the engine's ids must be unique.
        name = f"{job.request_id}-{index}-{next(self._numbers)}"
        clock = RequestClock(self.metrics, job.arrival)
        deltas = self.engine.stream(
            job.inputs[index], job.params, name, priority=job.priority, final_only=job.final_only
        )
        finished = False
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    finished = delta.finished
                    clock.see(delta)
                    if delta.error is not None:  # logged by the engine, with its trace
                        raise ApiError(500, INTERNAL, code="step_failed")
                    yield delta
        finally:
            if not finished:
                clock.cut("abort" if self.engine.failure is None else "error")

    async def _many(self, job: ClientRequest) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """What a slow reader has not read yet is merged, as in the mailbox of each stream."""
        unread: dict[int, RequestDelta] = {}
        changed = asyncio.Event()

        async def follow(index: int) -> None:
            async with aclosing(self._one(job, index)) as deltas:
                async for delta in deltas:
                    gather(unread, index, delta)
                    changed.set()

        tasks = [asyncio.create_task(follow(index)) for index in range(len(job.inputs))]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()  # raises what ended it
                done = all(task.done() for task in tasks)
                ready, unread = unread, {}
                for pair in ready.items():
                    yield pair
                if done:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

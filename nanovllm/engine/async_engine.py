"""AsyncLLMEngine: one thread drives an LLMEngine, any number of tasks stream from it.

    async with AsyncLLMEngine(EngineConfig()) as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

`stream` yields what is new (deltas) instead of everything so far; the server reads those. Leaving the `async for`
early, or cancelling its task, aborts the request: its blocks are free before the next step.
Only the engine thread uses the engine; other threads put commands into a queue and get deltas through their own event
loop, with one wake-up a step for all its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.engine.inputs import EngineInput, Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.outputs import RequestDelta, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.policy import make_policy
from nanovllm.telemetry.readers import Reader

logger = logging.getLogger("nanovllm")
T = TypeVar("T")
IDLE_SECONDS = 0.25  # between two checks of the executor while there is nothing to compute


class Mailbox:
    """The deltas of one request that were not read yet, merged. Made, filled and read on one event loop, so it needs no
    lock."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._unread: RequestDelta | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        self._unread = delta if self._unread is None else self._unread.merge(delta)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """No more deltas follow. Unread ones can still be read."""
        self._failure = error
        self._changed.set()

    async def take(self) -> RequestDelta:
        """All that is new; waits until there is something."""
        while self._unread is None:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        delta, self._unread = self._unread, None
        return delta


def deliver(mail: list[tuple[Mailbox, RequestDelta]]) -> None:
    for stream, delta in mail:
        stream.put(delta)


class AsyncLLMEngine:
    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        config = config or EngineConfig.from_options(**options)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Mailbox] = {}  # used by the engine thread only
        self._ids = itertools.count()
        self._lock = threading.Lock()  # around _stopping and _post: a command is either taken or refused, never lost
        self._stopping = False
        self._paused = False  # set by the engine thread only
        self._draining = False
        self._failure: BaseException | None = None
        self._step_began: float | None = None
        made: Future[LLMEngine] = Future()
        self._thread = threading.Thread(target=self._live, args=(config, made), name="nanovllm-engine", daemon=True)
        self._thread.start()
        try:
            self.engine = made.result()
        except BaseException:  # also Ctrl-C during loading: the thread closes the engine once it is loaded
            self._stopping = True
            raise

    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more, or None. It is public (/health), so it has the error's class, not its
        text."""
        if self._failure is not None:
            return f"the engine thread failed ({type(self._failure).__name__}); the log has the details"
        return "the engine was closed" if self._stopping or not self._thread.is_alive() else None

    @property
    def seconds_in_step(self) -> float:
        """How long the step that runs now has taken; 0 between steps. A kernel or a rank that hangs raises nothing; the
        caller decides what is too long."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after every step that moved it; the last one is finished. A slow reader
        gets the newest output and not those in between."""
        total: RequestDelta | None = None
        async with aclosing(self.stream(prompt, params, request_id, priority=priority)) as deltas:
            async for delta in deltas:
                total = delta if total is None else total.merge(delta)
                yield total.output()

    async def stream(
        self,
        prompt: Prompt | EngineInput,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Yield what is new of the request (final_only: everything, at its end); the last delta is finished. What a
        slow reader has not read yet is merged into one delta."""
        request_id = request_id or f"async-{next(self._ids)}"
        stream = Mailbox()

        def add() -> None:
            self.engine.add_request(request_id, prompt, params, priority=priority, final_only=final_only)
            self._streams[request_id] = stream

        ended = False
        try:
            await asyncio.wrap_future(self._submit(add))  # raises here if the request is refused
            while not ended:
                try:
                    delta = await stream.take()
                except EngineDeadError:
                    ended = True
                    raise
                ended = delta.finished
                yield delta
        finally:
            if not ended:
                # Also after a refusal or a cancelled add: then the id may be another request's, hence the stream.
                with contextlib.suppress(EngineDeadError):
                    self._post(lambda: self._abort(request_id, stream))

    async def abort(self, request_id: str) -> None:
        await asyncio.wrap_future(self._submit(lambda: self._abort(request_id)))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is forgotten, while requests run."""
        return await asyncio.wrap_future(self._submit(lambda: self.engine.reset_prefix_cache(), fatal=True))

    # ---- pausing and watching ----------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._paused

    async def pause(self) -> None:
        """Finish the steps in flight and start no more. New requests are accepted, and wait."""
        await asyncio.wrap_future(self._submit(self._pause, fatal=True))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._submit(lambda: self._set_paused(False)))

    async def step_once(self) -> None:
        """One step of a paused engine, planned and finished; nothing happens if there is nothing to compute."""
        if not self._paused:
            raise RequestError("action=step: the engine runs; pause it first")
        await asyncio.wrap_future(self._submit(self._step_once, fatal=True))

    async def set_policy(self, name: str) -> None:
        await asyncio.wrap_future(self._submit(lambda: self._set_policy(name)))

    def attach(self, reader: Reader, stays: bool = False) -> Future[None]:
        return self._submit(lambda: self.engine.watch.attach(reader, stays))

    def refresh(self, reader: Reader) -> Future[None]:
        return self._submit(lambda: self.engine.watch.refresh(reader))

    def detach(self, reader: Reader) -> None:
        with contextlib.suppress(EngineDeadError):  # closing the engine has detached it
            self._post(lambda: self.engine.watch.detach(reader))

    def expert_load(self) -> Future[list[list[int]] | None]:
        return self._submit(lambda: self.engine.executor.expert_load())

    def drain(self) -> None:
        """Before a shutdown: a paused engine resumes, so that running requests can finish, and readers are detached."""

        def go_on() -> None:
            self._draining = True
            self._set_paused(False)
            self.engine.watch.dismiss()

        with contextlib.suppress(EngineDeadError):
            self._post(go_on)

    def cut_off(self, make_error: Callable[[], BaseException]) -> None:
        """End every running request; its reader gets a new error of make_error."""

        def cut() -> None:
            for request_id, stream in list(self._streams.items()):
                self.engine.abort_request(request_id)
                del self._streams[request_id]
                _call(stream.loop, stream.fail, make_error())

        with contextlib.suppress(EngineDeadError):
            self._post(cut)

    def close(self) -> None:
        """Stop the thread and free the model; running requests end with EngineDeadError. Calling it twice is fine."""
        with contextlib.suppress(EngineDeadError):
            self._post(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    # ---- on the engine thread ----------------------------------------------------------------------------------

    def _submit(self, action: Callable[[], T], fatal: bool = False) -> Future[T]:
        """Run action on the engine thread between two steps; the future gets its result or exception. `fatal`: it
        computes, so its exception also ends the thread, as in any other step."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._refuse_if_ended()  # the thread may have failed or been stopped after this command was queued
                result = action()
            except BaseException as error:
                future.set_exception(error)
                if fatal:
                    raise
            else:
                future.set_result(result)

        self._post(run)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._refuse_if_ended()
            self._commands.put(action)

    def _refuse_if_ended(self) -> None:
        if self._stopping:
            raise EngineDeadError(f"this engine is closed{self._why()}: create a new one")

    def _stop(self) -> None:
        self._stopping = True

    def _live(self, config: EngineConfig, made: Future[LLMEngine]) -> None:
        """The thread that drives the engine also builds it. OpenMP keeps a team of threads for every thread that
        computes; with more teams than cores, threads sleep between two kernels instead of spinning: on two cores, 16
        sequences of SmolLM2 decode 126 tokens a second if another thread loaded the model, 149 if this one did."""
        try:
            self.engine = LLMEngine(config)
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(self.engine)
        self._drive()

    def _drive(self) -> None:
        try:
            while not self._stopping:
                idle = self._paused or not self.engine.has_unfinished_requests()
                if idle:
                    self.engine.executor.check()
                self._run_commands(wait=idle)
                if not (self._stopping or self._paused) and self.engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:
            self._failure = error
            logger.exception("the engine thread failed")
        finally:
            with self._lock:
                self._stopping = True
            try:
                self.engine.close()
            except Exception:  # the streams below still need their error
                logger.exception("closing the engine failed")
            self._run_commands(wait=False)  # commands queued meanwhile are refused, so that their callers do not wait
            for stream in self._streams.values():
                dead = EngineDeadError(f"the engine was closed while this request ran{self._why()}")
                _call(stream.loop, stream.fail, dead)

    def _step(self, alone: bool = False) -> None:
        self._step_began = time.monotonic()
        try:
            deltas = self.engine.step(alone=True) if alone else self.engine.step()
        finally:
            self._step_began = None
        self._send(deltas)

    def _send(self, deltas: list[RequestDelta]) -> None:
        """One call_soon_threadsafe per loop and step: each writes to the loop's pipe and makes a handle."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, RequestDelta]]] = {}
        for delta in deltas:
            if stream := self._streams.get(delta.request_id):
                mail.setdefault(stream.loop, []).append((stream, delta))
                if delta.finished:
                    del self._streams[delta.request_id]
        for loop, items in mail.items():
            _call(loop, deliver, items)

    def _pause(self) -> None:
        if self._draining or self._stopping:
            return
        while self.engine.scheduler.flights:
            self._step(alone=True)
        self._set_paused(True)

    def _step_once(self) -> None:
        if self._paused and not self._stopping and self.engine.has_unfinished_requests():
            self._step(alone=True)

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.engine.watch.paused(paused)

    def _set_policy(self, name: str) -> None:
        self.engine.scheduler.set_policy(make_policy(name, self.engine.config.max_wait_steps))
        self.engine.watch.policy_changed()

    def _why(self) -> str:
        return "" if self._failure is None else f" because it failed ({type(self._failure).__name__}: {self._failure})"

    def _run_commands(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(wait, IDLE_SECONDS)()
                wait = False

    def _abort(self, request_id: str, stream: Mailbox | None = None) -> None:
        """Given a stream, only if the request is still that stream's."""
        if stream is not None and self._streams.get(request_id) is not stream:
            return
        delta = self.engine.abort_request(request_id)
        self._send([] if delta is None else [delta])
        self._streams.pop(request_id, None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(function, argument)

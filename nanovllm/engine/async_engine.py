"""AsyncLLMEngine: one thread drives an LLMEngine, any number of tasks stream from it.

    async with AsyncLLMEngine(EngineConfig()) as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Leaving the `async for` early, or cancelling its task, aborts the request: its blocks are free before the next step.
Only the engine thread touches the engine; others hand it commands through a queue and get outputs through their own
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.inputs import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")


@dataclass
class _Stream:
    """Where the outputs of one request go."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[RequestOutput | BaseException]

    def put(self, item: RequestOutput | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class AsyncLLMEngine:
    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        self.engine = LLMEngine(config or EngineConfig.from_options(**options))
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # touched by the engine thread only
        self._ids = itertools.count()
        self._lock = threading.Lock()  # around _stopping and _post: a command is either taken or refused, never lost
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="nanovllm-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more, or None. The class of the error, not its text: strangers may read it."""
        if self._failure is not None:
            return f"the engine thread failed ({type(self._failure).__name__}); the log has the details"
        return "the engine was closed" if self._stopping or not self._thread.is_alive() else None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after every step that moved it; the last one is finished."""
        request_id = request_id or f"async-{next(self._ids)}"
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> None:
            self.engine.add_request(request_id, prompt, params, priority=priority)
            self._streams[request_id] = stream

        finished = False
        try:
            await asyncio.wrap_future(self._submit(add))  # raises here if the request is refused
            while not finished:
                item = await stream.items.get()
                while not stream.items.empty() and not isinstance(item, BaseException):
                    item = stream.items.get_nowait()  # outputs are cumulative: a slow reader skips to the newest
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                # Also after a refusal or a cancelled add: then the id may be somebody else's, hence the stream.
                with contextlib.suppress(EngineDeadError):
                    self._post(lambda: self._abort(request_id, stream))

    async def abort(self, request_id: str) -> None:
        await asyncio.wrap_future(self._submit(lambda: self._abort(request_id)))

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

    # ---- the other side of the queue ---------------------------------------------------------------------------

    def _submit(self, action: Callable[[], None]) -> Future[None]:
        """Run action on the engine thread between two steps; the future carries its exception."""
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                action()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._post(run)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._stopping:
                raise EngineDeadError(f"this engine is closed{self._why()}: create a new one")
            self._commands.put(action)

    def _stop(self) -> None:
        self._stopping = True

    def _drive(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(wait=not self.engine.has_unfinished_requests())
                if self._stopping or not self.engine.has_unfinished_requests():
                    continue
                for output in self.engine.step():
                    if stream := self._streams.get(output.request_id):
                        stream.put(output)
                        if output.finished:
                            del self._streams[output.request_id]
        except BaseException as error:
            self._failure = error
            logger.exception("the engine thread failed")
        finally:
            with self._lock:
                self._stopping = True
            self.engine.close()
            self._run_commands(wait=False)  # whoever asked meanwhile is refused by the closed engine, not left waiting
            for stream in self._streams.values():
                stream.put(EngineDeadError(f"the engine was closed while this request ran{self._why()}"))

    def _why(self) -> str:
        return "" if self._failure is None else f" because it failed ({type(self._failure).__name__}: {self._failure})"

    def _run_commands(self, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=wait)()
                wait = False

    def _abort(self, request_id: str, stream: _Stream | None = None) -> None:
        """Given a stream, only if the request is still that stream's."""
        if stream is not None and self._streams.get(request_id) is not stream:
            return
        output = self.engine.abort_request(request_id)
        stream = self._streams.pop(request_id, None)
        if stream and output:
            stream.put(output)

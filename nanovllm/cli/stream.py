"""Driving an engine from a terminal: text as it comes, Ctrl-C between steps, speed at the end."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.engine.interrupts import ctrl_c
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.inputs import EngineInput
    from nanovllm.engine.llm_engine import LLMEngine


def note(text: str) -> None:
    """Everything that is not the answer goes to stderr, so that stdout can be piped."""
    print(text, file=sys.stderr, flush=True)


class InOrder:
    """Prints completions one after another while all of them grow: the first that is not finished streams."""

    def __init__(self, ids: list[str], titles: list[str], n: int) -> None:
        self._items = [(request_id, index) for request_id in ids for index in range(n)]
        self._titles = [title for title in titles for _ in range(n)] if len(self._items) > 1 else None
        self._current = 0
        self._printed: int | None = None  # characters of the current one; None = not even its title

    def show(self, latest: dict[str, RequestOutput], end: bool = False) -> None:
        """`end`: nothing more will come, print all there is."""
        while self._current < len(self._items):
            request_id, index = self._items[self._current]
            output = latest.get(request_id)
            completion = output.outputs[index] if output else None
            if completion is None and not end:
                break
            if self._printed is None:
                self._printed = 0
                if self._titles:
                    print(f"[{self._current + 1}/{len(self._items)}] {self._titles[self._current]}")
            text = completion.text if completion else ""
            sys.stdout.write(text[self._printed :])
            sys.stdout.flush()
            self._printed = len(text)
            if not end and completion and not completion.finished:
                break
            print(flush=True)
            self._current += 1
            self._printed = None


def run_requests(
    engine: LLMEngine,
    inputs: list[EngineInput],
    params: SamplingParams,
    ids: list[str],
    show: Callable[[dict[str, RequestOutput]], None] | None,
) -> tuple[list[RequestOutput], bool]:
    """Outputs in the order of the inputs, and whether Ctrl-C cut them short. `show` sees all after each step."""
    latest: dict[str, RequestOutput] = {}
    with ctrl_c() as keys:
        for request_id, parsed in zip(ids, inputs):
            engine.add_request(request_id, parsed, params, final_only=show is None)
        while engine.has_unfinished_requests() and not keys.pressed:
            moved = engine.step()
            latest.update((output.request_id, output) for output in moved)
            if show and moved:
                show(latest)
        interrupted = engine.has_unfinished_requests()
        for request_id in ids:
            if cut := engine.abort_request(request_id):
                latest[request_id] = cut
    outputs = [latest[request_id] for request_id in ids]
    if failed := next((output.error for output in outputs if output.error), None):
        raise EngineDeadError(f"the step failed: {failed}")
    return outputs, interrupted


class Speed:
    """What the engine did between two points in time, in one line."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._before = copy.copy(engine.stats)

    def line(self, outputs: list[RequestOutput]) -> str:
        before, now = self._before, self._engine.stats
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        written = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        waits = [wait for output in outputs if (wait := output.metrics.time_to_first_token) is not None]
        parts = [f"prompt: {prompt} tokens"]
        if cached:
            parts[0] += f" ({cached} cached)"
        if seconds := now.prefill_seconds - before.prefill_seconds:
            parts[0] += f", {(prompt - cached) / seconds:.1f} tok/s"
        if waits:
            parts.append(f"first token: {statistics.median(waits):.2f} s")
        parts.append(f"output: {written} tokens")
        if seconds := now.decode_seconds - before.decode_seconds:
            parts[-1] += f", {(now.decode_tokens - before.decode_tokens) / seconds:.1f} tok/s"
        return " | ".join(parts)


def encode(engine: LLMEngine, text: str, chat: bool | None, system: str | None) -> EngineInput:
    """A prompt as the model wants it. chat=None: through the chat template if the model has one."""
    from nanovllm.engine.inputs import EngineInput

    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    if not (has_template if chat is None else chat):
        if system is not None:
            raise RequestError("--system needs a chat template: this prompt is used as it is")
        return engine.inputs.parse(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return EngineInput(engine.inputs.render_chat([*messages, {"role": "user", "content": text}]), text)

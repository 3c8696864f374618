"""Driving an engine from a terminal: text as it comes, Ctrl-C between steps, speed at the end."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.engine.interrupts import ctrl_c
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.outputs import RequestDelta, RequestOutput, gather
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
        self._has_title = False  # of the current one
        self._texts: dict[tuple[str, int], list[str]] = {}  # of those that have begun: not printed yet
        self._ended: set[tuple[str, int]] = set()

    def show(self, delta: RequestDelta) -> None:
        for new in delta.outputs:
            item = delta.request_id, new.index
            self._texts.setdefault(item, []).append(new.text)
            if new.finish_reason is not None:
                self._ended.add(item)
        self._print()

    def end(self) -> None:
        """Nothing more will come: print all there is."""
        self._print(is_end=True)

    def _print(self, is_end: bool = False) -> None:
        while self._current < len(self._items):
            item = self._items[self._current]
            if item not in self._texts and not is_end:
                break
            if self._titles and not self._has_title:
                print(f"[{self._current + 1}/{len(self._items)}] {self._titles[self._current]}")
            sys.stdout.write("".join(self._texts.get(item, ())))
            sys.stdout.flush()
            self._texts[item], self._has_title = [], True
            if item not in self._ended and not is_end:
                break
            print(flush=True)
            self._current += 1
            self._has_title = False


def run_requests(
    engine: LLMEngine,
    inputs: list[EngineInput],
    params: SamplingParams,
    ids: list[str],
    show: Callable[[RequestDelta], None] | None,
) -> tuple[list[RequestOutput], bool]:
    """Outputs in the order of the inputs, and whether Ctrl-C cut them short. `show` sees what is new as it comes."""
    totals: dict[str, RequestDelta] = {}

    def take(delta: RequestDelta) -> None:
        if show:
            show(delta)
        gather(totals, delta.request_id, delta)

    with ctrl_c() as keys:
        for request_id, parsed in zip(ids, inputs):
            engine.add_request(request_id, parsed, params, final_only=show is None)
        while engine.has_unfinished_requests() and not keys.pressed:
            for delta in engine.step():
                take(delta)
        keys.pressed, interrupted = False, engine.has_unfinished_requests()
        for request_id in ids:
            if cut := engine.abort_request(request_id):
                take(cut)
    outputs = [totals[request_id].output() for request_id in ids]
    if failed := next((output.error for output in outputs if output.error), None):
        raise EngineDeadError(f"the step failed: {failed}")
    return outputs, interrupted


class SpeedMeter:
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
    """A prompt as the model reads it. chat=None: through the chat template if the model has one."""
    from nanovllm.engine.inputs import EngineInput

    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    if not (has_template if chat is None else chat):
        if system is not None:
            raise RequestError("--system needs a chat template: this prompt is used as it is")
        return engine.inputs.parse(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return EngineInput(engine.inputs.render_chat([*messages, {"role": "user", "content": text}]), text)

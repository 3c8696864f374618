"""LLM: the offline interface, in vLLM's names.

from nanovllm import LLM, SamplingParams
llm = LLM()                                   # SmolLM2-135M-Instruct
for out in llm.chat([{"role": "user", "content": "What is the capital of France?"}]):
    print(out["text"])
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.inputs import Prompt, as_list
from nanovllm.engine.interrupts import CtrlC, ctrl_c
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineDeadError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.light_tokenizer import transformers_tokenizer


class LLM:
    """A model ready to generate. Options are those of EngineConfig; docs/options.md explains them."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model=model, **options))
        self._count = 0
        self._driver: dict[str, int] = {}  # "thread" -> id of the thread whose call runs
        self._ids: list[str] = []  # of the call that runs, or of one that was interrupted
        self._closing = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs in the order of the prompts. If one of them is refused, none is completed. If
        the engine dies, what was completed is in EngineDeadError.finished."""
        return self._run(as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """One conversation (a list of messages) or several; a chat template, the model's own unless one is given,
        makes the prompts. chat_template_kwargs are its variables, for example {"enable_thinking": False}."""
        if not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}, or of such lists")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        render = functools.partial(
            self.engine.inputs.render_chat,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts: list[Prompt] = [{"prompt_token_ids": render(messages)} for messages in conversations]  # type: ignore[arg-type]
        return self._run(prompts, sampling_params, use_tqdm, None)

    @property
    def llm_engine(self) -> LLMEngine:
        return self.engine

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is forgotten, while requests run."""
        return self.engine.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """Used where a call gives none: the model's own, or those that generation_config names."""
        return SamplingParams(**self.engine.sampling_defaults.values)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; for a GGUF file it is made by the first call (weights/light_tokenizer.py)."""
        return transformers_tokenizer(self.engine.tokenizer)

    def close(self) -> None:
        """Free the model. A call that runs in another thread raises EngineDeadError after the step it is in."""
        self._closing = True
        with self._driving():
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", sampling_params, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        done: dict[str, RequestOutput] = {}
        with self._driving(), ctrl_c() as keys:
            self._abort_all()
            try:
                self._add_all(prompts, params, priorities, keys)
                self._drive(self._ids, done, use_tqdm, keys)
            except EngineDeadError as error:
                error.finished = {i: done[request_id] for i, request_id in enumerate(self._ids) if request_id in done}
                raise
            finally:  # after Ctrl-C too the engine is empty and ready for the next call
                ids = list(self._ids)
                self._abort_all()
        return [done[request_id] for request_id in ids]

    def _add_all(self, prompts: list[Prompt], params: list[SamplingParams], priorities: list[int], keys: CtrlC) -> None:
        """Tokenising and checking 100,000 tokens takes a host 20 to 200 ms. So the device begins as soon as there is
        enough for a step of full size, which is then the same step as if all prompts had been here."""
        num_waiting = 0  # tokens
        for index, checked in enumerate(zip(prompts, params, priorities)):
            prompt, param, priority = checked
            keys.check()
            self._ids.append(f"llm-{self._count}")
            self._count += 1
            try:
                parsed = self.engine.check(prompt, param, priority)
                self.engine.add_request(self._ids[-1], parsed, param, priority=priority, final_only=True)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            num_waiting += len(parsed.token_ids)
            if num_waiting >= self.engine.scheduler.limits.max_num_batched_tokens:
                self.engine.begin()
                num_waiting = 0

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        """One thread at a time; the others wait. Not a Lock: an interrupt just before its release would leave it locked
        for ever, while the interrupted thread can pass this one again. dict.setdefault is atomic."""
        me = threading.get_ident()
        while self._driver.setdefault("thread", me) != me:
            time.sleep(0.01)
        try:
            yield
        finally:
            self._driver.clear()

    def _abort_all(self) -> None:
        """A second Ctrl-C may come while these are aborted: then the next call aborts the rest."""
        while self._ids:
            self.engine.abort_request(self._ids[-1])
            self._ids.pop()

    def _drive(self, ids: list[str], done: dict[str, RequestOutput], use_tqdm: bool, keys: CtrlC) -> None:
        ours = set(ids)
        stats = self.engine.stats
        prompt_tokens, generated = stats.prompt_tokens, stats.generated_tokens
        shown = started = time.monotonic()
        progress = tqdm(total=len(ids), desc="generating", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        with progress as bar:
            while len(done) < len(ids):
                keys.check()
                if self._closing:
                    raise EngineDeadError("the engine was closed while this request ran")
                if not self.engine.has_unfinished_requests():
                    raise EngineDeadError("requests were lost; this is a fault of the engine")
                finished = 0
                for delta in self.engine.step():
                    if delta.request_id in ours:
                        done[delta.request_id] = delta.output()
                        finished += 1
                    else:  # of a request that the caller added and reads by calling step
                        self.engine.unread[delta.request_id] = delta
                bar.update(finished)
                now = time.monotonic()
                if use_tqdm and (finished or now - shown > 0.5):
                    shown = now
                    seconds = max(now - started, 1e-9)
                    prefill = (stats.prompt_tokens - prompt_tokens) / seconds
                    decode = (stats.generated_tokens - generated) / seconds
                    bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s")


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts: give one for all, or one for each")
    return list(value)

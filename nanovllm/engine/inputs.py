"""Prompts as callers write them -> token ids, checked before anything reaches the engine.

A prompt is a string, token ids (a list or an array), {"prompt": str} or {"prompt_token_ids": [...]}. A dict with both
is read by its ids; the text is only shown. Dicts may carry a "cache_salt" (only requests with the same salt share
cached prefixes).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from nanovllm.engine.control_tokens import ControlTokens
from nanovllm.errors import ContextLengthError, RequestError
from nanovllm.sampling_params import MAX_BAD_WORD, SamplingParams
from nanovllm.weights.light_tokenizer import transformers_tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
MESSAGES = "messages must be a non-empty list of {'role': ..., 'content': ...}"
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# No tokenizer makes tokens longer than a few hundred characters, so a longer text cannot fit; tokenising 100 MB to
# find that out would take minutes and gigabytes.
MAX_CHARS_PER_TOKEN = 256


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str | None


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: Sequence[int]
    prompt: str | None  # not read, only shown in the output
    cache_salt: str | None


@dataclass(frozen=True)
class EngineInput:
    token_ids: list[int]
    text: str | None = None
    cache_salt: str = ""


class InputProcessor:
    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        max_model_len: int,
        special_tokens_in_text: str = "allow",
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.control_tokens = ControlTokens(tokenizer, special_tokens_in_text, self.encode)

    def parse(self, prompt: Prompt) -> EngineInput:
        text, token_ids, salt = self._split(prompt)
        if token_ids is None:
            assert text is not None
            text = self.control_tokens.clean(text, "the prompt")
            token_ids = self.encode(text)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token (a BOS token or a space would do)")
        token_ids = list(token_ids)  # a deque has no slices
        head = token_ids[: self.max_model_len]  # a longer prompt is refused for its length (Scheduler.check_fits)
        # One look at all: a check of each took 1.5 us a token, a quarter of the time of a long prefill.
        if set(map(type, head)) != {int} or min(head) < 0 or max(head) >= self.vocab_size:
            head = [self._checked_id(token_id) for token_id in head]
        return EngineInput(head + token_ids[self.max_model_len :], text, salt)

    def _checked_id(self, token_id: Any) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < self.vocab_size:
            raise RequestError(
                f"prompt token id {token_id!r}: must be an integer in [0, {self.vocab_size - 1}], the vocabulary"
            )
        return int(token_id)

    def encode(self, text: str, add_special_tokens: bool = True, what: str = "the prompt") -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids, not text")
        limit = self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > limit:
            raise ContextLengthError(
                f"{what} has {len(text)} characters; at max_model_len={self.max_model_len} at most {limit} can fit"
            )
        check_unicode(what, text)
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cleaned: bool = False,
    ) -> list[int]:
        """Messages -> token ids through the model's own chat template, or through the caller's (never one from a
        request of the server: a template is a program). `cleaned`: ControlTokens has checked them already."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init): chat needs one")
        template = chat_template or getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise RequestError(
                "this model has no chat template: use generate() (over HTTP: /v1/completions) with a plain prompt, or "
                "chat_template="
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(MESSAGES)
        if tools and not shows_tools(template):
            raise RequestError("tools: the chat template does not show them; describe them in a system message")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message=True begins no new message: set add_generation_prompt=False")
        extra = self._checked_template_options(chat_template, chat_template_kwargs)
        rows = [_plain_message(message) for message in messages]
        shown: list[Any] = list(tools or ())
        if not cleaned:
            rows, shown = self.control_tokens.clean_chat(rows, shown)
        try:
            text = self.tokenizer.apply_chat_template(
                rows,
                tokenize=False,
                tools=shown or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **extra,
            )
        except RequestError:
            raise
        except Exception as error:  # templates raise what they like (TemplateError, TypeError, ...) on odd messages
            whose = "model's " if chat_template is None else ""
            raise RequestError(f"the {whose}chat template refused these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _checked_template_options(self, chat_template: Any, kwargs: Any) -> dict[str, Any]:
        own = getattr(self.tokenizer, "chat_template", None)
        names = own if isinstance(own, Mapping) else {}
        is_template = isinstance(chat_template, str) and ("{" in chat_template or chat_template in names)
        if chat_template is not None and not is_template:
            raise RequestError(f"chat_template={chat_template!r:.80}: must be the text of a Jinja template")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise RequestError(f"chat_template_kwargs={kwargs!r:.80}: must map names to values")
        if not kwargs:
            return {}
        render: Any = transformers_tokenizer(self.tokenizer).apply_chat_template
        reserved = {*inspect.signature(render).parameters, "messages"} - {"documents"}
        if taken := sorted(reserved & set(kwargs)):
            raise RequestError(f"chat_template_kwargs: {taken} are not variables of the template; give them to chat()")
        return dict(kwargs)

    def check_params(self, params: SamplingParams) -> None:
        """Checks that need the vocabulary or the tokenizer, which SamplingParams does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise RequestError(f"{name}: token id {token_id} is outside the vocabulary of {self.vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise RequestError(f"{name}={getattr(params, name)}: the vocabulary has only {self.vocab_size} tokens")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError("stop strings and bad_words need a tokenizer (skip_tokenizer_init is set)")
        words = self.bad_words_ids(params.bad_words or ())  # type: ignore[arg-type]
        banned = {word[0]: "bad_words" for word in words if len(word) == 1}
        if params.min_tokens:
            ends = () if params.ignore_eos else self.eos_token_ids
            banned |= dict.fromkeys(ends, "min_tokens and the model's end tokens")
            banned |= dict.fromkeys(params.stop_token_ids or (), "min_tokens and stop_token_ids")
        allowed = params.allowed_token_ids
        if allowed is not None and all(token_id in banned for token_id in allowed):
            raise RequestError(f"allowed_token_ids: {' and '.join(sorted(set(banned.values())))} ban all of them")

    def check_priority(self, priority: int, policy: str) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority={priority!r}: must be an integer; smaller is served first")
        if priority and policy != "priority":
            raise RequestError(f"priority={priority}: this engine serves {policy}; set scheduling_policy='priority'")

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written inside a text and at its start: with and without a space before it."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for variant in (word, " " + word.lstrip()):
                ids = tuple(self.encode(variant, add_special_tokens=False, what="an entry of bad_words"))
                if len(ids) > MAX_BAD_WORD:
                    raise RequestError(f"bad_words: {word[:40]!r}...: {len(ids)} tokens; the limit is {MAX_BAD_WORD}")
                if ids:
                    found[ids] = None
        return tuple(found)

    @staticmethod
    def _split(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str]:
        if isinstance(prompt, str):
            return prompt, None, ""
        if isinstance(prompt, Mapping):
            unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
            if unknown:
                raise RequestError(f"prompt has unknown keys {sorted(map(str, unknown))}: {', '.join(PROMPT_KEYS)}")
            text, token_ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
            token_ids, salt = _as_python(token_ids), "" if salt is None else salt
            if text is None and token_ids is None:
                raise RequestError("a prompt dict needs 'prompt' (str) or 'prompt_token_ids' (list)")
            if text is not None and not isinstance(text, str):
                raise RequestError(f"prompt={type(text).__name__}: must be a string")
            if token_ids is not None and (not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes)):
                raise RequestError(f"prompt_token_ids={type(token_ids).__name__}: must be a list of integers")
            if not isinstance(salt, str):
                raise RequestError(f"cache_salt={type(salt).__name__}: the salt of a prompt must be a string")
            check_unicode("the prompt", text or "")
            check_unicode("cache_salt", salt)
            return text, token_ids, salt
        token_ids = _as_python(prompt)
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, (bytes, bytearray)):
            return None, token_ids, ""
        raise RequestError(f"a prompt must be a string, token ids or a dict, not {type(prompt).__name__}")


def shows_tools(template: Any) -> bool:
    """Whether the word occurs in the template (one text, or several by name)."""
    return re.search(r"\btools\b", str(template)) is not None


def _plain_message(message: Any) -> dict[str, Any]:
    """The form that templates expect: content is one text, and the arguments of calls are objects."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(MESSAGES)
    role, content = message["role"], message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list | tuple):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if not isinstance(part, Mapping) or kind != "text":
                raise RequestError(f"messages: a content part {kind!r:.40}: only parts of type 'text' are read")
            if not isinstance(part.get("text"), str):
                raise RequestError("messages: a content part of type 'text' needs 'text', a string")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"messages: the content of a message of role {role!r:.40} must be text; {MESSAGES}")
    calls = [_plain_call(call) for call in message.get("tool_calls") or ()]
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _plain_call(call: Any) -> Any:
    """OpenAI's API writes the arguments as a text of JSON; templates write them out as objects."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        raise RequestError(f"messages: the arguments of a call, {function['arguments']!r:.60}, are not JSON") from None


def check_unicode(what: str, text: str) -> None:
    """Half a surrogate pair, which JSON allows, has no bytes: it cannot be tokenised or hashed."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode: {error.reason} at character {error.start}") from None


def _as_python(value: Any) -> Any:
    """An array of numpy or torch becomes lists of Python's numbers; other values stay as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A list of ints is one prompt; a list of anything else is many."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = _as_python(prompts)
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a string or a list, not {type(prompts).__name__}")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

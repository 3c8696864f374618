"""Prompts as callers write them -> token ids, checked before anything reaches the engine.

A prompt is a string, token ids (a list or an array), {"prompt": str} or {"prompt_token_ids": [...]}. A dict with both
is read by its ids; the text is only shown. Dicts may carry a "cache_salt" (only requests with the same salt share cached
prefixes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from nanovllm.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# No tokenizer makes tokens longer than a few hundred characters, so a longer text cannot fit whatever it says;
# tokenising 100 MB first to find that out would take minutes and gigabytes.
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
    def __init__(self, tokenizer: Any | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def parse(self, prompt: Prompt) -> EngineInput:
        text, token_ids, salt = self._split(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self.encode(text)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token (a BOS token or a space would do)")
        head = token_ids[: self.max_model_len]  # a longer prompt is refused for its length, whatever it holds
        for token_id in head:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt token id {token_id!r}: must be an integer in [0, {self.vocab_size - 1}], the vocabulary"
                )
        return EngineInput([*map(int, head), *token_ids[self.max_model_len :]], text, salt)

    def encode(self, text: str, add_special_tokens: bool = True, what: str = "the prompt") -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids, not text")
        limit = self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > limit:
            raise RequestError(
                f"{what} has {len(text)} characters; at max_model_len={self.max_model_len} at most {limit} can fit"
            )
        check_unicode(what, text)
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Messages -> token ids through the model's own chat template (never one from a request). Tools are shown to
        the model if its template knows of them."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init): chat needs one")
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template: use generate() with a plain prompt")
        if not messages or any(not isinstance(m, Mapping) or "role" not in m or "content" not in m for m in messages):
            raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
            )  # fmt: skip
        except Exception as error:  # templates raise what they like (TemplateError, TypeError, ...) on odd messages
            raise RequestError(f"the model's chat template refused these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written inside a text and at its start: with and without a space before it."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for variant in (word, " " + word.lstrip()):
                ids = tuple(self.encode(variant, add_special_tokens=False, what="an entry of bad_words"))
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
        prompt = _as_python(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return None, prompt, ""
        raise RequestError(f"a prompt must be a string, token ids or a dict, not {type(prompt).__name__}")


def check_unicode(what: str, text: str) -> None:
    """Half a surrogate pair, which JSON lets through, has no bytes: nothing can tokenise or hash it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode: {error.reason} at character {error.start}") from None


def _as_python(value: Any) -> Any:
    """An array of numpy or torch as lists of Python's numbers; anything else as it is."""
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

"""SamplingParams: how one request turns logits into tokens, in vLLM's names.

A value that cannot be honoured is refused here, before it can reach the engine: NaN in a sampler or n=10**9 in a
scheduler would affect every other request too.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from nanovllm.errors import RequestError

MAX_N = 1024  # completions of one prompt; each is a sequence of its own
MAX_LOGPROBS = 1000  # alternatives returned per position
MAX_STOP_STRINGS = 128
MAX_STRUCTURE = 100_000  # characters of a schema, regex or grammar
GREEDY_EPS = 1e-5  # temperatures below this are greedy, as in vLLM: dividing logits by less overflows


def _number(name: str, value: Any, low: float, high: float, remedy: str, low_open: bool = False) -> float:
    if isinstance(value, Real) and not isinstance(value, int):
        value = float(value)  # numpy's too; an int stays, since one of 400 digits has no float
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:  # NaN fails too
        raise RequestError(f"{name}={value!r:.40}: must be a finite number; {remedy}")
    if value < low or value > high or (low_open and value == low):
        left = "(" if low_open else "["
        raise RequestError(f"{name}={value!r}: must be in {left}{low:g}, {high:g}]; {remedy}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name}={value!r}: must be an integer; {remedy}")
    number = int(value)
    if number < low or number > high:
        raise RequestError(f"{name}={number}: must be in [{low}, {high}]; {remedy}")
    return number


def _strings(name: str, value: Any, limit: int) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        items = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        raise RequestError(f"{name}={value!r}: must be a string or a list of strings") from None
    if len(items) > limit:
        raise RequestError(f"{name}: {len(items)} strings, at most {limit} are allowed")
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{name}={item!r}: every entry must be a non-empty string")
    return items


def _token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        tokens = tuple(value)
    except TypeError:  # an array without dimensions is an Iterable too
        raise RequestError(f"{name}={value!r}: must be a list of token ids") from None
    return tuple(_integer(f"{name} entry", t, 0, 2**31 - 1, "token ids are non-negative integers") for t in tokens)


MAX_BAD_WORD = 64  # tokens: the device keeps as many of the output (ops/sampler_state.py)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a text must have: exactly one of these."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None  # in llguidance's variant of Lark, or GBNF
    json_object: bool | None = False  # any JSON object

    def __post_init__(self) -> None:
        if self.json_object is None:
            object.__setattr__(self, "json_object", False)
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if not isinstance(self.json_object, bool) or len(given) + self.json_object != 1:
            raise RequestError("structured_outputs: give exactly one of json, json_object, regex, choice, grammar")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", jsonlib.dumps(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs choice", self.choice, 1024))
            if not self.choice:
                raise RequestError("structured_outputs choice=[]: give at least one")
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_STRUCTURE):
                raise RequestError(f"structured_outputs {name}: must be text of 1 to {MAX_STRUCTURE} characters")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Defaults are vLLM's: one completion of 16 tokens at temperature 1. None is the default
    of any field but max_tokens. The fields that may be given by position stand in vLLM's order."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = all tokens
    min_p: float = 0.0
    seed: int | None = None  # the same tokens whatever else is in the batch
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None = until max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # -1 = the whole vocabulary
    prompt_logprobs: int | None = None
    _: KW_ONLY
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:  # the class is frozen; values are normalised once, here
            object.__setattr__(self, name, value)

        def put_integer(name: str, low: int, high: int, remedy: str) -> None:
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), low, high, remedy))

        for field in fields(self):
            if getattr(self, field.name) is None and field.name != "max_tokens":
                put(field.name, field.default)
        put_integer("n", 1, MAX_N, "give at least one")
        put("temperature", _number("temperature", self.temperature, 0.0, 100.0, "0 is greedy, 1 is the model's own"))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens", low_open=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens"))
        put_integer("top_k", -1, 2**31 - 1, "0 or -1 keeps all tokens")
        put("top_k", max(self.top_k, 0))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _number(name, getattr(self, name), -2.0, 2.0, "0 is off"))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 is off", True))
        put_integer("seed", -(2**63), 2**64 - 1, "leave it None for a fresh one")
        put_integer("max_tokens", 1, 2**31 - 1, "None means until max_model_len")
        limit = self.max_tokens if self.max_tokens is not None else 2**31 - 1
        put_integer("min_tokens", 0, limit, "it cannot exceed max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            put_integer(name, -1, MAX_LOGPROBS, "None is off, -1 is the whole vocabulary")
        put("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        put("bad_words", _strings("bad_words", self.bad_words, 1024))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids=[]: nothing could be sampled; give at least one id or None")
        put("logit_bias", self._checked_bias())
        put("structured_outputs", self._checked_structure())
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not self.detokenize and self.stop:
            raise RequestError("stop strings need text: set detokenize=True or use stop_token_ids")

    def _checked_bias(self) -> dict[int, float]:
        if self.logit_bias is None:
            return {}
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias={self.logit_bias!r}: must map token ids to numbers")
        bias = {}
        for token, value in self.logit_bias.items():
            token = int(token) if isinstance(token, str) and token.isdecimal() else token  # JSON keys are strings
            token = _integer("logit_bias key", token, 0, 2**31 - 1, "keys are token ids")
            bias[token] = _number(f"logit_bias[{token}]", value, -100.0, 100.0, "as in OpenAI's API")
        return bias

    def _checked_structure(self) -> StructuredOutputsParams | None:
        wanted = self.structured_outputs
        if wanted is None or isinstance(wanted, StructuredOutputsParams):
            return wanted
        names = [f.name for f in fields(StructuredOutputsParams)]
        if not isinstance(wanted, Mapping) or not set(wanted) <= set(names):
            raise RequestError(f"structured_outputs={wanted!r:.80}: must be a StructuredOutputsParams or have {names}")
        return StructuredOutputsParams(**wanted)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy, with these fields changed: parameters are frozen, since a running request reads them."""
        return replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

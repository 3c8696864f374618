"""Structured output: the sampler may only take tokens that a grammar allows. llguidance compiles and parses grammars.

    grammars = Grammars(tokenizer, vocab_size, eos_token_ids)     # one for an engine
    params = grammars.compiled(params)                            # structured_outputs becomes a Grammar
    structured_tokens(logits, rows)                               # an edit step of the sampler

A row has only the tokens of its output, so a Grammar finds the parser's state by them: the state of the step before is
kept, and the tokens since then are added. If it is missing (a preempted sequence, two completions of one prompt that
differ) the whole output is parsed again, some microseconds a token. Guessed tokens (speculation) are added to a copy.

Compiling is bounded: llguidance counts the work of a grammar and of a step in "fuel" and gives up (limits below).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanovllm.errors import RequestError
from nanovllm.sampling.json_schema import without_unions
from nanovllm.sampling.rows import SamplingRow, bits_of
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.weights.light_tokenizer import transformers_tokenizer

logger = logging.getLogger("nanovllm")
MOST_NEW = 17  # tokens between two steps: sixteen guesses and one more
# JSON allows any amount of white space between two values, and small models may write it until max_tokens.
JSON_SPACES: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,32}"}
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark has a single colon
# Each of these could ban all tokens that the grammar allows.
CONFLICTS = {"ignore_eos": False, "min_tokens": 0, "allowed_token_ids": None, "bad_words": ()}


@dataclass(frozen=True, kw_only=True)
class Grammar(StructuredOutputsParams):
    """A specification that was compiled for one request of one engine."""

    source: str = ""  # as llguidance writes it
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    executor: Any = field(default=None, repr=False, compare=False)  # llguidance's threads
    states: dict[bytes, Any] = field(default_factory=dict, repr=False, compare=False)  # output so far -> matcher

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether the text may end here. False after an error, where the text ends without being complete."""
        matcher = self.matcher(np.asarray(output_ids, np.int32))
        return not matcher.is_error() and bool(matcher.is_accepting())

    def matcher(self, output_ids: np.ndarray, num_drafted: int = 0, kept: AbstractSet[bytes] = frozenset()) -> Any:
        """`num_drafted`: the last so many tokens are guesses, which the next call may not have. `kept`: outputs whose
        states stay as they are: of several completions one may have the beginning of another."""
        if num_drafted:
            matcher = self.matcher(output_ids[:-num_drafted], 0, kept).deep_copy()
            matcher.consume_tokens(output_ids[-num_drafted:].tolist())
            return matcher
        key = output_ids.tobytes()
        if (here := self.states.get(key)) is not None:
            return here
        for start in range(len(output_ids) - 1, max(-1, len(output_ids) - 1 - MOST_NEW), -1):
            before = output_ids[:start].tobytes()
            if (matcher := self.states.get(before)) is not None:
                matcher = matcher.deep_copy() if before in kept else self.states.pop(before)
                break
        else:
            start, matcher = 0, make_matcher(self.tokenizer, self.source)
        matcher.consume_tokens(output_ids[start:].tolist())
        self.states[key] = matcher
        return matcher

    def num_allowed(self, output_ids: np.ndarray, draft: np.ndarray) -> int:
        """How many of these tokens may follow the output, one after another."""
        matcher = self.matcher(output_ids)
        return 0 if matcher.is_error() else int(matcher.validate_tokens(draft.tolist()))


class Grammars:
    """Compiles for one tokenizer. Several threads may use it."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None  # made on first use: a second for a large vocabulary
        self._executor: Any = None

    def compiled(self, params: SamplingParams) -> SamplingParams:
        """With a compiled Grammar in structured_outputs; the same object if there is nothing to compile."""
        wanted = params.structured_outputs
        if wanted is None or isinstance(wanted, Grammar):
            return params
        for name, harmless in CONFLICTS.items():
            if getattr(params, name) != harmless:
                raise RequestError(f"{name}: cannot be combined with structured_outputs")
        if not self._eos_token_ids:
            raise RequestError("structured_outputs: this model has no end token, so no text could ever be complete")
        assert isinstance(wanted, StructuredOutputsParams)
        tokenizer = self._load()
        source = to_source(wanted)
        matcher = make_matcher(tokenizer, source)
        if matcher.is_error():
            # The first line is the error; the others may be a dump of the grammar.
            reason = (str(matcher.get_error()).strip().splitlines() or [""])[0][:200]
            raise RequestError(f"structured_outputs: cannot be compiled: {reason}")
        grammar = Grammar(
            **{f.name: getattr(wanted, f.name) for f in dataclasses.fields(StructuredOutputsParams)},
            source=source,
            tokenizer=tokenizer,
            eos_token_ids=self._eos_token_ids,
            executor=self._executor,
        )
        return dataclasses.replace(params, structured_outputs=grammar)

    def _load(self) -> Any:
        if self._hf_tokenizer is None:
            raise RequestError("structured_outputs: needs a tokenizer (skip_tokenizer_init is set)")
        try:
            from llguidance import LLExecutor
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise RequestError("structured_outputs: needs llguidance, pip install 'nano-vllm[server]'") from None
        with self._lock:
            if self._tokenizer is None:
                eos = list(self._eos_token_ids)
                found = transformers_tokenizer(self._hf_tokenizer)
                self._tokenizer = from_tokenizer(found, n_vocab=self._vocab_size, eos_token=eos)
                self._executor = LLExecutor()
            return self._tokenizer


def to_source(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    try:
        if wanted.json is not None or wanted.json_object:
            schema = without_unions(str(wanted.json or '{"type": "object"}'))
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_SPACES))
        return to_lark(wanted)
    except ValueError as error:
        raise RequestError(f"structured_outputs: {str(error)[:200]}") from None


def to_lark(wanted: StructuredOutputsParams) -> str:
    """Any structure in llguidance's variant of Lark, for a larger grammar to contain."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if wanted.json is not None or wanted.json_object:
        schema = json.loads(without_unions(str(wanted.json or '{"type": "object"}')))
        spaced = {**schema, "x-guidance": JSON_SPACES} if isinstance(schema, dict) else {"x-guidance": JSON_SPACES}
        return f"start: %json {json.dumps(spaced)}"
    if wanted.regex is not None:  # \d, \w and \s of ASCII, as in vLLM and in JavaScript; Rust's have all of Unicode
        return f"start: /{regex_to_lark(wanted.regex, 'dws')}/"
    if wanted.choice is not None:
        return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice)
    source = str(wanted.grammar)
    if GBNF_RULE.search(source) is None:
        return source
    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # it has several types, and Exception is one of them
        raise RequestError(f"structured_outputs grammar: is no GBNF: {str(error)[:200]}") from None


def make_matcher(tokenizer: Any, source: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    # A quarter of a second for the whole of compiling and 15 ms for a step at the speeds llguidance names
    limits = LLParserLimits(initial_lexer_fuel=4_000_000, step_lexer_fuel=200_000, max_grammar_size=200_000)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def allowed_words(rows: Sequence[tuple[Grammar, np.ndarray, int]], vocab: int) -> np.ndarray:
    """int32 [rows, vocab / 32 rounded up]: for each grammar, the output so far and the number of guesses at its end, a
    bit for each token that may come next. llguidance computes all rows at once, in threads of its own."""
    from llguidance.numpy import fill_next_token_bitmask_par

    words = np.zeros((len(rows), -(-vocab // 32)), np.int32)
    kept = {output_ids[: len(output_ids) - num_drafted].tobytes() for _, output_ids, num_drafted in rows}
    matchers = [grammar.matcher(output_ids, num_drafted, kept) for grammar, output_ids, num_drafted in rows]
    first = {id(matcher): i for i, matcher in reversed(list(enumerate(matchers)))}  # equal outputs share a matcher
    grammar = rows[0][0]
    found = np.zeros((len(rows), -(-grammar.tokenizer.vocab_size // 32)), np.int32)
    sound = [(matchers[i], i) for i in first.values() if not matchers[i].is_error()]
    if sound:
        fill_next_token_bitmask_par(grammar.executor, sound, found)
        single = np.count_nonzero(found, axis=1) == 1
        for matcher, i in sound:
            if single[i] and (token := spelling(grammar.tokenizer, matcher, found[i])) is not None:
                found[i] = bits_of([token], 32 * len(found[i]))
    width = min(words.shape[1], found.shape[1])
    words[:, :width] = found[[first[id(matcher)] for matcher in matchers], :width]
    if vocab % 32:
        words[:, -1] &= (1 << vocab % 32) - 1
    for i, matcher in enumerate(matchers):
        if matcher.is_error():  # out of fuel: end this text and not the step, which has rows of other requests
            # Nothing is given up behind an end token (the steps of a plan go on), nor behind a guess, which may be one.
            if not rows[i][2] and not np.isin(rows[i][1], grammar.eos_token_ids).any():
                logger.warning("structured output given up: %.200s", str(matcher.get_error()).strip())
            words[i] = 0
    for i in np.flatnonzero(~words.any(1)).tolist():
        words[i] = bits_of(grammar.eos_token_ids, vocab)
    return words


def spelling(tokenizer: Any, matcher: Any, words: np.ndarray) -> int | None:
    """Where only one text can follow, llguidance allows one token, the first that the tokenizer makes of that text. If
    the text spells a special or added token ("<|im_end|>" inside a string), that is the token, and the matcher itself
    does not accept it. Then this is an ordinary token to begin the text with; None if the token is accepted."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    if len(allowed) != 1 or matcher.validate_tokens(allowed.tolist()):
        return None
    ids = tokenizer.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))  # [] before an end token
    return ids[0] if ids else None


def structured_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    vocab = logits.shape[-1]
    found = [row.params.structured_outputs for row in rows]
    limited = {i: grammar for i, grammar in enumerate(found) if isinstance(grammar, Grammar)}
    if limited:
        words = allowed_words([(g, rows[i].output_ids, rows[i].num_drafted) for i, g in limited.items()], vocab)
        banned = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab] == 0
        places = torch.tensor(list(limited), device=logits.device)
        logits[places] = logits[places].masked_fill(torch.from_numpy(banned).to(logits.device), float("-inf"))
    return logits

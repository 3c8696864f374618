"""Structured output: a model with random weights writes only what the grammar allows."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.sampling import structured
from nanovllm.sampling.structured import Grammar, Grammars, make_matcher
from nanovllm.sampling_params import MAX_STRUCTURE, StructuredOutputsParams
from tests.tiny_models import TinyModel

pytest.importorskip("llguidance")
llguidance_numpy = pytest.importorskip("llguidance.numpy")

SCHEMA = {
    "type": "object",
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
}


def texts(llm: LLM, wanted: Any, n: int = 6, **options: Any) -> list[str]:
    """Only those that had the room to end."""
    params = SamplingParams(structured_outputs=wanted, n=n, **{"max_tokens": 140, "seed": 0, **options})
    [output] = llm.generate(["the rain"], params, use_tqdm=False)
    assert all(c.finish_reason in ("stop", "length") for c in output.outputs)
    return [c.text for c in output.outputs if c.finish_reason == "stop"]


def test_choice(llm: LLM) -> None:
    choices = ["red", "green", 'gr\u00fcn "quoted" \\ \n', "雨"]
    found = texts(llm, {"choice": choices}, n=12, temperature=50.0)
    assert len(found) == 12
    assert set(found) <= set(choices)
    assert len(set(found)) > 1


def test_regex(llm: LLM) -> None:
    found = texts(llm, StructuredOutputsParams(regex="[0-9]{3}-[a-c]{1,5}x?"))
    assert len(found) == 6
    assert all(re.fullmatch("[0-9]{3}-[a-c]{1,5}x?", text) for text in found)


def test_json_schema(llm: LLM) -> None:
    for form in (SCHEMA, json.dumps(SCHEMA)):
        found = [json.loads(text) for text in texts(llm, {"json": form}, n=12)]
        assert len(found) >= 6
        for value in found:
            assert set(value) == {"name", "age", "tags"}
            assert len(value["name"]) <= 4
            assert 0 <= value["age"] <= 120
            assert set(value["tags"]) <= {"x", "y"}


def test_json_object(llm: LLM) -> None:
    found = texts(llm, {"json_object": True})
    assert found
    assert all(isinstance(json.loads(text), dict) for text in found)


def test_grammar(llm: LLM) -> None:
    found = texts(llm, {"grammar": 'start: "ab" inner\ninner: /[cd]/ | "(" inner ")"'})
    assert found
    assert all(re.fullmatch(r"ab(\()*[cd](\))*", t) and t.count("(") == t.count(")") for t in found)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"choice": ["<|bos|>"]}, "<|bos|>"),
        ({"regex": "x<|eos|>y".replace("|", r"\|")}, "x<|eos|>y"),
        ({"json": {"const": "<|eos|>"}}, '"<|eos|>"'),
    ],
)
def test_forced_text_that_spells_a_special_token_is_text(llm: LLM, wanted: Any, text: str) -> None:
    params = SamplingParams(structured_outputs=wanted, max_tokens=20)
    [output] = llm.generate(["the rain"], params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == (text, "stop")
    assert not set(output.token_ids[:-1]) & set(llm.engine.tokenizer.all_special_ids)


def test_completions_of_one_request_do_not_share_a_state(llm: LLM) -> None:
    """One may have the beginning of another's output, and be some tokens behind: after guesses, or a preemption."""
    params = SamplingParams(n=2, structured_outputs={"regex": "(ab|ba){2,9}"})
    grammars, vocab = llm.engine.grammars, llm.engine.model_config.vocab_size
    longer = np.array([llm.get_tokenizer().encode(c, add_special_tokens=False)[0] for c in "abba"], np.int32)
    for first, second in ((1, len(longer)), (len(longer), 1), (1, 2), (0, len(longer))):
        outputs: Any = longer[:first], longer[:second]
        grammar: Any = grammars.compiled(params).structured_outputs
        together = structured.allowed_words([(grammar, output, 0) for output in outputs], vocab)
        again = structured.allowed_words([(grammar, output, 0) for output in outputs], vocab)
        for output, words, later in zip(outputs, together, again):
            fresh: Any = grammars.compiled(params).structured_outputs
            assert (words == structured.allowed_words([(fresh, output, 0)], vocab)[0]).all()
            assert (words == later).all()
        guess = structured.allowed_words([(grammar, longer[:2], 1), (grammar, longer[:1], 0)], vocab)
        assert (guess[0] == structured.allowed_words([(fresh, longer[:2], 0)], vocab)[0]).all()


def test_a_guess_behind_a_guessed_end_is_no_failure(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    wanted = llm.engine.grammars.compiled(SamplingParams(structured_outputs={"choice": ["red"]})).structured_outputs
    assert isinstance(wanted, Grammar)
    ids = [*llm.get_tokenizer().encode("red", add_special_tokens=False), wanted.eos_token_ids[0], 5]
    vocab = llm.engine.model_config.vocab_size
    structured.allowed_words([(wanted, np.asarray(ids, np.int32), 2)], vocab)
    structured.allowed_words([(wanted, np.asarray(ids, np.int32), 0)], vocab)  # a step of the same plan, behind the end
    assert "given up" not in caplog.text
    structured.allowed_words([(wanted, np.asarray([*ids[:1], 5], np.int32), 0)], vocab)
    assert "given up" in caplog.text


def test_forced_text_that_spells_an_added_token_is_text(llm: LLM) -> None:
    """Qwen's <tool_call> is one token but not a special one. By its id a grammar can still ask for it."""
    tokenizer = copy.deepcopy(llm.engine.tokenizer)
    tokenizer.add_tokens(["<tool_call>"])
    added = tokenizer.convert_tokens_to_ids("<tool_call>")
    grammars = Grammars(tokenizer, len(tokenizer), llm.engine.model_config.eos_token_ids)
    for source, expected in (('start: "<tool_call>"', None), (f"start: <[{added}]>", [added])):
        grammar = grammars.compiled(SamplingParams(structured_outputs={"grammar": source})).structured_outputs
        assert isinstance(grammar, Grammar)
        ids: list[int] = []
        while len(ids) < 20 and not grammar.is_complete(ids):
            words = structured.allowed_words([(grammar, np.asarray(ids, np.int32), 0)], len(tokenizer))
            ids.append(int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]))
        assert tokenizer.decode(ids) == "<tool_call>"
        assert ids == expected if expected else added not in ids


def test_together_with_everything_else(llm: LLM) -> None:
    """A grammar for one row leaves the other rows of the batch alone, and edits for its own row still count."""
    plain = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    alone = llm.generate(["the men"], plain, use_tqdm=False)[0]["token_ids"]
    yes = llm.engine.tokenizer.encode("yes", add_special_tokens=False)[0]
    wanted = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, logit_bias={yes: 100.0}, logprobs=2)
    both = llm.generate(["the men", "the men"], [plain, wanted], use_tqdm=False)
    assert both[0]["token_ids"] == alone
    assert both[1]["text"] == "yes"
    assert all(len(position) >= 2 for position in both[1]["logprobs"])


def test_greedy_twins_and_preemption(make_llm: Callable[..., LLM]) -> None:
    """Twins share a state; a preempted sequence has lost its own."""
    roomy = make_llm()
    few = make_llm(num_kvcache_blocks=10, max_num_seqs=6)
    wanted = {"regex": "[a-z ]{60,80}"}
    for options in ({"temperature": 0}, {"seed": 1}):
        expected = texts(roomy, wanted, **options)
        before = few.engine.scheduler.num_preemptions
        assert texts(few, wanted, **options) == expected
        assert few.engine.scheduler.num_preemptions > before
        assert len(expected) == 6


@pytest.mark.parametrize(
    "wanted",
    [{}, {"regex": "a", "choice": ["b"]}, {"x": 1}, {"choice": []}, {"choice": [1]}, {"json": 5}, {"regex": ""},
     {"json_object": False}, {"json_object": 1}, {"regex": "a" * (MAX_STRUCTURE + 1)}, "regex", 5],
)  # fmt: skip
def test_wrong_specifications(wanted: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs=wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "("},
        {"grammar": "nonsense!"},
        {"json": "{"},
        {"json": {"type": 5}},
        {"grammar": "start: missing"},
        {"json": {"$ref": "http://127.0.0.1:9/s"}},
        {"json": '{"items":' * 300 + "{}" + "}" * 300},
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_cannot_be_compiled_is_refused(llm: LLM, wanted: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate(["a"], SamplingParams(structured_outputs=wanted), use_tqdm=False)


NASTY = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(.*a.{1,500}){50}"},
    {"regex": "|".join(f"{i:040}" for i in range(2000))},
    {"json": {"properties": {f"p{i}": {"type": "string", "pattern": "^.*a.{12}b$"} for i in range(800)}}},
    {"grammar": "start: A\nA: " + " & ".join(f"/.*{c}.{{{k}}}.*/" for k, c in enumerate("abcdefghijklmn", 5))},
    {"grammar": 'start: x\nx: x x | "a" | ""'},
    {"choice": ["x" * 1000] * 90},
]


@pytest.mark.parametrize("wanted", NASTY, ids=lambda x: str(x)[:40])
def test_grammars_made_to_be_slow_are_bounded(llm: LLM, wanted: Any) -> None:
    """Compiled or refused, run or given up: within a second here, and the row beside it is not touched."""
    plain = SamplingParams(max_tokens=10, seed=3, ignore_eos=True)
    alone = llm.generate(["the men"], plain, use_tqdm=False)[0]["token_ids"]
    started = time.monotonic()
    try:
        slow = SamplingParams(structured_outputs=wanted, max_tokens=10)
        both = llm.generate(["the men", "the men"], [plain, slow], use_tqdm=False)
    except RequestError:
        return
    assert time.monotonic() - started < 5
    assert both[0]["token_ids"] == alone


@pytest.mark.parametrize(
    "other", [{"ignore_eos": True}, {"min_tokens": 1}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}]
)
def test_what_could_leave_nothing_is_refused(llm: LLM, other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(other))):
        llm.generate(["a"], SamplingParams(structured_outputs={"regex": "a"}, **other), use_tqdm=False)


def test_compiled_once_for_a_request(llm: LLM, llama: TinyModel) -> None:
    grammars = llm.engine.grammars
    params = SamplingParams(structured_outputs={"regex": "a"})
    once = grammars.compiled(params)
    assert isinstance(once.structured_outputs, Grammar)
    assert grammars.compiled(once) is once
    assert grammars.compiled(params).structured_outputs is not once.structured_outputs
    with pytest.raises(RequestError, match="tokenizer"):
        Grammars(None, 300, [2]).compiled(params)
    with pytest.raises(RequestError, match="end token"):
        Grammars(llm.engine.tokenizer, 300, []).compiled(params)


# ---- what a text is when its grammar cannot go on --------------------------------------------------------------------


def test_a_grammar_that_is_given_up_never_ends_as_if_complete(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance runs out of fuel in the middle of a text. The row ends, the one beside it is not touched."""
    plain = SamplingParams(max_tokens=10, seed=3, ignore_eos=True)
    alone = llm.generate(["the men"], plain, use_tqdm=False)[0]["token_ids"]
    real_fill = llguidance_numpy.fill_next_token_bitmask_par

    class Tired:
        """A matcher that fails after three tokens."""

        def __init__(self, matcher: Any) -> None:
            self._matcher, self._num = matcher, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def consume_tokens(self, ids: list[int]) -> Any:
            self._num += len(ids)
            return self._matcher.consume_tokens(ids)

        def consume_token(self, token: int) -> Any:
            return self.consume_tokens([token])

        def is_error(self) -> bool:
            return self._num >= 3

        def get_error(self) -> str:
            return "out of fuel"

    def fill(executor: Any, matchers: list[tuple[Any, int]], table: Any) -> None:
        real_fill(executor, [(matcher._matcher, i) for matcher, i in matchers], table)

    monkeypatch.setattr(llguidance_numpy, "fill_next_token_bitmask_par", fill)
    monkeypatch.setattr(structured, "make_matcher", lambda *args: Tired(make_matcher(*args)))
    wanted = SamplingParams(structured_outputs={"regex": "[ab]{20}"}, max_tokens=40)
    row, cut = llm.generate(["the men", "the men"], [plain, wanted], use_tqdm=False)
    assert row["token_ids"] == alone
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "structured output given up")
    assert len(cut["text"]) < 20


def test_a_complete_text_ends_with_stop(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "[ab]{5}"}, max_tokens=40, n=4, seed=1)
    for one in llm.generate(["the men"], params, use_tqdm=False)[0].outputs:
        assert (one.finish_reason, one.stop_reason, len(one.text)) == ("stop", None, 5)
    cut = SamplingParams(structured_outputs={"regex": "[ab]{50}"}, max_tokens=5)
    assert llm.generate(["the men"], cut, use_tqdm=False)[0]["finish_reason"] == "length"
    ended = SamplingParams(structured_outputs={"regex": "a{9}"}, max_tokens=40, stop="aaa")  # as the caller wished
    assert llm.generate(["the men"], ended, use_tqdm=False)[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("regex", "yes", "no"),
    [
        (r"\d", "7", "٣"),
        (r"\w", "a", "é"),
        (r"[\d.]", ".", "٣"),
        (r"\S\D\W", "xxé", "xxx"),
        (r"\s", "\t", "\u3000"),
        (r"\\d", "\\d", "\\7"),
        (r"a/b", "a/b", "ab"),
    ],
)
def test_classes_of_a_regex_are_ascii(llm: LLM, regex: str, yes: str, no: str) -> None:
    grammar = llm.llm_engine.grammars.compiled(SamplingParams(structured_outputs={"regex": regex})).structured_outputs
    for text, fits in ((yes, True), (no, False)):
        ids = llm.llm_engine.tokenizer.encode(text, add_special_tokens=False)
        matcher = make_matcher(grammar.tokenizer, grammar.source)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


def test_gbnf(llm: LLM) -> None:
    wanted = {"grammar": 'root ::= pair ("," pair)?\npair ::= [a-b] "=" [0-1] # two of them\n'}
    for text in texts(llm, wanted, max_tokens=40):
        assert re.fullmatch("[ab]=[01](,[ab]=[01])?", text)
    for broken in ("root ::= (", 'root ::= "a" nope', 'other ::= "a"'):
        with pytest.raises(RequestError, match="grammar: is no GBNF"):
            llm.generate(["a"], SamplingParams(structured_outputs={"grammar": broken}), use_tqdm=False)


def test_unique_items(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": False}
    for text in texts(llm, {"json": schema}, max_tokens=100):
        assert set(json.loads(text)) <= {1, 2}
    named = {
        "type": "object",
        "properties": {"uniqueItems": {"const": False}},
        "required": ["uniqueItems"],
        "additionalProperties": False,
    }
    for text in texts(llm, {"json": named}, max_tokens=150):
        assert json.loads(text) == {"uniqueItems": False}
    with pytest.raises(RequestError, match="uniqueItems"):
        texts(llm, {"json": {**schema, "uniqueItems": True}})

"""<think>...</think> as reasoning_content, through the openai client, whole and streamed. The model is random: grammars
and biases decide what it writes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response as OpenAIResponse

from nanovllm import LLM, SamplingParams
from nanovllm.sampling.structured import make_matcher
from nanovllm.server.reasoning import Start, ThoughtReader, after_thoughts, where
from tests.server.rig import TAGS, Running, add_tokens, events_of, make_talker, running, until
from tests.server.test_clients import short_json
from tests.server.test_tools import ASK, WEATHER

pytest.importorskip("llguidance")

INSIDE, MAYBE, OUTSIDE = Start
THINK = ["<think>", "</think>"]
SCHEMA = {"properties": {"town": {"enum": ["Oslo", "Rome"]}}, "required": ["town"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "object", **SCHEMA}}}

TEXTS = [
    (MAYBE, "<think>\nhm hm\n</think>\n\nOslo", "hm hm", "Oslo"),
    (MAYBE, "\n<think>hm</think>Oslo", "hm", "Oslo"),
    (MAYBE, "Oslo <think>", "", "Oslo <think>"),
    (MAYBE, "  Oslo", "", "  Oslo"),
    (MAYBE, "<thin", "", "<thin"),
    (MAYBE, "<think>\n\n</think>\n\nOslo", "", "Oslo"),
    (MAYBE, "", "", ""),
    (INSIDE, "hm\n</think>\n\nOslo\n", "hm", "Oslo\n"),
    (INSIDE, "<think>\nhm</think>Oslo", "hm", "Oslo"),
    (INSIDE, "hm </thin", "hm </thin", ""),
    (INSIDE, "hm \n\n hm ", "hm \n\n hm", ""),
    (INSIDE, "a < b </ c", "a < b </ c", ""),
    (INSIDE, "hm</think>a</think>b", "hm", "a</think>b"),
    (OUTSIDE, "Oslo</think>", "", "Oslo</think>"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), TEXTS)
def test_how_a_text_is_cut_makes_no_difference(start: Start, text: str, reasoning: str, content: str) -> None:
    for seed in range(30):
        draw, reader, found, at = random.Random(seed), ThoughtReader(start), ["", ""], 0
        while at < len(text):
            size = draw.choice((1, 2, 3, 50)) if seed else len(text)
            pieces = reader.feed(text[at : at + size], at + size >= len(text))
            found, at = [old + new for old, new in zip(found, pieces)], at + size
        assert found == [reasoning, content]


def test_where_a_completion_begins() -> None:
    for parser, prompt, start in (
        ("qwen3", "<|im_start|>assistant\n", MAYBE),
        ("deepseek_r1", "<|Assistant|>", INSIDE),
        ("qwen3", "assistant\n<think>\n", INSIDE),
        ("deepseek_r1", "x<think>\n", INSIDE),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", OUTSIDE),
        ("deepseek_r1", "<think>\n\n</think>\n\n", OUTSIDE),
    ):
        assert where(parser, prompt) is start
    assert where("deepseek_r1", "the men", "the men") is OUTSIDE
    assert where("qwen3", "the men", "<think>the men") is INSIDE


@pytest.fixture(scope="module", params=["qwen3", "deepseek_r1"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_talker(tmp_path_factory.mktemp("models") / "thinker", with_tags=True)
    add_tokens(model, THINK)
    with running(model, {"num_kvcache_blocks": 600}, reasoning_parser=request.param) as made:
        yield made
        until(made.is_empty)


def asked(server: Running, **options: Any) -> tuple[str, str, list[Any], str]:
    """(reasoning, content, calls, finish reason), the same whole and streamed."""
    settings = {"model": server.model, "messages": ASK, "max_tokens": 120, **options}
    with server.client() as client:
        choice = client.chat.completions.create(**settings).choices[0]
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        whole = (message.model_extra.get("reasoning_content", ""), message.content or "", calls, choice.finish_reason)
        if whole[0] and not whole[1]:
            assert message.content is None
        reasoning = content = reason = ""
        parts: dict[int, list[str]] = {}
        for chunk in client.chat.completions.create(**settings, stream=True):
            delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
            reasoning += delta.model_extra.get("reasoning_content", "")
            content += delta.content or ""
            for call in delta.tool_calls or ():
                parts.setdefault(call.index, [call.function.name, ""])[1] += call.function.arguments
    assert (reasoning, content, [tuple(part) for part in parts.values()], reason) == whole
    return whole


def bias(server: Running, *tags: str) -> dict[str, int]:
    known = server.engine.tokenizer.get_added_vocab()
    return {**short_json(server), **{str(known[tag]): 100 if tag in tags else -100 for tag in (*THINK, *TAGS)}}


def test_thoughts_are_apart(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.server.answers.free_thoughts", lambda engine, params, start: params)
    known = server.engine.tokenizer.get_added_vocab()
    for opens in (True, False):
        text = f'{f"<[{known[THINK[0]]}]>" if opens else ""} "\\nhm\\n" <[{known[THINK[1]]}]> "\\n\\nOslo"'
        found = asked(server, extra_body={"structured_outputs": {"grammar": f"start: {text}"}}, seed=1)
        if opens or server.service.options.reasoning_parser == "deepseek_r1":
            assert found == ("hm", "Oslo", [], "stop")
        else:
            assert found == ("", "\nhm\n</think>\n\nOslo", [], "stop")


def test_thoughts_that_are_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.server.answers.free_thoughts", lambda engine, params, start: params)
    opener = server.engine.tokenizer.get_added_vocab()[THINK[0]]
    extra = {"structured_outputs": {"grammar": f'start: <[{opener}]> "the rain in the town" "x"*'}}
    reasoning, content, _, reason = asked(server, extra_body=extra, max_tokens=6)
    assert "the rain in the town".startswith(reasoning)
    assert (bool(reasoning), content, reason) == (True, "", "length")


@pytest.mark.parametrize("form", ["response_format", "regex", "choice", "grammar", "gbnf"])
def test_a_grammar_binds_the_answer_and_not_the_thoughts(server: Running, form: str) -> None:
    extra: dict[str, Any] = {
        "response_format": {"response_format": FORM},
        "regex": {"guided_regex": r"\{/\d\}"},
        "choice": {"guided_choice": ["Oslo", "Rome"]},
        "grammar": {"guided_grammar": 'start: "Os" lo\nlo: /lo}?/'},
        "gbnf": {"guided_grammar": 'root ::= "Ro" "me"'},
    }[form]
    fits = {
        "response_format": lambda text: json.loads(text)["town"] in ("Oslo", "Rome"),
        "regex": lambda text: len(text) == 4 and text.startswith("{/") and text[2] in "0123456789",
        "choice": lambda text: text in ("Oslo", "Rome"),
        "grammar": lambda text: text in ("Oslo", "Oslo}"),
        "gbnf": lambda text: text == "Rome",
    }[form]
    pushed = bias(server, *THINK)  # towards the tags and, in JSON, towards its end
    reasoning, content, _, reason = asked(server, extra_body=extra, logit_bias=pushed, seed=1, max_tokens=400)
    assert (reason, fits(content)) == ("stop", True)
    assert set(reasoning) <= {"}"}


@pytest.mark.parametrize("tags", ["tokens", "letters"])
@pytest.mark.parametrize("start", Start)
def test_what_the_grammar_takes(server: Running, llm: LLM, tags: str, start: Start) -> None:
    engine = server.engine if tags == "tokens" else llm.llm_engine
    source = after_thoughts('start: "Oslo" | %json {"const": "}{"}', start, engine.tokenizer)
    grammar = engine.grammars.compiled(SamplingParams(structured_outputs={"grammar": source})).structured_outputs
    for text, where_taken in (
        ("Oslo", (OUTSIDE, MAYBE)),
        ("hm </ th> hm</think>\n\nOslo", (INSIDE,)),
        ("</think>Oslo", (INSIDE,)),
        ('<think>hm\n</think>"}{"', (INSIDE, MAYBE)),
        ("<think>hm</think>\n\n\nOslo", ()),
        ("<think>hm", ()),
        ("hm</think>Rome", ()),
        ("Oslo</think>", ()),
    ):
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        matcher = make_matcher(grammar.tokenizer, grammar.source)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is (start in where_taken), text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_after_thoughts(server: Running, choice: Any) -> None:
    reasoning, content, calls, reason = asked(
        server,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        logit_bias=bias(server, *THINK),
        seed=1,
        max_tokens=400,
    )
    assert (content, reason) == ("", "tool_calls")
    assert set(reasoning) <= {"}"}
    assert json.loads(calls[0][1])["town"] in ("Oslo", "Rome")


def test_thoughts_can_be_sent_back(server: Running) -> None:
    past = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    body = {"messages": [*ASK, past, *ASK], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_thoughts_in_other_dialects(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of their own, whole and streamed."""
    monkeypatch.setattr("nanovllm.server.answers.free_thoughts", lambda engine, params, start: params)
    known = server.engine.tokenizer.get_added_vocab()
    text = f'<[{known[THINK[0]]}]> "\\nhm hm\\n" <[{known[THINK[1]]}]> "\\n\\nOslo"'
    bound = {"structured_outputs": {"grammar": f"start: {text}"}}

    body = {"messages": ASK, "max_tokens": 60, **bound}
    thought, answer = server.post("/v1/messages", body).json()["content"]
    assert (thought["type"], thought["thinking"], answer["type"], answer["text"]) == (
        "thinking",
        "hm hm",
        "text",
        "Oslo",
    )
    events = events_of(server.post("/v1/messages", {**body, "stream": True}).text)
    assert "".join(event.get("delta", {}).get("thinking", "") for event in events) == "hm hm"

    body = {"input": "rain?", "max_output_tokens": 60, **bound}
    record = server.post("/v1/responses", body).json()
    assert [item.type for item in OpenAIResponse.model_validate(record).output] == ["reasoning", "message"]
    thought, answer = record["output"]
    assert (thought["summary"], thought["content"]) == ([], [{"type": "reasoning_text", "text": "hm hm"}])
    assert answer["content"][0]["text"] == "Oslo"
    events = events_of(server.post("/v1/responses", {**body, "stream": True}).text)
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm hm"  # in one or several: a stream merges what its reader has not taken yet
    assert [event["text"] for event in events if event["type"] == "response.reasoning_text.done"] == ["hm hm"]

"""Calls of functions through the real openai client: forced ones follow their schema with any model, free ones are
read from what the model writes. The model is random, so `structured_outputs` dictates what it writes freely."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanovllm.server.protocol import ChatBody
from nanovllm.server.tools import FORMS, AnswerPart, CallReader
from tests.server.rig import TAGS, Running, running, until
from tests.server.test_refusals import check_error

pytest.importorskip("llguidance")

ASK: list[Any] = [{"role": "user", "content": "rain?"}]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"$ref": "#/$defs/Town"}, "days": {"enum": [1, 2, 3]}},
    "required": ["town", "days"],
    "additionalProperties": False,
    "$defs": {"Town": {"enum": ["Oslo", "Rome"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]
CALL = '{"name": "weather", "arguments": {"town": "Oslo", "days": 2}}'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.town }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
)


@pytest.fixture(scope="module", params=[True, False], ids=["tags-are-tokens", "tags-are-letters"])
def server(request: pytest.FixtureRequest, talker: Callable[[bool], Path]) -> Iterator[Running]:
    with running(talker(request.param), {"num_kvcache_blocks": 600}) as made:
        yield made
        until(made.is_empty)


def ask(client: openai.OpenAI, server: Running, **options: Any) -> Any:
    settings = {"model": server.model, "messages": ASK, "tools": TOOLS, "max_tokens": 200, **options}
    return client.chat.completions.create(**settings)


def assemble(stream: Any, n: int = 1) -> list[dict[str, Any]]:
    """What a client makes of the events: content, calls, finish reason of each choice."""
    found: list[dict[str, Any]] = [{"content": "", "calls": [], "reason": None} for _ in range(n)]
    for chunk in stream:
        for choice in chunk.choices:
            one = found[choice.index]
            assert one["reason"] is None
            one["content"] += choice.delta.content or ""
            one["reason"] = choice.finish_reason
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(one["calls"]):
                    assert (len(delta.id), delta.type) == (9, "function")
                    one["calls"].append([delta.function.name, ""])
                else:
                    assert (delta.index, delta.id, delta.function.name) == (len(one["calls"]) - 1, None, None)
                one["calls"][delta.index][1] += delta.function.arguments
    return found


def as_whole(answer: Any) -> list[dict[str, Any]]:
    return [
        {
            "content": choice.message.content or "",
            "reason": choice.finish_reason,
            "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
        }
        for choice in answer.choices
    ]


def check_arguments(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "weather":
        assert set(value) == {"town", "days"}
        assert value["town"] in ("Oslo", "Rome")
        assert value["days"] in (1, 2, 3)
    else:
        assert (name, isinstance(value, dict)) == ("clock", True)


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_always_parse(server: Running, parallel: bool) -> None:
    options = {"tool_choice": "required", "n": 4, "seed": 3, "parallel_tool_calls": parallel, "tools": [WEATHER]}
    with server.client() as client:
        answer = ask(client, server, **options)
        whole = as_whole(answer)
        streamed = assemble(ask(client, server, **options, stream=True), 4)
    assert streamed == whole
    done = [one for one in whole if one["reason"] == "tool_calls"]
    assert done
    for one in done:
        assert one["content"] == ""
        assert len(one["calls"]) == 1 or parallel
        for name, arguments in one["calls"]:
            check_arguments(name, arguments)
    assert all(choice.message.content is None for choice in answer.choices if choice.message.tool_calls)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == len(ids)


def test_arguments_may_be_a_discriminated_union(server: Running) -> None:
    kinds = {
        kind: {
            "type": "object",
            "required": ["kind"],
            "properties": {"kind": {"const": kind}},
            "additionalProperties": False,
        }
        for kind in ("cat", "dog")
    }
    pet = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    schema = {"type": "object", "required": ["pet"], "properties": {"pet": pet}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "feed", "parameters": {**schema, "$defs": kinds}}}
    with server.client() as client:
        [one] = as_whole(ask(client, server, tools=[tool], tool_choice="required", seed=1, parallel_tool_calls=False))
    assert one["reason"] == "tool_calls"
    assert json.loads(one["calls"][0][1]) in [{"pet": {"kind": "cat"}}, {"pet": {"kind": "dog"}}]


def test_a_named_function_is_the_one_that_is_called(server: Running) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with server.client() as client:
        [one] = as_whole(ask(client, server, tool_choice=choice, seed=1))
        chunks = list(ask(client, server, tool_choice=choice, seed=1, stream=True))
    assert assemble(chunks) == [one]
    assert [name for name, _ in one["calls"]] == ["weather"]
    check_arguments(*one["calls"][0])
    assert one["reason"] == "tool_calls"
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)  # what a slow reader has not read yet is merged


def test_a_call_that_is_cut_off_says_so(server: Running) -> None:
    written = '<tool_call>\n{"name": "weather", "arguments": {'
    head = len(server.engine.tokenizer.encode(written, add_special_tokens=False))
    with server.client() as client:
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        [one] = as_whole(ask(client, server, tool_choice=choice, max_tokens=head + 2))
    assert one["reason"] == "length"
    assert one["calls"][0][1].startswith("{")


FREE = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (f"Well.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "Well.\n", 2),
    ("no call <tool> at all", "no call <tool> at all", 0),
    ('<tool_call>{"name": "bomb", "arguments": {}}</tool_call>', None, 0),  # not one that was offered
    ('<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>', None, 0),
]


@pytest.mark.parametrize(("text", "content", "num_calls"), FREE, ids=range(len(FREE)))
def test_calls_that_the_model_makes_by_itself(server: Running, text: str, content: str | None, num_calls: int) -> None:
    extra = {"structured_outputs": {"grammar": dictated(server, text)}}
    marked = {**extra, "skip_special_tokens": False}  # the end marker is no content beside calls
    with server.client() as client:
        [one] = as_whole(ask(client, server, extra_body=extra))
        [streamed] = assemble(ask(client, server, extra_body=marked, stream=True))
        [plain] = as_whole(ask(client, server, extra_body=extra, tool_choice="none"))
        [single] = as_whole(ask(client, server, extra_body=extra, parallel_tool_calls=False))
    assert streamed == one
    assert one["content"] == (text if content is None else content)
    assert [(name, json.loads(given)) for name, given in one["calls"]] == [
        ("weather", {"town": "Oslo", "days": 2})
    ] * num_calls
    assert one["reason"] == ("tool_calls" if num_calls else "stop")
    assert plain == {"content": text, "calls": [], "reason": "stop"}
    assert len(single["calls"]) == min(num_calls, 1)


def dictated(server: Running, text: str) -> str:
    """A grammar of one text, its tags as a model would write them."""
    known = server.engine.tokenizer.get_added_vocab()
    parts = [part for part in re.split(f"({'|'.join(TAGS)})", text) if part]
    return "start: " + " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part) for part in parts)


def test_strict_holds_where_the_model_decides(server: Running) -> None:
    """Pushed to open calls and to write brackets, it can only write calls that follow the schema."""
    tokenizer = server.engine.tokenizer
    opener = tokenizer.encode(TAGS[0], add_special_tokens=False)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    bias = {str(token): 30.0 for token in opener} if len(opener) == 1 else {}
    with server.client() as client:
        answers = [
            as_whole(ask(client, server, tools=[strict], seed=seed, logit_bias=bias, max_tokens=200))[0]
            for seed in range(2)
        ]
    calls = [call for one in answers for call in (one["calls"] if one["reason"] == "tool_calls" else one["calls"][:-1])]
    for name, arguments in calls:
        check_arguments(name, arguments)
    if bias:
        assert len(calls) >= 2
    # a call that was cut off before its name is text
    assert all(one["content"].count(TAGS[0]) <= (one["reason"] == "length") for one in answers)


# ---- what the model gets ------------------------------------------------------------------------------------------

PAST: list[Any] = [
    {"role": "system", "content": "Be short."},
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}},
            {"id": "abcdefgh2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "wet"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": [{"type": "text", "text": "noon"}]},
]


def prompt_of(server: Running, messages: list[Any], tools: list[Any] | None) -> str:
    found = server.post("/tokenize", {"messages": messages, "tools": tools}).json()
    return str(server.engine.tokenizer.decode(found["tokens"]))


def test_a_template_that_knows_tools_gets_them(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", TEMPLATE)
    text = prompt_of(server, PAST, TOOLS)
    shown, rest = text.split("]system:")
    assert [tool["function"]["name"] for tool in json.loads(shown + "]")] == ["weather", "clock"]
    assert rest == (
        "Be short.;user:rain?;assistant:[abcdefgh1 weather Oslo][abcdefgh2 clock ];tool:wet(abcdefgh1);"
        "tool:noon(abcdefgh2);"
    )
    with server.client() as client:
        without = ask(client, server, messages=PAST, tool_choice="none", max_tokens=1).usage.prompt_tokens
        with_tools = ask(client, server, messages=PAST, max_tokens=1).usage.prompt_tokens
    counted = [server.post("/tokenize", {"messages": PAST, "tools": tools}).json()["count"] for tools in (None, TOOLS)]
    assert [without, with_tools] == counted


def test_a_template_that_does_not_gets_them_in_words(server: Running) -> None:
    text = prompt_of(server, PAST, TOOLS)
    system, rest = text.split("<|end|>", 1)
    assert system.startswith("<|system|>Be short.\n\n")
    assert json.dumps(SCHEMA) in system
    assert '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>' in system
    assert rest == (
        "<|user|>rain?<|end|><|assistant|>"
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nwet\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|end|><|assistant|>"
    )
    assert prompt_of(server, ASK, TOOLS).startswith("<|system|>These functions")
    assert prompt_of(server, ASK, None) == "<|user|>rain?<|end|><|assistant|>"


def test_an_answer_can_be_sent_back(server: Running) -> None:
    """Two rounds, as an agent makes them: what the server gave is what it takes."""
    with server.client() as client:
        message = ask(client, server, tool_choice="required", seed=3, parallel_tool_calls=False).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in message.tool_calls]
        [one] = as_whole(ask(client, server, messages=[*ASK, message, *results], tool_choice="none", max_tokens=4))
    assert one["calls"] == []


# ---- what is refused -------------------------------------------------------------------------------------------------

ODD = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": 5}}}}}
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "tools.0"),
    ({"tools": [CLOCK, {"type": "function", "function": {"name": "a b"}}]}, "tools", "tools.1.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools", "tools.0.function.x"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "tools.1.function.name"),
    ({"tools": [CLOCK] * 129}, "tools", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools",
     "tools.0.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools",
     "tools.0.function.parameters"),
    ({"tools": [CLOCK, ODD], "tool_choice": "required"}, "tools", "tools.1.function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}}}]}, "tools", "tools.0.function.parameters"),
    ({"tools": [CLOCK, ODD], "tool_choice": {"type": "function", "function": {"name": "odd"}}}, "tools",
     "tools.1.function.parameters"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "other"),
    ({"tool_choice": "always"}, "tool_choice", "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "parallel_tool_calls"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
     "response_format", "compiled"),
    ({"response_format": {"type": "json_object"}, "tools": [CLOCK, ODD]}, "tools", "tools.1.function.parameters"),
    ({"structured_outputs": {"regex": "a"}, "tool_choice": "required"}, "structured_outputs", "tool_choice"),
    ({"structured_outputs": {"regex": "a"}, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
     "structured_outputs", "strict"),
    ({"ignore_eos": True, "tool_choice": "required"}, "ignore_eos", "tools"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages", "tool_call_id"),
    ({"messages": [{**PAST[2], "role": "user"}]}, "messages", "assistant"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]}, "messages", "arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "param", "said"), FAULTS, ids=range(len(FAULTS)))
def test_faults_are_named(server: Running, fault: dict[str, Any], param: str, said: str) -> None:
    for stream in (False, True):
        body = {"messages": ASK, "tools": TOOLS, "max_tokens": 4, "stream": stream, **fault}
        error = check_error(server.post("/v1/chat/completions", body))
        assert error["param"] == param, error
        assert said in error["message"]
        assert param in error["message"]


def test_tools_that_ask_for_nothing(server: Running) -> None:
    for nothing in (
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tool_choice": "none"},
        {"tools": [], "parallel_tool_calls": False, "tool_choice": "auto"},
    ):
        assert server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1, **nothing}).status_code == 200
    assert check_error(server.post("/tokenize", {"prompt": "a", "tools": TOOLS}))["param"] == "tools"


# ---- forms of other families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mistral", "llama"])
def test_other_forms(talker: Callable[[bool], Path], form: str) -> None:
    free = FORMS[form].write([{"name": "weather", "arguments": {"town": "Oslo", "days": 2}}] * 2)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    options = {"num_kvcache_blocks": 600}
    with running(talker(False), options, tool_call_parser=form) as server, server.client() as client:
        extra = {"structured_outputs": {"choice": [free]}}
        [one] = as_whole(ask(client, server, extra_body=extra))
        assert assemble(ask(client, server, extra_body=extra, stream=True)) == [one]
        assert [json.loads(arguments) for _, arguments in one["calls"]] == [{"town": "Oslo", "days": 2}] * 2
        for forced in ({"tool_choice": "required"}, {"tools": [strict]}):
            more: dict[str, Any] = {**forced, "n": 2, "seed": 1, "max_tokens": 100}
            answer = ask(client, server, **more)
            streamed = assemble(ask(client, server, **more, stream=True), 2)
            assert streamed == as_whole(answer)
            for one in as_whole(answer):
                if one["reason"] == "tool_calls":
                    for name, arguments in one["calls"]:
                        check_arguments(name, arguments)


TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
TEXTS = [
    ("hermes", f"a <tool_call b {TAGGED}\n{TAGGED} and  more", "a <tool_call b and  more", 2),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"town": "}<tool_call>\\"{"}}</tool_call>', "", 1),
    ("hermes", TAGGED[:-4], "", 1),
    ("hermes", TAGGED[:-16], TAGGED[:-16], 0),
    ("hermes", TAGGED[:30], TAGGED[:30], 0),
    ("hermes", "<tool_call>", "<tool_call>", 0),
    ("hermes", "<tool_call>\n[1]", "<tool_call>\n[1]", 0),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
    ("mistral", f"[{CALL}]", "", 1),
    ("mistral", "[]", "[]", 0),
    ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", 0),
    ("mistral", f"see [{CALL}]", f"see [{CALL}]", 0),
    ("mistral", "[1, 2]", "[1, 2]", 0),
    ("llama", f"<|python_tag|>{CALL}; {CALL}", "", 2),
    ("llama", f"{CALL} so", " so", 1),
    ("llama", '{"a": 1}', '{"a": 1}', 0),
]


@pytest.mark.parametrize(("form", "text", "content", "num_calls"), TEXTS, ids=range(len(TEXTS)))
def test_how_a_text_is_cut_makes_no_difference(form: str, text: str, content: str, num_calls: int) -> None:
    rng, body = random.Random(0), ChatBody(messages=ASK, tools=[WEATHER])  # type: ignore[list-item]
    cuts = [sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(10)))) for _ in range(60)]
    for places in [[], list(range(1, len(text))), *cuts]:
        reader = CallReader(FORMS[form], body)
        found = AnswerPart()
        for start, end in zip([0, *places], [*places, len(text)]):
            said = reader.feed(text[start:end], finished=end == len(text))
            found.content += said.content
            found.calls += said.calls
        assert (found.content, len(found.whole_calls()), reader.num_calls) == (content, num_calls, num_calls)
        assert all(json.loads(call["function"]["arguments"])["town"] for call in found.whole_calls())

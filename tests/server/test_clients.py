"""Clients that send more than the server reads: openai's own objects sent back, and what libraries built on it
(litellm, instructor, the agents SDK) send. These are not in the `test` extra: their tests run where they are installed,
and what they send is also here as plain bodies."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from nanovllm.server.tools import FORMS
from tests.server.rig import Running, running
from tests.server.test_refusals import check_error
from tests.server.test_tools import ASK, WEATHER

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
}


@pytest.fixture
def server(talking: Running) -> Running:
    return talking


def short_json(server: Running) -> dict[str, int]:
    """A bias towards the end of objects: a random model writes white space and more properties until max_tokens."""
    tokenizer = server.engine.tokenizer
    spaces = {str(i): -100 for i in range(len(tokenizer)) if not tokenizer.decode([i]).strip()}
    return {**spaces, str(tokenizer.encode("}", add_special_tokens=False)[0]): 100}


# ---- bodies ----------------------------------------------------------------------------------------------------------

ABOUT: dict[str, Any] = {
    "store": True,
    "metadata": {"a": "b"},
    "user": "me",
    "verbosity": "low",
    "reasoning_effort": "high",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "x"},
}
CALLED = {
    "id": "abcdefgh1",
    "index": 0,
    "type": "function",
    "function": {"name": "weather", "arguments": "", "parsed_arguments": {}, "provider_specific_fields": {}},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "rain?", "id": "msg_1", "cache_control": {"type": "ephemeral"}},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALLED],
        "annotations": [],
        "refusal": None,
        "reasoning_content": "hm",
        "provider_specific_fields": {"refusal": None},
        "function_call": None,
        "audio": None,
        "parsed": None,
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "wet", "name": "weather"},
    {"role": "assistant", "refusal": "no", "content": None},
    {"role": "user", "content": "and now?"},
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_no_text_is_ignored_with_one_line(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {"messages": HISTORY, "max_tokens": 4, "temperature": 0, "stream": stream}
    plain_history = [{"role": m["role"], "content": m["content"] or ""} for m in HISTORY]
    plain_history[0]["content"] = "Be short."
    plain = {"tool_calls": [{"id": "abcdefgh1", "function": {"name": "weather", "arguments": "{}"}}]}
    plain_history[2].update(plain)  # type: ignore[arg-type]
    plain_history[3]["tool_call_id"] = "abcdefgh1"
    plain_history[3]["name"] = "weather"
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = server.post("/v1/chat/completions", {**body, **ABOUT}, headers={"X-Request-Id": "me-1"})
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert found.status_code == 200, found.text
    assert len(lines) == 1
    assert "me-1" in lines[0]
    for name in ("store", "verbosity", "annotations", "cache_control", "index", "parsed_arguments", "id"):
        assert f"'{name}'" in lines[0]
    counts = [server.post("/tokenize", {"messages": messages}).json()["count"] for messages in (HISTORY, plain_history)]
    assert counts[0] == counts[1]


def test_the_line_in_the_log_has_a_limit(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    message = {"role": "user", "content": "a", **{f"{i}\n{'x' * 99}": 1 for i in range(50)}}
    with caplog.at_level(logging.INFO, "nanovllm"):
        answer = server.post("/v1/chat/completions", {"messages": [message] * 9, "max_tokens": 1})
    assert answer.status_code == 200
    [line] = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(line) < 3000
    assert "\n" not in line


@pytest.mark.parametrize("field", ["temprature", "max_token", "top_a", "store_", "Stop"])
def test_unknown_sampling_fields_stay_errors(server: Running, field: str) -> None:
    error = check_error(server.post("/v1/chat/completions", {"messages": ASK, **ABOUT, field: 1}))
    assert (error["param"], error["code"]) == (field, "unknown_field")
    assert check_error(server.post("/v1/completions", {"prompt": "a", "store": True, field: 1}))["param"] == field
    error = check_error(server.post("/v1/chat/completions", {"messages": ASK, "tools": [{**WEATHER, field: 1}]}))
    assert (error["param"], error["code"]) == ("tools", "unknown_field")


# ---- openai ----------------------------------------------------------------------------------------------------------


def test_the_message_of_openais_stream_helper_can_be_sent_back(server: Running) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    settings: dict[str, Any] = {"model": server.model, "tools": [strict], "parallel_tool_calls": False}
    with server.client() as client:
        ask = {**settings, "tool_choice": "required", "max_tokens": 200, "logit_bias": short_json(server)}
        with client.chat.completions.stream(messages=ASK, **ask) as stream:
            message = stream.get_final_completion().choices[0].message
        [call] = message.tool_calls
        assert call.function.parsed_arguments["town"] in ("Oslo", "Rome")
        result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
        for sent in (message, message.model_dump(), message.to_dict()):
            again = client.chat.completions.create(messages=[*ASK, sent, result], max_tokens=4, **settings)  # type: ignore
            assert again.choices[0].finish_reason in ("length", "stop")


# ---- libraries -------------------------------------------------------------------------------------------------------


LOOKS_LIKE_A_CALL = {
    "properties": {
        "name": {"const": "weather"},
        "arguments": {"const": {"town": "Oslo", "days": 1}},
        "parameters": {"const": {"town": "Oslo", "days": 1}},
    },
    "required": ["name", "arguments", "parameters"],
    "additionalProperties": False,
}


def check_tool_beside_format(server: Running, schema: dict[str, Any], opener: str) -> None:
    """As agents with an output_type send it. Whether the model calls or answers depends on the opener alone."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object", **schema}}}
    body = {"messages": ASK, "response_format": form, "tools": [WEATHER], "max_tokens": 300}
    for calls, bias in ((False, -100), (True, 100)):
        sent = {**body, "logit_bias": {**short_json(server), opener: bias}, "parallel_tool_calls": False}
        choice = server.post("/v1/chat/completions", sent).json()["choices"][0]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        if calls:
            assert choice["message"]["content"] is None
            arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
            assert json.loads(arguments)["town"] in ("Oslo", "Rome")
        else:
            assert json.loads(choice["message"]["content"]).keys() == schema["properties"].keys()
            assert "tool_calls" not in choice["message"]


def test_a_format_beside_tools(server: Running) -> None:
    check_tool_beside_format(server, SCHEMA, str(server.engine.tokenizer.get_added_vocab()["<tool_call>"]))


@pytest.mark.parametrize("form", ["mistral", "llama"])
def test_a_format_beside_tools_in_forms_without_tags(talker: Callable[[bool], Path], form: str) -> None:
    with running(talker(False), {"num_kvcache_blocks": 600}, tool_call_parser=form) as server:
        opener = str(server.engine.tokenizer.encode(FORMS[form].opener, add_special_tokens=False)[0])
        check_tool_beside_format(server, LOOKS_LIKE_A_CALL, opener)


# ---- the libraries themselves ----------------------------------------------------------------------------------------


def test_litellms_tool_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    for provider in ("openai", "hosted_vllm"):
        settings: dict[str, Any] = {
            "model": f"{provider}/{server.model}",
            "api_base": f"{server.url}/v1",
            "api_key": "none",
            "tools": [copy.deepcopy(WEATHER)],  # litellm takes keys out of it
            "max_tokens": 200,
            "seed": 3,
            "metadata": {"a": "b"},
            "user": "me",
            "parallel_tool_calls": False,
            "logit_bias": short_json(server),
        }
        messages: list[Any] = list(ASK)
        message = litellm.completion(messages=messages, tool_choice="required", **settings).choices[0].message
        assert message.tool_calls
        chunks = list(litellm.completion(messages=messages, tool_choice="required", stream=True, **settings))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        assert [call.function.arguments for call in rebuilt.tool_calls] == [
            call.function.arguments for call in message.tool_calls
        ]
        for sent in (message, message.model_dump(), rebuilt):
            calls = sent["tool_calls"]
            results = [{"role": "tool", "tool_call_id": c["id"], "name": "weather", "content": "wet"} for c in calls]
            again = litellm.completion(messages=[*messages, sent, *results], **{**settings, "max_tokens": 4})
            assert again.choices[0].finish_reason


def test_instructors_modes(server: Running) -> None:
    instructor = pytest.importorskip("instructor")
    pydantic = pytest.importorskip("pydantic")
    Place = pydantic.create_model("Place", town=(Literal["Oslo", "Rome"], ...))
    with server.client() as client:
        for mode in ("JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"):
            made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
            found = made.chat.completions.create(
                model=server.model,
                messages=list(ASK),
                response_model=Place,
                max_tokens=300,
                max_retries=1,
                logit_bias=short_json(server),
            )
            assert found.town in ("Oslo", "Rome")
        # any object at all: the bias makes it {}
        Maybe = pydantic.create_model("Maybe", town=(str, "Bern"))
        for mode in ("JSON", "JSON_SCHEMA"):
            made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
            found = made.chat.completions.create(
                model=server.model,
                messages=list(ASK),
                response_model=Maybe,
                max_tokens=40,
                max_retries=1,
                logit_bias=short_json(server),
            )
            assert found.town == "Bern"


def test_the_agents_sdk(server: Running) -> None:
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def clock() -> str:
        """The time."""
        return "noon"

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model=server.model, openai_client=client)
    settings = agents.ModelSettings(
        tool_choice="required",
        max_tokens=300,
        parallel_tool_calls=False,
        store=True,
        metadata={"a": "b"},
        verbosity="low",
        extra_args={"prompt_cache_key": "k", "logit_bias": short_json(server)},
    )
    agent = agents.Agent(name="teller", instructions="Be short.", model=model, tools=[clock], model_settings=settings)
    found = agents.Runner.run_sync(agent, "What time is it?", max_turns=3)
    kinds = [item.type for item in found.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert found.new_items[-1].type == "message_output_item"

"""/v1/messages through the real anthropic client. As in test_responses.py, what a random model writes is forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.server.rig import Running
from tests.server.test_tools import CALL, SCHEMA, check_arguments, dictated

anthropic = pytest.importorskip("anthropic")

ASK: list[Any] = [{"role": "user", "content": "rain?"}]
WEATHER: Any = {"name": "weather", "description": "of a town", "input_schema": SCHEMA}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def server(talking: Running) -> Running:
    return talking


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0, timeout=30) as made:
        yield made


def ask(client: Any, server: Running, messages: Any = ASK, extra: Any = None, **options: Any) -> Any:
    """Newer clients have no arguments for temperature and the like, but pass them on."""
    settings = {"model": server.model, "max_tokens": 8, "messages": messages, **options}
    return client.messages.create(extra_body={"temperature": 0, **(extra or {})}, **settings)


def count(server: Running, messages: list[Any], **more: Any) -> int:
    return int(server.post("/tokenize", {"messages": messages, **more}).json()["count"])


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["be short", [{"type": "text", "text": "be short", "cache_control": {"type": "x"}}]])
def test_text_is_that_of_a_chat(server: Running, client: Any, system: Any) -> None:
    answer = ask(client, server, system=system, metadata={"user_id": "me"})
    messages: Any = [{"role": "system", "content": "be short"}, *ASK]
    with server.client() as chats:
        chat = chats.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=8)
    assert [(block.type, block.text) for block in answer.content] == [("text", chat.choices[0].message.content)]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", server.model)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == 8


def test_stop_reasons(server: Running, client: Any) -> None:
    written = {"structured_outputs": {"choice": ["red rain"]}}
    answer = ask(client, server, max_tokens=40, extra=written)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("red rain", "end_turn", None)
    for stream in (False, True):
        answer = ask(client, server, max_tokens=40, extra=written, stop_sequences=["zzz", "d r"], stream=stream)
        if stream:
            events = list(answer)
            assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == "re"
            [end] = [event.delta for event in events if event.type == "message_delta"]
        else:
            assert answer.content[0].text == "re"
            end = answer
        assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "d r")


def test_a_stream_tells_the_whole_answer(server: Running, client: Any) -> None:
    whole = ask(client, server)
    events = list(ask(client, server, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas  # one or several: a stream merges what its reader has not taken yet
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text
    start = events[0].message
    assert (start.content, start.stop_reason, start.usage.input_tokens > 0) == ([], None, True)
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 8)
    settings: Any = {"model": server.model, "max_tokens": 8, "messages": ASK, "extra_body": {"temperature": 0}}
    with client.messages.stream(**settings) as helped:
        final = helped.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (text, "max_tokens", 8)


def test_a_conversation(server: Running, client: Any) -> None:
    """Blocks that mean nothing here are left out, those of text are joined as in a chat."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c", "citations": None},
            ],
        },
        {"role": "user", "content": "d"},
    ]
    expected = [("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    size = count(server, [{"role": role, "content": text} for role, text in expected])
    assert client.messages.count_tokens(model=server.model, messages=messages).input_tokens == size
    usage = ask(client, server, messages).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == size


def test_the_beginning_of_the_answer(server: Running, client: Any) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It"}]
    size = count(server, messages, add_generation_prompt=False, continue_final_message=True)
    usage = ask(client, server, messages).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == size


def test_cached_tokens_are_counted_beside_the_others(server: Running, client: Any) -> None:
    messages = [{"role": "user", "content": "the men of the town sing " * 40}]
    one, two = (ask(client, server, messages).usage for _ in range(2))
    assert one.cache_read_input_tokens == 0
    assert two.cache_read_input_tokens > 0
    assert two.input_tokens + two.cache_read_input_tokens == one.input_tokens


# ---- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_loop_with_tools(server: Running, client: Any, choice: Any, stream: bool) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    options: Any = {"tools": [WEATHER], "max_tokens": 200, "tool_choice": choice}
    if stream:
        with client.messages.stream(
            model=server.model, messages=ASK, extra_body={"temperature": 0}, **options
        ) as events:
            pieces = [event.partial_json for event in events if event.type == "input_json"]
            answer = events.get_final_message()
        assert pieces  # one or several: a stream merges what its reader has not taken yet
        assert json.loads("".join(pieces)) == answer.content[0].input
    else:
        answer = ask(client, server, **options)
    [call] = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    check_arguments("weather", json.dumps(call.input))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    past = {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}}
    expected = [
        *ASK,
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        {"role": "user", "content": "and now?"},
    ]
    usage = ask(client, server, turns, tools=[WEATHER], tool_choice={"type": "none"}).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count(server, expected)
    tool = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": SCHEMA}}
    counted = client.messages.count_tokens(model=server.model, messages=turns, tools=[WEATHER])
    assert counted.input_tokens == count(server, expected, tools=[tool])


def test_text_and_calls(server: Running, client: Any) -> None:
    text = f"Well.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    extra = {"structured_outputs": {"grammar": dictated(server, text)}}
    answer = ask(client, server, tools=[WEATHER, CLOCK], max_tokens=300, extra=extra)
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert answer.content[0].text == "Well.\n"
    assert answer.content[1].input == answer.content[2].input == {"town": "Oslo", "days": 2}
    assert answer.content[1].id != answer.content[2].id
    with client.messages.stream(
        model=server.model, messages=ASK, tools=[WEATHER], max_tokens=300, extra_body={"temperature": 0, **extra}
    ) as stream:
        streamed = stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in streamed.content] == [
        (block.type, getattr(block, "input", None)) for block in answer.content
    ]
    plain = ask(client, server, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=300, extra=extra)
    assert [(block.type, block.text) for block in plain.content] == [("text", text)]


def test_a_call_that_is_cut_off(server: Running, client: Any) -> None:
    head = len(server.engine.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {'))
    answer = ask(client, server, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=head + 2)
    assert (answer.stop_reason, answer.content[0].name, answer.content[0].input) == ("max_tokens", "weather", {})


def test_a_failed_call_is_told(server: Running, client: Any) -> None:
    call = {"type": "tool_use", "id": "1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no clock", "is_error": True}
    turns = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    past = {"id": "1", "function": {"name": "clock", "arguments": "{}"}}
    expected = [
        *ASK,
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "1", "content": "error: no clock"},
    ]
    assert client.messages.count_tokens(model=server.model, messages=turns).input_tokens == count(server, expected)


class Trip(BaseModel):
    town: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def test_structured_output(server: Running, client: Any) -> None:
    wanted = {"format": {"type": "json_schema", "schema": {**Trip.model_json_schema(), "additionalProperties": False}}}
    answer = ask(client, server, max_tokens=400, extra={"output_config": wanted})
    assert answer.stop_reason == "end_turn"
    Trip.model_validate_json(answer.content[0].text)


# ---- what is refused -------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 10**6}, "max_tokens", "lower max_tokens"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "image"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages", "image"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "needs text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "messages",
        "assistant",
    ),
    ({"messages": [{"role": "user", "content": "a b c " * 3000}]}, "messages", "max_model_len"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"top_p": True}, "top_p", "number"),
    ({"top_k": -5}, "top_k", "-5"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "16"),
    ({"stop_sequences": [""]}, "stop_sequences", "empty"),
    ({"nothing": 1}, "nothing", "unknown field"),
    ({"n": 2}, "n", "support"),
    ({"stop_sequences": ["a"], "structured_outputs": {"regex": "("}}, "structured_outputs", "compiled"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "only custom"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "twice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "tool"}, "tools": [CLOCK]}, "tool_choice", "needs name"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "support"),
    ({"container": "x"}, "container", "support"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config", "compiled"),
    ({"system": [IMAGE]}, "system", "only text"),
]


@pytest.mark.parametrize(("fault", "param", "words"), FAULTS, ids=lambda x: str(x)[:50])
def test_faults(server: Running, fault: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        answer = server.post("/v1/messages", {"messages": ASK, "max_tokens": 4, "stream": stream, **fault})
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert words in error["message"], error


def test_errors_as_the_client_sees_them(server: Running, client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="image"):
        ask(client, server, [{"role": "user", "content": [IMAGE]}])
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.count_tokens(model="claude", messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with server.http() as http:
        for answer, status in (
            (http.get("/v1/messages"), 405),
            (http.post("/v1/messages", content=b"{}"), 415),
            (http.post("/v1/messages", json=5), 400),
            (http.post("/v1/messages/nothing", json={}), 404),
        ):
            assert (answer.status_code, answer.json()["type"]) == (status, "error")

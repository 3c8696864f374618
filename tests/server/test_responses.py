"""/v1/responses through the real openai client. The model is random: forced calls and structured output make it write
what can be checked, and `structured_outputs` dictates the rest."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from nanovllm.server.protocol import Message
from nanovllm.server.responses import Kept, ResponseStore
from tests.server.rig import Running, running
from tests.server.test_refusals import check_error
from tests.server.test_tools import CALL, SCHEMA, check_arguments, dictated
from tests.tiny_models import TinyModel

WEATHER: Any = {"type": "function", "name": "weather", "description": "of a town", "parameters": SCHEMA, "strict": True}
CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}
CHANGING = ("id", "call_id", "item_id", "created_at", "completed_at", "sequence_number")


@pytest.fixture
def server(talking: Running) -> Running:
    return talking


def ask(client: openai.OpenAI, server: Running, given: Any = "rain?", **options: Any) -> Any:
    settings = {"model": server.model, "temperature": 0, "max_output_tokens": 8, **options}
    return client.responses.create(input=given, **settings)


def same(record: Any) -> Any:
    """Without what differs between two answers of the same content."""
    if isinstance(record, dict):
        return {name: same(value) for name, value in record.items() if name not in CHANGING}
    return [same(value) for value in record] if isinstance(record, list) else record


def count(server: Running, messages: list[Any]) -> int:
    return int(server.post("/tokenize", {"messages": messages}).json()["count"])


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_is_that_of_a_chat(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client, server, instructions="be short", metadata={"a": "b"}, user="me", top_p=0.5)
    messages: Any = [{"role": "system", "content": "be short"}, {"role": "user", "content": "rain?"}]
    chat = client.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=8)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.metadata, answer.user, answer.store) == ("be short", {"a": "b"}, "me", True)
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0, 0.5, 8)
    assert (answer.object, answer.model, answer.error) == ("response", server.model, None)
    assert [(item.type, item.role, item.status) for item in answer.output] == [("message", "assistant", "incomplete")]
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 8)
    assert usage.total_tokens == usage.input_tokens + 8
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_ends_by_itself_is_completed(server: Running, client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["red rain"]}}
    answer = ask(client, server, extra_body=extra, max_output_tokens=40)
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "red rain")
    assert answer.output[0].status == "completed"


def test_input_as_items(server: Running, client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "be short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "c"},
    ]
    pairs = [("system", "be short"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    answer = ask(client, server, items)
    assert answer.usage.input_tokens == count(server, [{"role": role, "content": text} for role, text in pairs])


@pytest.mark.parametrize("extra", [{}, {"structured_outputs": {"choice": ["red rain"]}}])
def test_a_stream_tells_the_whole_answer(server: Running, client: openai.OpenAI, extra: dict[str, Any]) -> None:
    options = {"max_output_tokens": 40, "extra_body": extra}
    whole = ask(client, server, **options)
    events = list(ask(client, server, stream=True, **options))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas  # one or several: a stream merges what its reader has not taken yet
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        whole.status,
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-4].text
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert first.id == last.id
    assert same(last.to_dict()["output"]) == same(whole.to_dict()["output"])
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(last.id).output_text == text
    if whole.status == "completed":  # the client's helper knows no other end
        with client.responses.stream(model=server.model, input="rain?", temperature=0, **options) as helped:
            assert helped.get_final_response().output_text == text


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(server: Running, client: openai.OpenAI) -> None:
    one = ask(client, server, "a", instructions="only once")
    two = ask(client, server, "b", previous_response_id=one.id)
    three = ask(client, server, [{"role": "user", "content": "c"}], previous_response_id=two.id, instructions="new")
    turns = [
        ("user", "a"),
        ("assistant", one.output_text),
        ("user", "b"),
        ("assistant", two.output_text),
        ("user", "c"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert (two.previous_response_id, three.previous_response_id) == (one.id, two.id)
    assert two.usage.input_tokens == count(server, messages[:3])
    assert three.usage.input_tokens == count(server, [{"role": "system", "content": "new"}, *messages])
    again = ask(client, server, "c", previous_response_id=two.id)
    assert again.output_text == ask(client, server, messages).output_text
    branch = ask(client, server, "other", previous_response_id=one.id)  # an answer may be gone on with more than once
    assert branch.usage.input_tokens == count(server, [*messages[:2], {"role": "user", "content": "other"}])


def test_answers_are_kept_until_they_are_deleted(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client, server, metadata={"a": "b"})
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    for attempt in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="max-responses"):
            attempt(answer.id)
    forgotten = ask(client, server, store=False)
    assert forgotten.store is False
    for name in (answer.id, forgotten.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError) as found:
            ask(client, server, previous_response_id=name, stream=True)
        assert found.value.body["param"] == "previous_response_id"  # type: ignore[index]
        assert found.value.body["code"] == "response_not_found"  # type: ignore[index]


def test_ids_are_not_those_of_requests(server: Running) -> None:
    """Two requests may have the same X-Request-Id, and others may guess it."""
    body = {"input": "a", "max_output_tokens": 1}
    ids = {server.post("/v1/responses", body, headers={"X-Request-Id": "me"}).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(name) == 37 and "me" not in name for name in ids)


def test_the_oldest_answers_go_first(llama: TinyModel) -> None:
    with running(llama.path, max_responses=2) as server, server.client() as client:
        one, two = (ask(client, server, text) for text in "ab")
        ask(client, server, previous_response_id=one.id, store=False)  # a use
        ask(client, server, "c")
        assert client.responses.retrieve(one.id).id == one.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(two.id)
    with running(llama.path, max_responses=0) as server, server.client() as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ask(client, server).id)


def test_bytes_are_limited_too() -> None:
    message = Message(role="user", content="a" * 100)
    store = ResponseStore(10, 1000)
    for number in range(5):
        store.put(str(number), Kept(b"x" * 100, [message], 200))
    assert store._size == 900
    for number in range(2):
        with pytest.raises(Exception, match="not kept"):
            store.get(str(number))
    store.delete("3")
    store.put("large", Kept(b"", [], 2000))  # larger than everything: nothing is left, and nothing breaks
    assert (store._size, len(store._kept)) == (0, 0)


# ---- functions -------------------------------------------------------------------------------------------------------


def calls_of(answer: Any) -> list[Any]:
    return [item for item in answer.output if item.type == "function_call"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_a_loop_with_tools(server: Running, client: openai.OpenAI, stream: bool, by_id: bool) -> None:
    options: Any = {"tools": [WEATHER], "max_output_tokens": 200, "parallel_tool_calls": False}
    answer = ask(client, server, tool_choice="required", stream=stream, **options)
    if stream:
        events = list(answer)
        answer = events[-1].response
        grown = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        [item] = [event.item for event in events if event.type == "response.output_item.done"]
        [added] = [event.item for event in events if event.type == "response.output_item.added"]
        assert grown == done.arguments == item.arguments
        assert (added.arguments, added.status, added.name) == ("", "in_progress", "weather")
        assert added.call_id == item.call_id
        assert any(event.type == "response.function_call_arguments.delta" for event in events)  # pieces may be merged
    assert answer.status == "completed"
    [call] = calls_of(answer)
    check_arguments(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given = {"previous_response_id": answer.id} if by_id else {}
    items = [result] if by_id else [{"role": "user", "content": "rain?"}, *answer.output, result]
    final = ask(client, server, items, tools=[WEATHER], tool_choice="none", **given)
    past = {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    assert final.usage.input_tokens == count(server, messages)


def test_a_function_by_name(server: Running, client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    answer = ask(client, server, tools=[CLOCK, WEATHER], tool_choice=choice, max_output_tokens=200)
    assert [call.name for call in calls_of(answer)] == ["weather"]
    assert answer.tool_choice.to_dict() == choice
    assert [tool.name for tool in answer.tools] == ["clock", "weather"]


def test_text_and_calls(server: Running, client: openai.OpenAI) -> None:
    text = f"Well.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    free = {**WEATHER, "strict": False}
    options = {
        "tools": [free],
        "max_output_tokens": 300,
        "extra_body": {"structured_outputs": {"grammar": dictated(server, text)}},
    }
    whole = ask(client, server, **options)
    *events, last = ask(client, server, stream=True, **options)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text == "Well.\n"
    assert len({call.call_id for call in calls_of(whole)}) == 2
    assert same(last.response.to_dict()["output"]) == same(whole.to_dict()["output"])
    order = [(event.type.split(".")[-1], event.output_index) for event in events if ".output_item." in event.type]
    assert order == [(kind, index) for index in range(3) for kind in ("added", "done")]


def test_a_call_that_is_cut_off(server: Running, client: openai.OpenAI) -> None:
    head = len(server.engine.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {'))
    answer = ask(client, server, tools=[WEATHER], tool_choice="required", max_output_tokens=head + 2)
    [call] = calls_of(answer)
    assert (answer.status, call.status) == ("incomplete", "incomplete")
    assert call.arguments.startswith("{")
    again = ask(client, server, "b", previous_response_id=answer.id)  # half a call is no part of the conversation
    turns = [("user", "rain?"), ("assistant", ""), ("user", "b")]
    assert again.usage.input_tokens == count(server, [{"role": role, "content": text} for role, text in turns])


# ---- structured output -----------------------------------------------------------------------------------------------


class Trip(BaseModel):
    town: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def test_structured_output(server: Running, client: openai.OpenAI) -> None:
    options: Any = {"model": server.model, "input": "rain?", "max_output_tokens": 400, "temperature": 0}
    answer = client.responses.parse(text_format=Trip, **options)
    assert isinstance(answer.output_parsed, Trip)
    assert answer.text.format.to_dict()["schema"]["properties"].keys() == {"town", "days"}
    with client.responses.stream(text_format=Trip, **options) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    loose = ask(client, server, text={"format": {"type": "json_object"}}, extra_body={"seed": 1, "temperature": 1})
    assert loose.output_text.startswith("{")
    assert ask(client, server, text={"format": {"type": "text"}, "verbosity": "low"}).output_text


# ---- what is refused -------------------------------------------------------------------------------------------------

FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1"), ({"input": 5}, "input", "input"), ({"input": None}, "input", "required"),
    ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    ({"input": [{"role": "user"}]}, "input", "needs content"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "input", "input.0.role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "needs call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input", "JSON object"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
    ({"input": "a b c " * 3000}, "input", "max_model_len"), ({"max_output_tokens": 0}, "max_output_tokens", "0"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "lower max_output_tokens"),
    ({"temperature": -1}, "temperature", "-1"), ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 3}, "top_p", "3"), ({"n": 2}, "n", "support"), ({"max_tokens": 5}, "max_tokens", "unknown field"),
    ({"background": True}, "background", "support"), ({"conversation": "c"}, "conversation", "support"),
    ({"truncation": "auto"}, "truncation", "support"), ({"prompt": {"id": "p"}}, "prompt", "support"),
    ({"tools": [{"type": "web_search"}]}, "tools", "only function"), ({"tools": [WEATHER] * 2}, "tools", "twice"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "name"), ({"store": 1}, "store", "boolean"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"), ({"metadata": {"a": 1}}, "metadata", "string"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "needs schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text", "compiled"),
    ({"include": ["message.output_text.logprobs"]}, "include", "encrypted"), ({"top_logprobs": 2}, "top_logprobs", ""),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "param", "words"), FAULTS, ids=lambda x: str(x)[:50])
def test_faults(server: Running, fault: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        error = check_error(server.post("/v1/responses", {"input": "a", "stream": stream, **fault}))
        assert (error["param"], words in error["message"]) == (param, True), error

"""response_format and structured_outputs over HTTP."""

from __future__ import annotations

import json

import openai
import pytest

from tests.server.rig import Running

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "a"}]


def test_response_format(server: Running, client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        response_format=form,
        n=4,
        seed=0,
        max_tokens=120,  # type: ignore[arg-type]
    )
    done = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert done
    assert {json.loads(choice.message.content)["a"] for choice in done} <= {1, 2}
    answer = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        seed=1,
        n=4,
        max_tokens=120,
    )
    done = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert done
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in done)


def test_structured_outputs_in_a_stream(server: Running, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=server.model,
        prompt="a",
        stream=True,
        max_tokens=40,
        extra_body={"structured_outputs": {"choice": ["red rain", "blue"]}},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) in ("red rain", "blue")


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_marker_is_no_text_even_when_special_tokens_are(
    server: Running, client: openai.OpenAI, stream: bool
) -> None:
    settings = {"model": server.model, "stream": stream, "max_tokens": 40, "logprobs": True, "messages": MESSAGES}
    extra = {"structured_outputs": {"choice": ["red rain"]}, "skip_special_tokens": False}
    for more, text in (({}, "red rain"), ({"include_stop_str_in_output": True}, "red rain<|eos|>")):
        answer = client.chat.completions.create(**settings, extra_body={**extra, **more})  # type: ignore[call-overload]
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        parts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
        tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert ("".join(parts), choices[-1].finish_reason) == (text, "stop")
        assert "".join(tokens) == "red rain<|eos|>"  # every token has its log probability, the last one too


FORMS = [
    ({"regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
    ({"choice": ["red", "blue"]}, {"red", "blue"}),
    ({"grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
    ({"json": {"enum": [1, 2]}}, {"1", "2"}),
]


@pytest.mark.parametrize(("form", "texts"), FORMS, ids=["regex", "choice", "grammar", "json"])
def test_every_kind_of_structure(
    server: Running, client: openai.OpenAI, form: dict[str, object], texts: set[str]
) -> None:
    extra = {"structured_outputs": form}
    whole = client.completions.create(model=server.model, prompt="a", n=4, max_tokens=60, extra_body=extra)
    assert {choice.text.strip() for choice in whole.choices if choice.finish_reason == "stop"} <= texts
    assert any(choice.finish_reason == "stop" for choice in whole.choices)
    chat = client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=60, extra_body=extra)
    assert chat.choices[0].message.content.strip() in texts


def test_a_plain_text_format_asks_for_nothing(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "response_format": {"type": "text"}}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_grammar_that_cannot_be_compiled(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": form})
    assert (answer.status_code, "compiled" in answer.json()["error"]["message"]) == (400, True)

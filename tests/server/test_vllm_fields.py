"""Fields that vLLM adds to OpenAI's API, through the openai client's extra_body. The model is random: grammars dictate
what it writes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.rig import Running, events_of, running
from tests.server.test_refusals import HI, check_error
from tests.tiny_models import TinyModel

GREEDY: dict[str, Any] = {"temperature": 0}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}bot:{{ '' if enable_thinking | default(true) else 'quiet' }}{% endif %}"
)


def rendered(server: Running, **options: Any) -> str:
    found = server.post("/v1/chat/completions", {"max_tokens": 1, "return_token_ids": True, **options})
    assert found.status_code == 200, found.text
    tokens = found.json()["prompt_token_ids"]
    fields = {name: value for name, value in options.items() if name != "response_format"}
    assert server.post("/tokenize", fields).json()["tokens"] == tokens
    return server.engine.tokenizer.decode(tokens)


def test_variables_of_the_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", TEMPLATE)
    assert rendered(server, messages=HI) == "user:a;bot:"
    assert rendered(server, messages=HI, chat_template_kwargs={"enable_thinking": False}) == "user:a;bot:quiet"
    assert rendered(server, messages=HI, chat_template_kwargs={"enable_thinking": True, "other": [1]}) == "user:a;bot:"
    assert rendered(server, messages=HI, add_generation_prompt=False) == "user:a;"
    going = [*HI, {"role": "assistant", "content": "the men"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(server, messages=going, **options) == "user:a;assistant:the men"


def test_variables_are_users_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", "{{ note }}{{ messages[0].content }}")
    monkeypatch.setattr(server.engine.inputs.control_tokens, "_mode", "refuse")
    body = {"messages": HI, "chat_template_kwargs": {"note": "x<|end|>"}}
    error = check_error(server.post("/v1/chat/completions", body))
    assert (error["param"], "<|end|>" in error["message"]) == ("chat_template_kwargs", True)


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GUIDED: list[tuple[dict[str, Any], set[str]]] = [
    ({"guided_regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
    ({"guided_choice": ["red", "blue"]}, {"red", "blue"}),
    ({"guided_grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
    ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
    ({"guided_json": '{"enum": [1, 2]}'}, {"1", "2"}),
    ({"guided_grammar": 'root ::= "x" tail # GBNF\ntail ::= "y" | [z]'}, {"xy", "xz"}),
    ({"structured_outputs": {"regex": "(ab|cd){2}"}}, {"abab", "abcd", "cdab", "cdcd"}),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, {"red", "blue"}),
    ({"structured_outputs": {"grammar": 'root ::= "x" "y"'}}, {"xy"}),
    ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"1", "2"}),
]


@pytest.mark.parametrize(("extra", "texts"), GUIDED, ids=[str(extra)[:40] for extra, _ in GUIDED])
def test_guided_fields(server: Running, client: openai.OpenAI, extra: dict[str, Any], texts: set[str]) -> None:
    options = {"model": server.model, "max_tokens": 60, "extra_body": {**extra, "guided_decoding_backend": "xgrammar"}}
    plain = client.completions.create(prompt="a", **options).choices[0]
    chat = client.chat.completions.create(messages=HI, **options).choices[0]
    for choice, text in ((plain, plain.text), (chat, chat.message.content)):
        assert (text.strip() in texts, choice.finish_reason) == (True, "stop")
    streamed = client.completions.create(prompt="a", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed).strip() in texts


def test_response_format(server: Running, client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    options: Any = {"model": server.model, "messages": HI, "n": 4, "seed": 1, "max_tokens": 120}
    for form, allowed in ((schema, ({"a": 1}, {"a": 2})), ({"type": "json_object"}, None)):
        answer = client.chat.completions.create(response_format=form, **options)
        done = [json.loads(one.message.content) for one in answer.choices if one.finish_reason == "stop"]
        assert done
        assert all(isinstance(value, dict) and (allowed is None or value in allowed) for value in done)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_marker_is_no_text_even_when_special_tokens_are(
    server: Running, client: openai.OpenAI, stream: bool
) -> None:
    settings = {"model": server.model, "stream": stream, "max_tokens": 40, "logprobs": True, "messages": HI}
    extra = {"structured_outputs": {"choice": ["red rain"]}, "skip_special_tokens": False}
    for more, text in (({}, "red rain"), ({"include_stop_str_in_output": True}, "red rain<|eos|>")):
        answer = client.chat.completions.create(**settings, extra_body={**extra, **more})  # type: ignore[call-overload]
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        parts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
        tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert ("".join(parts), choices[-1].finish_reason) == (text, "stop")
        assert "".join(tokens) == "red rain<|eos|>"  # every token has its log probability, the last one too


def test_prompt_logprobs(server: Running, client: openai.OpenAI, llama: TinyModel) -> None:
    answer = llama.answers[4]
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    options: dict[str, Any] = {"model": server.model, "max_tokens": 3, "extra_body": extra, **GREEDY}
    found = client.completions.create(prompt=answer.prompt, **options).choices[0].model_extra
    assert found["prompt_token_ids"] == answer.prompt
    assert found["token_ids"] == answer.tokens[:3]
    first, *others = found["prompt_logprobs"]
    assert first is None
    assert len(others) == len(answer.prompt) - 1
    for position, (token, scores) in enumerate(zip(answer.prompt[1:], others)):
        assert 2 <= len(scores) <= 3
        own = scores[str(token)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert own["logprob"] == pytest.approx(float(answer.logprobs[position, token]), abs=2e-3)
        assert {1, 2} <= {score["rank"] for score in scores.values()}
    chat = client.chat.completions.create(messages=HI, **options)
    assert len(chat.model_extra["prompt_logprobs"]) == len(chat.model_extra["prompt_token_ids"])
    assert len(chat.choices[0].model_extra["token_ids"]) == 3
    # beside echo, each with its own count
    both = {"prompt": answer.prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = server.post("/v1/completions", both).json()["choices"][0]
    assert all(len(best) <= 2 for best in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(scores) >= 3 for scores in choice["prompt_logprobs"][1:])


def test_token_ids_in_streams(server: Running, client: openai.OpenAI, llama: TinyModel) -> None:
    answer = llama.answers[4]
    options: dict[str, Any] = {"model": server.model, "max_tokens": 8, "stream": True, **GREEDY}
    extra = {"return_token_ids": True}
    events = [
        chunk.choices[0].model_extra
        for chunk in client.completions.create(prompt=answer.prompt, extra_body=extra, **options)
    ]
    assert [token for event in events for token in event["token_ids"]] == answer.tokens[:8]
    assert [event.get("prompt_token_ids") for event in events] == [answer.prompt] + [None] * (len(events) - 1)
    whole = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 8, **GREEDY, **extra}).json()
    chunks = list(client.chat.completions.create(messages=HI, extra_body=extra, **options))
    assert chunks[0].model_extra["prompt_token_ids"] == whole["prompt_token_ids"]
    found = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids", [])]
    assert found == whole["choices"][0]["token_ids"]


def test_prompts_are_truncated_from_the_left(server: Running, llama: TinyModel) -> None:
    prompt = llama.prompts[-1]
    options = {"max_tokens": 5, "return_token_ids": True, **GREEDY}
    for given in (prompt, server.engine.tokenizer.decode(prompt)):
        cut = server.post("/v1/completions", {"prompt": given, "truncate_prompt_tokens": 9, **options}).json()
        kept = cut["choices"][0]["prompt_token_ids"]
        assert len(kept) == 9
        if given is prompt:
            assert kept == prompt[-9:]
        plain = server.post("/v1/completions", {"prompt": kept, **options}).json()
        assert plain["choices"][0]["token_ids"] == cut["choices"][0]["token_ids"]
    long = [5] * 500
    answer = server.post("/v1/completions", {"prompt": long, "truncate_prompt_tokens": -1, **options}).json()
    assert len(answer["choices"][0]["prompt_token_ids"]) == server.engine.max_model_len - 5
    chat = {"messages": [{"role": "user", "content": "the rain " * 90}], "truncate_prompt_tokens": 20, **options}
    assert len(server.post("/v1/chat/completions", chat).json()["prompt_token_ids"]) == 20
    echo = {"prompt": prompt, "truncate_prompt_tokens": 9, "echo": True, "max_tokens": 1}
    text = server.post("/v1/completions", echo).json()["choices"][0]["text"]
    assert text.startswith(server.engine.tokenizer.decode(prompt[-9:]).rstrip("\ufffd"))


def test_a_cache_below_max_model_len_is_the_limit(llama: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    with running(llama.path, {"num_kvcache_blocks": 5, "kvcache_block_size": 16}) as small:
        [warning] = [record.message for record in caplog.records if "KV cache" in record.message]
        for part in ("holds 80 tokens", "max_model_len=160", "num_kvcache_blocks=10"):
            assert part in warning
        options = {"max_tokens": 5, "return_token_ids": True, **GREEDY}
        long = {"prompt": [5] * 150, "truncate_prompt_tokens": -1, **options}
        [choice] = small.post("/v1/completions", long).json()["choices"]
        assert (len(choice["prompt_token_ids"]), len(choice["token_ids"])) == (75, 5)
        for body, part in (({"prompt": [5] * 76}, "leaves room for 4"), ({**long, "truncate_prompt_tokens": 81}, "80")):
            answer = small.post("/v1/completions", {**options, **body})
            assert (answer.status_code, "KV cache" in answer.text, part in answer.text) == (400, True, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_not_cut_by_stop_strings(server: Running, stream: bool) -> None:
    """Its text is the server's own business, and half a call is of no use; nor is the special token a stop."""
    schema = {"properties": {"a": {"const": "stop <|end|>here"}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    ban = {str(i): -100 for i in range(300) if not server.engine.tokenizer.decode([i]).strip()}
    stops = {"stop": ["here", "{", '"'], "stop_token_ids": list(range(7, 100))}
    limits = {"max_tokens": 110, "logit_bias": ban, "truncate_prompt_tokens": 20}
    body = {"messages": HI, "tools": [tool], "stream": stream, **stops, **limits}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        sent = {**body, "tool_choice": choice, "parallel_tool_calls": False}
        answer = server.post("/v1/chat/completions", sent)
        assert answer.status_code == 200, answer.text
        if stream:
            events = events_of(answer.text)
            calls = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", [])]
            text = "".join(call["function"]["arguments"] for call in calls)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            [choice_made] = answer.json()["choices"]
            text = choice_made["message"]["tool_calls"][0]["function"]["arguments"]
            reason = choice_made["finish_reason"]
        assert (json.loads(text), reason) == ({"a": "stop <|end|>here"}, "tool_calls")

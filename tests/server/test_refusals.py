"""Every field is honoured or refused by name, with OpenAI's error shape; no text of an exception leaks."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from nanovllm.server.body import Body
from nanovllm.server.guard import Gate
from nanovllm.server.messages import CountBody, MessagesBody
from nanovllm.server.protocol import ChatBody, CompletionBody, TokenizeBody
from nanovllm.server.responses import ResponseBody
from tests.server.rig import Running, running
from tests.tiny_models import TinyModel

HI = [{"role": "user", "content": "a"}]
COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"nothing": 1}, "nothing"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": True}, "top_p"), ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": 10**9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"stop": ["a"] * 17}, "stop"), ({"stop": [""]}, "stop"), ({"stop": 3}, "stop"), ({"seed": 2**70}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"7": 101}}, "logit_bias"),
    ({"logit_bias": {"300": 1}}, "logit_bias"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"), ({"min_p": 2}, "min_p"), ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"bad_words": ["x" * 65]}, "bad_words"), ({"min_tokens": 17}, "min_tokens"), ({"priority": 1}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"cache_salt": "\ud800"}, None),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options"), ({"user": 5}, "user"), ({"echo": 1}, "echo"),
    ({"prompt": ""}, None), ({"prompt": []}, "prompt"), ({"prompt": [300]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"), ({"prompt": ["a"] * 9}, "prompt"), ({"prompt": ["a"] * 5000}, "prompt"),
    ({"prompt": [5] * 160}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"), ({"prompt": "\ud800"}, None), ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"), ({"prompt": [[5], "a"]}, "prompt"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"guided_regex": "("}, "guided_regex"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": 5}}, "guided_json"), ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"), ({"guided_grammar": 'root ::= "a" nope'}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
     "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"), ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}}}, "structured_outputs"),
]  # fmt: skip
CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": "a"}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a b c " * 100}]}, "messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"), ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"), ({"tools": [{"type": "function"}]}, "tools"),
    ({"audio": {}}, "audio"), ({"modalities": ["audio"]}, "modalities"), ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 161}, "truncate_prompt_tokens"), ({"return_token_ids": 1}, "return_token_ids"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"), ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": -1}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"echo": True}, "echo"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
]  # fmt: skip


def check_error(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "nanovllm/" not in response.text
    assert len(error["message"]) <= 510
    return error


@pytest.mark.parametrize(("fault", "param"), COMPLETION_FAULTS, ids=lambda x: str(x)[:60])
def test_completion_faults(server: Running, fault: dict[str, Any], param: str | None) -> None:
    body = {"prompt": "the", "max_tokens": 16, **fault}
    for stream in (False, True):
        data = json.dumps({"stream": stream, **body})
        with server.http() as http:
            answer = http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
        fits_a_stream = stream and param == "stream_options" and "stream" not in fault
        if fault == {"prompt": ""} or fits_a_stream:  # an empty prompt: this tokenizer puts a BOS before it
            assert answer.status_code == 200
        else:
            error = check_error(answer)
            assert error["param"] == param
            assert (param or "hex escape") in error["message"]
            assert "structured_outputs" in fault or "structured_outputs" not in error["message"]


@pytest.mark.parametrize(("fault", "param"), CHAT_FAULTS, ids=lambda x: str(x)[:60])
def test_chat_faults(server: Running, fault: dict[str, Any], param: str) -> None:
    error = check_error(server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 4, **fault}))
    assert error["param"] == param
    assert param in error["message"]


BASES: list[tuple[str, type[Body], dict[str, Any]]] = [
    ("/v1/completions", CompletionBody, {"prompt": "the", "max_tokens": 1}),
    ("/v1/chat/completions", ChatBody, {"messages": HI, "max_tokens": 1}),
    ("/v1/responses", ResponseBody, {"input": "a", "max_output_tokens": 1}),
    ("/v1/messages", MessagesBody, {"messages": HI, "max_tokens": 1}),
]
HINTS: dict[type[Body], dict[str, Any]] = {
    ResponseBody: {
        "reasoning": {"effort": "low"}, "prompt_cache_key": "x", "safety_identifier": "x", "service_tier": "auto",
        "include": ["reasoning.encrypted_content"], "stream": True, "stream_options": {"include_obfuscation": True},
    },
    MessagesBody: {
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto", "top_k": 5, "top_p": 0.5,
        "metadata": {}, "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"},
        "stop_sequences": [], "tools": [], "context_management": {"edits": []},
    },
    ChatBody: {"response_format": {"type": "text"}},
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "base"), BASES, ids=[path for path, _, _ in BASES])
def test_what_asks_for_nothing_passes(server: Running, path: str, body: type[Body], base: dict[str, Any]) -> None:
    single = [{name: value} for name, values in body.HARMLESS.items() for value in (None, *values)]
    for fields in (*single, dict.fromkeys(body.model_fields), HINTS.get(body, {})):
        assert server.post(path, {**fields, **base}).status_code == 200, fields


def test_every_field_of_the_clients_has_a_meaning_here() -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    anthropic = pytest.importorskip("anthropic.types")
    create = anthropic.message_create_params.MessageCreateParamsBase
    count = anthropic.message_count_tokens_params.MessageCountTokensParams
    for body, params in ((ResponseBody, Responses), (MessagesBody, create), (CountBody, count)):
        assert set(params.__annotations__) <= body.model_fields.keys() | body.HARMLESS.keys()


def test_every_field_is_either_a_field_or_refused() -> None:
    """No field may stand in the model without an effect."""
    folder = Path(__file__).parents[2] / "nanovllm/server"
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.value
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    for body in (CompletionBody, ChatBody):
        assert set(body.model_fields) <= used
        assert not set(body.model_fields) & set(body.HARMLESS)


def test_the_model_must_be_ours(server: Running) -> None:
    count = ("/v1/messages/count_tokens", CountBody, {"messages": HI})
    for path, _, base in (*BASES, count, ("/tokenize", TokenizeBody, {"prompt": "a"})):
        answer = server.post(path, {**base, "model": "gpt-4"})
        assert answer.status_code == 404
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"1", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "a"', b"[" * 5000, b'{"a":' * 5000,
                b'{"prompt": 1e999999}', b"9" * 10_000, b'{"prompt": [' + b"9" * 5000 + b"]}"],
)  # fmt: skip
def test_bodies_that_are_no_object(server: Running, content: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            check_error(http.post(path, content=content, headers={"content-type": "application/json"}))


def test_the_error_of_a_template_is_shown_and_that_of_its_failure_is_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template, shown in (("{{ raise_exception('roles must alternate') }}", True), ("{{ 1 + 'secret' }}", False)):
        monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
        error = check_error(server.post("/v1/chat/completions", {"messages": HI}))
        assert error["param"] == "messages"
        assert ("alternate" in error["message"]) is shown
        assert "unsupported operand" not in error["message"]


def test_tokenize_faults(server: Running) -> None:
    check_error(server.post("/tokenize", {}))
    check_error(server.post("/tokenize", {"prompt": "a", "messages": HI}))
    assert check_error(server.post("/tokenize", {"prompt": "a" * 100_000}))["param"] == "prompt"
    for tokens in ([300], [-1], [2**200], ["a"], [True]):
        assert check_error(server.post("/detokenize", {"tokens": tokens}))["param"] == "tokens"


def test_only_json_that_says_so(server: Running) -> None:
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = http.post("/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
            check_error(answer, 415)


def test_large_bodies(server: Running) -> None:
    """Whether or not the length is announced."""
    limit = server.service.options.max_body_bytes
    with server.http() as http:
        headers = {"content-type": "application/json"}
        check_error(http.post("/v1/completions", content=b" " * (limit + 1), headers=headers), 413)
        parts = (b" " * 4096 for _ in range(limit // 4096 + 1))  # its length is not announced
        check_error(http.post("/v1/completions", content=parts, headers=headers), 413)
        just = b'{"prompt":"the","max_tokens":1}'
        assert http.post("/v1/completions", content=just.rjust(limit), headers=headers).status_code == 200


def test_api_key(llama: TinyModel) -> None:
    with running(llama.path, api_key="right-key") as server, server.http() as http:
        assert http.get("/health").status_code == 200
        wrong = ["Bearer wrong", "Bearer right-ke", "Bearer right-key2", "Basic right-key", "Bearer \xff"]
        tries = [{}, *({"Authorization": key.encode("latin-1")} for key in wrong), {"X-Api-Key": "wrong"}]
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
            for headers in tries:
                error = check_error(http.get(path, headers=headers), 401)  # type: ignore[arg-type]
                assert error["code"] == "invalid_api_key"
        for path, _, base in BASES:
            answer = http.post(path, json=base, headers={"X-Api-Key": "wrong"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert (answer.json().get("type") == "error") is (path == "/v1/messages")
            for headers in ({"X-Api-Key": "right-key"}, {"Authorization": "Bearer right-key"}):
                assert http.post(path, json=base, headers=headers).status_code == 200
        with server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_the_key_is_compared_in_constant_time() -> None:
    assert "compare_digest" in inspect.getsource(Gate._has_key)


def test_an_unexpected_exception_says_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a secret path /home/x")

    monkeypatch.setattr("nanovllm.server.answers.encode_prompts", broken)
    monkeypatch.setattr("nanovllm.server.app.tokenize", broken)
    for path in ("/v1/completions", "/tokenize"):
        answer = server.post(path, {"prompt": "a"}, headers={"X-Request-Id": "me"})
        assert check_error(answer, 500)["code"] == "internal_error"
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"] == "me"


def test_too_many_of_what_may_be_one_or_several_are_counted(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "stop": ["a"] * 17})
    assert "at most 16" in answer.json()["error"]["message"]


def test_special_tokens_are_refused_at_the_place_that_the_client_knows(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at that of the chat into which its body is made."""
    kept = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1}).json()["id"]
    monkeypatch.setattr(server.engine.inputs.control_tokens, "_mode", "refuse")
    fine, bad = {"role": "user", "content": "a"}, {"role": "user", "content": "x<|end|>"}
    parts = [{"type": "tool_result", "tool_use_id": "1", "content": "a"}, {"type": "text", "text": "x<|end|>"}]
    for path, body, place in (
        ("/v1/messages", {"system": "x<|end|>", "messages": [fine]}, "system"),
        ("/v1/messages", {"system": "a", "messages": [fine, bad]}, "messages[1]"),
        ("/v1/messages", {"messages": [fine, {"role": "user", "content": parts}]}, "messages[1]"),
        ("/v1/messages/count_tokens", {"system": "x<|end|>", "messages": [fine]}, "system"),
        ("/v1/messages/count_tokens", {"system": "a", "messages": [fine, bad]}, "messages[1]"),
        ("/v1/responses", {"instructions": "x<|end|>", "input": "a"}, "instructions"),
        ("/v1/responses", {"instructions": "a", "input": "x<|end|>"}, "input"),
        ("/v1/responses", {"previous_response_id": kept, "input": [fine, bad]}, "input[1]"),
    ):
        limits = {"/v1/messages": {"max_tokens": 4}, "/v1/responses": {"max_output_tokens": 4}}
        error = server.post(path, {**body, **limits.get(path, {})}).json()["error"]
        assert error["message"].startswith(f"{place}: contains '<|end|>'"), (path, error)
        assert error["param"] == place.partition("[")[0]

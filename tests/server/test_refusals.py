"""Every field is honoured or refused by name, with OpenAI's error shape; nothing of ours leaks (lessons 29 and 30)."""

from __future__ import annotations

import ast
import inspect
import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from nanovllm.server.guard import Gate
from nanovllm.server.protocol import ChatBody, CompletionBody
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
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a b c " * 100}]}, "messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 161}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": -1}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"echo": True}, "echo"),
]


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


@pytest.mark.parametrize(("fault", "param"), CHAT_FAULTS, ids=lambda x: str(x)[:60])
def test_chat_faults(server: Running, fault: dict[str, Any], param: str | None) -> None:
    error = check_error(server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 4, **fault}))
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_what_asks_for_nothing_passes(server: Running, body: type[Any]) -> None:
    base = {"prompt": "the"} if body is CompletionBody else {"messages": HI}
    path = "/v1/completions" if body is CompletionBody else "/v1/chat/completions"
    for name, values in body.HARMLESS.items():
        for value in (None, *values):
            assert server.post(path, {**base, "max_tokens": 1, name: value}).status_code == 200, (name, value)
    nulls = dict.fromkeys(body.model_fields)
    assert server.post(path, {**nulls, **base, "max_tokens": 1}).status_code == 200


def test_every_field_is_either_a_field_or_refused() -> None:
    """Lesson 30: no field may sit in the model and reach nothing."""
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


def test_the_model_must_be_ours(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="gpt-4", prompt="a")
    assert found.value.body["code"] == "model_not_found"  # type: ignore[index]
    assert found.value.body["param"] == "model"  # type: ignore[index]
    check_error(server.post("/tokenize", {"model": "x", "prompt": "a"}), 404)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"1", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "a"', b"[" * 5000, b'{"a":' * 5000,
                b'{"prompt": 1e999999}', b"9" * 10_000, b'{"prompt": [' + b"9" * 5000 + b"]}"],
)  # fmt: skip
def test_bodies_that_are_no_object(server: Running, content: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            check_error(http.post(path, content=content, headers={"content-type": "application/json"}))


def test_what_a_template_says_is_told_and_what_breaks_in_it_is_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template, told in (("{{ raise_exception('roles must alternate') }}", True), ("{{ 1 + 'secret' }}", False)):
        monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
        error = check_error(server.post("/v1/chat/completions", {"messages": HI}))
        assert error["param"] == "messages"
        assert ("alternate" in error["message"]) is told
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
    """Lesson 29: whether or not the length is announced."""
    limit = server.service.options.max_body_bytes
    with server.http() as http:
        headers = {"content-type": "application/json"}
        check_error(http.post("/v1/completions", content=b" " * (limit + 1), headers=headers), 413)
        parts = (b" " * 4096 for _ in range(limit // 4096 + 1))  # its length is not announced
        check_error(http.post("/v1/completions", content=parts, headers=headers), 413)
        just = b'{"prompt":"the","max_tokens":1}'
        assert http.post("/v1/completions", content=just.rjust(limit), headers=headers).status_code == 200


def test_large_headers(server: Running) -> None:
    """A client that sends them without end is cut off at max_header_kb."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
        try:
            for _ in range(64):
                connection.sendall(b"a" * 1024)
            answer = connection.recv(1000)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/health", headers={"A": "a" * 8000}).status_code == 200


def test_api_key(llama: TinyModel) -> None:
    with running(llama.path, api_key="right-key") as server, server.http() as http:
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
            for key in (None, "Bearer wrong", "Bearer right-ke", "Bearer right-key2", "Basic right-key", "Bearer \xff"):
                headers = {} if key is None else {"Authorization": key.encode("latin-1")}
                error = check_error(http.get(path, headers=headers), 401)  # type: ignore[arg-type]
                assert error["code"] == "invalid_api_key"
        with server.client(api_key="right-key") as client:
            assert client.models.list().data
        with server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_the_key_is_compared_in_constant_time() -> None:
    """Lesson 29."""
    assert "compare_digest" in inspect.getsource(Gate._has_key)


def test_an_unexpected_exception_says_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 29: the text of exceptions was echoed to clients."""

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

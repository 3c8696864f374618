"""What a request leaves out comes from the model's generation_config.json, and the server says so at its start."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.generation_config import NEUTRAL, SamplingDefaults
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions
from nanovllm.server.run import serve
from tests.server.rig import ENGINE, Running, running
from tests.tiny_models import TinyModel

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 24}
VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 24}
COMPLETION = ("/v1/completions", {"prompt": "the rain"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the rain"}]})
BOTH = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])


def with_file(llama: TinyModel, folder: Path, **values: Any) -> Path:
    shutil.copytree(llama.path, folder)
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tuned(llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(with_file(llama, tmp_path_factory.mktemp("tuned") / "model", **FILE)) as server:
        yield server


def sampled_by(server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> SamplingParams:
    """What the engine gets for this request."""
    seen: list[SamplingParams] = []
    add = server.engine.add_request

    def note(request_id: str, prompt: Any, params: SamplingParams, **more: Any) -> None:
        seen.append(params)
        add(request_id, prompt, params, **more)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "add_request", note)
        answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    [params] = seen
    return params


@BOTH
def test_fields_left_out_or_null_are_the_models(
    tuned: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert sampled_by(tuned, monkeypatch, path, body) == SamplingParams(**VALUES)
    assert sampled_by(tuned, monkeypatch, path, {**body, **dict.fromkeys(VALUES)}) == SamplingParams(**VALUES)


GIVEN = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"top_k": 0},
    {"top_k": -1},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"repetition_penalty": 1.0},
    {"max_tokens": 23},
    {"max_tokens": 24},
]


@BOTH
def test_given_fields_win_one_by_one(
    tuned: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    for given in GIVEN:
        assert sampled_by(tuned, monkeypatch, path, {**body, **given}) == SamplingParams(**{**VALUES, **given})


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_max_new_tokens_is_a_limit_too(tuned: Running, path: str, body: dict[str, Any], stream: bool) -> None:
    """max_tokens is lowered before its room is counted: 9,000 would not fit."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    long = {**body, "max_tokens": 9000, "ignore_eos": True, "stream": stream, **options}
    text = tuned.post(path, long).text
    if not stream:
        assert json.loads(text)["choices"][0]["finish_reason"] == "length"
        assert json.loads(text)["usage"]["completion_tokens"] == 24
    else:
        assert '"finish_reason":"length"' in text
        assert '"completion_tokens":24' in text


@BOTH
@pytest.mark.parametrize("given", [{"max_tokens": 0}, {"max_tokens": -3}, {"min_tokens": 25}], ids=str)
def test_what_is_still_refused(tuned: Running, path: str, body: dict[str, Any], given: dict[str, Any]) -> None:
    answer = tuned.post(path, {**body, **given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(given))


def test_scores_of_a_prompt_are_not_drawn(tuned: Running) -> None:
    body = {"prompt": "the rain", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = tuned.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "the rain"
    assert answer["usage"]["completion_tokens"] == 0


def test_other_fields_of_a_chat_take_them_too(tuned: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((7, 7), (99, 24)):
        params = sampled_by(tuned, monkeypatch, CHAT[0], {**CHAT[1], "max_completion_tokens": given})
        assert params.max_tokens == expected
    params = sampled_by(tuned, monkeypatch, CHAT[0], {**CHAT[1], "response_format": {"type": "json_object"}})
    assert params.structured_outputs is not None
    assert params.clone(structured_outputs=None) == SamplingParams(**VALUES)


def test_without_the_file_nothing_changes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_by(server, monkeypatch, *COMPLETION) == SamplingParams()
    assert sampled_by(server, monkeypatch, CHAT[0], {**CHAT[1], "max_tokens": 16}) == SamplingParams()
    assert sampled_by(server, monkeypatch, *CHAT) == SamplingParams(max_tokens=None)


def test_the_page_of_facts_has_them(tuned: Running, server: Running) -> None:
    with tuned.http() as client:
        assert client.get("/engine/info").json()["sampling_defaults"] == VALUES
    with server.http() as client:
        assert client.get("/engine/info").json()["sampling_defaults"] == {}


def test_the_document_claims_no_other_default(server: Running) -> None:
    with server.http() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for body in ("CompletionBody", "ChatBody"):
        assert {schemas[body]["properties"][name]["default"] for name in VALUES} == {None}


@pytest.mark.parametrize("option", ["auto", "vllm"])
def test_the_server_says_it_at_its_start(
    llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    model = with_file(llama, tmp_path / "model", temperature=0.6, top_k="many")
    config = EngineConfig.from_options(model=str(model), **ENGINE, generation_config=option)
    said: list[str] = []
    monkeypatch.setattr("nanovllm.server.run.DrainingServer.run", lambda server, sockets: sockets[0].close())
    with caplog.at_level("INFO", "nanovllm"):
        serve(config, ServerOptions(port=0), said.append)
    file = model / "generation_config.json"
    if option == "auto":
        assert f"sampling defaults: temperature=0.6, from {file}" in said
        [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert line.startswith(f"{file}: top_k='many' is ignored: must be an integer")
    else:
        assert f"sampling defaults: {NEUTRAL}; generation_config='vllm'" in said
        assert "top_k" not in caplog.text


def test_replicas_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = pytest.importorskip("nanovllm.server.replicas")
    defaults, said = SamplingDefaults({"top_k": 5}, "FILE"), []
    opened = contextlib.nullcontext(replicas.Replicas(None, 2, "", defaults))
    monkeypatch.setattr(replicas, "open_replicas", lambda *_: opened)
    monkeypatch.setattr("nanovllm.server.run.DrainingServer.run", lambda server, sockets: None)
    replicas.serve_replicas(EngineConfig(), ServerOptions(port=0), 2, said.append)
    assert "sampling defaults: top_k=5, from FILE" in said


def test_files_of_replicas_are_found_before_ray_is_started(
    llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = pytest.importorskip("nanovllm.server.replicas")
    with_file(llama, tmp_path / "model", top_k=5)
    monkeypatch.chdir(tmp_path)
    config, defaults = replicas.find_files(EngineConfig(model="model", generation_config="model"))
    assert (config.model, config.generation_config) == (str(tmp_path / "model"),) * 2
    assert defaults.values == {"top_k": 5}
    assert replicas.find_files(EngineConfig(model="model"))[0].generation_config == "auto"
    with (
        pytest.raises(ConfigError, match=r"generation_config='nowhere': .*nowhere"),
        replicas.open_replicas(EngineConfig(model="model", generation_config="nowhere"), ServerOptions(), 2),
    ):
        pytest.fail("it began")

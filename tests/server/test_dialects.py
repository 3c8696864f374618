"""What /v1/responses and /v1/messages share with the other endpoints: keys, metrics, clients that leave or stall,
failures in a stream. Their own tests are test_responses.py and test_messages.py."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response as OpenAIResponse

from nanovllm.server.answers import ChatAnswer
from nanovllm.server.prefix_router import body_keys
from nanovllm.server.tools import AnswerPart
from tests.server.rig import answers_of_a_stalled_client, running, until
from tests.server.test_metrics import read as read_metrics
from tests.tiny_models import TinyModel, edit_config

LONG: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "the rain", "max_output_tokens": 60, "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 60, "ignore_eos": True},
}
paths = pytest.mark.parametrize("path", LONG)


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


@paths
def test_keys(llama: TinyModel, path: str) -> None:
    with running(llama.path, api_key="right-key") as server, server.http() as http:
        for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": ""}):
            answer = http.post(path, json=LONG[path], headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert (answer.json().get("type") == "error") is (path == "/v1/messages")
        for headers in ({"X-Api-Key": "right-key"}, {"Authorization": "Bearer right-key"}):
            assert http.post(path, json=LONG[path], headers=headers).status_code == 200


@paths
def test_a_client_that_leaves_takes_its_request_with_it(llama: TinyModel, path: str) -> None:
    """The engine stops after a few steps: a request that was not aborted would stay for ever."""
    with running(llama.path) as server:
        step, allowed = server.engine.step, threading.Semaphore(3)
        server.engine.step = lambda: (allowed.acquire(), step())[1]
        with server.http() as http, http.stream("POST", path, json={**LONG[path], "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
        server.engine.step = step
        allowed.release(1)
        until(server.is_empty)
        until(lambda: read_metrics(server)["vllm:request_success_total abort"] == 1)


@paths
def test_requests_are_counted(llama: TinyModel, path: str) -> None:
    with running(llama.path) as server:
        for stream in (False, True):
            assert server.post(path, {**LONG[path], "stream": stream}).status_code == 200
        found = read_metrics(server)
        assert found["vllm:request_success_total length"] == 2
        assert found["vllm:generation_tokens_total"] == 120


@paths
def test_a_step_that_fails(llama: TinyModel, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with running(llama.path) as server:
        launch, count, seen = server.engine.executor.launch, [], threading.Event()

        def failing(plan: Any) -> Any:
            count.append(plan)
            if len(count) == 3:
                seen.wait(20)
                raise RuntimeError("a secret")
            return launch(plan)

        monkeypatch.setattr(server.engine.executor, "launch", failing)
        with server.http() as http, http.stream("POST", path, json={**LONG[path], "stream": True}) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                seen.set()
        *_, last = events_of(text)
        assert answer.status_code == 200
        assert "secret" not in text
        if path == "/v1/responses":
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert last["response"]["error"]["code"] == "step_failed"
            answer = server.http().get(f"/v1/responses/{last['response']['id']}")
            assert answer.status_code == 404
        else:
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        count.clear()
        answer = server.post(path, LONG[path])
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "step_failed")


@paths
def test_a_client_that_stalls_gets_all_it_has_missed_at_once(llama_copy: Path, path: str) -> None:
    """Its connection takes no more after the first events: the server waits in `send`, and the engine goes on."""
    edit_config(llama_copy, max_position_embeddings=2048)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**LONG[path], limit: 400, "seed": 1}
    answer, sent = answers_of_a_stalled_client(llama_copy, path, body)
    whole = json.loads(answer)
    events = events_of(b"".join(sent).decode())
    assert len(sent) <= 4  # the first, perhaps one that was on its way, the rest, and an empty end
    assert len(events) <= 15
    if path == "/v1/responses":
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
        deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
        assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    else:
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(deltas) == whole["content"][0]["text"]


@paths
def test_thoughts_are_blocks_of_their_own(llama: TinyModel, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Whatever finds them in the text: here all of it is one, and the answer comes at the end."""

    def read(_: Any, __: Any, new: Any) -> tuple[AnswerPart, str | None]:
        return AnswerPart("done" if new.finish_reason else "", thought=new.text), new.finish_reason

    monkeypatch.setattr(ChatAnswer, "read", read)
    with running(llama.path) as server:
        body = {**LONG[path], "temperature": 0}
        whole = server.post(path, body).json()
        events = events_of(server.post(path, {**body, "stream": True}).text)
    if path == "/v1/responses":
        thought, text = whole["output"]
        assert (thought["summary"], thought["content"][0]["type"]) == ([], "reasoning_text")
        told, words = thought["content"][0]["text"], text["content"][0]["text"]
        deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert [event["text"] for event in events if event["type"] == "response.reasoning_text.done"] == [told]
        parsed = OpenAIResponse.model_validate(whole)
        assert [item.type for item in parsed.output] == ["reasoning", "message"]
    else:
        thought, text = whole["content"]
        assert (thought["type"], text["type"]) == ("thinking", "text")
        told, words = thought["thinking"], text["text"]
        deltas = [event["delta"]["thinking"] for event in events if "thinking" in event.get("delta", {})]
    assert words == "done"
    assert len(deltas) > 1
    assert "".join(deltas) == told


def test_conversations_meet_the_same_replica() -> None:
    """What begins alike has the same first keys: the next turn of a conversation, the same instructions."""
    long = "the men of the town sing in the rain " * 20
    turn = {"role": "user", "content": long}
    for one, two in (
        ({"input": [turn]}, {"input": [turn, {"role": "user", "content": "b"}]}),
        ({"input": long + "a"}, {"input": long + "b"}),
        ({"instructions": long, "input": "a"}, {"instructions": long, "input": "b"}),
        (
            {"system": long, "messages": [{"role": "user", "content": "a"}]},
            {"system": long, "messages": [{"role": "user", "content": "b"}]},
        ),
    ):
        first, second = (body_keys(json.dumps(body).encode()) for body in (one, two))
        assert first
        assert first[:4] == second[:4]
    assert body_keys(b'{"input": 5}') == body_keys(b'{"input": null}') == ()

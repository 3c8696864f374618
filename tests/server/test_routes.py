"""Routes and answers that monitors, load balancers and scripts written for vLLM expect."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.telemetry.readers import TraceFile
from tests.server.rig import Running, running, until
from tests.server.test_refusals import check_error
from tests.tiny_models import TinyModel

HI = [{"role": "user", "content": "a"}]
CROSS = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}


@pytest.fixture(scope="module")
def shared(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, events=True, max_watchers=2) as made:
        yield made


# ---- routes --------------------------------------------------------------------------------------------------------


def test_head_is_get_without_a_body(server: Running) -> None:
    with server.http() as http:
        for path in ("/health", "/ping", "/v1/models", "/version", "/openapi.json", "/", "/engine/info", "/load"):
            head, got = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            assert head.headers["content-length"] == str(len(got.content))
        assert http.head("/metrics").status_code == 200
        assert http.head("/nothing").status_code == 404
        assert http.head("/v1/completions").status_code == 405
        assert http.get("/health").status_code == 200  # the same connection


def test_head_of_the_feed_takes_no_place(server: Running) -> None:
    with server.http() as http:
        for _ in range(5):  # max_watchers is 2
            answer = http.head("/engine/events")
            assert (answer.status_code, answer.content) == (200, b"")
            until(lambda: http.head("/engine/events").status_code == 200)


def test_a_405_names_all_methods(server: Running) -> None:
    with server.http() as http:
        for method, path, allowed in (
            ("PUT", "/v1/responses/x", "DELETE, GET, HEAD"),
            ("DELETE", "/ping", "GET, HEAD, POST"),
            ("GET", "/v1/completions", "POST"),
        ):
            answer = http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_ping(llama: TinyModel) -> None:
    with running(llama.path, api_key="k") as server, server.http() as http:
        for answer in (http.get("/ping"), http.post("/ping"), http.get("/health")):
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_load(server: Running) -> None:
    with server.http() as http:
        assert http.get("/load").json() == {"server_load": 0}
        assert server.post("/engine/control", {"action": "pause"}).status_code == 200
        try:
            body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}
            thread = threading.Thread(target=server.post, args=("/v1/completions", body))
            thread.start()
            until(lambda: http.get("/load").json() == {"server_load": 1})  # requests, not sequences
            until(lambda: server.engine.has_unfinished_requests())
            assert check_error(http.post("/reset_prefix_cache"), 409)["code"] == "requests_running"
        finally:
            server.post("/engine/control", {"action": "resume"})
        thread.join()
        assert http.get("/load").json() == {"server_load": 0}


def test_reset_prefix_cache(server: Running) -> None:
    prompt = [3 + number for number in range(100)]

    def cached() -> int:
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    until(server.is_empty)
    with server.http() as http:
        answer = http.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"reset": True})
        assert cached() == 0
        assert http.get("/reset_prefix_cache").status_code == 405


def test_reset_prefix_cache_needs_a_key_or_events(llama: TinyModel) -> None:
    with running(llama.path) as plain, plain.http() as http:
        error = check_error(http.post("/reset_prefix_cache"), 404)
        assert "--events" in error["message"]
        assert "--api-key" in error["message"]
    with running(llama.path, api_key="k") as keyed, keyed.http() as http:
        check_error(http.post("/reset_prefix_cache"), 401)
        assert http.post("/reset_prefix_cache", headers={"Authorization": "Bearer k"}).status_code == 200


# ---- pages of other sites that send no Origin ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/engine/events", "/metrics", "/health", "/static/app.js", "/v1/models"])
def test_pictures_of_other_sites(server: Running, path: str) -> None:
    with server.http() as http:
        for site in ("cross-site", "same-site"):
            error = check_error(http.get(path, headers={**CROSS, "Sec-Fetch-Site": site}), 403)
            assert (error["param"], error["code"]) == ("Sec-Fetch-Site", "origin_not_allowed")
    assert server.is_empty()


def test_what_a_browser_sends_for_ourselves(server: Running) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with server.http() as http:
        for site in ("same-origin", "none"):
            assert http.get("/health", headers={**CROSS, "Sec-Fetch-Site": site}).status_code == 200
        assert http.get("/", headers=link).status_code == 200  # a user follows a link
        check_error(http.get("/", headers={**link, "Sec-Fetch-Dest": "iframe"}), 403)
        check_error(http.get("/engine/events", headers=link), 403)


def test_allowed_pages_are_known_by_their_origin(llama: TinyModel) -> None:
    origin = {"Origin": "https://chat.example.com"}
    with running(llama.path, allowed_origins=("https://chat.example.com",)) as server, server.http() as http:
        assert http.get("/health", headers={**CROSS, "Sec-Fetch-Mode": "cors", **origin}).status_code == 200
        check_error(http.get("/health", headers=CROSS), 403)
    with running(llama.path, allowed_origins=("*",)) as server, server.http() as http:
        assert http.get("/health", headers=CROSS).status_code == 200


# ---- what does not fit ---------------------------------------------------------------------------------------------


def test_a_context_that_is_too_small(server: Running) -> None:
    limit = server.engine.max_model_len
    for path, body, param in (
        ("/v1/completions", {"prompt": [5] * limit}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [5] * limit]}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 300 * limit}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c " * 100}]}, "messages"),
    ):
        error = check_error(server.post(path, body))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_more_new_tokens_than_there_is_room(server: Running, stream: bool) -> None:
    limit = server.engine.max_model_len
    prompt = [5] * (limit - 10)
    body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "stream": stream}
    assert server.post("/v1/completions", {**body, "max_tokens": 10}).status_code == 200
    error = check_error(server.post("/v1/completions", {**body, "max_tokens": 11}))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    for part in ("max_tokens=11", str(limit - 10), str(limit), "10"):
        assert part in error["message"]
    many = {**body, "prompt": [[5], prompt], "max_tokens": 11}
    assert check_error(server.post("/v1/completions", many))["code"] == "context_length_exceeded"
    for name in ("max_tokens", "max_completion_tokens"):
        error = check_error(server.post("/v1/chat/completions", {"messages": HI, name: 10**6, "stream": stream}))
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    # What was not asked for is not promised
    text = server.post("/v1/completions", body).text
    assert '"finish_reason":"length"' in text


def test_whose_limit_min_tokens_exceeds(llama: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    with running(llama.path, {"generation_config": str(tmp_path)}) as server:
        for path, body in (("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", {"messages": HI})):
            for given in ({}, {"max_tokens": 20}):
                error = check_error(server.post(path, {**body, **given, "min_tokens": 10}))
                assert error["param"] == "min_tokens"
                assert "max_tokens=5" in error["message"]
                assert "generation_config.json" in error["message"]
            error = check_error(server.post(path, {**body, "max_tokens": 4, "min_tokens": 10}))
            assert "generation_config" not in error["message"]
    with running(llama.path) as server:
        error = check_error(server.post("/v1/completions", {"prompt": "the", "min_tokens": 20}))
        assert "max_tokens=16 is the default of completions: give max_tokens" in error["message"]


# ---- when things end -----------------------------------------------------------------------------------------------


def test_a_dead_engine_runs_nothing(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies while the engine is paused leaves a request in the scheduler; it does not run any more."""
    with running(llama.path, events=True) as server, server.http() as http:
        server.post("/engine/control", {"action": "pause"})
        thread = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "the", "max_tokens": 9}))
        thread.start()
        until(lambda: 'num_requests_waiting{engine="0"' in http.get("/metrics").text)
        until(lambda: server.engine.has_unfinished_requests())
        server.post("/engine/control", {"action": "step"})

        def dead() -> None:
            raise EngineDeadError("rank 1 has ended")

        monkeypatch.setattr(server.engine.executor, "check", dead)
        until(lambda: http.get("/health").status_code == 503)
        thread.join()
        metrics = http.get("/metrics").text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            [line] = [line for line in metrics.splitlines() if line.startswith(f"vllm:{name}{{")]
            assert float(line.split()[-1]) == 0, line


def test_a_trace_to_a_pipe_that_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    failed: list[Exception] = []

    def write() -> None:
        try:
            TraceFile(pipe, {}).end()
        except ConfigError as error:
            failed.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    if thread.is_alive():
        pipe.read_bytes()  # lets it go
        pytest.fail("it waits for a reader")
    assert "pipe" in str(failed[0])


def test_a_trace_to_a_pipe_that_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    TraceFile(pipe, {"a": 1}).end()
    assert os.read(reader, 1000).startswith(b'{"type": "header"')
    os.close(reader)

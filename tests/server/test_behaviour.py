"""Under load and in trouble: who leaves frees blocks, too many requests get 429, a failure hurts no other request."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nanovllm.server import run
from nanovllm.server.guard import Guard
from tests.ranks.test_faults import stop
from tests.server.rig import Running, command, events_of, raw_post, running, until
from tests.tiny_models import TinyModel

LONG = {"prompt": "the rain", "max_tokens": 150, "temperature": 0, "ignore_eos": True}


def slow_down(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> list[float]:
    """Steps of a known length; returns when each began."""
    step, began = server.engine.step, []

    def slow() -> Any:
        began.append(time.monotonic())
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(server.engine, "step", slow)
    return began


def is_running(server: Running, count: int = 1) -> bool:
    return len(server.engine.scheduler.running) == count


MESSAGES = [{"role": "user", "content": "the rain"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True},
    "/v1/responses": {"input": "the rain", "max_output_tokens": 100, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True},
}
each_path = pytest.mark.parametrize("path", BODIES)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "more", "count"),
    [
        ("/v1/completions", {"n": 2}, 2),
        ("/v1/completions", {"prompt": ["the rain", "men"], "n": 2}, 4),
        ("/v1/responses", {}, 1),
        ("/v1/messages", {}, 1),
    ],
)
def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool, path: str, more: dict[str, Any], count: int
) -> None:
    began, noticed, watch = slow_down(server, monkeypatch, 0.2), [], Guard._watch

    async def note(guard: Guard) -> None:
        await watch(guard)
        noticed.append(len(began))

    monkeypatch.setattr(Guard, "_watch", note)
    with server.connect() as connection:
        connection.sendall(raw_post({**BODIES[path], "stream": stream, **more}, path))
        until(lambda: is_running(server, count))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(server.is_empty)
    assert len(noticed) == 1
    assert len(began) - noticed[0] <= 1  # one may begin while the news travels from the loop to the engine's thread


def test_a_client_that_leaves_while_waiting(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llama.path, {"max_num_seqs": 1, "max_num_batched_tokens": 16}) as server:
        slow_down(server, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.post, "/v1/completions", LONG)
            until(lambda: is_running(server))
            with pytest.raises(httpx.ReadTimeout), server.http() as http:
                http.post("/v1/completions", json=LONG, timeout=0.3)
            until(lambda: len(server.engine.scheduler.waiting) == 0)
            assert first.result().json()["usage"]["completion_tokens"] == 150
        until(server.is_empty)


def test_the_queue_has_an_end(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    with running(llama.path, options, max_waiting=2) as server, ThreadPoolExecutor(4) as pool:
        slow_down(server, monkeypatch)
        taken = [pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 40}) for _ in range(4)]
        until(lambda: server.service.num_admitted == 4)
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=server.model, prompt="a", max_tokens=1, stream=True)
        never = server.post("/v1/completions", {**LONG, "n": 5})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        with server.http() as http:
            assert http.get("/health").status_code == 200
        assert [one.result().status_code for one in taken] == [200] * 4
        assert server.post("/v1/completions", {**LONG, "n": 4, "max_tokens": 4}).status_code == 200
        until(server.is_empty)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_may_take_only_so_long(llama: TinyModel, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with running(llama.path, request_timeout=0.5) as server:
        slow_down(server, monkeypatch)
        with server.client() as client:
            settings: dict[str, Any] = {"model": server.model, "prompt": "the", "max_tokens": 150}
            if stream:
                with pytest.raises(openai.APIError, match=r"0\.5 s") as found:
                    list(client.completions.create(**settings, stream=True, extra_body={"ignore_eos": True}))
            else:
                with pytest.raises(openai.APIStatusError, match=r"0\.5 s") as found:
                    client.completions.create(**settings, extra_body={"ignore_eos": True})
                assert found.value.status_code == 408  # type: ignore[attr-defined]
                assert found.value.response.headers["x-should-retry"] == "false"  # type: ignore[attr-defined]
        until(server.is_empty)
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("part", "path", "body"),
    [
        ("inputs.render_chat", "/v1/chat/completions", {"messages": MESSAGES}),
        ("inputs.encode", "/tokenize", {"prompt": "a"}),
        ("grammars.compiled", "/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}),
    ],
)
def test_slow_encoding_is_cut_off_and_does_not_hold_up_others(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, part: str, path: str, body: dict[str, Any]
) -> None:
    """Templates, tokenizers and grammars have a time limit and are no work of the event loop."""
    with running(llama.path, encode_timeout=0.3) as server:
        go_on = threading.Event()
        owner, name = part.split(".")
        usual, loop_thread = getattr(getattr(server.engine, owner), name), []

        def slow_one(*given: Any, **named: Any) -> Any:
            if getattr(given[0], "structured_outputs", "a text") is None:  # another request's parameters
                return usual(*given, **named)
            loop_thread.append(asyncio._get_running_loop() is not None)
            return go_on.wait(20)

        monkeypatch.setattr(getattr(server.engine, owner), name, slow_one)
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(server.post, path, body)
            assert server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}).status_code == 200
            assert slow.result().status_code == 408
        assert loop_thread == [False]
        go_on.set()
        until(server.is_empty)


def test_health_answers_while_the_engine_is_busy(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends only after they have answered, so that waiting for it would be waiting in vain."""
    began, answered, step = threading.Event(), threading.Event(), server.engine.step

    def wait() -> Any:
        began.set()
        assert answered.wait(60)
        return step()

    monkeypatch.setattr(server.engine, "step", wait)
    with ThreadPoolExecutor(1) as pool, server.http() as http:
        busy = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 5})
        assert began.wait(60)
        for path in ("/health", "/metrics", "/v1/models"):
            assert http.get(path).status_code == 200
        assert not busy.done()
        answered.set()
        assert busy.result().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@each_path
def test_a_failed_step_is_an_error_without_its_text(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    launch, seen = server.engine.executor.launch, threading.Event()

    def failing(plan: Any) -> Any:
        if seen.wait(0.02) or not stream:  # the first events have reached the client
            seen.clear()
            raise RuntimeError("a secret")
        return launch(plan)

    monkeypatch.setattr(server.engine.executor, "launch", failing)
    text = ""
    with server.http() as http, http.stream("POST", path, json={**BODIES[path], "stream": stream}) as answer:
        for part in answer.iter_text():
            text += part
            seen.set()
    assert "secret" not in text
    assert answer.status_code == (200 if stream else 500)
    last = events_of(text)[-1] if stream else json.loads(text)
    if stream and path == "/v1/responses":
        last = last["response"]
        assert (last["status"], last["error"]["code"]) == ("failed", "step_failed")
        assert server.http().get(f"/v1/responses/{last['id']}").status_code == 404
    else:
        assert last["error"]["code"] == "step_failed"
        assert last.get("type") == ("error" if path == "/v1/messages" else None)
        assert last["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert text.endswith("data: [DONE]\n\n") == (stream and "completions" in path)
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200


def test_a_poisoned_request_hurts_no_other(server: Running) -> None:
    """Bad ones of every kind among good ones: the good ones' tokens are as if they were alone."""
    good = {**LONG, "max_tokens": 40}
    alone = server.post("/v1/completions", good).json()["choices"][0]["text"]
    bad: list[dict[str, Any]] = [
        {"prompt": [5] * 159},
        {"prompt": [5] * 10_000},
        {"prompt": []},
        {"n": 16, "best_of": 3},
        {"temperature": 1e-300},
        {"logit_bias": {str(i): -100 for i in range(300)}},
        {"allowed_token_ids": [0]},
        {"logprobs": 20, "n": 16},
        {"stop": ["\x00"]},
        {"temperature": 100, "top_k": 1},
        {"prompt": "\x00" * 100},
        {"repetition_penalty": 1e-9},
    ]
    with ThreadPoolExecutor(12) as pool:
        goods = [pool.submit(server.post, "/v1/completions", good) for _ in range(6)]
        bads = [pool.submit(server.post, "/v1/completions", {"prompt": "the", "max_tokens": 8, **b}) for b in bad]
        assert [one.result().json()["choices"][0]["text"] for one in goods] == [alone] * 6
        assert {one.result().status_code for one in bads} <= {200, 400, 429}


def test_an_engine_that_died(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise AssertionError("a secret invariant")

    with running(llama.path) as server, ThreadPoolExecutor(2) as pool:
        slow_down(server, monkeypatch)
        waiting = pool.submit(server.post, "/v1/completions", LONG)
        streaming = pool.submit(server.post, "/v1/completions", {**LONG, "stream": True})
        until(lambda: is_running(server, 2))
        until(lambda: server.engine.stats.generated_tokens > 8)
        monkeypatch.setattr(server.engine.scheduler, "schedule", broken)
        assert waiting.result().status_code == 503
        assert "engine_failed" in streaming.result().text
        with server.http() as http:
            health = http.get("/health")
            assert http.get("/v1/models").status_code == 200
            assert http.get("/metrics").status_code == 200
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "AssertionError" in health.json()["reason"]
        later = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert later.status_code == 503
        for answer in (waiting.result(), streaming.result(), later, health):
            assert "secret" not in answer.text
        assert server.service.num_admitted == 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_rank_that_is_lost(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, busy: bool
) -> None:
    """The engine is dead: requests get 503, not the 500 of a failed step, and /health says so, idle or not."""
    options = {"tensor_parallel_size": 2, "worker_timeout": 60.0}
    with running(tiny("qwen3-bias-tied").path, options) as server, ThreadPoolExecutor(2) as pool, server.http() as http:
        worker = server.engine.executor._workers[0].process.pid
        assert http.get("/health").status_code == 200
        lost, step = threading.Event(), server.engine.step
        if busy:
            # The second step waits: all are running then, whatever the machine's speed.
            held = lambda: (server.engine.stats.num_steps == 0 or lost.wait(60)) and step()  # noqa: E731
            monkeypatch.setattr(server.engine, "step", held)
            waiting = pool.submit(server.post, "/v1/completions", {**LONG, "n": 8})
            until(lambda: is_running(server, 8) and server.engine.stats.num_steps == 1)
        os.kill(worker, sign) if sign == signal.SIGKILL else stop(server.engine.executor)
        lost.set()
        # An all-reduce that had begun when the worker was stopped waits for the 60 s that it began with.
        until(lambda: http.get("/health").status_code == 503, 180)
        assert "EngineDeadError" in http.get("/health").json()["reason"]
        if busy:
            assert (waiting.result().status_code, waiting.result().json()["error"]["code"]) == (503, "engine_failed")
        later = server.post("/v1/completions", LONG)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_failed")
        assert "rank" not in later.text
        assert server.service.num_admitted == 0
        ends = dict(re.findall(r'request_success_total{.*finished_reason="(.*?)".*} (.*)', http.get("/metrics").text))
        assert (float(ends["error"]), float(ends["abort"])) == (busy, 0), "no client has left"
    assert not Path(f"/proc/{worker}").exists()


def test_a_step_that_never_ends(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel or a rank that hangs raises nothing; only the clock can tell."""
    go_on, step = threading.Event(), None

    def hang() -> Any:
        go_on.wait(20)
        return step()

    with running(llama.path, step_timeout=0.3) as server, ThreadPoolExecutor(1) as pool, server.http() as http:
        assert server.service.engine.seconds_in_step == 0
        step = server.engine.step
        monkeypatch.setattr(server.engine, "step", hang)
        waiting = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 3})
        until(lambda: server.service.engine.seconds_in_step > 0)
        until(lambda: http.get("/health").status_code == 503)
        health = http.get("/health").json()
        assert (health["status"], "0.3 s" in health["reason"]) == ("failed", True)
        refused = server.post("/v1/completions", LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stuck")
        assert refused.headers["retry-after"]
        started = time.monotonic()
        server.service.close()  # as after SIGTERM: it does not wait for what never ends
        assert time.monotonic() - started < 15
        go_on.set()
        assert waiting.result().status_code == 200
        until(lambda: http.get("/health").status_code == 200)


def test_priority(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "scheduling_policy": "priority"}
    with running(llama.path, options) as server, ThreadPoolExecutor(4) as pool:
        slow_down(server, monkeypatch, 0.01)
        order: list[int] = []

        def ask(priority: int) -> None:
            body = {"prompt": "the", "max_tokens": 20, "priority": priority, "ignore_eos": True}
            assert server.post("/v1/completions", body).status_code == 200
            order.append(priority)

        first = pool.submit(ask, -100)
        until(lambda: is_running(server))
        others = []
        for number, priority in enumerate((5, 1, 3), 1):
            others.append(pool.submit(ask, priority))
            until(lambda n=number: len(server.engine.scheduler.waiting) == n)
        for one in (first, *others):
            one.result()
        assert order == [-100, 1, 3, 5]


def test_the_user_is_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nanovllm"):
        body = {"prompt": "the", "max_tokens": 1, "user": "ann"}
        assert server.post("/v1/completions", body, headers={"X-Request-Id": "r7"}).status_code == 200
    assert "request r7 is of user 'ann'" in caplog.text


def test_a_slow_reader_holds_up_no_other_and_gets_all(server: Running) -> None:
    """It reads nothing until the others are done; what it then reads is whole."""
    body = {**LONG, "n": 4, "stream": True, "logprobs": 20}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as slow:
        assert server.post("/v1/completions", LONG).status_code == 200
        until(lambda: not server.engine.has_unfinished_requests())
        events = events_of("\n".join(slow.iter_lines()))
    tokens = [0] * 4
    for event in events:
        [choice] = event["choices"]
        tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert tokens == [150] * 4


def test_two_servers_in_one_process(llama: TinyModel) -> None:
    with running(llama.path) as one, running(llama.path, served_model_name="other") as two:
        one.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
        with two.http() as http:
            assert 'vllm:generation_tokens_total{engine="0",model_name="other"} 0.0' in http.get("/metrics").text
            assert http.get("/v1/models").json()["data"][0]["id"] == "other"


@pytest.mark.parametrize(("sign", "num_ranks"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_lets_what_runs_finish_then_exits_with_0(
    tiny: Callable[[str], TinyModel], sign: signal.Signals, num_ranks: int
) -> None:
    """To all processes of the group, as terminals and service managers send it."""
    ranks = ("--tensor-parallel-size", str(num_ranks))
    with command(tiny("qwen3-bias-tied").path, "--num-kvcache-blocks", "64", *ranks) as (process, url):
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as answer:
            for line in answer.iter_lines():
                if not lines:
                    os.killpg(process.pid, sign)
                lines += [line] if line else []
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_the_drain_has_an_end(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        with running(llama.path, drain_timeout=1) as server:
            slow_down(server, monkeypatch, 0.1)
            endless = pool.submit(server.post, "/v1/completions", {**LONG, "stream": True})
            until(lambda: is_running(server))
            started = time.monotonic()
        assert time.monotonic() - started < 12  # 150 steps would take 15 s at least
        events = endless.result().text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "server_left"
        assert events[-2:] == ["data: [DONE]", ""]
        assert (server.service.num_admitted, server.service.num_cut) == (0, 1)


def test_the_drain_ends_in_the_middle_of_a_long_step(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes nothing, not even that a request is cut off: the server answers for it."""
    monkeypatch.setattr(run, "CUT_SECONDS", 1)
    go_on = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        with running(llama.path, drain_timeout=0.2) as server:
            step, begun = server.engine.step, threading.Event()
            monkeypatch.setattr(server.engine, "step", lambda: (begun.set(), go_on.wait(20), step())[2])
            answers = [pool.submit(server.post, "/v1/completions", {**LONG, "stream": True})]
            assert begun.wait(20)
            answers.append(pool.submit(server.post, "/v1/completions", LONG))
            until(lambda: server.service.num_requests == 2)
            threading.Timer(4, go_on.set).start()
        for answer in answers:
            assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "server_left")

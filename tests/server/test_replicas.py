"""Two CPU replicas of a tiny model, of two ranks each, on a private Ray: where requests land, and what happens when a
replica or one of its ranks dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, ModelError
from nanovllm.server.options import ServerOptions
from tests.cli.runner import make_runner
from tests.ranks.processes import all_on_loopback, children, descendants
from tests.server.rig import ENGINE, events_of, in_thread, until
from tests.tiny_models import TinyModel

pytest.importorskip("ray.serve", reason="needs ray[serve]")
KEY = "the key"
APP = "https://chat.example.com"


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("qwen3-bias-tied")  # its heads divide by two


@pytest.fixture(scope="module")
def url(model: TinyModel) -> Iterator[str]:
    """One Ray for all tests here: starting it takes longer than all of them."""
    from nanovllm.server.replicas import make_front, open_replicas
    from nanovllm.server.run import DrainingServer

    kept = {name: os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED")}
    os.environ.pop("RAY_ADDRESS", None)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = ServerOptions(port=0, api_key=KEY, max_body_mb=0.1, allowed_hosts=("gpu-box",), allowed_origins=(APP,))
    config = EngineConfig.from_options(model=str(model.path), tensor_parallel_size=2, **ENGINE)
    with contextlib.ExitStack() as stack:
        front = make_front(stack.enter_context(open_replicas(config, options, 2)), options)
        yield stack.enter_context(in_thread(DrainingServer(front, options), options))
    for name, value in kept.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, timeout=60, verify=False, headers=headers) as client:
        yield client


def where(response: httpx.Response) -> str:
    return response.headers["x-nanovllm-replica"]


def complete(http: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})


def test_a_conversation_goes_back_to_the_replica_that_keeps_it(http: httpx.Client) -> None:
    """Also where another one has less to do, or was sent the same beginning."""
    answers = [http.post("/v1/responses", json={"input": text, "max_output_tokens": 2}) for text in "abcd"]
    assert len(set(map(where, answers))) == 2
    for answer in answers:
        name = answer.json()["id"]
        for _ in range(3):
            more = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, "previous_response_id": name})
            assert (more.status_code, where(more)) == (200, where(answer)), more.text
        assert http.get(f"/v1/responses/{name}").json() == answer.json()
        assert http.delete(f"/v1/responses/{name}").json()["deleted"]
        assert http.get(f"/v1/responses/{name}").status_code == 404


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def names(http: httpx.Client) -> set[str]:
    return set(re.findall(r'replica="([^"]+)"', http.get("/metrics").text))


def running(http: httpx.Client) -> list[float]:
    found = re.findall(r"^vllm:num_requests_running\{.*replica=.*\} (\S+)$", http.get("/metrics").text, re.M)
    assert len(found) == 2
    return [float(value) for value in found]


def test_same_prefix_same_replica_different_prefixes_spread(http: httpx.Client) -> None:
    prompts = [char * 130 for char in "abcdefgh"]
    first = [complete(http, prompt) for prompt in prompts]
    assert [cached(response) for response in first] == [0] * 8
    places = [where(response) for response in first]
    assert sorted(places.count(place) for place in set(places)) == [4, 4]
    again = [complete(http, prompt + "tail") for prompt in prompts]
    assert [where(response) for response in again] == places
    assert all(cached(response) >= 112 for response in again)  # whole blocks of 16 tokens, of 131 with the first


def test_a_conversation_stays_where_it_began(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "z" * 100}]
    first = http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 2})
    assert cached(first) == 0
    for more in "uvw":
        turns += [{"role": "assistant", "content": more}, {"role": "user", "content": more * 3}]
        later = http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 2})
        assert where(later) == where(first)
        assert cached(later) >= 96


def test_streams_and_ids(http: httpx.Client) -> None:
    whole = complete(http, "the town", max_tokens=6, temperature=0).json()["choices"][0]["text"]
    body = {"prompt": "the town", "max_tokens": 6, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers.get_list("x-request-id") == ["mine"]
        text = "\n".join(response.iter_lines())
    assert text.rstrip().endswith("[DONE]")
    chunks = events_of(text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}


def test_errors_are_those_of_one_server(http: httpx.Client) -> None:
    unknown = complete(http, "x", nothing=1)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "nothing")
    assert complete(http, "x", model="other").status_code == 404
    assert http.post("/v1/completions", content=b"{").status_code == 415
    assert http.post("/v1/completions", json={"prompt": "x" * 200_000}).status_code == 413
    assert http.get("/nothing").status_code == 404
    wrong = complete(http, "x" * 130, stream=True, max_tokens=-1)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert httpx.post(f"{http.base_url}/v1/completions", json={"prompt": "x"}, verify=False).status_code == 401


def test_facts(http: httpx.Client, model: TinyModel) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == model.path.name
    assert http.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert len(names(http)) == 2
    text = http.get("/metrics").text
    helps = re.findall(r"^# HELP (\S+)", text, re.M)
    assert len(set(helps)) == len(helps) > 10
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('replica="' in line for line in samples)
    assert http.get("/load").json() == {"server_load": 0}
    assert (http.head("/health").status_code, http.head("/health").content) == (200, b"")
    assert http.post("/ping", headers={"Authorization": ""}).status_code == 200
    refused = http.post("/reset_prefix_cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "unsupported_with_replicas")


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    body = {"prompt": "x" * 10, "max_tokens": 140, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    until(lambda: sum(running(http)) == 0)


def test_names_and_web_pages_are_checked_by_the_front(http: httpx.Client) -> None:
    assert complete(http, "x").status_code == 200
    for path in ("/health", "/metrics", "/engine/info", "/v1/models"):
        assert http.get(path, headers={"Host": "evil.example"}).status_code == 421
        assert http.get(path, headers={"Origin": "http://evil.example"}).status_code == 403
        allowed = http.get(path, headers={"Host": "gpu-box", "Origin": APP})
        assert allowed.status_code == 200
        assert allowed.headers.get_list("access-control-allow-origin") == [APP]
        assert allowed.headers.get_list("vary") == ["Origin"]
    asked = {"Origin": APP, "Access-Control-Request-Method": "POST", "Authorization": ""}
    assert http.options("/v1/completions", headers=asked).status_code == 204


def test_a_replica_ends_a_request_that_swallows_its_cancellation() -> None:
    from nanovllm.server.guard import ClientGone, Guard
    from nanovllm.server.replicas import EngineReplica

    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        try:
            async with Guard(receive, 600):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
                await asyncio.sleep(600)
        except (ClientGone, asyncio.CancelledError) as error:
            ended.append(error)

    async def leave() -> None:
        replica = object.__new__(EngineReplica)
        replica.app, replica.name = app, b"one"
        answers = replica.answer({}, b"")
        assert [message["status"] for message in await answers.__anext__()] == [200]
        await asyncio.wait_for(answers.aclose(), 20)  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert len(ended) == 1


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_everything_listens_on_the_loopback(http: httpx.Client) -> None:
    pids = {int(where(complete(http, char * 130)).rpartition("-")[2]) for char in "ab"}
    assert len(pids) == 2
    family = descendants()
    assert pids < family
    assert all_on_loopback(family)


def test_a_replica_whose_rank_died_is_replaced(http: httpx.Client) -> None:
    prompt = "r" * 130
    home = where(complete(http, prompt))
    assert home in names(http)
    (worker,) = children(int(home.rpartition("-")[2]))
    os.kill(worker, signal.SIGKILL)
    until(lambda: len(names(http) - {home}) == 2, 90)
    assert home not in names(http)
    later = complete(http, prompt)
    assert (later.status_code, where(later) != home) == (200, True)
    assert http.get("/health").status_code == 200


def test_a_killed_replica(http: httpx.Client) -> None:
    """Last, because it takes a while until there are two again."""
    prompt = "k" * 130
    home = where(complete(http, prompt))
    pid = int(home.rpartition("-")[2])
    found: list[httpx.Response] = []
    slow = {"max_tokens": 20, "n": 8, "ignore_eos": True}
    waiting = threading.Thread(target=lambda: found.append(complete(http, prompt, **slow)))
    body = {"prompt": prompt, **slow, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGSTOP)  # whatever the machine's speed: now it is in the middle
        waiting.start()
        os.kill(pid, signal.SIGKILL)
        events = [line[6:] for line in lines if line]
    assert where(response) == home
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["type"]) == ("replica_failed", "service_unavailable_error")
    waiting.join(60)
    # Not yet taken by the dead one, it is sent to the other; else it has the error.
    assert found[0].status_code == 200 or found[0].json()["error"]["code"] == "replica_failed"
    later = [complete(http, prompt) for _ in range(2)]
    assert [response.status_code for response in later] == [200, 200]
    assert where(later[0]) == where(later[1]) != home
    assert cached(later[1]) >= 112


# ---- without a Ray -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "options", "num_replicas", "expected"),
    [
        ({"CPU": 2.0}, {}, 2, {"num_cpus": 1}),
        ({"CPU": 2.0}, {}, 3, {"num_cpus": 0.666}),
        ({"CPU": 64.0}, {}, 2, {"num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, {"tensor_parallel_size": 4}, 2, {"num_gpus": 4, "num_cpus": 1}),
        ({"CPU": 8.0, "GPU": 8.0}, {"device": "cpu"}, 2, {"num_cpus": 1}),
    ],
)
def test_what_a_replica_takes(cluster: Any, options: Any, num_replicas: int, expected: Any) -> None:
    from nanovllm.server.replicas import _resources

    found = _resources(EngineConfig.from_options(**options), num_replicas, cluster)
    assert found == expected
    with pytest.raises(ConfigError, match=r"replicas=3: .* need 6 GPUs, Ray has 4: ask for at most 2"):
        _resources(EngineConfig.from_options(tensor_parallel_size=2), 3, {"CPU": 8.0, "GPU": 4.0})


def test_a_wrong_model_is_known_before_ray_is_started() -> None:
    from nanovllm.server.replicas import open_replicas

    with (
        pytest.raises(ModelError, match="no such file or folder"),
        open_replicas(EngineConfig(model="/no/such/folder"), ServerOptions(), 2),
    ):
        pytest.fail("it began")


@pytest.mark.parametrize("backend", ["ray", "torchrun"])
def test_ranks_of_a_replica_are_beside_it(backend: str) -> None:
    from nanovllm.server.replicas import check_replicas

    config = EngineConfig.from_options(tensor_parallel_size=2, distributed_executor_backend=backend)
    with pytest.raises(ConfigError, match=f"distributed_executor_backend='{backend}'"):
        check_replicas(config)


def test_merged_metrics() -> None:
    from nanovllm.server.replicas import merge_metrics

    text = '# HELP a:b Words {here}\n# TYPE a:b counter\na:b{x="1 }"} 2.0\n# HELP c More\n# TYPE c gauge\nc 3.0\n'
    assert merge_metrics({"r2": text, "r1": text}).splitlines() == [
        "# HELP a:b Words {here}",
        "# TYPE a:b counter",
        'a:b{x="1 }",replica="r1"} 2.0',
        'a:b{x="1 }",replica="r2"} 2.0',
        "# HELP c More",
        "# TYPE c gauge",
        'c{replica="r1"} 3.0',
        'c{replica="r2"} 3.0',
    ]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    monkeypatch.setattr("nanovllm.server.replicas.serve_replicas", lambda *args: seen.append(args))
    run = make_runner(monkeypatch, capsys)
    assert run("serve", "--replicas", 3, "--max-num-seqs", 7).code == 0
    [(config, options, num_replicas, _)] = seen
    assert (config.max_num_seqs, options.host, num_replicas) == (7, "127.0.0.1", 3)
    assert run("serve", "--replicas", 0).code == 2
    monkeypatch.setitem(sys.modules, "nanovllm.server.replicas", None)  # as if Ray were missing
    refused = run("serve", "--replicas", 2)
    assert refused.code == 2
    assert "replicas=2: needs Ray Serve 2.60 or later" in refused.err
    assert "pip install 'nano-vllm[ray]'" in refused.err

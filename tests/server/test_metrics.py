"""/metrics: vLLM's names, numbers that add up, and a dashboard that asks only for what is there."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm.server import service
from tests.drafting import always
from tests.server.rig import Running, running, until
from tests.tiny_models import TinyModel

EXPERT_GB = 3 * 48 * 80 * 4 / 2**30  # of the tiny mixtral, float32
DASHBOARD = Path(__file__).parents[2] / "docs/grafana/nanovllm.json"


@pytest.fixture
def fresh(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path) as server:
        yield server


def read(server: Running) -> dict[str, float]:
    """Sample name and, for several, the label that tells them apart -> value."""
    with server.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == server.model
            extra = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f" {value}" for value in extra.values())] = sample.value
    return found


NAMES = [f"vllm:{name}" for name in (
    "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total length", "request_success_total stop", "request_success_total abort",
    "request_queue_time_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count",
    "request_time_per_output_token_seconds_count", "request_inference_time_seconds_count",
    "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
)]  # fmt: skip


def test_all_names_are_there_from_the_start(fresh: Running) -> None:
    found = read(fresh)
    assert {name: found.get(name) for name in NAMES} == dict.fromkeys(NAMES, 0.0)


def test_guesses_are_counted_where_there_are_any(fresh: Running, llama: TinyModel) -> None:
    assert not any("spec_decode" in name for name in read(fresh))
    options = {"speculative_method": "ngram", "prompt_lookup_min": 1}
    with running(llama.path, options) as server:
        always(server, 4, 2, 0)
        body = {"prompt": [31, 32] * 9, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": [31, 32], "seed": 1}
        assert server.post("/v1/completions", body).status_code == 200
        found, stats = read(server), server.engine.stats
    assert found["vllm:spec_decode_num_draft_tokens_total"] == stats.num_drafted > stats.num_accepted
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == stats.num_accepted > 0
    drafts = found["vllm:spec_decode_num_drafts_total"]
    assert drafts == stats.num_drafts
    assert stats.num_drafted / 4 <= drafts <= stats.num_drafted
    assert found["vllm:generation_tokens_total"] == 40


def test_numbers_add_up(fresh: Running) -> None:
    prompt = list(range(10, 50))
    for _ in range(2):
        body = {"prompt": prompt, "max_tokens": 8, "n": 2, "ignore_eos": True}
        assert fresh.post("/v1/completions", body).status_code == 200
    assert fresh.post("/v1/completions", {"prompt": [300]}).status_code == 400
    found = read(fresh)
    assert found["vllm:prompt_tokens_total"] == 80
    assert found["vllm:generation_tokens_total"] == 32
    assert found["vllm:request_success_total length"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:request_generation_tokens_sum"] == 32
    assert found["vllm:time_to_first_token_seconds_sum"] <= found["vllm:e2e_request_latency_seconds_sum"]
    assert 1 <= found["vllm:inter_token_latency_seconds_count"] <= 28
    assert found["vllm:prefix_cache_queries_total"] == 160
    assert found["vllm:prefix_cache_hits_total"] == 32 * 3
    assert found["vllm:kv_cache_usage_perc"] == 0
    for stream in (False, True):
        body = {"input": "the rain", "max_output_tokens": 6, "ignore_eos": True, "stream": stream}
        assert fresh.post("/v1/responses", body).status_code == 200
    later = read(fresh)
    assert later["vllm:request_success_total length"] == 4
    assert later["vllm:generation_tokens_total"] == 32 + 12


def test_what_runs_and_who_left(fresh: Running) -> None:
    """The engine waits after three steps until its numbers have been read, however slow the reader is."""
    body = {"prompt": "the rain", "max_tokens": 150, "ignore_eos": True, "stream": True}
    step, allowed = fresh.engine.step, threading.Semaphore(3)
    fresh.engine.step = lambda: (allowed.acquire(), step())[1]
    try:
        with fresh.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            found = read(fresh)
    finally:
        fresh.engine.step = step
        allowed.release(100)
    assert found["vllm:num_requests_running"] == 1
    assert found["vllm:kv_cache_usage_perc"] > 0
    until(fresh.is_empty)
    until(lambda: read(fresh)["vllm:request_success_total abort"] == 1)


HALF_ON_DISK = {"expert_placement": "offload", "expert_cache_gb": 5 * EXPERT_GB, "expert_host_gb": 8 * EXPERT_GB}


@pytest.fixture(scope="module")
def offloading(tiny: Callable[[str], TinyModel]) -> Iterator[Running]:
    with running(tiny("mixtral").path, {**HALF_ON_DISK, "skip_tokenizer_init": True}) as server:
        yield server


def test_expert_hit_rates(offloading: Running) -> None:
    """16 experts, 8 of them on disk: what a layer wanted is found in one of three places, and every byte that came is
    counted where it came from."""
    tiers = ("device", "host", "disk")
    hits, misses = ([f"nanovllm:expert_{kind}_total {tier}" for tier in tiers] for kind in ("hits", "misses"))
    loads = [f"nanovllm:expert_loaded_bytes_total {tier}" for tier in tiers[1:]]
    before = read(offloading)
    assert [before[name] for name in (*hits, *misses, *loads)] == [0] * 8
    for seed in range(3):
        body = {"prompt": [10 + seed, 40, 70], "max_tokens": 8, "ignore_eos": True}
        assert offloading.post("/v1/completions", body).status_code == 200
    found, stats = read(offloading), offloading.engine.executor.expert_stats()
    assert min(found[name] for name in (*hits, *loads)) > 0
    assert found[hits[0]] == stats.hits
    assert found[misses[0]] == stats.misses == found[hits[1]] + found[hits[2]]
    assert found[misses[1]] == found[hits[2]]
    assert found[misses[2]] == 0
    assert sum(found[name] for name in loads) == stats.bytes_copied


def test_experts_that_stay_are_not_counted(fresh: Running) -> None:
    assert not [name for name in read(fresh) if "expert" in name]


def test_the_dashboard_asks_only_for_what_is_there(fresh: Running, offloading: Running) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set(re.findall(r"(?:nano)?vllm:\w+", DASHBOARD.read_text()))
    assert "nanovllm:expert_hits_total" in asked
    text = ""
    for server in (fresh, offloading):
        with server.http() as http:
            text += http.get("/metrics").text
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert asked <= there
    assert len(dashboard["panels"]) >= 8
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_load_of_experts(tiny: Callable[[str], TinyModel], fresh: Running) -> None:
    """By layer as the model numbers them, of which the second is dense; only where they are requested, and the page
    reads the same."""
    with running(
        tiny("qwen3-moe-dense-layers").path, {"skip_tokenizer_init": True, "enable_prefix_caching": False}, events=True
    ) as server:
        body = {"prompt": list(range(10, 22)), "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200

        def tokens() -> dict[tuple[str, str], float]:
            with server.http() as http:
                text = http.get("/metrics", params={"experts": 1}).text
            [family] = [f for f in text_string_to_metric_families(text) if f.name == "nanovllm:expert_tokens"]
            assert {s.labels["model_name"] for s in family.samples} == {server.model}
            return {(s.labels["layer"], s.labels["expert"]): s.value for s in family.samples}

        before = tokens()
        assert set(before) == {(layer, str(expert)) for layer in "02" for expert in range(6)}
        assert set(before.values()) == {0}, "counting begins with the first reading"
        assert server.post("/v1/completions", body).status_code == 200
        after = tokens()
        for layer in "02":
            assert sum(count for (of, _), count in after.items() if of == layer) == (12 + 3) * 2
        with server.http() as http:
            assert "expert_tokens" not in http.get("/metrics").text
            shown = http.get("/engine/experts").json()
        assert shown["layers"] == [0, 2]
        assert shown["tokens"] == [[after[layer, str(expert)] for expert in range(6)] for layer in "02"]
    with fresh.http() as http:
        assert "expert_tokens" not in http.get("/metrics", params={"experts": 1}).text, "a dense model has none"
        assert http.get("/metrics", params={"experts": "x"}).status_code == 400
        assert http.get("/engine/experts").status_code == 404


def test_a_long_step_keeps_no_reader_waiting(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOAD_SECONDS", 0.1)
    with running(tiny("mixtral").path, {"skip_tokenizer_init": True}, events=True) as server, server.http() as http:
        gate = threading.Event()
        server.service.engine._post(lambda: [gate.wait(30)][:0])  # the engine thread is busy
        try:
            assert http.get("/engine/experts").json() == {"layers": None, "tokens": None}
            answer = http.get("/metrics", params={"experts": 1})
            assert answer.status_code == 200
            assert "vllm:generation_tokens" in answer.text
            assert "expert_tokens" not in answer.text
        finally:
            gate.set()
        until(lambda: http.get("/engine/experts").json()["layers"] == [0, 1])

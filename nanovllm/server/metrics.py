"""Metrics for Prometheus, under the names that vLLM exports, so that its dashboards work here; what only we count is
called nanovllm:...

Each server has a registry of its own: two in one process do not count each other's requests. What the engine counts
anyway is read when /metrics is; only times and lengths of requests are recorded as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nanovllm.engine.async_engine import AsyncLLMEngine
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.outputs import RequestDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LABELS = ("model_name", "engine")


HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to the first token", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a sequence", BETWEEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first", BETWEEN),
    "e2e_request_latency_seconds": ("From arrival to the last token", LATENCY),
    "request_queue_time_seconds": ("Waiting to be scheduled", LATENCY),
    "request_inference_time_seconds": ("Scheduled to the last token", LATENCY),
    "request_prefill_time_seconds": ("Scheduled to the first token", LATENCY),
    "request_decode_time_seconds": ("First to last token", LATENCY),
    "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
    "request_generation_tokens": ("Tokens of an answer", TOKENS),
}


class Metrics:
    def __init__(self, engine: AsyncLLMEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        labels = self._labels = (model, "0")
        more: dict[str, Any] = {"registry": self.registry}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, **more).labels(*labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        text = "Prompt tokens computed or taken from the cache"
        self.prompt_tokens = Counter("vllm:prompt_tokens", text, LABELS, **more).labels(*labels)
        ended = Counter("vllm:request_success", "Requests that ended, by reason", (*LABELS, "finished_reason"), **more)
        # All are there from the start: a rate needs a zero
        self._ended = {reason: ended.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")}
        self.registry.register(EngineCollector(engine, labels))

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_end(self, reason: str) -> None:
        self._ended.get(reason, self._ended["error"]).inc()

    def text(self, load: ExpertCounts | None = None) -> bytes:
        more = generate_latest(LoadCollector(load, self._labels)) if load else b""
        return generate_latest(self.registry) + more


class EngineCollector:
    """What the engine counts, read whenever /metrics is."""

    def __init__(self, engine: AsyncLLMEngine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Any]:
        scheduler = self._engine.engine.scheduler
        blocks = scheduler.blocks
        lives = self._engine.failure is None  # what a dead engine's scheduler still holds does not run any more
        gauges = {
            "num_requests_running": ("Sequences that run", lives * len(scheduler.running)),
            "num_requests_waiting": ("Sequences that wait", lives * len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of KV blocks in use, 1 = all", lives * blocks.num_used / blocks.num_blocks),
        }
        counters = {
            "generation_tokens": ("Tokens generated", self._engine.engine.stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", blocks.num_queries),
            "prefix_cache_hits": ("Prompt tokens found there", blocks.num_hits),
            "num_preemptions": ("Sequences that gave up their blocks for others", scheduler.num_preemptions),
        }
        if scheduler.limits.num_drafts:
            stats = self._engine.engine.stats
            counters |= {
                "spec_decode_num_drafts": ("Steps of a sequence in which tokens were guessed", stats.num_drafts),
                "spec_decode_num_draft_tokens": ("Tokens that were guessed and verified", stats.num_drafted),
                "spec_decode_num_accepted_tokens": ("Guessed tokens that were right", stats.num_accepted),
            }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in values.items():
                metric = family(f"vllm:{name}", text, labels=LABELS)
                metric.add_metric(self._labels, value)
                yield metric
        if (experts := self._engine.engine.expert_stats) is not None:
            yield from self._experts(experts)

    def _experts(self, stats: ExpertStats) -> Iterator[Any]:
        """An expert that is not on the device is looked for in host memory, then on disk. vLLM does not count that."""
        host_misses, host_bytes = stats.disk_misses, stats.bytes_copied - stats.bytes_from_disk
        tiers = {"device": stats.hits, "host": stats.misses - host_misses, "disk": host_misses}
        missed = {"device": stats.misses, "host": host_misses, "disk": 0}
        counters = {
            "expert_hits": ("Experts that a layer chose, by the tier where they were found", tiers),
            "expert_misses": ("Experts that were looked for in a tier and not there", missed),
            "expert_loaded_bytes": (
                "Bytes of experts copied to the device, by the tier they came from",
                {"host": host_bytes, "disk": stats.bytes_from_disk},
            ),
        }
        for name, (text, values) in counters.items():
            metric = CounterMetricFamily(f"nanovllm:{name}", text, labels=(*LABELS, "tier"))
            for tier, value in values.items():
                metric.add_metric((*self._labels, tier), value)
            yield metric


ExpertCounts = dict[int, list[int]]  # index of a sparse layer -> tokens of each of its experts


class LoadCollector:
    """Only where they are requested (`/metrics?experts=1`): DeepSeek-V3 has 14,848 of these, and counting takes some
    microseconds a step (moe/load.py)."""

    def __init__(self, load: ExpertCounts, labels: tuple[str, str]) -> None:
        self._load, self._labels = load, labels

    def collect(self) -> Iterator[Any]:
        text = "Tokens that chose an expert, since counting began"
        metric = CounterMetricFamily("nanovllm:expert_tokens", text, labels=(*LABELS, "layer", "expert"))
        for layer, counts in self._load.items():
            for expert, count in enumerate(counts):
                metric.add_metric((*self._labels, str(layer), str(expert)), count)
        yield metric


class RequestClock:
    """Times of one request, from its deltas as they come."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._counts: list[int] = []  # tokens seen of each completion
        self._first = self._last = 0.0
        self._reason: str | None = None  # why the first completion ended

    def see(self, delta: RequestDelta) -> None:
        now = time.monotonic()
        metrics, is_first = self._metrics, not self._counts
        if is_first:
            self._counts = [0] * len(delta.outputs)
            self._first = self._last = delta.metrics.first_token_time or now
            metrics.observe("time_to_first_token_seconds", self._first - self._arrival)
            metrics.prompt_tokens.inc(len(delta.prompt_token_ids))
        for new in delta.outputs:
            count = len(new.token_ids)
            if count > is_first:  # the first token of all ends no gap
                metrics.observe("inter_token_latency_seconds", (now - self._last) / (count - is_first))
            self._counts[new.index] += count
            self._reason = new.finish_reason if new.index == 0 else self._reason
        self._last = now
        if delta.finished:
            self._finish(delta, now)

    def cut(self, reason: str) -> None:
        """It ended without its last delta."""
        self._metrics.count_end(reason)

    def _finish(self, delta: RequestDelta, now: float) -> None:
        metrics, times = self._metrics, delta.metrics
        metrics.observe("e2e_request_latency_seconds", now - self._arrival)
        metrics.observe("request_prompt_tokens", len(delta.prompt_token_ids))
        for count in self._counts:
            metrics.observe("request_generation_tokens", count)
        metrics.count_end(self._reason or "error")
        longest = max(self._counts)
        if longest > 1:
            metrics.observe("request_time_per_output_token_seconds", (now - self._first) / (longest - 1))
        if times.first_scheduled_time is None or times.first_token_time is None or times.finished_time is None:
            return
        metrics.observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        metrics.observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        metrics.observe("request_decode_time_seconds", times.finished_time - times.first_token_time)
        metrics.observe("request_inference_time_seconds", times.finished_time - times.first_scheduled_time)

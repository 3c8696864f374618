"""Measure a server over HTTP, as its clients see it; any server that speaks OpenAI's /v1/completions.

Open loop: requests leave at times drawn beforehand, whatever the server does, as strangers' requests do. (A closed
loop, where each client waits for its answer before its next request, slows down with the server and hides how long
people would have waited.) Times count from when a request should have left, and `send_delay` is how late it really did:
if that is not small, this client was the bottleneck. A closed loop is there too (`clients`, closed_loop.py), for what a
server can do at most.

    TTFT  to the first event with text        TPOT  mean time per token after the first
    ITL   between two events of a stream      E2E   to the last
    goodput: requests a second that met every limit given
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.bench.report import percentile, print_milliseconds, summary
from nanovllm.bench.workload import LARGEST_TOKEN, Lengths
from nanovllm.errors import ConfigError

TIMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Load:
    """The server, and what to send to it, before random numbers are drawn."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    num_requests: int = 64
    rate: float = 4.0
    arrivals: str = "poisson"
    clients: int | None = None
    input_len: str = "64..256"
    output_len: str = "64"
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab_size: int = LARGEST_TOKEN + 1
    text: str | None = None
    ignore_eos: bool = True
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_itl_ms: float | None = None
    slo_e2e_ms: float | None = None
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "rate", "num_prefixes", "vocab_size", "timeout"):
            if not 0 < getattr(self, name) < 1e12:  # NaN fails too
                raise ConfigError(f"{name}={getattr(self, name)}: must be a positive number")
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"clients={self.clients}: must be 1 or more")
        if self.prefix_len < 0:
            raise ConfigError(f"prefix_len={self.prefix_len}: must be 0 or more")
        if self.arrivals not in ("poisson", "fixed"):
            raise ConfigError(f"arrivals={self.arrivals!r}: must be poisson or fixed")
        for text in (self.input_len, self.output_len):
            Lengths.parse(text)

    @property
    def slo(self) -> dict[str, float]:
        """Limits in seconds by name of TIMES."""
        limits = {name: getattr(self, f"slo_{name}_ms") for name in TIMES}
        return {name: limit / 1000 for name, limit in limits.items() if limit is not None}

    def send_times(self, rng: random.Random) -> list[float]:
        now, times = 0.0, []
        for _ in range(self.num_requests):
            times.append(now)
            now += rng.expovariate(self.rate) if self.arrivals == "poisson" else 1 / self.rate
        return times

    def prompts(self, rng: random.Random) -> list[Any]:
        """Token ids, or with `text` so many words of that file. Each begins with one of num_prefixes shared ones."""
        draw = self._words(rng) if self.text is not None else self._token_ids(rng)
        input_len = Lengths.parse(self.input_len)
        prefixes = [draw(self.prefix_len) for _ in range(self.num_prefixes)]
        found = []
        for _ in range(self.num_requests):
            words = rng.choice(prefixes) + draw(input_len.draw(rng))
            found.append(" ".join(words) if self.text is not None else words)
        return found

    def _token_ids(self, rng: random.Random) -> Any:
        return lambda count: [rng.randrange(self.vocab_size) for _ in range(count)]

    def _words(self, rng: random.Random) -> Any:
        assert self.text is not None
        try:
            words = Path(self.text).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {self.text}: cannot be read: {error}") from None
        if not words:
            raise ConfigError(f"--text {self.text}: holds no words")

        def draw(count: int) -> list[str]:
            start = rng.randrange(len(words))
            return [words[(start + i) % len(words)] for i in range(count)]

        return draw


@dataclass
class Seen:
    """One request as the client saw it, in seconds from when it should have left."""

    send_delay: float = 0.0
    events: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    end: float = 0.0
    error: str | None = None

    @property
    def times(self) -> dict[str, list[float]]:
        """Each in a list: one value, none, or the gaps."""
        gaps = [after - before for before, after in zip(self.events, self.events[1:])]
        per_token = (self.events[-1] - self.events[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None
        return {
            "ttft": [self.events[0]],
            "tpot": [] if per_token is None else [per_token],
            "itl": gaps,
            "e2e": [self.end],
        }


@dataclass(frozen=True)
class ServerUnderTest:
    url: str
    headers: dict[str, str]
    body: dict[str, Any]  # of every request

    @classmethod
    def of(cls, load: Load) -> ServerUnderTest:
        """With the model that it lists first, if the load names none. A key is read from OPENAI_API_KEY."""
        url, key = load.url.rstrip("/").removesuffix("/v1"), os.environ.get("OPENAI_API_KEY")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if load.ignore_eos else {}
        return cls(url, headers, {"model": load.model or find_model(url, headers), **body})


def requests_of(load: Load) -> list[dict[str, Any]]:
    """What of the body is a request's own."""
    rng, output_len = random.Random(load.seed), Lengths.parse(load.output_len)
    prompts = load.prompts(rng)
    return [
        {"prompt": prompt, "max_tokens": output_len.draw(rng), "seed": load.seed + number}
        for number, prompt in enumerate(prompts)
    ]


async def send_request(client: Any, server: ServerUnderTest, own: dict[str, Any]) -> tuple[list[float], Any]:
    """(when each event with text came, usage). Raises on anything but a whole stream."""
    body = {**server.body, **own}
    came, usage, done = [], None, False
    async with client.stream("POST", f"{server.url}/v1/completions", json=body, headers=server.headers) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise ConnectionError(f"HTTP {answer.status_code}: {text[:200]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise ConnectionError(f"error in the stream: {str(event['error'])[:200]}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                came.append(time.perf_counter())
    if not done or not came:
        raise ConnectionError("the stream broke off")
    return came, usage


async def _send_at(client: Any, server: ServerUnderTest, at: float, own: dict[str, Any]) -> Seen:
    import asyncio

    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    seen = Seen(send_delay=time.perf_counter() - at)
    try:
        came, usage = await send_request(client, server, own)
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"[:200]
        return seen
    seen.end = time.perf_counter() - at
    seen.events = [moment - at for moment in came]
    seen.num_tokens = int((usage or {}).get("completion_tokens") or len(came))
    seen.num_prompt_tokens = int((usage or {}).get("prompt_tokens") or 0)
    return seen


async def _try(server: ServerUnderTest, load: Load) -> None:
    """Warms up, and fails at once if anything is wrong."""
    import httpx

    async with httpx.AsyncClient(timeout=load.timeout) as client:
        await send_request(client, server, {**requests_of(load)[0], "max_tokens": 2})


async def _run(server: ServerUnderTest, load: Load) -> tuple[list[Seen], float]:
    import httpx
    from tqdm.asyncio import tqdm

    requests = requests_of(load)
    times = load.send_times(random.Random(load.seed + 1))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=load.timeout) as client:
        start = time.perf_counter() + 0.05
        work = [_send_at(client, server, start + at, own) for at, own in zip(times, requests)]
        seen = await tqdm.gather(*work, desc="answered", unit="request", disable=None, leave=False)
        return list(seen), time.perf_counter() - start


def find_model(url: str, headers: dict[str, str]) -> str:
    import httpx

    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(f"--url {url}: no list of models there ({error}); is a server running?") from None


def measure(server: ServerUnderTest, load: Load) -> tuple[dict[str, Any], list[Seen]]:
    """Of `load.slo` a request's own mean must stay within (ITL: its 99th percentile)."""
    import asyncio

    slo = load.slo
    try:
        asyncio.run(_try(server, load))
        if load.clients is None:
            seen, seconds = asyncio.run(_run(server, load))
        else:
            from nanovllm.bench.closed_loop import run_clients

            seen, seconds = run_clients(server, load)
    except ConnectionError as error:
        raise ConfigError(f"--url {server.url}: the first request failed: {error}") from None
    good = [one for one in seen if one.error is None]
    met = [one for one in good if all(_worst(one, name) <= limit for name, limit in slo.items())]
    tokens = sum(one.num_tokens for one in good)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(seen) - len(good),
        "errors": dict(Counter(one.error for one in seen if one.error is not None).most_common(5)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "prompt_tokens_per_second": sum(one.num_prompt_tokens for one in good) / seconds,
        "send_delay": summary([one.send_delay for one in seen]) if load.clients is None else None,
    }
    for name in TIMES:
        values = [value for one in good for value in one.times[name]]
        found[name] = summary(values) if values else None
    if slo:
        found["goodput"] = {"limits": slo, "requests_per_second": len(met) / seconds, "share": len(met) / len(seen)}
    return found, good


def _worst(one: Seen, name: str) -> float:
    values = one.times[name]
    if not values:
        return 0.0
    return percentile(values, 99) if name == "itl" else values[0]


def distributions(good: list[Seen]) -> dict[str, list[tuple[float, float]]]:
    """For a plot: name -> (milliseconds, share of values at or below)."""
    curves = {}
    for name in TIMES:
        values = sorted(value * 1000 for one in good for value in one.times[name])
        if values:
            step = max(1, len(values) // 500)
            curves[name.upper()] = [(values[i], (i + 1) / len(values)) for i in range(0, len(values), step)]
    return curves


def print_measured(found: dict[str, Any]) -> None:
    shown = {name.upper(): found[name] for name in TIMES if found[name]}
    if found["send_delay"] is not None:
        shown["late to leave"] = found["send_delay"]
    print_milliseconds("milliseconds", shown)
    print(
        f"{found['completed']} answered, {found['failed']} failed in {found['seconds']:.1f} s: "
        f"{found['requests_per_second']:.2f} requests/s, "
        f"{found['output_tokens_per_second']:.1f} output tokens/s"
    )
    for error, count in found["errors"].items():
        print(f"  {count} x {error}")
    if "goodput" in found:
        goodput = found["goodput"]
        print(f"goodput: {goodput['requests_per_second']:.2f} requests/s, {goodput['share']:.0%} of all sent")

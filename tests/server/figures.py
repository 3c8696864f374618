"""What HTTP costs: throughput of streaming clients against the same engine offline, and /health under that load.

    python -m tests.server.figures     # 16 clients; a table, and benchmarks/results/2026-11-15-cpu-serve.json

One run, interleaved: a round offline (LLM.generate in this process), a round over HTTP (`nanovllm serve` in another),
and so on, so that other load of the machine hits both. Both engines have the same options, both get the same prompts,
new ones in each round so that nothing is found in the prefix cache. While one computes the other is idle; over HTTP the
clients share the machine with the server. The share is the median over rounds of (tokens a second over HTTP) divided by
(tokens a second offline).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.bench import report
from tests.server.rig import command, raw_stream

RESULT = Path("benchmarks/results/2026-11-15-cpu-serve.json")
HEALTH_SECONDS = 0.2  # between two questions: 50 a second are a load of their own (a quarter of the throughput)


class Client:
    def __init__(self, url: str) -> None:
        self._url = url

    async def stream(self, prompt: list[int], num_tokens: int) -> int:
        """Read a stream to its end; tokens, as the server counts them."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        events = await raw_stream(self._url, {**body, "stream_options": {"include_usage": True}})
        assert events is not None
        return int(events[-1]["usage"]["completion_tokens"])

    async def first_byte(self) -> float:
        """Seconds from the request to the first byte of /health, on a connection of its own."""
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(*self._url.removeprefix("http://").split(":"))
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            begin = await reader.read(1)
            seconds = time.perf_counter() - started
            assert begin + await reader.read(11) == b"HTTP/1.1 200"
            return seconds
        finally:
            writer.close()

    async def round(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float]]:
        """(tokens a second of as many clients as prompts, times of /health meanwhile)"""
        times: list[float] = []

        async def watch() -> None:
            while True:
                times.append(await self.first_byte())
                await asyncio.sleep(HEALTH_SECONDS)

        watcher = asyncio.create_task(watch())
        started = time.perf_counter()
        counts = await asyncio.gather(*(self.stream(prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        assert counts == [num_tokens] * len(prompts)
        return sum(counts) / seconds, times


def offline_round(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert len(outputs) == len(prompts)
    return len(prompts) * num_tokens / seconds


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(asked.seed)
    rounds, health = [], []
    options = {"max_num_seqs": asked.clients, "max_model_len": asked.max_model_len}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with LLM(asked.model, device="cpu", **options) as llm, command(asked.model, *words) as (_, url):
        client = Client(url)
        vocab = llm.engine.model_config.vocab_size
        for number in range(asked.rounds + 1):
            prompts = [[rng.randrange(3, vocab) for _ in range(asked.input_len)] for _ in range(asked.clients)]
            offline = offline_round(llm, prompts, asked.output_len)
            http, times = asyncio.run(client.round(prompts, asked.output_len))
            if number:  # the first warms up
                rounds.append({"offline": offline, "http": http, "share": http / offline})
                health += times
    return {
        "clients": asked.clients,
        "input_len": asked.input_len,
        "output_len": asked.output_len,
        "rounds": rounds,
        "offline_tokens_per_second": statistics.median(one["offline"] for one in rounds),
        "http_tokens_per_second": statistics.median(one["http"] for one in rounds),
        "share": statistics.median(one["share"] for one in rounds),
        "health_first_byte_seconds": {**report.summary(health), "count": len(health)},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    for name, default in (
        ("clients", 16),
        ("input-len", 32),
        ("output-len", 64),
        ("rounds", 5),
        ("seed", 0),
        ("max-model-len", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    found = measure(asked)
    rows = [[i + 1, one["offline"], one["http"], f"{one['share']:.1%}"] for i, one in enumerate(found["rounds"])]
    report.print_table(f"{asked.clients} clients, tokens a second", ["round", "offline", "HTTP", "share"], rows)
    times = found["health_first_byte_seconds"]
    print(
        f"HTTP keeps {found['share']:.1%} of the offline throughput; first byte of /health under this load: "
        f"p50 {times['p50'] * 1000:.1f} ms, p99 {times['p99'] * 1000:.1f} ms of {times['count']}"
    )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    written = report.make_report("serve-figures", None, model=asked.model, results=found)
    asked.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

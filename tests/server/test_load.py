"""Many streaming clients at once, of which a third leave at random moments: nothing is lost, nothing leaks.

NANOVLLM_CLIENTS=50 runs it with fewer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
from typing import Any

from tests.server.rig import Running, running, until
from tests.tiny_models import TinyModel

CLIENTS = int(os.environ.get("NANOVLLM_CLIENTS", "500"))
TOKENS = 24


async def stream(server: Running, number: int, leave_after: int | None) -> list[str] | None:
    """The texts of the events; None for one that left. Raw sockets: 500 HTTP clients would be the slower side."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    prompt = [3 + (number * 7 + i) % 290 for i in range(1 + number % 40)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    try:
        writer.write(head.encode() + b"\r\n\r\n" + data)
        texts: list[str] = []
        if leave_after == 0:
            await writer.drain()
            return None
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(1000)
        while True:
            line = (await reader.readline()).strip()
            assert not reader.at_eof(), "the stream broke off"
            if line == b"data: [DONE]":
                return texts
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            texts += [choice["text"] for choice in event["choices"]]
            if event["usage"]:
                assert event["usage"]["completion_tokens"] == TOKENS
            if leave_after is not None and len(texts) >= leave_after:
                return None
    finally:
        writer.close()


async def crowd(server: Running, seed: int) -> dict[int, str]:
    rng = random.Random(seed)
    leaving = [rng.choice([None, None, rng.randrange(0, TOKENS)]) for _ in range(CLIENTS)]
    work = (stream(server, number, leave) for number, leave in enumerate(leaving))
    found = await asyncio.wait_for(asyncio.gather(*work), 300)
    assert all((texts is not None) == (leave is None) or leave for texts, leave in zip(found, leaving))
    return {number: "".join(texts) for number, texts in enumerate(found) if texts is not None}


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def test_a_crowd_with_random_leavers(llama: TinyModel) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_kvcache_blocks": 96}
    with running(llama.path, options, max_waiting=CLIENTS) as server:
        first = asyncio.run(crowd(server, 0))
        until(server.is_empty)
        gc.collect()
        before = resident_kb()
        for seed in (1,):
            again = asyncio.run(crowd(server, seed))
            assert len(again) >= CLIENTS // 3
            for number in first.keys() & again.keys():
                assert first[number] == again[number], "the text depends on who else is there"
            until(server.is_empty)
        gc.collect()
        assert resident_kb() - before < 48 * 1024
        assert server.engine.scheduler.blocks.num_free == 96
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200

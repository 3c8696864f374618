"""Many streaming clients at once, of which a third leave at random moments: nothing is lost, nothing leaks.

NANOVLLM_CLIENTS=500 runs it with more.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from typing import Any

from nanovllm.hardware.host import resident_bytes
from tests.server.rig import Running, raw_stream, running, until
from tests.tiny_models import TinyModel

CLIENTS = int(os.environ.get("NANOVLLM_CLIENTS", "80"))
TOKENS = 24


async def crowd(server: Running, seed: int) -> dict[int, str]:
    rng = random.Random(seed)
    leaving = [rng.choice([None, None, rng.randrange(0, TOKENS)]) for _ in range(CLIENTS)]

    async def stream(number: int, leave_after: int | None) -> list[Any] | None:
        prompt = [3 + (number * 7 + i) % 290 for i in range(1 + number % 40)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        return await raw_stream(server.url, {**body, "stream_options": {"include_usage": True}}, leave_after)

    found = await asyncio.wait_for(asyncio.gather(*(stream(*one) for one in enumerate(leaving))), 300)
    assert all((events is not None) == (leave is None) or leave for events, leave in zip(found, leaving))
    wholes = {number: events for number, events in enumerate(found) if events is not None}
    assert {events[-1]["usage"]["completion_tokens"] for events in wholes.values()} == {TOKENS}
    return {
        number: "".join(choice["text"] for event in events for choice in event["choices"])
        for number, events in wholes.items()
    }


def resident_kb() -> int:
    return resident_bytes() // 1024


def test_a_crowd_with_random_leavers(llama: TinyModel) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_kvcache_blocks": 96}
    with running(llama.path, options, max_waiting=CLIENTS) as server:
        first = asyncio.run(crowd(server, 0))
        until(server.is_empty)
        gc.collect()
        before = resident_kb()
        again = asyncio.run(crowd(server, 1))
        assert len(again) >= CLIENTS // 3
        for number in first.keys() & again.keys():
            assert first[number] == again[number], "the text depends on the other requests"
        until(server.is_empty)
        gc.collect()
        assert resident_kb() - before < 48 * 1024
        assert server.engine.scheduler.blocks.num_free == 96
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200

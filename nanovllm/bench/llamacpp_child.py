"""llama.cpp in a process of its own, for `bench throughput --compare llamacpp` (the package xllamacpp).

    python -m nanovllm.bench.llamacpp_child MODEL.gguf THREADS SLOTS TOKENS_A_SLOT

First line out: facts. Then for each line in, {"prompts": [[ids]], "num_tokens": n}, one line out: {"seconds",
"num_tokens", "first_token_ms", "resident_mb"}. llama.cpp's own log goes to stderr. A process of its own: its memory is
counted apart, and its threads and OpenMP's do not meet.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanovllm.hardware.host import resident_bytes


def start(model: str, threads: int, slots: int, tokens_a_slot: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = slots * tokens_a_slot, slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def complete(server: Any, prompt: list[int], num_tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    return server.handle_completions({**body, "stream": False})


def answer(server: Any, pool: ThreadPoolExecutor, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """All at once: one thread waits for each."""
    started = time.perf_counter()
    found = list(pool.map(lambda prompt: complete(server, prompt, num_tokens), prompts))
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "num_tokens": sum(one["usage"]["completion_tokens"] for one in found),
        "first_token_ms": max(one["timings"]["prompt_ms"] for one in found),
        "resident_mb": resident_bytes() / 1e6,
    }


def main() -> None:
    import xllamacpp

    model, threads, slots, tokens_a_slot = sys.argv[1], *map(int, sys.argv[2:5])
    server = start(model, threads, slots, tokens_a_slot)
    facts = {"version": xllamacpp.__version__, "system_info": xllamacpp.get_system_info()}
    print(json.dumps(facts), flush=True)
    with ThreadPoolExecutor(slots) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(answer(server, pool, asked["prompts"], asked["num_tokens"])), flush=True)


if __name__ == "__main__":
    main()

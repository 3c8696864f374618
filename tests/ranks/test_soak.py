"""Engines made and closed again and again leave nothing behind: no file, thread, process or memory.

NANOVLLM_SOAK_CYCLES=200 python -m pytest -s tests/ranks/test_soak.py        # the long way, some minutes
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.hardware.host import resident_bytes
from tests.ranks.processes import children, num_threads, open_files
from tests.tiny_models import TinyModel

CYCLES = int(os.environ.get("NANOVLLM_SOAK_CYCLES", "5"))
WARM = 2  # libraries open files and start threads of their own, once
MIB = 2**20
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def held() -> dict[str, int]:
    gc.collect()
    return {
        "files": len(open_files()),
        "threads": num_threads(),
        "processes": len(children()),
        "shared_memory": len(os.listdir("/dev/shm")),
        "mib": resident_bytes() // MIB,
    }


@pytest.mark.parametrize("size", [1, 2])
def test_engines_leave_nothing_behind(tiny: Callable[[str], TinyModel], size: int) -> None:
    path, expected, before = str(tiny("qwen3-bias-tied").path), None, {}
    for cycle in range(WARM + CYCLES):
        if cycle == WARM:
            before = held()
        with LLM(path, device="cpu", max_num_seqs=4, num_kvcache_blocks=64, tensor_parallel_size=size) as llm:
            outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], PARAMS, use_tqdm=False)
        found = outputs[0].outputs[0].token_ids
        expected = expected or found
        assert found == expected
        if cycle >= WARM and (cycle + 1 - WARM) % 20 == 0:
            print(f"{size} ranks, {cycle + 1 - WARM} cycles: {held()}, before: {before}", flush=True)
    after = held()
    print(f"{size} ranks, {CYCLES} cycles: {after}, before: {before}", flush=True)
    # Libraries that other tests loaded into this process (Ray) and other programs of this machine open and close things
    # of their own; an engine that leaked would leave at least one each cycle. The allocator's arenas settle within some
    # tens of MiB.
    for name in ("files", "threads", "processes", "shared_memory"):
        assert after[name] < before[name] + CYCLES, (name, before, after)
    assert after["mib"] < before["mib"] + 32 + CYCLES // 10, (before, after)

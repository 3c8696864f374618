"""Interrupts and kills in the middle of a copy, a kernel or a decision: the same engine answers the next call right,
and a killed process leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.moe.offload import cache as cache_module
from nanovllm.moe.offload import store as store_module
from nanovllm.moe.offload.cache import ExpertCache
from nanovllm.moe.offload.offload import OffloadOptions
from nanovllm.runner import expert_memory
from tests.engine.test_expert_errors import EXPERT_BYTES, GREEDY, PROMPTS, ROOT, TRAINED, gb, make, tokens
from tests.moe.offload_rig import FixedIdle
from tests.moe.test_cache import check_consistent


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with make() as llm:
        return tokens(llm)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.logger, "level", logging.CRITICAL)


class Interrupt:
    """Raises at the n-th call of what it wraps, before or after the work was done."""

    def __init__(self, work: Callable[..., Any], at: int, after: bool) -> None:
        self.work, self.at, self.after, self.count = work, at, after, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.count == self.at and not self.after:
            raise KeyboardInterrupt
        result = self.work(*args)
        if self.count == self.at:
            raise KeyboardInterrupt
        return result


@pytest.fixture(scope="module")
def served() -> Iterator[LLM]:
    """One engine that is interrupted again and again: half of the experts not in host memory, guesses of a third of an
    expert."""
    options = partial(OffloadOptions, piece_bytes=EXPERT_BYTES // 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_memory, "OffloadOptions", options)
        llm = make(expert_cache_gb=gb(10), expert_host_gb=gb(16), enable_prefix_caching=False)
    llm.engine.executor.offload.idle = FixedIdle(2)
    with llm:
        yield llm


@pytest.mark.parametrize("where", ["send", "expert_pairs"])
def test_interrupted_around_a_copy_or_a_kernel(
    served: LLM, where: str, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at random moments: the same engine answers the next call right."""
    draw = random.Random(f"interrupt {where}")
    offload = served.engine.executor.offload
    raised = 0
    for _ in range(8):
        at, after = draw.randrange(1, 60), draw.random() < 0.5
        with monkeypatch.context() as patch:
            if where == "send":
                patch.setattr(offload.store, "send", Interrupt(offload.store.send, at, after))
            else:
                stop = Interrupt(offload._ops.expert_pairs, at, after)
                patch.setattr(offload, "_ops", replace(offload._ops, expert_pairs=stop))
            try:
                served.generate(PROMPTS, GREEDY, use_tqdm=False)
            except KeyboardInterrupt:
                raised += 1
        assert not served.engine.has_unfinished_requests()
        assert tokens(served) == wanted
    assert raised >= 5


def test_interrupted_at_any_line(served: LLM, wanted: list[list[int]]) -> None:
    """A signal does not choose its moment: any line of the code that decides, copies and counts."""
    draw = random.Random("any line")
    code = (str(ROOT / "nanovllm/moe"), str(ROOT / "nanovllm/hardware/copies.py"))
    num_lines = 0

    def run(stop_at: int) -> bool:
        nonlocal num_lines
        num_lines = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal num_lines
            if not frame.f_code.co_filename.startswith(code):
                return None
            if event == "line":
                num_lines += 1
                if num_lines == stop_at:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            served.generate(PROMPTS, GREEDY, use_tqdm=False)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    assert not run(-1)
    total = num_lines
    assert total > 5000
    for _ in range(15):
        raised = run(draw.randrange(1, total))
        assert not served.engine.has_unfinished_requests()
        assert tokens(served) == wanted, raised
        check_consistent(served.engine.executor.offload.cache)


def drive(cache: ExpertCache, calls: list[tuple[int, list[int]]]) -> None:
    for layer, experts in calls:
        for wave in cache.select(layer, dict.fromkeys(experts, 1)).waves:
            for expert, buffer in wave:
                if cache.content(buffer) != (layer, expert) and (moved := cache.rescue(buffer)):
                    cache.held[moved[0]].discard(moved[2])
                    cache.held[moved[0]].add(moved[1])
                cache.begin(layer, expert, buffer)
                cache.copied(buffer, 1)
        cache.adopt(layer)
        for expert, buffer, upto in cache.guess(1 - layer, [0, 1], 1):
            cache.begin(1 - layer, expert, buffer)
            cache.copied(buffer, upto, guess=True)


def test_decisions_interrupted_at_every_line() -> None:
    """The bookkeeping alone, and there every line once."""
    calls = [(0, [0, 1, 2]), (1, [0, 1]), (0, [1, 2]), (0, [3, 4]), (1, [2, 3]), (0, [0, 3]), (1, [0, 4])]
    num_lines = stop_at = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != cache_module.__file__:
            return None
        num_lines += event == "line"
        if event == "line" and num_lines == stop_at:
            raise KeyboardInterrupt
        return trace

    while num_lines >= stop_at:
        num_lines, stop_at = 0, stop_at + 1
        cache = ExpertCache(2, 5, 2, 3, 3)
        cache.held, cache.num_blocks = [{0, 1, 2}, {0, 1, 2}], [3, 3]
        sys.settrace(trace)
        try:
            drive(cache, calls)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        drive(cache, calls[::-1])
        check_consistent(cache)
        assert [len(held) for held in cache.held] == [3, 3]
    assert stop_at > 1000


SERVE_AND_DIE = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from nanovllm import LLM, SamplingParams

folder, cache_gb, host_gb, prompts = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

def serve(rounds):
    llm = LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, num_kvcache_blocks=32,
              max_num_batched_tokens=64, expert_cache_gb=cache_gb, expert_host_gb=host_gb)
    for _ in range(rounds):
        found = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
    return found

def writable_files(pid):
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = os.readlink(f"/proc/{pid}/fd/{fd}")
        flags = int(open(f"/proc/{pid}/fdinfo/{fd}").read().split("flags:")[1].split()[0], 8)
        if path.startswith("/") and not path.startswith(("/dev/null", "/dev/pts")) and flags & 3:
            found.append(path)
    maps = open(f"/proc/{pid}/maps").read().splitlines()
    return found + [line for line in maps if "/dev/shm" in line and not line.endswith("(deleted)")]  # a lock of tqdm's

serve(1)  # everything is imported and compiled: the children are killed at work
draw, held, models = random.Random(5), [], 0
for _ in range(5):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        serve(10**6)
    time.sleep(draw.uniform(0.0, 0.3))
    held += writable_files(child)
    models += any("safetensors" in os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd"))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
print(json.dumps({"held": held, "models": models, "tokens": serve(1), "pid": os.getpid()}))
"""


@pytest.mark.parametrize(("num_buffers", "in_host"), [(2, 0), (9, 27)])
def test_killed_in_the_middle_of_a_copy(
    num_buffers: int, in_host: int, tmp_path: Path, wanted: list[list[int]]
) -> None:
    """Five times, loading or serving from disk, or while experts change places between buffers and host memory: the
    process holds no file that it could leave behind, and the next one runs."""
    home = tmp_path / "home"
    home.mkdir()
    before = set(os.listdir("/dev/shm"))
    env = {**os.environ, "TMPDIR": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    room = [str(gb(num_buffers)), str(gb(in_host))]
    words = [sys.executable, "-c", SERVE_AND_DIE, str(TRAINED), *room, json.dumps(PROMPTS)]
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["held"] == []
    assert found["models"] > 0, "at least one was killed with the model's files open"
    assert found["tokens"] == wanted
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if str(found["pid"]) in name]

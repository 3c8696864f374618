"""Ranks in processes of their own: the tokens of one rank, and what happens when one of them dies, hangs or raises."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.errors import EngineDeadError
from nanovllm.executor import multiprocess
from tests.tiny_models import TinyModel, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, top_p=0.9)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((3, 17, 33, 40))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture
def two_ranks(make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]) -> LLM:
    return make_llm(tiny("qwen3-bias-tied").path, tensor_parallel_size=2, worker_timeout=5.0)


@pytest.mark.parametrize(("name", "size"), [("llama-mqa-bias", 4), ("mixtral", 2)])
def test_tokens_of_several_ranks_are_those_of_one(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], name: str, size: int
) -> None:
    path, before = tiny(name).path, children()
    alone = make_llm(path)
    expected = tokens(alone, GREEDY), tokens(alone, SEEDED)
    several = make_llm(path, tensor_parallel_size=size)
    assert (tokens(several, GREEDY), tokens(several, SEEDED)) == expected
    assert len(children() - before) == size - 1
    several.close()
    assert children() <= before


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_lost_rank_is_named_and_nothing_is_left_behind(
    two_ranks: LLM, make_llm: Callable[..., LLM], sign: signal.Signals
) -> None:
    """Lesson 25: a dead worker left rank 0 waiting for ever."""
    engine = two_ranks.engine
    expected = tokens(two_ranks, GREEDY)
    worker = engine.executor._workers[0].process  # type: ignore[attr-defined]
    os.kill(worker.pid, sign)
    started = time.monotonic()
    for number in range(3):
        engine.add_request(str(number), {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    done = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    assert time.monotonic() - started < 20
    assert len(done) == 3
    for output in done:
        assert output.outputs[0].finish_reason == "error"
        assert "rank" in (output.error or "")
    if sign == signal.SIGKILL:
        assert "rank 1" in (done[0].error or "")
        assert "signal 9" in (done[0].error or "")
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    two_ranks.close()
    again = make_llm(engine.config.model, tensor_parallel_size=2)
    assert tokens(again, GREEDY) == expected


def test_a_rank_that_cannot_start_says_why(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    start = multiprocess.start_worker

    def start_and_kill(rank: int) -> multiprocess.Worker:
        worker = start(rank)
        worker.process.kill()
        return worker

    monkeypatch.setattr(multiprocess, "start_worker", start_and_kill)
    monkeypatch.setattr(multiprocess, "STARTUP_SECONDS", 5.0)
    with pytest.raises((EngineDeadError, BrokenPipeError), match=r"rank 1|Broken pipe"):
        make_llm(tiny("qwen2").path, tensor_parallel_size=2, worker_timeout=5.0)
    assert children() <= before


def test_sizes_that_do_not_divide_are_refused_with_those_that_would(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]
) -> None:
    with pytest.raises((ConfigError, EngineDeadError), match=r"tensor_parallel_size=3: .* possible: \[1, 2, 4"):
        make_llm(tiny("qwen2").path, tensor_parallel_size=3)

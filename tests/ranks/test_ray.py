"""Ranks as actors of a Ray cluster, its own or one that is there: the tokens of one rank; a lost rank is named; what
was reserved is given back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, ConfigError, EngineDeadError
from nanovllm.ranks import ray_cluster
from tests.ranks.processes import all_on_loopback, children, descendants, is_alive, soon
from tests.ranks.test_faults import (
    NOTICED,
    PATIENT,
    add_requests,
    expect_notice,
    killed_or_hung,
    open_two,
    run_to_death,
)
from tests.ranks.test_multiprocess import GREEDY, SEEDED, tokens
from tests.tiny_models import TinyModel

NUM_CPUS = 2
LIMITS = {signal.SIGKILL: PATIENT, signal.SIGSTOP: 5.0}  # a rank that is well may be slow on a busy machine
MakeRay = Callable[..., LLM]


@pytest.fixture
def make_ray(make_llm: Callable[..., LLM], qwen: Path) -> MakeRay:
    return lambda **options: make_llm(qwen, distributed_executor_backend="ray", **options)


def test_without_ray_the_error_has_what_to_install(make_ray: MakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'nano-vllm\[ray\]'"):
        make_ray()


def test_a_cluster_of_its_own_is_started_and_stopped(
    make_ray: MakeRay, make_llm: Callable[..., LLM], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = children()
    llm = make_ray()
    assert ray.is_initialized()
    assert all_on_loopback(descendants())  # nothing may be reachable from other machines
    assert tokens(llm, GREEDY) == tokens(make_llm(qwen), GREEDY)
    llm.close()
    assert not ray.is_initialized()
    assert soon(lambda: children() <= before), children() - before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        object_store_memory=80 * 2**20,
    )
    yield ray
    ray.shutdown()


def all_is_free(ray: Any) -> bool:
    return ray.available_resources().get("CPU", 0) == NUM_CPUS


def check_idle_ranks(executor: Any) -> None:
    """Those that are well answer."""
    for _ in range(3):
        executor.check()
        assert soon(lambda: executor._is_done(0) and executor._is_done(1))
        assert executor._reports() == []
    executor._called -= executor._timeout + 1  # all have answered since, so this is no silence
    executor.check()


def test_two_ranks_have_the_tokens_of_one_and_give_all_back(
    cluster: Any, make_ray: MakeRay, make_llm: Callable[..., LLM], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_llm(qwen)
    llm = make_ray(tensor_parallel_size=2)
    assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
    assert tokens(llm, SEEDED) == tokens(alone, SEEDED)
    assert len(llm.engine.describe()["runs_on"]["hosts"]) == 1
    actors = [process for _, _, process in llm.engine.executor._places]  # type: ignore[attr-defined]
    assert len(actors) == 2
    assert os.getpid() not in actors, "the caller's process computes nothing"
    check_idle_ranks(llm.engine.executor)
    monkeypatch.setattr(ray_cluster, "RESERVE_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"had no room for 2 times {'CPU': 1}"):
        make_ray(tensor_parallel_size=2)
    llm.close()
    assert cluster.is_initialized(), "a cluster that was there stays"
    assert soon(lambda: all_is_free(cluster)), cluster.available_resources()
    assert soon(lambda: not any(map(is_alive, actors)))


@killed_or_hung
def test_a_lost_rank_is_named(cluster: Any, make_ray: MakeRay, sign: signal.Signals) -> None:
    llm = make_ray(tensor_parallel_size=2, worker_timeout=LIMITS[sign])
    lost = llm.engine.executor._places[1][2]  # type: ignore[attr-defined]
    add_requests(llm)
    llm.engine.step()
    os.kill(lost, sign)
    started = time.monotonic()
    run_to_death(llm, "rank 1:", "process is gone:" if sign == signal.SIGKILL else "no answer")
    assert time.monotonic() - started < NOTICED
    assert soon(lambda: not is_alive(lost)), "not even a stopped process may stay"
    llm.close()
    assert soon(lambda: all_is_free(cluster))


@killed_or_hung
def test_an_idle_engine_notices(cluster: Any, qwen: Path, sign: signal.Signals) -> None:
    with contextlib.closing(open_two(qwen, LIMITS[sign], distributed_executor_backend="ray")) as engine:
        lost = engine.engine.executor._places[1][2]  # type: ignore[attr-defined]
        cause = "its process is gone:" if sign == signal.SIGKILL else "no answer within 5 s"
        expect_notice(engine, lost, lambda: os.kill(lost, sign), cause)


def test_experts_move_and_are_counted(
    cluster: Any, tiny: Callable[[str], TinyModel], make_llm: Callable[..., LLM]
) -> None:
    model = tiny("mixtral")
    settings = {"window_size": 3, "step_interval": 2, "num_redundant_experts": 2}
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "distributed_executor_backend": "ray"}
    alone, spread = make_llm(model.path), make_llm(model.path, **ranks, enable_eplb=True, eplb_config=settings)
    alone.engine.executor.expert_load()
    assert tokens(spread, GREEDY) == tokens(alone, GREEDY)
    assert spread.engine.executor.expert_load() == alone.engine.executor.expert_load()


def test_counting_experts_on_a_lost_rank_is_no_error_of_its_own(cluster: Any, make_ray: MakeRay) -> None:
    """A request that is finished is reported, whatever happens to rank 0 just then; the next launch raises."""
    llm = make_ray(tensor_parallel_size=2)
    executor = llm.engine.executor
    executor._facts = dataclasses.replace(executor._facts, has_offload=True)  # type: ignore[attr-defined]
    os.kill(executor._places[0][2], signal.SIGKILL)  # type: ignore[attr-defined]
    assert executor.expert_stats() is None
    with pytest.raises(EngineDeadError, match="rank 0:"):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)

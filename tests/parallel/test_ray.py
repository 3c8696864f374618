"""Ranks as actors of a Ray cluster, its own or one that is there: the tokens of one rank; a lost rank is named; what
was reserved is given back."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.executor import ray_cluster
from tests.parallel.processes import all_on_loopback, children, descendants, is_alive, soon
from tests.parallel.test_faults import NUM_REQUESTS, TIMEOUT, add_requests, assert_all_told, run_to_end
from tests.parallel.test_multiprocess import GREEDY, SEEDED, tokens
from tests.tiny_models import TinyModel

MODEL = "qwen3-bias-tied"
NUM_CPUS = 2
MakeRay = Callable[..., LLM]


@pytest.fixture
def make_ray(make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]) -> MakeRay:
    return lambda **options: make_llm(tiny(MODEL).path, distributed_executor_backend="ray", **options)


def test_without_ray_it_says_what_to_install(make_ray: MakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'nano-vllm\[ray\]'"):
        make_ray()


def test_a_cluster_of_its_own_is_started_and_stopped(
    make_ray: MakeRay, make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = children()
    llm = make_ray()
    assert ray.is_initialized()
    assert all_on_loopback(descendants())  # lesson 27
    assert tokens(llm, GREEDY) == tokens(make_llm(tiny(MODEL).path), GREEDY)
    llm.close()
    assert not ray.is_initialized()
    assert soon(lambda: children() <= before, 10), children() - before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(
        address="local", num_cpus=NUM_CPUS, include_dashboard=False, logging_level="warning", log_to_driver=False,
        object_store_memory=80 * 2**20,
    )  # fmt: skip
    yield ray
    ray.shutdown()


def all_is_free(ray: Any) -> bool:
    return ray.available_resources().get("CPU", 0) == NUM_CPUS


def test_two_ranks_have_the_tokens_of_one_and_give_all_back(
    cluster: Any, make_ray: MakeRay, make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    alone = make_llm(tiny(MODEL).path)
    llm = make_ray(tensor_parallel_size=2)
    assert tokens(llm, GREEDY) == tokens(alone, GREEDY)
    assert tokens(llm, SEEDED) == tokens(alone, SEEDED)
    assert len(llm.engine.describe()["runs_on"]["hosts"]) == 1
    actors = [process for _, _, process in llm.engine.executor._places]  # type: ignore[attr-defined]
    assert len(actors) == 2
    assert os.getpid() not in actors, "the caller's process computes nothing"
    monkeypatch.setattr(ray_cluster, "RESERVE_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"had no room for 2 times {'CPU': 1}"):
        make_ray(tensor_parallel_size=2)
    llm.close()
    assert cluster.is_initialized(), "a cluster that was there stays"
    assert soon(lambda: all_is_free(cluster), 10), cluster.available_resources()
    assert soon(lambda: not any(map(is_alive, actors)))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_lost_rank_is_named(cluster: Any, make_ray: MakeRay, sign: signal.Signals) -> None:
    llm = make_ray(tensor_parallel_size=2, worker_timeout=TIMEOUT)
    lost = llm.engine.executor._places[1][2]  # type: ignore[attr-defined]
    add_requests(llm, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    llm.engine.step()
    os.kill(lost, sign)
    started = time.monotonic()
    done = run_to_end(llm)
    assert time.monotonic() - started < TIMEOUT + ray_cluster.GRACE_SECONDS + 5
    assert_all_told(done, NUM_REQUESTS, "rank 1:", "gone" if sign == signal.SIGKILL else "no answer")
    assert soon(lambda: not is_alive(lost)), "not even a stopped process may stay"
    llm.close()
    assert soon(lambda: all_is_free(cluster), 10)

"""A rank dies, hangs, raises or runs out of memory: the engine is dead, with the rank and the cause; what was finished
is kept, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLMEngine, RequestDelta, SamplingParams
from nanovllm.engine.async_engine import IDLE_SECONDS
from nanovllm.errors import EngineDeadError
from nanovllm.hardware.parallel import limit_waiting
from nanovllm.ranks import multiprocess
from nanovllm.ranks.faults import (
    ALARM_SECONDS,
    FAILED,
    GRACE_SECONDS,
    LOST,
    Alarm,
    LostTouchError,
    Report,
    name_cause,
)
from tests.ranks.processes import children, is_alive, open_files, soon
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("NANOVLLM_FAULT_ROUNDS", "4"))
TIMEOUT = 2.0  # for ranks that hang; a busy machine may let one that is well wait as long, so no test begins with it
PATIENT = 60.0
SHORTER = 10.0  # where an all-reduce that has begun is sure to wait for the whole limit
NOTICED = TIMEOUT + 2.0 + 20.0  # what is promised, and a machine that others keep busy
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
NUM_REQUESTS = 20  # more than max_num_seqs: some run, some wait

MakeTwo = Callable[..., LLM]
killed_or_hung = pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])


@pytest.fixture
def make_two(make_llm: Callable[..., LLM], qwen: Path) -> MakeTwo:
    return lambda limit=PATIENT: make_llm(qwen, tensor_parallel_size=2, worker_timeout=limit)


def stop(executor: Any, rank: int = 1) -> None:
    """The worker hangs from now on, and rank 0 waits for TIMEOUT only."""
    executor._timeout = TIMEOUT
    limit_waiting(executor._parallel, TIMEOUT)
    executor._workers[rank - 1].connection.settimeout(TIMEOUT)
    os.kill(executor._workers[rank - 1].process.pid, signal.SIGSTOP)


def add_requests(llm: LLM, params: SamplingParams = LONG, count: int = NUM_REQUESTS) -> None:
    for number in range(count):
        llm.engine.add_request(str(number), {"prompt_token_ids": [5, 6, 7 + number]}, params)


def run_to_death(llm: LLM, *words: str) -> None:
    """Steps until EngineDeadError with these words. For a request that ends before, a new one is added."""
    numbers = itertools.count()

    def step() -> None:
        for output in llm.engine.step():
            assert output.error is None
            if output.finished:
                llm.engine.add_request(f"more-{next(numbers)}", {"prompt_token_ids": [5, 6, 7]}, LONG)

    with pytest.raises(EngineDeadError) as caught:
        deque(iter(step, "never"), maxlen=0)
    for word in words:
        assert word in str(caught.value)


def worker_of(llm: LLM, rank: int = 1) -> int:
    return int(llm.engine.executor._workers[rank - 1].process.pid)  # type: ignore[attr-defined]


def test_killed_or_hung_at_any_moment(make_two: MakeTwo) -> None:
    """Rank 0 must not wait for ever. Each round makes a new engine at once after the last."""
    rng, before, files = random.Random(6), children(), None
    for number in range(ROUNDS):
        sign, limit = ((signal.SIGKILL, PATIENT), (signal.SIGSTOP, SHORTER))[number % 2]
        llm = make_two(limit)
        worker = worker_of(llm)
        add_requests(llm)
        for _ in range(rng.randrange(3)):
            llm.engine.step()
        sent: list[float] = []

        def strike(llm: LLM = llm, sign: signal.Signals = sign, sent: list[float] = sent) -> None:
            os.kill(worker_of(llm), sign) if sign == signal.SIGKILL else stop(llm.engine.executor)
            sent.append(time.monotonic())

        timer = threading.Timer(rng.random() * 0.3, strike)  # in the middle of whatever is going on
        timer.start()
        run_to_death(llm, "rank 1", "signal 9" if sign == signal.SIGKILL else "no answer within")
        timer.join()
        took = time.monotonic() - sent[0]
        # An all-reduce that had begun when the worker was stopped waits for the limit that it began with.
        assert took < NOTICED + SHORTER * (sign == signal.SIGSTOP), (sign, took)
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.engine.executor.launch(None)  # type: ignore[arg-type]
        assert not is_alive(worker), "not even a stopped process may stay"
        llm.close()
        assert children() <= before
        files = files or len(open_files())
        assert len(open_files()) <= files, open_files()


@pytest.mark.parametrize("how", ["closed", "killed", "hung"])
def test_an_exchange_of_experts_under_way_keeps_nothing(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], how: str
) -> None:
    """Two: one that the Balancer has begun on both ranks, and one that rank 1 never takes part in."""
    before, limit = children(), SHORTER if how == "hung" else PATIENT
    eplb = {"expert_parallel_size": 2, "enable_eplb": True, "eplb_window_size": 3, "eplb_step_interval": 2}
    llm = make_llm(tiny("mixtral").path, tensor_parallel_size=2, worker_timeout=limit, **eplb)
    add_requests(llm)
    executor = llm.engine.executor
    balancer = executor._inner.balancer  # type: ignore[attr-defined]
    while balancer._move is None:
        llm.engine.step()
    rows = torch.zeros(2, 4, dtype=torch.uint8)
    finish = executor._parallel.begin_exchange(rows, torch.empty_like(rows), [1, 1], [1, 1])  # type: ignore[attr-defined]
    began = time.monotonic()
    if how == "killed":
        os.kill(worker_of(llm), signal.SIGKILL)
        run_to_death(llm, "rank 1", "signal 9")
    elif how == "hung":
        stop(executor)
        run_to_death(llm, "rank 1", "no answer within")
    llm.close()
    assert time.monotonic() - began < NOTICED + SHORTER * (how == "hung")
    with pytest.raises(RuntimeError):
        finish()
    assert children() <= before
    assert executor._inner.balancer is None, "it would keep the experts' weights"  # type: ignore[attr-defined]


def test_of_four_ranks_the_one_that_hangs_is_named(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]
) -> None:
    """Ranks 0, 1 and 3 all raise a timeout; rank 2 is the cause."""
    llm = make_llm(tiny("llama-mqa-bias").path, tensor_parallel_size=4, worker_timeout=5.0)
    add_requests(llm)
    llm.engine.step()
    os.kill(worker_of(llm, 2), signal.SIGSTOP)
    run_to_death(llm, "rank 2: no answer")
    assert not any(f"rank {other}" in str(llm.engine.executor._dead) for other in (0, 1, 3))  # type: ignore[attr-defined]


def test_a_rank_that_raises_is_named(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_two()
    add_requests(llm)
    llm.engine.step()
    monkeypatch.setattr(multiprocess, "encode_plan", lambda plan: b"nonsense")
    run_to_death(llm, "rank 1: EngineDeadError: a plan of 8 bytes")


STARVED = """
import torch
from nanovllm.ranks.local import LocalExecutor

def launch(self, plan):
    torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine can address

LocalExecutor.launch = launch
"""


def test_a_rank_without_memory_is_named(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python imports `sitecustomize` when it starts, so the worker's model has no memory and that of rank 0 has."""
    (tmp_path / "sitecustomize.py").write_text(STARVED)
    monkeypatch.syspath_prepend(tmp_path)
    llm = make_two()
    add_requests(llm)
    run_to_death(llm, "rank 1: RuntimeError", "can't allocate memory")


def test_rank_0_without_memory_ends_all_ranks(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank, one request fails and the others go on; two ranks of which one has missed a step cannot go on."""
    llm = make_two()
    worker = worker_of(llm)

    def fail(plan: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(llm.engine.executor._inner, "launch", fail)  # type: ignore[attr-defined]
    add_requests(llm)
    run_to_death(llm, "rank 0: MemoryError: no room")
    assert not is_alive(worker)


def test_a_rank_that_takes_no_plan_is_named(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a long prompt does not fit into the socket of a worker that has stopped reading."""
    llm = make_two()
    add_requests(llm)
    llm.engine.step()
    stop(llm.engine.executor)
    monkeypatch.setattr(multiprocess, "encode_plan", lambda plan: bytes(1 << 22))
    run_to_death(llm, "rank 1: no answer within 2 s")


def test_a_rank_that_died_as_its_plan_was_sent_is_named(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_two()
    add_requests(llm)
    executor = llm.engine.executor
    monkeypatch.setattr(executor, "_find_dead", list)  # as if it had died only just afterwards
    process = executor._workers[0].process  # type: ignore[attr-defined]
    process.kill()
    process.wait()
    run_to_death(llm, "rank 1: its process was killed by signal 9")


def test_what_was_finished_is_kept(make_two: MakeTwo) -> None:
    llm = make_two()
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7 + number]} for number in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, short, use_tqdm=False)]
    ended, step = 0, llm.engine.step

    def kill_after_three() -> list[RequestDelta]:
        nonlocal ended
        deltas = step()
        ended += sum(delta.finished for delta in deltas)
        if ended >= 3:
            os.kill(worker_of(llm), signal.SIGKILL)
        return deltas

    llm.engine.step = kill_after_three  # type: ignore[method-assign]
    params = [LONG, short, LONG, short, short, LONG]
    with pytest.raises(EngineDeadError, match="rank 1: its process was killed by signal 9") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    finished = caught.value.finished
    assert sorted(finished) == [1, 3, 4]
    assert [finished[number].outputs[0].token_ids for number in (1, 3, 4)] == [expected[n] for n in (1, 3, 4)]
    llm.engine.step = step  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=r"rank 1: .* create a new engine") as again:
        llm.generate(prompts, short, use_tqdm=False)
    assert again.value.finished == {}
    assert not llm.engine.has_unfinished_requests()


def open_two(qwen: Path, worker_timeout: float = PATIENT, **options: Any) -> AsyncLLMEngine:
    sizes = {"max_num_seqs": 2, "num_kvcache_blocks": 128, "tensor_parallel_size": 2}
    return AsyncLLMEngine(model=str(qwen), device="cpu", worker_timeout=worker_timeout, **sizes, **options)


def test_streams_of_the_async_engine_end_with_the_cause(qwen: Path) -> None:
    async def main() -> None:
        async with open_two(qwen) as engine:
            begun = asyncio.Event()

            async def last(number: int) -> None:
                params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
                async for _ in engine.generate({"prompt_token_ids": [5, 6, 7 + number]}, params):
                    begun.set()

            waiting = [asyncio.create_task(last(number)) for number in range(5)]
            await begun.wait()
            assert engine.failure is None
            os.kill(worker_of(engine), signal.SIGKILL)  # type: ignore[arg-type]
            for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), NOTICED + PATIENT):
                assert isinstance(error, EngineDeadError)
                assert "rank 1: its process was killed by signal 9" in str(error)
            assert "EngineDeadError" in (engine.failure or "")
            with pytest.raises(EngineDeadError, match="rank 1"):
                await last(6)

    asyncio.run(main())


def expect_notice(engine: AsyncLLMEngine, lost: int, strike: Callable[[], object], cause: str) -> None:
    """`strike` kills or stops rank 1, process `lost`, while the engine has nothing to do."""
    assert engine.failure is None
    strike()
    assert soon(lambda: engine.failure is not None, NOTICED + PATIENT)
    assert "EngineDeadError" in (engine.failure or "")
    assert soon(lambda: not is_alive(lost)), "not even a stopped process may stay"
    with pytest.raises(EngineDeadError, match=f"rank 1: .*{cause}"):
        asyncio.run(engine.abort("nothing"))


@killed_or_hung
def test_an_idle_engine_notices(qwen: Path, sign: signal.Signals) -> None:
    with contextlib.closing(open_two(qwen)) as engine:
        worker = worker_of(engine)  # type: ignore[arg-type]
        if sign == signal.SIGKILL:
            expect_notice(engine, worker, lambda: os.kill(worker, sign), "signal 9")
        else:
            expect_notice(engine, worker, lambda: stop(engine.engine.executor), "no answer within 2 s")


def test_an_idle_rank_that_is_well_answers(make_two: MakeTwo) -> None:
    executor = make_two().engine.executor
    (worker,) = executor._workers  # type: ignore[attr-defined]
    for _ in range(3):
        executor.check()
        assert worker.pinged_at is not None
        assert soon(lambda: not executor._reports() and worker.pinged_at is None, PATIENT)  # type: ignore[attr-defined]
    worker.pinged_at = time.monotonic() - PATIENT + 30
    executor.check()
    worker.pinged_at = time.monotonic() - PATIENT - 1
    with pytest.raises(EngineDeadError, match="rank 1: no answer within 60 s"):
        executor.check()


def test_a_rank_that_hangs_is_noticed_within_two_seconds_of_its_limit() -> None:
    """The sum of the waits beyond worker_timeout. A measured time would depend on the load of the machine."""
    in_a_step = ALARM_SECONDS + GRACE_SECONDS + multiprocess.KILL_SECONDS
    idle = IDLE_SECONDS + IDLE_SECONDS + GRACE_SECONDS + multiprocess.KILL_SECONDS  # pinged, then checked
    assert max(in_a_step, idle) < 2


SCRIPT = """
import signal, sys
from nanovllm import LLM, SamplingParams

def fail(*_):
    raise RuntimeError("an exception in generate")

signal.signal(signal.SIGALRM, fail)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, max_num_seqs=16, num_kvcache_blocks=128)
print(llm.engine.executor._workers[0].process.pid, flush=True)
params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
while True:
    llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 16, params, use_tqdm=False)
"""


SIGNS = {"ctrl-c": signal.SIGINT, "exception": signal.SIGALRM, "killed": signal.SIGKILL, "ended": signal.SIGTERM}


@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_a_script_that_ends_in_generate_leaves_nothing(qwen: Path, sign: signal.Signals) -> None:
    """As at a terminal, Ctrl-C goes to all processes of the group; so does a service manager's SIGTERM. The script
    closes nothing itself."""
    command = [sys.executable, "-c", SCRIPT, str(qwen)]
    script = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert script.stdout is not None
        worker = int(script.stdout.readline())
        time.sleep(0.5)
        (os.killpg if sign in (signal.SIGINT, signal.SIGTERM) else os.kill)(script.pid, sign)
        _, errors = script.communicate(timeout=60)
        assert script.returncode != 0
        said = {signal.SIGINT: "KeyboardInterrupt", signal.SIGALRM: "an exception in generate"}
        assert said.get(sign, "") in errors
        assert soon(lambda: not is_alive(worker), 60)
    finally:
        script.kill()


def test_an_engine_that_was_interrupted_is_dead_and_closes(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_two()

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.executor._inner, "launch", interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], LONG, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="rank 0: KeyboardInterrupt"):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], LONG, use_tqdm=False)
    llm.close()


def test_an_alarm_ends_what_waits_too_long() -> None:
    """A wait for a GPU cannot be interrupted; the alarm must end it. Here an event stands for the GPU."""
    ended = threading.Event()
    alarm = Alarm(0.5, lambda: False, ended.set)
    assert alarm.watch(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        alarm.watch(lambda: 1 // 0)
    time.sleep(1.0)  # nothing is watched: time does not count
    assert not ended.is_set()
    with pytest.raises(LostTouchError):
        alarm.watch(lambda: ended.wait(60))
    alarm.close()
    dead = threading.Event()
    alarm = Alarm(1000, dead.is_set, ended.set)  # a rank that is known to be dead is not waited for
    ended.clear()
    dead.set()
    with pytest.raises(LostTouchError):
        alarm.watch(lambda: ended.wait(60))
    alarm.close()
    assert "nanovllm-alarm" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        ([Report(0, LOST, "x"), Report(2, FAILED, "oom"), Report(1, LOST, "y")], "rank 2: oom"),
        ([Report(0, LOST, "x"), Report(2, LOST, "y")], "rank 1: no answer within 7 s"),
        ([Report(rank, LOST, "cable") for rank in range(3)], "rank 0 lost touch with the others: cable; rank 1"),
    ],
)
def test_the_cause_is_separated_from_its_consequences(reports: list[Report], cause: str) -> None:
    assert name_cause(reports, 3, 7.0).startswith(cause)


def test_an_alarm_rings_for_an_engine(make_two: MakeTwo) -> None:
    """As on a GPU: rank 0 waits without an end of its own (gloo's is far away), and the alarm finds the dead rank."""
    llm = make_two()
    executor = llm.engine.executor
    rang = threading.Event()
    executor._alarm = Alarm(TIMEOUT, lambda: bool(executor._find_dead()), rang.set)  # type: ignore[attr-defined]

    def wait(plan: object) -> None:
        rang.wait(60)

    executor._inner.launch = wait  # type: ignore[attr-defined]
    add_requests(llm)
    stop(executor)
    run_to_death(llm, "rank 1: no answer within 2 s")

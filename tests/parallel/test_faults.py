"""A rank dies, hangs, raises or runs out of memory: who waits is told which and why, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm import LLM, AsyncLLMEngine, RequestOutput, SamplingParams
from nanovllm.errors import EngineDeadError
from nanovllm.executor import multiprocess
from nanovllm.executor.faults import FAILED, LOST, Alarm, LostTouchError, Report, name_cause
from tests.parallel.processes import children, is_alive, open_files, soon
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("NANOVLLM_FAULT_ROUNDS", "4"))  # 50 were run for the report of this work
TIMEOUT = 2.0
NOTICED = TIMEOUT + 2.0 + 2.0  # worker_timeout, the grace for ranks to report, and a loaded machine
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
NUM_REQUESTS = 20  # more than max_num_seqs: some run, some wait

MakeTwo = Callable[[], LLM]


@pytest.fixture
def make_two(make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]) -> MakeTwo:
    return lambda: make_llm(tiny("qwen3-bias-tied").path, tensor_parallel_size=2, worker_timeout=TIMEOUT)


def add_requests(llm: LLM, params: SamplingParams = LONG, count: int = NUM_REQUESTS) -> None:
    for number in range(count):
        llm.engine.add_request(str(number), {"prompt_token_ids": [5, 6, 7 + number]}, params)


def run_to_end(llm: LLM) -> list[RequestOutput]:
    done = []
    while llm.engine.has_unfinished_requests():
        done += [output for output in llm.engine.step() if output.finished]
    return done


def worker_of(llm: LLM, rank: int = 1) -> int:
    return int(llm.engine.executor._workers[rank - 1].process.pid)  # type: ignore[attr-defined]


def assert_all_told(done: list[RequestOutput], count: int, *words: str) -> None:
    assert len(done) == count
    for output in done:
        assert output.outputs[0].finish_reason == "error"
        for word in words:
            assert word in (output.error or ""), output.error


def test_killed_or_hung_at_any_moment(make_two: MakeTwo) -> None:
    """Lesson 25: a dead worker left rank 0 waiting for ever. Each round makes a new engine at once after the last."""
    rng, before, files = random.Random(6), children(), None
    for number in range(ROUNDS):
        llm = make_two()
        worker, sign = worker_of(llm), (signal.SIGKILL, signal.SIGSTOP)[number % 2]
        add_requests(llm, SamplingParams(temperature=0, max_tokens=250, ignore_eos=True))
        for _ in range(rng.randrange(3)):
            llm.engine.step()
        sent: list[float] = []

        def strike(worker: int = worker, sign: signal.Signals = sign, sent: list[float] = sent) -> None:
            os.kill(worker, sign)
            sent.append(time.monotonic())

        timer = threading.Timer(rng.random() * 0.3, strike)  # in the middle of whatever is going on
        timer.start()
        done = run_to_end(llm)
        took = time.monotonic() - sent[0]
        timer.join()
        assert took < NOTICED, (sign, took)
        told = [output for output in done if output.error]
        assert len(done) == NUM_REQUESTS
        cause = "signal 9" if sign == signal.SIGKILL else "no answer within 2 s"
        assert_all_told(told, len(told), "rank 1", cause)
        assert told
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.engine.executor.launch(None)  # type: ignore[arg-type]
        assert not is_alive(worker), "not even a stopped process may stay"
        llm.close()
        assert children() <= before
        files = files or len(open_files())
        assert len(open_files()) <= files, open_files()


def test_of_four_ranks_the_one_that_hangs_is_named(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel]
) -> None:
    """Ranks 0, 1 and 3 all see a timeout; only rank 2 is to blame."""
    llm = make_llm(tiny("llama-mqa-bias").path, tensor_parallel_size=4, worker_timeout=TIMEOUT)
    add_requests(llm)
    llm.engine.step()
    os.kill(worker_of(llm, 2), signal.SIGSTOP)
    done = run_to_end(llm)
    assert_all_told(done, NUM_REQUESTS, "rank 2: no answer")
    assert not any(f"rank {other}" in (done[0].error or "") for other in (0, 1, 3))


def test_a_rank_that_raises_is_named(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_two()
    add_requests(llm)
    llm.engine.step()
    monkeypatch.setattr(multiprocess, "encode_plan", lambda plan: b"nonsense")
    assert_all_told(run_to_end(llm), NUM_REQUESTS, "rank 1: EngineDeadError: a plan of 8 bytes")


def test_a_rank_without_memory_is_named(make_two: MakeTwo) -> None:
    llm = make_two()
    resource.prlimit(worker_of(llm), resource.RLIMIT_AS, (1, 1))
    for number in range(NUM_REQUESTS):
        llm.engine.add_request(str(number), {"prompt_token_ids": [3 + number] * 150}, LONG)
    done = run_to_end(llm)
    assert_all_told(done, NUM_REQUESTS, "rank 1")
    assert "alloc" in (done[0].error or "") or "MemoryError" in (done[0].error or ""), done[0].error


def test_rank_0_without_memory_ends_all_ranks(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank, one request gives way and the others go on; but ranks that are a step apart never meet again."""
    llm = make_two()
    worker = worker_of(llm)

    def fail(plan: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(llm.engine.executor._inner, "launch", fail)  # type: ignore[attr-defined]
    add_requests(llm)
    assert_all_told(run_to_end(llm), NUM_REQUESTS, "rank 0: MemoryError: no room")
    assert not is_alive(worker)


def test_streams_of_the_async_engine_are_told(tiny: Callable[[str], TinyModel]) -> None:
    async def last(engine: AsyncLLMEngine, number: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
        return [output async for output in engine.generate({"prompt_token_ids": [5, 6, 7 + number]}, params)][-1]

    async def main() -> list[RequestOutput]:
        options = {"device": "cpu", "max_num_seqs": 2, "num_kvcache_blocks": 128, "tensor_parallel_size": 2}
        async with AsyncLLMEngine(model=str(tiny("qwen3-bias-tied").path), worker_timeout=TIMEOUT, **options) as engine:
            waiting = [asyncio.create_task(last(engine, number)) for number in range(5)]
            await asyncio.sleep(0.1)
            os.kill(worker_of(engine), signal.SIGKILL)  # type: ignore[arg-type]
            return await asyncio.wait_for(asyncio.gather(*waiting), NOTICED)

    assert_all_told(asyncio.run(main()), 5, "rank 1", "signal 9")


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
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 16, params, use_tqdm=False)
    if outputs[0].error:
        raise RuntimeError(outputs[0].error)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGALRM, signal.SIGKILL], ids=["ctrl-c", "exception", "killed"])
def test_a_script_that_ends_in_generate_leaves_nothing(
    tiny: Callable[[str], TinyModel], sign: signal.Signals
) -> None:
    """As at a terminal, Ctrl-C goes to all processes of the group. The script closes nothing itself."""
    command = [sys.executable, "-c", SCRIPT, str(tiny("qwen3-bias-tied").path)]
    script = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert script.stdout is not None
        worker = int(script.stdout.readline())
        time.sleep(0.5)
        started = time.monotonic()
        if sign == signal.SIGINT:
            os.killpg(script.pid, sign)
        else:
            os.kill(script.pid, sign)
        _, errors = script.communicate(timeout=5)
        assert time.monotonic() - started < 5
        assert script.returncode != 0
        if sign != signal.SIGKILL:
            assert {signal.SIGINT: "KeyboardInterrupt", signal.SIGALRM: "an exception in generate"}[sign] in errors
        assert soon(lambda: not is_alive(worker), 5)
    finally:
        script.kill()


def test_an_engine_that_was_interrupted_says_so_and_closes(make_two: MakeTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_two()

    def interrupt(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.executor._inner, "launch", interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], LONG, use_tqdm=False)
    monkeypatch.undo()
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], LONG, use_tqdm=False)
    assert "rank 0: KeyboardInterrupt" in (output.error or "")
    started = time.monotonic()
    llm.close()
    assert time.monotonic() - started < 5


def test_an_alarm_ends_what_waits_too_long() -> None:
    """What waits for a GPU cannot be interrupted; the alarm's ring must end it. Here an event stands for the GPU."""
    ended = threading.Event()
    alarm = Alarm(0.5, lambda: False, ended.set)
    assert alarm.watch(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        alarm.watch(lambda: 1 // 0)
    time.sleep(1.0)  # nothing is watched: time does not count
    assert not ended.is_set()
    started = time.monotonic()
    with pytest.raises(LostTouchError):
        alarm.watch(lambda: ended.wait(20))
    assert 0.4 < time.monotonic() - started < 10
    alarm.close()
    dead = threading.Event()
    alarm = Alarm(1000, dead.is_set, ended.set)  # a rank that is known to be dead is not waited for
    ended.clear()
    dead.set()
    with pytest.raises(LostTouchError):
        alarm.watch(lambda: ended.wait(20))
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
def test_the_cause_is_told_from_its_consequences(reports: list[Report], cause: str) -> None:
    assert name_cause(reports, 3, 7.0).startswith(cause)


def test_an_alarm_rings_for_an_engine(make_two: MakeTwo) -> None:
    """As on a GPU: rank 0 waits without an end of its own (gloo's is far away), and the alarm finds the dead rank."""
    llm = make_two()
    executor = llm.engine.executor
    rang = threading.Event()
    executor._alarm = Alarm(TIMEOUT, lambda: bool(executor._find_dead()), rang.set)  # type: ignore[attr-defined]

    def wait(plan: object) -> None:
        rang.wait(30)

    executor._inner.launch = wait  # type: ignore[attr-defined]
    add_requests(llm)
    os.kill(worker_of(llm), signal.SIGSTOP)
    assert_all_told(run_to_end(llm), NUM_REQUESTS, "rank 1: no answer within 2 s")

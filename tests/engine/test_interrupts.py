"""Ctrl-C at every line of the loop, Ctrl-C from the outside, and calls from two threads: the engine is empty and usable
afterwards, the next answers are right and every block is free."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, EngineDeadError, SamplingParams
from nanovllm.engine.interrupts import ctrl_c_leaves
from nanovllm.scheduling.plan import StepPlan
from tests.tiny_models import NEW_TOKENS, TinyModel

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)  # hundreds of times: a whole answer takes long
PACKAGE = Path(nanovllm.__file__).parent
LOOP = tuple(str(PACKAGE / name) for name in ("scheduling", "engine", "runner", "ranks", "llm.py"))
CHOSEN = [5, 2, 5, 7, 3]  # prompts; one comes twice and shares the blocks of the first
Place = tuple[str, int]  # (file, line)


@functools.cache
def lines_of(code: CodeType) -> frozenset[int | None]:
    return frozenset(line for _, _, line in code.co_lines())


class Tracer:
    """Counts how often each line of the loop runs, and raises at one of these moments. To reach one it watches only the
    function that has the line: to watch all takes longer than what they do."""

    def __init__(self, place: Place | None = None, hit: int = 1, files: tuple[str, ...] = LOOP) -> None:
        self.hits: Counter[Place] = Counter()
        self._place, self._hit, self._files = place, hit, files

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self._place is not None and (code.co_filename != self._place[0] or self._place[1] not in lines_of(code)):
            return None
        return self._line if code.co_filename.startswith(self._files) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.hits[place] += 1
            if place == self._place and self.hits[place] == self._hit:
                raise KeyboardInterrupt
        return self._line

    def run(self, function: Callable[[], Any]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    # Few blocks and few tokens a step: sequences are preempted and prompts are cut into chunks.
    return make_llm(max_num_seqs=4, num_kvcache_blocks=6, max_num_batched_tokens=24, decode_steps=2)


def assert_right(llm: LLM, llama: TinyModel) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.blocks.num_used == 0
    outputs = llm.generate([llama.prompts[i] for i in CHOSEN[:3]], SHORT, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [llama.tokens[i][: SHORT.max_tokens] for i in CHOSEN[:3]]
    assert llm.engine.scheduler.blocks.num_used == 0


def moments(hits: Counter[Place]) -> list[tuple[Place, int]]:
    """Each line once, at one of the first times it runs; of the runner, whose state is dropped whole after an
    interrupt, every fourth line. The choice is the same in every run."""
    pick = random.Random(0)
    chosen = [(place, pick.randint(1, min(count, 8))) for place, count in sorted(hits.items())]
    runner = [moment for moment in chosen if moment[0][0].startswith(LOOP[2:4])]
    return [moment for moment in chosen if moment not in runner] + runner[::4]


def test_an_interrupt_at_every_line_of_the_loop(llm: LLM, llama: TinyModel) -> None:
    def generate() -> None:
        llm.generate([llama.prompts[i] for i in CHOSEN], GREEDY, use_tqdm=False)

    generate()
    tracer = Tracer()
    tracer.run(generate)
    assert llm.engine.scheduler.num_preemptions > 0
    files = {Path(file).name for file, _ in tracer.hits}
    assert files >= {"scheduler.py", "block_manager.py", "llm_engine.py", "llm.py", "model_runner.py", "input_batch.py"}
    interrupted = 0
    for place, hit in moments(tracer.hits):
        if Tracer(place, hit).run(generate):
            interrupted += 1
            try:
                assert_right(llm, llama)
            except BaseException as error:
                raise AssertionError(f"interrupted at {place[0]}:{place[1]}, time {hit}") from error
    assert interrupted > 300


def test_an_interrupt_while_requests_are_aborted(llm: LLM, llama: TinyModel) -> None:
    """A second Ctrl-C comes while the requests are aborted: the next call aborts the rest."""
    step, abort = llm.engine.step, llm.engine.abort_request

    def broken_step() -> Any:
        step()
        raise KeyboardInterrupt

    def broken_abort(request_id: str) -> Any:
        raise KeyboardInterrupt

    llm.engine.step, llm.engine.abort_request = broken_step, broken_abort  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([llama.prompts[i] for i in CHOSEN], GREEDY, use_tqdm=False)
    llm.engine.step, llm.engine.abort_request = step, abort  # type: ignore[method-assign]
    llm.generate([llama.prompts[0]], GREEDY, use_tqdm=False)
    assert_right(llm, llama)


def generate_until_interrupted(llm: LLM, prompts: list[Any], timer: threading.Timer) -> None:
    timer.start()
    while True:
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_ctrl_c_from_the_outside_comes_between_two_steps(llm: LLM, llama: TinyModel) -> None:
    """Real signals at random moments. The engine never sees them inside a step: what it has cached stays cached."""
    clears: list[None] = []
    clear = llm.engine.scheduler.clear
    llm.engine.scheduler.clear = lambda: (clears.append(None), clear())[1]  # type: ignore[method-assign]
    prompts = [llama.prompts[i] for i in CHOSEN] * 3
    started = time.monotonic()
    llm.generate(prompts, GREEDY, use_tqdm=False)
    whole = time.monotonic() - started
    pick = random.Random(1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(10):
            timer = threading.Timer(pick.uniform(0, whole), os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                generate_until_interrupted(llm, prompts, timer)
            timer.join()
            assert_right(llm, llama)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not clears
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_the_last_step_is_not_lost(llm: LLM, llama: TinyModel) -> None:
    """The call is complete, but a script that makes another one must not go on."""
    step = llm.engine.step

    def press_at_the_end() -> Any:
        deltas = step()
        if not llm.engine.has_unfinished_requests():
            os.kill(os.getpid(), signal.SIGINT)
        return deltas

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    llm.engine.step = press_at_the_end  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([llama.prompts[0]], GREEDY, use_tqdm=False)
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, before)
    assert_right(llm, llama)


def test_ctrl_c_waits_for_a_step_that_begins_before_all_prompts_are_read(make_llm: MakeLLM) -> None:
    """On a GPU: an interrupt inside of it would empty the prefix cache, or end an engine of several ranks."""
    llm = make_llm(max_num_batched_tokens=64, num_kvcache_blocks=128, max_num_seqs=16)
    executor: Any = llm.engine.executor
    executor.runner.overlap = 2
    warm: Any = {"prompt_token_ids": list(range(3, 60))}
    llm.generate(warm, SHORT, use_tqdm=False)
    launch, pressed = executor.launch, []

    def launched(plan: StepPlan) -> Any:
        if not pressed:
            pressed.append(len(llm._ids))
            os.kill(os.getpid(), signal.SIGINT)
        return launch(plan)

    executor.launch = launched
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([{"prompt_token_ids": [first] * 60} for first in range(3, 9)], SHORT, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    executor.launch = launch
    assert pressed[0] < 6, "it did not begin early"
    assert llm.generate(warm, SHORT, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.engine.scheduler.blocks.num_free == 128


@pytest.mark.parametrize("name", ["add", "abort"])
def test_ctrl_c_waits_while_requests_are_added_and_aborted(make_llm: MakeLLM, name: str) -> None:
    llm = make_llm(num_kvcache_blocks=128)
    warm: Any = {"prompt_token_ids": list(range(3, 60))}
    llm.generate(warm, SHORT, use_tqdm=False)
    scheduler, change, count = llm.engine.scheduler, getattr(llm.engine.scheduler, name), 0

    def pressed(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:  # also while the requests of the first press are aborted
            os.kill(os.getpid(), signal.SIGINT)
        return change(*args)

    setattr(scheduler, name, pressed)
    step, before = llm.engine.step, signal.signal(signal.SIGINT, signal.default_int_handler)
    if name == "abort":
        llm.engine.step = lambda: (os.kill(os.getpid(), signal.SIGINT), step())[1]  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([{"prompt_token_ids": [first] * 20} for first in range(3, 9)], SHORT, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
        setattr(scheduler, name, change)
        llm.engine.step = step  # type: ignore[method-assign]
    assert count == (1 if name == "add" else 6)
    assert llm.generate(warm, SHORT, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.engine.scheduler.blocks.num_free == 128


def test_a_handler_of_the_callers_stays(llm: LLM, llama: TinyModel) -> None:
    """It may raise any exception at any place."""

    class TimeIsUp(Exception):
        pass

    def handler(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGINT, handler)
    step = llm.engine.scheduler.schedule

    def signalled() -> Any:
        assert signal.getsignal(signal.SIGINT) is handler
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    try:
        llm.engine.scheduler.schedule = signalled  # type: ignore[method-assign]
        with pytest.raises(TimeIsUp):
            llm.generate([llama.prompts[i] for i in CHOSEN], GREEDY, use_tqdm=False)
    finally:
        llm.engine.scheduler.schedule = step  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, before)
    assert_right(llm, llama)


def test_two_threads_may_generate(llm: LLM, llama: TinyModel) -> None:
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        outputs = llm.generate([llama.prompts[i] for i in CHOSEN], GREEDY, use_tqdm=False)
        found[number] = [output["token_ids"][:NEW_TOKENS] for output in outputs]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [llama.tokens[i] for i in CHOSEN] for number in range(4)}
    assert_right(llm, llama)


def test_closing_from_another_thread(make_llm: MakeLLM, llama: TinyModel) -> None:
    """A step that runs is finished first; what was completed is not lost."""
    llm = make_llm()
    launch, started, errors = llm.engine.executor.launch, threading.Event(), []

    def slow(plan: StepPlan) -> Any:
        if plan.step_id > 4:  # the short request has ended
            started.set()
            time.sleep(0.05)
        return launch(plan)

    def work() -> None:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (1, 90)]
        try:
            llm.generate(llama.prompts[:2], params, use_tqdm=False)
        except BaseException as error:
            errors.append(error)

    llm.engine.executor.launch = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    llm.close()
    thread.join()
    [error] = errors
    assert isinstance(error, EngineDeadError)
    assert "closed while this request ran" in str(error)
    assert list(error.finished) == [0]


IMPORTING = """
import os, signal, time
from nanovllm.engine.interrupts import ctrl_c_leaves
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
with ctrl_c_leaves():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except BaseException:
        pass  # as torch does with an import of NumPy that fails
print("swallowed")
"""


def test_ctrl_c_while_modules_are_imported_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_handler_of_the_caller_stays_while_modules_are_imported() -> None:
    def own(*_: object) -> None:
        pass

    for handler in (own, signal.default_int_handler):
        before = signal.signal(signal.SIGINT, handler)
        try:
            with ctrl_c_leaves():
                assert (signal.getsignal(signal.SIGINT) is own) == (handler is own)
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)

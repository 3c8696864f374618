"""AsyncLLMEngine: many tasks, one engine thread; a request that leaves frees its blocks and disturbs no other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nanovllm import AsyncLLMEngine, EngineDeadError, RequestError, RequestOutput, SamplingParams
from nanovllm.engine import async_engine
from tests.tiny_models import NEW_TOKENS, TinyModel

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64}


@pytest.fixture
def engine(llama: TinyModel) -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine(model=str(llama.path), **OPTIONS)
    yield made
    made.close()
    assert not made._thread.is_alive()


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))  # a test that hangs must fail


async def last(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params, **options)][-1]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.002)


def is_empty(engine: AsyncLLMEngine) -> bool:
    return not engine.engine.has_unfinished_requests() and engine.engine.scheduler.blocks.num_used == 0


def test_fifty_at_once(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, llama.prompts[i % 11]) for i in range(50)))

    assert [o["token_ids"] for o in run(work())] == [llama.tokens[i % 11] for i in range(50)]
    assert is_empty(engine)


def test_reset_prefix_cache(engine: AsyncLLMEngine) -> None:
    prompt = {"prompt_token_ids": [7] * 40}

    async def work() -> None:
        task = asyncio.create_task(last(engine, prompt, LONG))
        await until(lambda: bool(engine.engine.scheduler.running))
        await engine.pause()
        assert await engine.reset_prefix_cache() is False
        await engine.resume()
        await task
        assert (await last(engine, prompt)).num_cached_tokens == 32
        assert await engine.reset_prefix_cache() is True
        assert (await last(engine, prompt)).num_cached_tokens == 0

    run(work())


def test_cancellation_frees_the_blocks_at_once(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> None:
        tasks = [asyncio.create_task(last(engine, prompt, LONG)) for prompt in llama.prompts[:6]]
        await until(lambda: len(engine.engine.scheduler.running) == 6)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await until(lambda: is_empty(engine))
        assert engine.engine.stats.generated_tokens < 6 * 140
        assert (await last(engine, llama.prompts[4]))["token_ids"] == llama.tokens[4]

    run(work())


def test_cancellation_while_the_request_is_being_added(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    """The engine thread has added the request, but the task is cancelled before add_request returns."""
    add, entered, go_on = engine.engine.add_request, threading.Event(), threading.Event()

    def slow_add(*args: Any, **options: Any) -> None:
        entered.set()
        go_on.wait(20)
        add(*args, **options)

    engine.engine.add_request = slow_add  # type: ignore[method-assign]

    async def work() -> None:
        task = asyncio.create_task(last(engine, llama.prompts[0], LONG))
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.sleep(0.05)
        await until(lambda: is_empty(engine))
        assert engine.engine.stats.generated_tokens < 100
        assert not engine._streams

    run(work())


def test_leaving_the_loop_early(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> None:
        stream = engine.generate(llama.prompts[0], LONG)
        async for output in stream:
            assert not output.finished
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: is_empty(engine))
        assert engine.engine.stats.generated_tokens < 140

    run(work())


def test_abort_ends_the_stream(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> None:
        task = asyncio.create_task(last(engine, llama.prompts[0], LONG, request_id="x"))
        await until(lambda: len(engine.engine.scheduler.running) == 1)
        await engine.abort("x")
        assert (await task)["finish_reason"] == "abort"
        await engine.abort("unknown")
        assert is_empty(engine)

    run(work())


def test_a_refused_request_disturbs_no_other(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> None:
        good = asyncio.create_task(last(engine, llama.prompts[3], LONG, request_id="x"))
        await until(lambda: len(engine.engine.scheduler.running) == 1)
        for prompt, options in (([], {}), ([10**6], {}), (llama.prompts[0], {"request_id": "x"}), ([5] * 999, {})):
            with pytest.raises(RequestError):
                await last(engine, prompt, **options)
        output = await good
        assert (output["token_ids"][:NEW_TOKENS], output["finish_reason"]) == (llama.tokens[3], "length")

    run(work())


def test_close_while_requests_run(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    async def work() -> None:
        tasks = [asyncio.create_task(last(engine, prompt, LONG)) for prompt in llama.prompts[:4]]
        await until(lambda: len(engine.engine.scheduler.running) == 4)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results), results
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await last(engine, llama.prompts[0])
        with pytest.raises(EngineDeadError):
            await engine.abort("x")

    run(work())


def test_context_manager(llama: TinyModel) -> None:
    async def work() -> AsyncLLMEngine:
        async with AsyncLLMEngine(model=str(llama.path), **OPTIONS) as engine:
            assert (await last(engine, llama.prompts[2]))["token_ids"] == llama.tokens[2]
        return engine

    assert not run(work())._thread.is_alive()


def test_a_dead_thread_ends_every_request(
    engine: AsyncLLMEngine, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the engine itself (not in a step): every request ends with an error that has the reason."""

    def broken() -> Any:
        raise AssertionError("a broken invariant")

    async def work() -> None:
        tasks = [asyncio.create_task(last(engine, prompt, LONG)) for prompt in llama.prompts[:3]]
        await until(lambda: len(engine.engine.scheduler.running) == 3)
        monkeypatch.setattr(engine.engine.scheduler, "schedule", broken)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "a broken invariant" in str(result)
        with pytest.raises(EngineDeadError, match="a broken invariant"):
            await last(engine, llama.prompts[0])

    run(work())


def test_a_command_queued_while_the_thread_fails_is_refused(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the failure and the closed queue: even an abort of an unknown request, which nothing else refuses."""
    queued: list[Future[Any]] = []

    def broken() -> Any:
        raise AssertionError("a broken invariant")

    def report(*_: object) -> None:
        queued.append(engine._submit(lambda: engine._abort("unknown")))

    monkeypatch.setattr(async_engine.logger, "exception", report)
    monkeypatch.setattr(engine.engine.executor, "check", broken)
    run(until(lambda: len(queued) == 1))
    with pytest.raises(EngineDeadError, match="a broken invariant"):
        queued[0].result(60)


def test_tasks_of_two_loops(engine: AsyncLLMEngine, llama: TinyModel) -> None:
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = run(last(engine, llama.prompts[i]))["token_ids"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[i] for i in range(4)] == llama.tokens[:4]

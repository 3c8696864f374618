"""A GPU that is lost (an illegal access, a failed assertion in a kernel) fails every call from then on: the engine is
dead. Here Device.synchronize stands for the GPU: it raises as torch does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLMEngine, EngineDeadError, SamplingParams
from nanovllm.hardware.device import Device
from nanovllm.runner.model_runner import InFlight
from tests.tiny_models import TinyModel

FAULT = "CUDA error: an illegal memory access was encountered"
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7 + number]} for number in range(3)]


def lose(executor: Any, monkeypatch: pytest.MonkeyPatch, after: int, where: str) -> None:
    """From its step number `after` on, the device is lost; the step's `launch` finds out, or its `result`."""
    launch, count = executor.runner.launch, []

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(Device, "synchronize", fail)
        monkeypatch.setattr(Device, "release_cached", fail)
        raise getattr(torch, "AcceleratorError", RuntimeError)(FAULT)

    def launch_or_fail(plan: Any) -> InFlight:
        count.append(plan)
        if len(count) < after:
            return launch(plan)
        return fail() if where == "launch" else InFlight(fail)

    monkeypatch.setattr(executor.runner, "launch", launch_or_fail)


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("backend", ["local", "mp"])
def test_a_lost_device_is_the_end(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, where: str, backend: str
) -> None:
    llm = make_llm(distributed_executor_backend=backend)
    inner = llm.engine.executor if backend == "local" else llm.engine.executor._inner  # type: ignore[attr-defined]
    (expected,) = llm.generate(PROMPTS[1], SHORT, use_tqdm=False)
    with monkeypatch.context() as patch:
        lose(inner, patch, 4, where)
        with pytest.raises(EngineDeadError, match=f"this process .*{FAULT}.*start a new one") as caught:
            llm.generate(PROMPTS, [LONG, SHORT, LONG], use_tqdm=False)
        assert list(caught.value.finished) == [1]
        assert caught.value.finished[1].outputs[0].token_ids == expected.outputs[0].token_ids
        with pytest.raises(EngineDeadError, match=FAULT):
            llm.generate(PROMPTS, SHORT, use_tqdm=False)
        llm.close()  # freeing memory fails like every other call; that error is hidden


def test_an_error_that_leaves_the_device_whole_fails_its_step_alone(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def fail(plan: Any) -> Any:
        raise RuntimeError("a shape does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor.runner, "launch", fail)  # type: ignore[attr-defined]
        (output,) = llm.generate(PROMPTS[0], SHORT, use_tqdm=False)
    assert "a shape does not fit" in (output.error or "")
    assert llm.generate(PROMPTS[0], SHORT, use_tqdm=False)[0].error is None


def test_an_error_of_closing_is_not_hidden_while_the_device_is_well(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def fail(_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Device, "release_cached", fail)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            llm.close()


def test_streams_end_with_the_error_and_failure_is_set(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        options = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 64}
        async with AsyncLLMEngine(model=str(llama.path), **options) as engine:
            lose(engine.engine.executor, monkeypatch, 4, "result")

            async def read(prompt: Any) -> None:
                async for output in engine.generate(prompt, LONG):
                    assert output.error is None

            errors = await asyncio.wait_for(asyncio.gather(*map(read, PROMPTS), return_exceptions=True), 60)
            assert [type(error) for error in errors] == [EngineDeadError] * 3
            assert FAULT in str(errors[0])
            assert "EngineDeadError" in (engine.failure or "")

    asyncio.run(main())

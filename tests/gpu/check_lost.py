"""On a real GPU: after a failed assertion in a kernel every call fails, so the engine is dead, not only the step.

    python tests/gpu/check_lost.py [--model benchmarks/models/qwen3-0.6b]

A step reads beyond the end of a tensor, which a kernel of torch asserts against. LLM.generate must raise
EngineDeadError with what was finished before; a second call must raise it again; `close` must not raise. With
AsyncLLMEngine, `failure` must be set. Each in a process of its own: the GPU is lost to the process that did it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, AsyncLLMEngine, EngineDeadError, SamplingParams  # noqa: E402

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS = {"device": "cuda", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}


def lose(executor: Any, after: int) -> None:
    launch, count = executor.runner.launch, 0

    def launch_and_lose(plan: Any) -> Any:
        nonlocal count
        count += 1
        flight = launch(plan)
        if count == after:
            torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
        return flight

    executor.runner.launch = launch_and_lose


def offline(model: str) -> None:
    prompts = [{"prompt_token_ids": [5, 6, 7 + number]} for number in range(3)]
    with LLM(model, **OPTIONS) as llm:
        lose(llm.engine.executor, 6)
        found = []
        for _ in range(2):
            try:
                llm.generate(prompts, [LONG, SHORT, LONG], use_tqdm=False)
            except EngineDeadError as error:
                found.append(list(error.finished))
                print(error, flush=True)
        assert found == [[1], []], found


def served(model: str) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(model=model, **OPTIONS) as engine:
            lose(engine.engine.executor, 6)
            try:
                async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, LONG):
                    assert output.error is None
                raise AssertionError("it went on")
            except EngineDeadError as error:
                print(error, flush=True)
            assert "EngineDeadError" in (engine.failure or "")

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "benchmarks/models/qwen3-0.6b"))
    parser.add_argument("--child", choices=["offline", "served"])
    args = parser.parse_args()
    if args.child:
        {"offline": offline, "served": served}[args.child](args.model)
        return
    for child in ("offline", "served"):
        subprocess.run([sys.executable, __file__, "--model", args.model, "--child", child], check=True, timeout=300)
    print("lost GPUs are the end of their engines")


if __name__ == "__main__":
    main()

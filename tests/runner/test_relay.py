"""The decode step in segments gives what the whole step gives. Here the segments are called, on a GPU they are replayed
(tests/gpu/check_offload.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.attention import Step
from nanovllm.runner.relay import RELAY_SIZES, Relay
from tests.tiny_models import TinyModel

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"
PROMPTS = ["The state of our union", "My fellow Americans, this", "We", "Tonight I"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class InSegments:
    """Stands for the model: decode steps of few sequences go through a relay."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, step: Step, caches: Any) -> torch.Tensor:
        if len(step.token_ids) not in RELAY_SIZES or step.attention.num_decodes != len(step.token_ids):
            return self._model(step, caches)
        self.num_steps += 1
        hidden: list[torch.Tensor] = []

        def capture(function: Callable[[], None], trial: bool = True) -> Callable[[], None]:
            function()  # the trial run; storing the same keys again changes nothing
            return function

        relay = Relay(self._model, caches, step, lambda found: hidden.append(found), capture, pin=False)
        relay.run()
        return hidden[-1]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(str(FIXTURE), device="cpu", num_kvcache_blocks=128) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("cache_gb", "options"),
    [
        *((cache_gb, {}) for cache_gb in (0.0008, 0.002, 0.01, 1.0)),
        (0.0008, {"expert_policy": "lru"}),
        (0.002, {"expert_prefetch": False}),
        (0.01, {"expert_policy": "lru", "expert_prefetch": False}),
    ],
    ids=str,
)
def test_tokens_of_the_segments_are_those_of_the_whole(
    make_llm: Callable[..., LLM], cache_gb: float, options: dict[str, Any], expected: list[list[int]]
) -> None:
    llm = make_llm(FIXTURE, expert_placement="offload", expert_cache_gb=cache_gb, **options)
    runner = llm.engine.executor.runner
    runner.model = runner._forward.model = InSegments(runner.model)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert found == expected
    assert runner.model.num_steps >= 11
    alone = [llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("name", ["qwen3-moe-dense-layers", "qwen3-moe-every-second", "deepseek-v3"])
def test_dense_layers_between_sparse_ones(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], name: str
) -> None:
    model, prompts = tiny(name), [{"prompt_token_ids": [5, 9, 2, 7, 1, 3]}]
    expected = make_llm(model.path).generate(prompts, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    llm = make_llm(model.path, expert_placement="offload", expert_cache_gb=0.001)
    runner = llm.engine.executor.runner
    runner.model = runner._forward.model = InSegments(runner.model)
    assert llm.generate(prompts, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert runner.model.num_steps == 11

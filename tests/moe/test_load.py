"""Tokens by layer and expert: every token counts once for each expert it took, nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.moe import load as module
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.load import ExpertLoad
from tests.tiny_models import TinyModel

CPU = torch.device("cpu")


def chosen(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_counts_by_hand() -> None:
    load = ExpertLoad(2, 4, CPU)
    assert not load.is_wanted
    assert load.read() == [[0] * 4] * 2
    assert load.is_wanted
    load.add([chosen([0, 1], [0, 3], [2, 2]), chosen([3, 2], [3, 1], [0, 0])], 2)  # the third is padding
    load.add([chosen([1, 2]), chosen([1, 2])], 1)
    assert load.read() == [[2, 2, 1, 1], [0, 2, 2, 2]]


def test_counting_ends_when_it_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    load = ExpertLoad(1, 2, CPU)
    load.read()
    load.add([chosen([0])], 1)
    clock[0] += module.WANTED_SECONDS + 1
    assert not load.is_wanted
    assert load.read() == [[1, 0]], "what was counted is not lost"
    assert load.is_wanted


def test_the_window_slides() -> None:
    load = ExpertLoad(1, 3, CPU, window_size=2)
    assert load.is_wanted
    for expert in (0, 1, 2):
        load.add([chosen([expert])], 1)
    assert load.recent().tolist() == [[0, 1, 1]]
    assert load.read() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {}),
        ("mixtral", {"expert_cache_gb": 3e-4, "max_num_batched_tokens": 16}),
        ("qwen3-moe-dense-layers", {"decode_steps": 3}),
    ],
)
def test_every_token_is_counted_once_for_each_of_its_experts(
    tiny: Callable[[str], TinyModel], make_llm: Callable[..., LLM], name: str, options: dict[str, Any]
) -> None:
    """Against the routers themselves: resident and offloaded, chunked prompts, several decodes in a launch."""
    model = tiny(name)
    llm = make_llm(model.path, **options)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate(model.prompts, params, use_tqdm=False)  # before counting is wanted
    executor = llm.engine.executor
    sparse = [layer.mlp for layer in executor.runner.model.layers if isinstance(layer.mlp, MoeLayer)]
    found = executor.expert_load()
    assert found == [[0] * sparse[0].gate.weight.shape[0]] * len(sparse)
    wanted = [torch.zeros(len(layer), dtype=torch.int64) for layer in found]
    llm.reset_prefix_cache()
    for layer, counts in zip(sparse, wanted):
        route = layer.route

        def counting(x: torch.Tensor, route: Any = route, counts: torch.Tensor = counts) -> Any:
            ids, weights = route(x)
            counts += torch.bincount(ids.flatten(), minlength=len(counts))
            return ids, weights

        layer.route = counting
    llm.generate(model.prompts, params, use_tqdm=False)
    found = executor.expert_load()
    assert found == [counts.tolist() for counts in wanted]
    assert sum(found[0]) == sum(len(prompt) + 4 for prompt in model.prompts) * sparse[0].top_k


def test_a_dense_model_has_none(make_llm: Callable[..., LLM]) -> None:
    assert make_llm().engine.executor.expert_load() is None

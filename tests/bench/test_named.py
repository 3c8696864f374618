"""The named workloads are the ones of the published tables, and their limits are the published limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.bench.named import CEILINGS, count_touched, facts_of, limit_seconds, parse_workload
from nanovllm.bench.workload import Workload
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig

MODELS = Path(__file__).resolve().parents[2] / "benchmarks/models"
TINY_MIXTRAL = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"


def test_main_has_the_familys_token_counts() -> None:
    workload, is_prefill = parse_workload("main")
    assert (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens) == (256, 142_827, 133_966)
    assert not is_prefill
    assert max(max(prompt) for prompt in workload.prompts) <= 10_000


def test_a_repeat_shares_no_prefix() -> None:
    for name in ("main", "8x512", "prefill 2x64"):
        first, again = parse_workload(name)[0], parse_workload(name, 1)[0]
        assert list(map(len, first.prompts)) == list(map(len, again.prompts))
        assert first.output_lens == again.output_lens
        assert not any(a[:16] == b[:16] for a, b in zip(first.prompts, again.prompts))


@pytest.mark.parametrize(
    ("model", "name", "limit"),
    [
        ("qwen3-0.6b", "main", 37_158),
        ("qwen3-0.6b", "1x512", 3_466),
        ("qwen3-0.6b", "64x2048", 11_805),
        ("qwen3-0.6b", "256x512", 44_775),
        ("qwen3-0.6b", "prefill 64x1024", 654_000),
        ("qwen3-8b", "main", 13_070),
        ("qwen3-8b", "64x512", 10_220),
        ("qwen3-8b", "prefill 16x1024", 51_519),
        ("mixtral-8x7b", "main", 4_560),
        ("mixtral-8x7b", "1x256", 172),
        ("mixtral-8x7b", "16x256", 748),
        ("mixtral-8x7b", "64x512", 2_618),
        ("mixtral-8x7b", "prefill 16x1024", 30_233),
    ],
)
def test_limits_are_the_published_ones(model: str, name: str, limit: float) -> None:
    config = ModelConfig.from_hf(json.loads((MODELS / model / "config.json").read_text()))
    workload, is_prefill = parse_workload(name)
    tokens = workload.num_prompt_tokens if is_prefill else workload.num_output_tokens
    found = tokens / limit_seconds(workload, ModelFacts(config), CEILINGS["NVIDIA H200"])
    # Of Mixtral's prompts the published limit also has the head's product for every token, which nobody needs.
    assert found == pytest.approx(limit, rel=0.015 if is_prefill and config.moe else 0.005)


def test_integers_read_less_and_compute_as_much() -> None:
    """The limit of a prompt is that of 16 bits, that of a decode is not."""
    config = ModelConfig.from_hf(json.loads((MODELS / "qwen3-8b/config.json").read_text()))
    plain, small = ModelFacts(config), ModelFacts(config, quantization="int4-128")
    limits = {}
    for name in ("prefill 16x1024", "1x256"):
        workload, _ = parse_workload(name)
        limits[name] = [limit_seconds(workload, facts, CEILINGS["NVIDIA H200"]) for facts in (plain, small)]
    assert limits["prefill 16x1024"][0] == limits["prefill 16x1024"][1]
    assert limits["1x256"][1] < 0.4 * limits["1x256"][0]


@pytest.mark.parametrize("forms", ["FP8", "FP8, bfloat16"])
def test_a_matrix_that_is_not_quantised_does_not_hide_the_others(forms: str) -> None:
    engine: Any = SimpleNamespace(
        config=EngineConfig(),
        describe=lambda: {"runs_on": {"quantization": forms}},
        model_config=ModelConfig.from_hf(json.loads((MODELS / "deepseek-v3/config.json").read_text())),
    )
    found = facts_of(engine)
    assert (found.quantization, found.expert_scales) == ("fp8", 128)


def test_two_ranks_read_half_each() -> None:
    whole = ModelFacts(ModelConfig.from_hf(json.loads((MODELS / "qwen3-8b/config.json").read_text())))
    workload, _ = parse_workload("8x512")
    one, two = (limit_seconds(workload, replace(whole, num_ranks=n), CEILINGS["NVIDIA H200"]) for n in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.001)


@pytest.mark.parametrize("name", ["", "64", "x512", "64x", "decode 1x2", "main2"])
def test_a_typo_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="64x512"):
        parse_workload(name)


def test_experts_touched_are_counted_and_the_model_is_left_as_it_was(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence touches top_k = 2 of 8 experts a layer; eight touch more; then nothing counts any more."""
    engine = make_llm(TINY_MIXTRAL).engine
    route = [layer.mlp.ops.route for layer in engine.executor.runner.model.layers]
    prompts = [[(7 * i + j) % 2048 for j in range(16)] for i in range(8)]
    one = count_touched(engine, Workload(prompts[:1], [16]), 0.6)
    many = count_touched(engine, Workload(prompts, [16] * 8), 0.6)
    assert one == 2
    assert 2 < many <= 8
    assert [layer.mlp.ops.route for layer in engine.executor.runner.model.layers] == route
    elsewhere = replace(engine.executor.probe(), _runner=None)  # as with ray: nothing of the model is in this process
    monkeypatch.setattr(engine.executor, "probe", lambda: elsewhere)
    assert count_touched(engine, Workload(prompts[:1], [2]), 0.6) is None


def test_tied_routers_touch_as_many_experts_as_one_token(make_llm: Callable[..., LLM]) -> None:
    """Of tokens, and of the limit: with all experts read, the card could not do what is measured."""
    engine = make_llm(TINY_MIXTRAL).engine
    engine.executor.probe().tie_routing()
    top_k = engine.model_config.moe.top_k
    assert count_touched(engine, Workload([[n, n + 1, n + 2] for n in range(24)], [4] * 24), 0) == top_k
    facts = ModelFacts(ModelConfig.from_hf(json.loads((MODELS / "deepseek-v2-lite/config.json").read_text())))
    workload, _ = parse_workload("64x512")
    spread, tied = (limit_seconds(workload, facts, CEILINGS["NVIDIA H200"], tied=tied) for tied in (False, True))
    assert workload.num_output_tokens / spread == pytest.approx(8346, rel=0.01)
    assert tied < spread / 3

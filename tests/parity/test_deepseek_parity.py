"""DeepSeek-V2 and V3 against transformers: tiny random models in fp32, with everything that latent attention and its
cache can get wrong: prompts in pieces, cached prefixes, sequences computed anew, several ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanovllm.attention import latent
from tests.cli.runner import Run
from tests.parity.test_parity import (
    SCENARIOS,
    LongAnswers,
    Tiny,
    check,
    check_batch,
    check_config_as,
    check_not_ignored,
    check_prefix_cache,
    check_prompt_logprobs,
    engine,
    greedy,
    long_answers,
    old_style,
)
from tests.tiny_models import DEEPSEEK_VARIANTS

every_family = pytest.mark.parametrize("name", list(DEEPSEEK_VARIANTS))
SCENES = ("one_batch", "chunked_prefill", "block_size_32", "decode_steps_5_small_cache")


@pytest.mark.parametrize("scenario", SCENES)
@every_family
def test_all_in_one_batch(tiny: Tiny, name: str, scenario: str) -> None:
    check_batch(tiny(name), SCENARIOS[scenario])


@every_family
def test_one_by_one_then_again_from_the_prefix_cache(tiny: Tiny, name: str) -> None:
    check_prefix_cache(tiny(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v2-lite", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("deepseek-v2-lite", {"num_experts_per_tok": 2}),
        ("deepseek-v2-groups", {"topk_method": "greedy"}),
        ("deepseek-v2-groups", {"topk_group": 3}),
        ("deepseek-v2-groups", {"routed_scaling_factor": 1.0}),
        ("deepseek-v3", {"norm_topk_prob": False}),
        ("deepseek-v3", {"topk_group": 4}),
        ("deepseek-v3", {"rope_interleave": False}),
    ],
)
def test_what_the_config_says_is_not_ignored(tiny: Tiny, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_not_ignored(tiny(name), changes, tmp_path)


def published_style(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the published models have it."""
    is_v3 = config["architectures"] == ["DeepseekV3ForCausalLM"]
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"} if is_v3 else {"scoring_func": "softmax"}
    return old_style({"layer_types": None, **config}) | more | {"moe_layer_freq": 1, "head_dim": ..., "ep_size": 1}


@every_family
def test_config_of_the_published_models(tiny: Tiny, name: str, tmp_path: Path) -> None:
    check_config_as(tiny(name), published_style, tmp_path)


def test_the_log_and_the_plan_say_what_a_token_takes(tiny: Tiny, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny("deepseek-v3").path
    with caplog.at_level("INFO", "nanovllm"), engine(path):
        pass
    assert f"KV cache: {3 * 30 * 4} bytes a token, expanded {3 * 4 * 30 * 4} (4.0 x)" in caplog.text
    assert "multi-token prediction" not in caplog.text  # config.json has such a layer, the file has not
    result = run("plan", "--model", str(path), "--gpu-memory-gb", "24", "--dtype", "float32")
    assert f"a token takes {3 * 30 * 4} bytes of KV cache" in result.out
    assert f"would take {3 * 4 * 30 * 4}, 4.0 times as much" in result.out


@pytest.fixture(scope="module")
def long(tiny: Tiny) -> LongAnswers:
    return cache(lambda name: long_answers(tiny(name)))


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_preemption_by_a_small_cache(tiny: Tiny, name: str, long: LongAnswers) -> None:
    model, answers = tiny(name), long(name)
    with engine(model.path, num_kvcache_blocks=8, max_num_batched_tokens=64) as llm:
        outputs = llm.generate([wanted.prompt for wanted in answers], greedy(max_tokens=40), use_tqdm=False)
        check(outputs, answers)
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["deepseek-v2-groups", "deepseek-v3"])
def test_prompt_logprobs_with_prefixes_in_many_pieces(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of five tokens: every chunk of eleven merges several pieces of what was cached before it."""
    monkeypatch.setattr(latent, "WORKSPACE_BYTES", 5 * 4 * (16 + 14) * 4)
    model = tiny(name)
    with engine(model.path, max_num_batched_tokens=11, max_num_seqs=4) as llm:
        outputs = llm.generate(model.prompts, greedy(prompt_logprobs=5), use_tqdm=False)
    check_prompt_logprobs(outputs, model.answers)

"""Mixtral and Qwen3-MoE against transformers: tiny random models in fp32, and a small trained one.

The scenarios are those of test_parity.py in which a sparse layer can go wrong: tokens of several sequences in one step
take the same expert, prompts come in pieces, decodes join prompts, sequences are computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, ConfigError, ModelError
from tests.parity.test_parity import (
    SCENARIOS,
    Tiny,
    check_batch,
    check_config_as,
    check_not_ignored,
    check_prefix_cache,
    check_prompt_logprobs,
    engine,
    greedy,
    old_style,
)
from tests.tiny_models import MOE_VARIANTS, VARIANTS, hf_logprobs, load_hf

TRAINED = Path(__file__).parent.parent / "fixtures" / "tiny-mixtral"
every_family = pytest.mark.parametrize("name", list(MOE_VARIANTS))


@pytest.mark.parametrize("scenario", ["one_batch", "chunked_prefill", "sdpa_math", "decode_steps_5_small_cache"])
@every_family
def test_all_in_one_batch(tiny: Tiny, name: str, scenario: str) -> None:
    check_batch(tiny(name), SCENARIOS[scenario])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-dense-layers"])
def test_one_by_one_then_again_from_the_prefix_cache(tiny: Tiny, name: str) -> None:
    check_prefix_cache(tiny(name))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_prompt_logprobs(tiny: Tiny, name: str) -> None:
    model = tiny(name)
    with engine(model.path, max_num_batched_tokens=11, max_num_seqs=4) as llm:
        outputs = llm.generate(model.prompts, greedy(prompt_logprobs=5), use_tqdm=False)
    check_prompt_logprobs(outputs, model.answers)


def published_style(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the published models have it: transformers 5 writes num_local_experts for Qwen3-MoE too."""
    changes = old_style({"layer_types": None, **config})
    if config["model_type"] == "qwen3_moe":
        num_experts = config.get("num_local_experts", config.get("num_experts"))
        changes |= {"num_local_experts": ..., "num_experts": num_experts, "max_window_layers": 48}
    return changes


@every_family
def test_config_of_the_published_models(tiny: Tiny, name: str, tmp_path: Path) -> None:
    check_config_as(tiny(name), published_style, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("mixtral-window-sharded", {"sliding_window": None}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("qwen3-moe-renormalised", {"norm_topk_prob": False}),
        ("qwen3-moe-every-second", {"use_sliding_window": False}),
    ],
)
def test_what_the_config_says_is_not_ignored(tiny: Tiny, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_not_ignored(tiny(name), changes, tmp_path)


def test_mixtral_on_ranks_that_do_not_divide_it_is_refused_and_not_another_model(tiny: Tiny) -> None:
    """With tensor_parallel_size > 1 too: no family may silently stand in for another."""
    with pytest.raises(ConfigError, match="tensor_parallel_size=7"):
        engine(tiny("mixtral").path, tensor_parallel_size=7)


def test_the_fused_layout_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    """transformers 5 can save its own in-memory form, all experts of a layer in one tensor."""
    model = tiny("mixtral")
    model.load_hf().save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ModelError, match=r"not in the model: .*experts\.gate_up_proj"):
        engine(tmp_path)


def test_every_variant_takes_the_path_it_is_for(tiny: Tiny) -> None:
    assert not MOE_VARIANTS.keys() & VARIANTS.keys()
    sparse = {}
    for name in MOE_VARIANTS:
        with engine(tiny(name).path) as llm:
            layers = llm.engine.executor.runner.model.layers
            sparse[name] = "".join("01"[hasattr(layer.mlp, "experts")] for layer in layers)
    assert sparse == {
        "mixtral": "11",
        "mixtral-top1": "11",
        "mixtral-window-sharded": "11",
        "qwen3-moe": "11",
        "qwen3-moe-renormalised": "11",
        "qwen3-moe-dense-layers": "101",
        "qwen3-moe-every-second": "0101",
    }


# ---- trained weights -------------------------------------------------------------------------------------------------

PROMPTS = [
    "Fellow citizens of the Senate and",
    "The Congress of the United States",
    "Our relations with Great Britain have been",
    "The public debt",
    "I recommend that the appropriation for the Army and the Navy be increased, because",
]
WINDOW, NUM_WINDOWS = 512, 20


@pytest.fixture(scope="module")
def trained() -> Any:
    return load_hf(TRAINED)


@pytest.fixture(scope="module")
def make_trained() -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults = {"device": "cpu", "max_model_len": 640, "max_num_batched_tokens": 2048, "num_kvcache_blocks": 200}
        return LLM(str(TRAINED), **{**defaults, **options})

    return make


@torch.no_grad()
def test_trained_mixtral_writes_the_same_text(make_trained: Callable[..., LLM], trained: Any) -> None:
    with make_trained(dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, greedy(max_tokens=32, logprobs=None), use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    assert outputs[0]["text"].startswith(" House of Representatives:")
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        wanted = trained.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        assert output["token_ids"] == wanted
        assert output["text"] == tokenizer.decode(wanted)


@cache
def held_out_windows(num_windows: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    text = (TRAINED / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(TRAINED)(text[:60_000])["input_ids"]
    assert len(ids) >= num_windows * WINDOW
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(num_windows)]


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    """Of all tokens but the first of each window."""
    outputs = llm.generate(windows, greedy(max_tokens=1, logprobs=None, prompt_logprobs=0), use_tqdm=False)
    scores = [
        position[token].logprob
        for output in outputs
        for position, token in zip(output.prompt_logprobs or [], output.prompt_token_ids)
        if position is not None
    ]
    assert len(scores) == len(windows) * (WINDOW - 1)
    return math.exp(-sum(scores) / len(scores))


def test_trained_mixtral_has_the_same_perplexity(make_trained: Callable[..., LLM], trained: Any) -> None:
    windows = held_out_windows(NUM_WINDOWS)
    with make_trained(dtype="float32") as llm:
        ours = perplexity(llm, windows)
    scores = torch.cat([hf_logprobs(trained, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for ids in windows])
    theirs = math.exp(-scores.double().mean().item())
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-3)
    assert theirs == pytest.approx(69.9, abs=0.1)  # as the folder's README says


def test_trained_mixtral_in_16_bits_stays_close(make_trained: Callable[..., LLM]) -> None:
    windows = held_out_windows(NUM_WINDOWS)[:4]
    with make_trained(dtype="float32") as llm:
        exact = perplexity(llm, windows)
    with make_trained(dtype="bfloat16") as llm:
        assert perplexity(llm, windows) == pytest.approx(exact, rel=0.02)

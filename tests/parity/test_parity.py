"""Greedy tokens and logprobs equal to transformers', for every family and whatever the engine does to a batch.

The reference is computed once per model; the scenarios differ in how the engine arrives at the same answer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from tests.tiny_models import (
    MAX_POSITION,
    NEW_TOKENS,
    VARIANTS,
    Answer,
    TinyModel,
    answer,
    edit_config,
    hf_logprobs,
    random_prompts,
)

TOLERANCE = 1e-4
BLOCK = 16
Tiny = Callable[[str], TinyModel]
LongAnswers = Callable[[str], tuple[Answer, ...]]
every_family = pytest.mark.parametrize("name", list(VARIANTS))
# Where it does not matter how positions are rotated or how files are cut: shared heads, windows of all and of some
# layers, norms and biases.
FEW = ("llama-gqa-tied", "mistral-window", "qwen2-window", "qwen3-bias-tied")


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 5, **changes})


def engine(path: Path, **options: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_POSITION,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_kvcache_blocks": 128,
        "kvcache_block_size": BLOCK,
    }
    return LLM(str(path), **{**defaults, **options})


def check_position(got: dict[int, Any], token: int, expected: torch.Tensor) -> None:
    assert next(iter(got)) == token, "the chosen token comes first"
    for token_id, entry in got.items():
        assert entry.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    best = sorted((entry.logprob for entry in got.values()), reverse=True)[:5]
    assert best == pytest.approx(expected.topk(5).values.tolist(), abs=TOLERANCE)
    # Two logprobs may lie closer than the rounding of a processor: the rank is one of those that it allows.
    surely, perhaps = (1 + int((expected > expected[token] + shift).sum()) for shift in (TOLERANCE, -TOLERANCE))
    assert surely <= got[token].rank <= perhaps


def check(outputs: list[RequestOutput], answers: tuple[Answer, ...]) -> None:
    assert len(outputs) == len(answers)
    for output, wanted in zip(outputs, answers):
        assert output.prompt_token_ids == wanted.prompt
        for completion in output.outputs:
            assert completion.token_ids == wanted.tokens, f"prompt of {len(wanted.prompt)} tokens"
            assert completion.finish_reason == "length"
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(wanted.tokens)
            for i, position in enumerate(completion.logprobs):
                check_position(position, wanted.tokens[i], wanted.logprobs[len(wanted.prompt) - 1 + i])


@pytest.fixture(scope="module")
def long(tiny: Tiny) -> LongAnswers:
    return cache(lambda name: long_answers(tiny(name)))


SCENARIOS: dict[str, dict[str, Any]] = {
    "one_batch": {},
    "chunked_prefill": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "few_at_once": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "block_size_32": {"kvcache_block_size": 32, "max_num_batched_tokens": 48},
    "sdpa": {"attn_backend": "sdpa", "max_num_batched_tokens": 40},
    "sdpa_math": {"attn_backend": "sdpa.math", "max_num_batched_tokens": 40},
    "decode_steps_4": {"decode_steps": 4},
    "decode_steps_5_small_cache": {"decode_steps": 5, "num_kvcache_blocks": 9, "max_num_batched_tokens": 33},
}


def check_batch(model: TinyModel, options: dict[str, Any]) -> None:
    with engine(model.path, **options) as llm:
        check(llm.generate(model.prompts, greedy(), use_tqdm=False), model.answers)


def check_prefix_cache(model: TinyModel) -> None:
    """Prompts of exactly k blocks hit for all but their last block, whose last token is computed anew."""
    with engine(model.path) as llm:
        for wanted in model.answers:
            check(llm.generate(wanted.prompt, greedy(), use_tqdm=False), (wanted,))
        again = llm.generate(model.prompts, greedy(), use_tqdm=False)
        check(again, model.answers)
        assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // BLOCK * BLOCK for p in model.prompts]


def check_prompt_logprobs(outputs: list[RequestOutput], answers: tuple[Answer, ...]) -> None:
    check(outputs, answers)
    for output, wanted in zip(outputs, answers):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(wanted.prompt)
        for i, position in enumerate(output.prompt_logprobs[1:]):
            assert position is not None
            check_position(position, wanted.prompt[i + 1], wanted.logprobs[i])


def check_config_as(model: TinyModel, style: Callable[[dict[str, Any]], dict[str, Any]], folder: Path) -> None:
    """Written otherwise, it is the same model."""
    copy = Path(shutil.copytree(model.path, folder / "other"))
    edit_config(copy, **style(json.loads((copy / "config.json").read_text())))
    with engine(copy) as llm:
        check(llm.generate(model.prompts, greedy(), use_tqdm=False), model.answers)


def check_not_ignored(model: TinyModel, changes: dict[str, Any], folder: Path) -> None:
    """And the proof that the other tests can fail."""
    copy = Path(shutil.copytree(model.path, folder / "changed"))
    edit_config(copy, **changes)
    with engine(copy) as llm:
        outputs = llm.generate(model.prompts, greedy(), use_tqdm=False)
    assert [o["token_ids"] for o in outputs][-1] != model.tokens[-1]


ON_EVERY_FAMILY = ("one_batch", "chunked_prefill", "decode_steps_5_small_cache")


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, scenario) for name in VARIANTS for scenario in SCENARIOS if name in FEW or scenario in ON_EVERY_FAMILY],
)
def test_all_in_one_batch(tiny: Tiny, name: str, scenario: str) -> None:
    check_batch(tiny(name), SCENARIOS[scenario])


@every_family
def test_one_by_one_then_again_from_the_prefix_cache(tiny: Tiny, name: str) -> None:
    check_prefix_cache(tiny(name))


def long_answers(model: TinyModel) -> tuple[Answer, ...]:
    """Outputs of several blocks: admission keeps one block for every sequence that runs, so only these run out."""
    hf = model.load_hf()
    found = (answer(hf, prompt, 40) for seed in range(1, 9) for prompt in random_prompts((15, 16, 17, 33), seed))
    return tuple(islice((wanted for wanted in found if wanted is not None), 5))


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"decode_steps": 4}])
@pytest.mark.parametrize("name", FEW)
def test_preemption_by_a_small_cache(tiny: Tiny, name: str, options: dict[str, Any], long: LongAnswers) -> None:
    """Five sequences begin with some 7 blocks and end with some 20; there are 8."""
    model, answers = tiny(name), long(name)
    with engine(model.path, num_kvcache_blocks=8, max_num_batched_tokens=64, **options) as llm:
        outputs = llm.generate([wanted.prompt for wanted in answers], greedy(max_tokens=40), use_tqdm=False)
        check(outputs, answers)
        assert llm.engine.scheduler.num_preemptions > 0
        assert sum(o.metrics.num_preemptions for o in outputs) == llm.engine.scheduler.num_preemptions
        assert llm.engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize(("name", "budget"), [*((name, 11) for name in VARIANTS), *((name, 512) for name in FEW)])
def test_prompt_logprobs(tiny: Tiny, name: str, budget: int) -> None:
    model = tiny(name)
    with engine(model.path, max_num_batched_tokens=budget, max_num_seqs=4) as llm:
        llm.generate(model.prompts, greedy(), use_tqdm=False)  # what is cached must not cost any position its logprobs
        outputs = llm.generate(model.prompts, greedy(prompt_logprobs=5), use_tqdm=False)
    check_prompt_logprobs(outputs, model.answers)


@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 12, "max_num_batched_tokens": 32}])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-window", "qwen3"])
def test_n_completions_are_n_times_the_greedy_one(tiny: Tiny, name: str, options: dict[str, Any]) -> None:
    model = tiny(name)
    with engine(model.path, **options) as llm:
        outputs = llm.generate(model.prompts, greedy(n=3), use_tqdm=False)
    assert all([c.index for c in output.outputs] == [0, 1, 2] for output in outputs)
    check(outputs, model.answers)


@pytest.mark.parametrize("cut", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-window", "qwen2-window", "llama-yarn"])
def test_prefixes_shared_in_the_same_batch(tiny: Tiny, name: str, cut: int) -> None:
    """Branches of one long prompt, and the same prompt several times, all in one step."""
    model = tiny(name)
    trunk, hf = model.answers[-1], model.load_hf()
    branches = [answer(hf, trunk.prompt[:cut] + [7 + i] * (1 + 8 * i)) for i in range(6)]
    answers = (trunk, *(found for found in branches if found is not None), trunk, trunk)
    assert len(answers) > 5, "too many near-ties to mean anything"
    with engine(model.path) as llm:
        outputs = llm.generate([wanted.prompt for wanted in answers], greedy(), use_tqdm=False)
        check(outputs, answers)
        shared = cut // BLOCK * BLOCK
        assert [o.num_cached_tokens for o in outputs[1:]] == [shared] * (len(answers) - 3) + [64, 64]
        check(llm.generate([wanted.prompt for wanted in reversed(answers)], greedy(), use_tqdm=False), answers[::-1])


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it."""
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    return {
        "rope_parameters": ...,
        "layer_types": ...,
        "dtype": ...,
        "torch_dtype": config["dtype"],
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


@every_family
def test_config_of_transformers_4(tiny: Tiny, name: str, tmp_path: Path) -> None:
    check_config_as(tiny(name), old_style, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama-linear", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama-llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama-yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("mistral-window", {"sliding_window": None}),
        ("mistral-window", {"sliding_window": 21}),
        ("qwen2-window", {"layer_types": ["full_attention"] * 3}),
        ("qwen2-window", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen3", {"rms_norm_eps": 0.3}),
    ],
)
def test_what_the_config_says_is_not_ignored(tiny: Tiny, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """RoPE scaling is honoured, and the proof that the tests above can fail: another config gives another text."""
    check_not_ignored(tiny(name), changes, tmp_path)


def test_dynamic_rope_beyond_the_trained_length(tiny: Tiny) -> None:
    """transformers stretches for the text at hand, we for the longest text served: equal when those are."""
    model = tiny("llama-dynamic")
    length = MAX_POSITION + 57
    prompt = torch.randint(3, 300, (length - 1,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = hf_logprobs(model.load_hf(), [*prompt, 5])
    with engine(model.path, max_model_len=length) as llm:
        output = llm.generate(prompt, greedy(max_tokens=1, prompt_logprobs=5), use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    for i, position in enumerate(output.prompt_logprobs[1:]):
        assert position is not None
        check_position(position, prompt[i + 1], expected[i])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tiny: Tiny, dtype: str) -> None:
    """Not equal, but no further away than 16 bits explain: a wrong head or position would be off by whole units."""
    model = tiny("llama-gqa-tied")
    with engine(model.path, dtype=dtype) as llm:
        outputs = llm.generate(model.prompts, greedy(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    errors = [
        abs(position[token].logprob - wanted.logprobs[i, token].item())
        for output, wanted in zip(outputs, model.answers)
        for i, (position, token) in enumerate(zip((output.prompt_logprobs or [])[1:], wanted.prompt[1:]))
        if position is not None
    ]
    assert len(errors) > 300
    assert sum(errors) / len(errors) < (0.5 if dtype == "bfloat16" else 0.05)

"""Guesses in the captured loop, as device_path_cases.py runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.ops.opset import triton_ops
from nanovllm.runner import build, captured_steps
from nanovllm.runner.model_runner import ModelRunner, try_largest_step
from tests.drafting import always
from tests.mtp_models import MtpReference, add_knowing_layer, add_mtp_layer
from tests.runner.device_path_cases import OPTIONS, logprobs, on_device, tokens
from tests.tiny_models import TinyModel

FEW = [31, 32, 33]  # "9", ":", ";": a lookup of single tokens is right now and then
# The least used token is next, so the text repeats itself, and a wrong count changes it.
COUNTING: dict[str, Any] = {"temperature": 0, "frequency_penalty": 2.0, "max_tokens": 40}
GUESSED = [
    ([5, 9, 2, 7, 1, 3], {"temperature": 0, "logprobs": 2}),
    ([33, 31, 32] * 6, {"seed": 3, "allowed_token_ids": FEW, "logprobs": 25}),
    ([31, 33], {"seed": 4, "allowed_token_ids": FEW, "top_p": 0.9, "top_k": 3}),
    ([32, 32, 31], {"seed": 5, "allowed_token_ids": FEW, "repetition_penalty": 1.4, "frequency_penalty": 2.0}),
    ([40, 41], {"seed": 6, "allowed_token_ids": FEW, "min_tokens": 3, "stop_token_ids": [32], "max_tokens": 20}),
    ([41, 42], {"seed": 8, "allowed_token_ids": FEW, "logit_bias": {32: 1.5}, "min_tokens": 9}),
    ([33] * 17, {"seed": 7, "allowed_token_ids": FEW, "n": 2}),
    ([31, 32] * 3, {"allowed_token_ids": [*FEW, 40], "presence_penalty": 0.4, "logprobs": 2, **COUNTING}),
    ([31, 33, 32] * 4, {"seed": 10, "allowed_token_ids": FEW, "bad_words": ["9:", ";9;", ":::"], "max_tokens": 22}),
]
FORM: dict[str, Any] = {"ignore_eos": False, "max_tokens": 30}
GUESSED_IN_A_FORM: list[tuple[list[int], dict[str, Any]]] = [
    ([31, 32, 33] * 3, {**FORM, "seed": 1, "structured_outputs": {"regex": "[9:;]{14,18}"}, "logprobs": 2}),
    ([31, 32, 31], {**FORM, "seed": 2, "structured_outputs": {"regex": "(9:|:9|;){6,9}"}, "n": 2}),
    ([33] * 17, {**FORM, "structured_outputs": {"regex": "[9:;]{24,28}"}, **COUNTING}),
    ([33, 31, 32] * 6, {"seed": 3, "allowed_token_ids": FEW}),
    ([31, 33, 32] * 2, {"seed": 7, "allowed_token_ids": FEW, "bad_words": ["9:"], "max_tokens": 20}),
]


def watch_masks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The guesses of each step with a grammar: before and after it was asked."""
    before: list[int] = []
    after: list[int] = []
    sampler: Any = runner.sampler
    mask_guesses = sampler.mask_guesses

    def watched(entries: Any, fed: np.ndarray, exists: np.ndarray) -> np.ndarray:
        left = mask_guesses(entries, fed, exists)
        before.append(int(exists[:, 1:].sum()))
        after.append(int(left[:, 1:].sum()))
        return left

    monkeypatch.setattr(sampler, "mask_guesses", watched)
    return before, after


@pytest.mark.parametrize(
    ("name", "draft", "has_form"),
    [
        ("llama-mqa-bias", None, False),
        ("llama-mqa-bias", None, True),
        ("llama-mqa-bias", "llama-mqa-bias", False),
        ("llama-mqa-bias", "llama-mqa-bias", True),
        ("deepseek-v3", None, False),
        ("mixtral", None, True),
    ],
)
def test_guesses_change_nothing(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, name: str, draft: str | None, has_form: bool
) -> None:
    """By lookup; and by the model itself, which is right, also with penalties. With a grammar, which it does not know,
    it often is not."""
    requests = GUESSED if name == "llama-mqa-bias" else GUESSED[1:4]
    if has_form:
        requests = GUESSED_IN_A_FORM if name == "llama-mqa-bias" else GUESSED_IN_A_FORM[:2]
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [SamplingParams(**{"max_tokens": 14, "ignore_eos": True, **given}) for _, given in requests]
    options = {**OPTIONS, "max_num_batched_tokens": 24, "num_kvcache_blocks": 9}
    path = str(tiny(name).path)
    with LLM(path, **options) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    how: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if draft is not None:
        how = {"method": "draft_model", "model": str(tiny(draft).path)}
    with LLM(path, **options, speculative_config={"num_speculative_tokens": 3, **how}) as llm:
        runner = on_device(llm)
        always(llm, 3, 3, 0, 0, 2)  # two plans are in flight where two in turn do not guess
        fed, left = watch_masks(runner, monkeypatch)
        device = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats
    assert (sum(fed) > sum(left)) == has_form
    if all("structured_outputs" in given for _, given in requests):
        assert sum(left) >= stats.num_drafted  # what a grammar forbids is no guess
    for request, one, other in zip(requests, device, plain):
        assert tokens(one) == tokens(other), request
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3), request
    assert 0 < stats.num_accepted <= stats.num_drafted
    assert 0 < stats.num_drafts <= stats.num_drafted
    assert has_form or (stats.num_accepted > 0.9 * stats.num_drafted) == (draft is not None)
    assert sum(out.metrics.num_accepted for out in device) == stats.num_accepted
    if name == "llama-mqa-bias" and draft is None:
        accepted = [out.metrics.num_accepted for out in device]
        assert all(accepted) if has_form else all(accepted[3:]), accepted


@pytest.mark.parametrize("knows", [False, True])
def test_the_models_own_layer_guesses(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows: bool
) -> None:
    """Prompts in chunks beside decodes, plans with and without guesses. Each greedy guess is that of the formulas, so K
    and V of the layer and its ring of hidden states are right in captured steps, too."""
    model = tiny("deepseek-v3")
    (add_knowing_layer if knows else add_mtp_layer)(model.path, tmp_path)
    prompts = [[5, 9, 2, 7, 1, 3], list(range(20, 50)), [31], [33] * 17, [40, 41]]
    given: list[dict[str, Any]] = [{"temperature": 0}] * 3
    given += [{"temperature": 1.0, "seed": 3}, {"temperature": 0, "repetition_penalty": 1.2}]
    params = [SamplingParams(**{"max_tokens": 18 - i, "ignore_eos": True, **one}) for i, one in enumerate(given)]
    options = {**OPTIONS, "max_num_batched_tokens": 24, "num_kvcache_blocks": 14, "enable_prefix_caching": False}
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    with LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
        plain = llm.generate(inputs, params, use_tqdm=False)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    how = {"method": "mtp", "num_speculative_tokens": 2}
    found: list[tuple[list[int], list[int]]] = []
    with LLM(str(tmp_path), skip_tokenizer_init=True, **options, speculative_config=how) as llm:
        drafter = llm.engine.executor.runner.drafter
        guess = drafter.guess

        def watched(state: Any, history: torch.Tensor, tables: torch.Tensor, ints: torch.Tensor, num: int) -> None:
            guess(state, history, tables, ints, num)
            rows, tokens = state.rows.view(-1, 1 + num), state.tokens.view(-1, 1 + num)
            for lane, row in enumerate(state.lanes.tolist()):
                if row >= 0 and rows[lane, -1] >= 0:
                    text = history[row, : int(state.ends[lane]) + 1].tolist()
                    found.append((text, tokens[lane, 1:].tolist()))

        monkeypatch.setattr(drafter, "guess", watched)
        runner, blueprint = on_device(llm), llm.engine.executor.blueprint
        try_largest_step(runner.model, blueprint.device, blueprint.limits, 5)  # as on a card, before there is a cache
        always(llm, 2, 0, 0, 1)
        device = llm.generate(inputs, params, use_tqdm=False)
        stats = llm.engine.stats
    for one, other in zip(device, plain):
        assert tokens(one) == tokens(other)
    assert stats.num_drafted > 10
    if knows:
        assert stats.num_accepted > 0.95 * stats.num_drafted
        return
    reference = MtpReference(model, tmp_path)
    greedy = [(text, new) for text, new in found if any(text[: len(ids)] == ids for ids in prompts[:3])]
    assert {len(new) for _, new in greedy} == {1, 2}
    for text, new in greedy:
        reference.check(text, new)


def test_guesses_are_loads_of_experts(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is fed counts, right or wrong; padding does not. So EPLB sees plans with guesses too."""
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in ([33, 31, 32] * 4, [31, 33], [40] * 5)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=FEW)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    how = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 2}
    options = {**OPTIONS, "decode_steps": 1, "max_num_batched_tokens": 32}
    with LLM(str(tiny("mixtral").path), **options, speculative_config=how) as llm:
        loop: Any = on_device(llm)._draft_loop
        feed, fed = loop._feed, []

        def watched(size: int, num: int) -> torch.Tensor:
            fed.append(int((loop._state.first(size, num).rows >= 0).sum()))
            return feed(size, num)

        monkeypatch.setattr(loop, "_feed", watched)
        always(llm, 2)
        llm.engine.executor.expert_load()
        llm.generate(prompts, params, use_tqdm=False)
        [total] = {sum(layer) for layer in llm.engine.executor.expert_load()}
        stats = llm.engine.stats
    assert stats.num_drafted > stats.num_accepted > 0
    assert total == (12 + 2 + 5 + sum(fed)) * 2

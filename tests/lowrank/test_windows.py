"""The model without engine and cache gives what transformers gives, with gradients, and padding changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm.errors import ModelError
from nanovllm.lowrank.compress.evaluate import measure
from nanovllm.lowrank.compress.stream import run_model
from nanovllm.lowrank.compress.text import Windows
from tests.lowrank.rig import TRAINED, opened
from tests.tiny_models import DEEPSEEK_VARIANTS, MOE_VARIANTS, VARIANTS, hf_logprobs, hf_model, random_prompts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, object]]:
    def save(name: str) -> tuple[Path, object]:
        folder = tmp_path_factory.mktemp(name)
        variant = {**VARIANTS, **MOE_VARIANTS, **DEEPSEEK_VARIANTS}[name]
        model = hf_model(variant, 1)
        model.save_pretrained(folder, **variant.save)
        return folder, model

    return save


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "mixtral-window-sharded",
        "qwen3-moe-renormalised",
        "qwen3-moe-dense-layers",
        "deepseek-v2-lite",
        "deepseek-v3",
    ],
)
def test_logits_are_those_of_transformers(saved: Callable[[str], tuple[Path, object]], name: str) -> None:
    folder, reference = saved(name)
    prompts = random_prompts((1 + 1, 33, 40))
    windows = Windows.pack(prompts, 64)  # padded to 40
    with opened(folder) as model, torch.no_grad():
        found = run_model(model, windows.ids, model.dense_experts).log_softmax(-1).unflatten(0, windows.ids.shape)
    for i, prompt in enumerate(prompts):
        assert torch.allclose(found[i, : len(prompt)], hf_logprobs(reference, prompt), atol=2e-4)


def test_gradients_reach_the_input() -> None:
    with opened() as model:
        h = model.embed(torch.arange(5, 13)[None]).clone().requires_grad_()
        x, after = model.attend(1, h, 8)
        (x.sum() + after.square().sum()).backward()
    assert h.grad is not None
    assert float(h.grad.abs().min(0).values.max()) > 0


def test_the_teacher_against_itself() -> None:
    windows = Windows.pack([list(range(5, 70)), list(range(100, 130))], 64)
    with opened() as model:
        found = measure(model, windows, model.dense_experts)
    assert (found.kl, found.top1, found.router) == (pytest.approx(0, abs=1e-9), 1.0, 1.0)
    assert found.perplexity == found.teacher_perplexity
    assert found.num_tokens == 64 + 30  # the one token that is left of the first makes no window


def test_a_dense_model_is_refused(saved: Callable[[str], tuple[Path, object]]) -> None:
    folder, _ = saved("llama-gqa-tied")
    with pytest.raises(ModelError, match="no experts to compress"), opened(folder):
        pass


def test_windows_are_cut_and_padded() -> None:
    for length, lens in ((4, [4, 4, 2, 3]), (5, [5, 5, 3]), (9, [9, 3]), (10, [10, 3]), (11, [10, 3])):
        windows = Windows.pack([list(range(10)), [7, 8, 9], [1]], length)
        assert windows.lens.tolist() == lens, length
        assert windows.num_tokens == int(windows.real().sum()) == sum(lens)
    assert TRAINED.is_dir()

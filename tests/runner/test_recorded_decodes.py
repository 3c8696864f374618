"""Decode steps on a CPU: replayed ones give the tokens and logprobs of called ones, whatever the batch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.ops.native.build import load_library
from nanovllm.ops.native.ops import NativeOps
from nanovllm.runner import model_runner
from tests.tiny_models import TinyModel, Variant, hf_model

pytestmark = pytest.mark.skipif(isinstance(load_library(), str), reason="no native kernels")
PROMPTS = [[5 + i, *range(20, 20 + 3 * i)] for i in range(20)]


def answers(llm: LLM) -> list[Any]:
    """Lengths differ, so there are fewer sequences step by step; some are drawn, some have logprobs or penalties."""
    many = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=2 + i, ignore_eos=True, **more)
        for i, more in enumerate([{}, {"logprobs": 3}, {"repetition_penalty": 1.2}, {"top_p": 0.8}] * 5)
    ]
    found = llm.generate(PROMPTS, many, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in found]


@pytest.mark.parametrize(
    ("family", "quantization", "kv_cache_dtype", "num_blocks"),
    [  # of 24 blocks: sequences are preempted
        ("Qwen3", "int8", "auto", 128),
        ("Qwen2", "int4", "int8", 24),
        ("Mistral", "none", "float16", 24),
    ],
)
def test_replayed_steps_give_the_tokens_of_called_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    quantization: str,
    kv_cache_dtype: str,
    num_blocks: int,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "sliding_window": 24}
    hf_model(Variant(family, sizes), 0).save_pretrained(tmp_path)
    replays, replay = [], NativeOps.replay
    monkeypatch.setattr(NativeOps, "replay", lambda self, calls: replays.append(len(calls)) or replay(self, calls))
    found = []
    for records in (True, False):
        if not records:
            monkeypatch.setattr(model_runner, "can_record", lambda model: False)
        options = {
            "max_num_seqs": 20,
            "max_num_batched_tokens": 64,
            "num_kvcache_blocks": num_blocks,
            "kv_cache_dtype": kv_cache_dtype,
            "skip_tokenizer_init": True,
        }
        with LLM(str(tmp_path), device="cpu", quantization=quantization, block_size=16, **options) as llm:
            found.append([answers(llm), answers(llm)])  # every size comes again
        assert bool(replays) == records
        replays.clear()
    assert found[0] == found[1]


def test_one_token_of_a_prompt_is_no_decode(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a prompt that are as short as a decode, alone and beside decodes, are not sampled."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    found = []
    for records in (True, False):
        if not records:
            monkeypatch.setattr(model_runner, "can_record", lambda model: False)
        for budget in (1, 4):
            llm = make_llm(max_num_seqs=budget, max_num_batched_tokens=budget)
            found.append([out.outputs[0].token_ids for out in llm.generate(PROMPTS[:5], params, use_tqdm=False)])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_torch_takes_by_default_does_not_matter(tmp_path: Path, dtype: torch.dtype) -> None:
    """C writes float32 into memory that PyTorch allocates."""
    hf_model(Variant("Llama", {"hidden_size": 64, "intermediate_size": 96}), 0).save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            with LLM(str(tmp_path), device="cpu", quantization="int8", skip_tokenizer_init=True) as llm:
                out = llm.generate([list(range(5, 105)), [7]], params, use_tqdm=False)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([each.outputs[0].token_ids for each in out])
    assert found[0] == found[1]


def test_a_model_with_experts_is_called(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeOps, "replay", lambda self, calls: pytest.fail("replayed"))
    with LLM(str(tiny("mixtral").path), device="cpu", quantization="int8") as llm:
        answers(llm)

"""Engines with experts in 8-bit floats on the kernels of a GPU, interpreted (`test_device_path.py`): what they write is
what the expanded numbers give to rounding, and offloaded experts give the bits of resident ones."""

import os
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.memory.budget import GIB
from nanovllm.moe import check
from nanovllm.ops.opset import triton_ops
from nanovllm.ops.triton import moe_experts
from nanovllm.runner import build, captured_steps
from tests.moe.experts8 import BLOCK_FILE, MODELS, ROW_FILE, as_on_a_gpu
from tests.ops.quick_interpreter import skip_overflow_checks
from tests.runner.device_path_cases import OPTIONS, logprobs, on_device, tokens
from tests.weights.quantised_samples import write_folders

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"
skip_overflow_checks()

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2], [45])]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)


def generate(path: Path, device: bool = False, **options: Any) -> list[Any]:
    backend = "auto" if "kv_lora_rank" in (path / "config.json").read_text() else "sdpa"
    with LLM(str(path), **{**OPTIONS, "skip_tokenizer_init": True, "attn_backend": backend, **options}) as llm:
        if device:
            on_device(llm)
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def answers(outputs: list[Any]) -> list[Any]:
    return [(c.token_ids, c.logprobs) for output in outputs for c in output.outputs]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of experts that the kernels were given."""
    seen: list[str] = []
    pairs = moe_experts.expert_pairs

    def noted(x: Any, gate_up: Any, *args: Any, **more: Any) -> Any:
        seen.append(type(gate_up).__name__)
        return pairs(x, gate_up, *args, **more)

    monkeypatch.setattr(moe_experts, "expert_pairs", noted)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(check, "TRIED_ROWS", (1, 9))  # at the start
    return seen


@pytest.mark.parametrize("model", MODELS)
def test_kernels_give_what_expanded_numbers_give(
    model: str, tmp_path: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = write_folders(tmp_path, *MODELS[model], BLOCK_FILE)
    expected = generate(plain)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    resident = generate(small)
    offloaded = generate(small, expert_placement="offload", expert_cache_gb=4 * 70_000 / GIB)
    assert answers(offloaded) == answers(resident)
    runs = [resident]
    if model == "qwen3-moe":  # in graphs, as a GPU decodes; the smallest experts
        runs.append(generate(small, device=True))
    for found in runs:
        for one, other in zip(found, expected):
            assert tokens(one) == tokens(other)
            assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)
    assert set(gpu) == {"ScaledStack"}


def test_quantised_while_it_is_loaded(tmp_path: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rounding than the file's, so near what the numbers of the file give; placement changes no bit."""
    _, plain = write_folders(tmp_path, *MODELS["qwen3-moe"], ROW_FILE)
    expected = generate(plain)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    resident = generate(plain, quantization="fp8")
    offloaded = generate(plain, quantization="fp8", expert_placement="offload")
    assert answers(offloaded) == answers(resident)
    assert set(gpu) == {"ScaledStack"}
    # These numbers are multiples of the scales of their rows already: nothing is rounded again but the scales.
    assert logprobs(resident[0]) == pytest.approx(logprobs(expected[0]), abs=1e-3)

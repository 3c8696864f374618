"""Engines with experts in integers on the kernels of a GPU, interpreted (`test_device_path.py`): what they write is
what the expanded numbers give to rounding, and offloaded experts give the bits of resident ones."""

import os
from pathlib import Path

import pytest

from nanovllm.memory.budget import GIB
from nanovllm.ops.opset import triton_ops
from nanovllm.ops.triton import integers, moe_integers
from nanovllm.runner import build
from tests.moe.experts8 import FILES4, MODELS4
from tests.ops.quick_interpreter import skip_overflow_checks
from tests.runner.device_path_cases import logprobs
from tests.runner.experts8_cases import answers, generate, gpu
from tests.weights.quantised_samples import write_folders

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"
skip_overflow_checks()
__all__ = ["gpu"]  # a fixture


@pytest.mark.parametrize(("model", "form"), [("mixtral", "awq"), ("qwen3-moe", "gptq")])
def test_kernels_give_what_expanded_numbers_give(
    model: str, form: str, tmp_path: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = write_folders(tmp_path, *MODELS4[model], FILES4[form])
    expected = generate(plain, dtype="float16")
    monkeypatch.setattr(build, "choose_packing", lambda *_: None)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    for module in (integers, moe_integers):  # a program takes as long here, however many outputs it has
        monkeypatch.setattr(module, "choose_block", lambda *_: (64, 64, 1))
    monkeypatch.setattr(build, "_check_products", lambda *_: "")
    resident = generate(small, dtype="float16")
    offloaded = generate(small, dtype="float16", expert_placement="offload", expert_cache_gb=4 * 40_000 / GIB)
    assert answers(offloaded) == answers(resident)
    runs = [resident]
    if model == "qwen3-moe":  # in graphs, as a GPU decodes; the smallest experts
        runs.append(generate(small, device=True, dtype="float16"))
    for found in runs:
        for one, other in zip(found, expected):
            assert logprobs(one) == pytest.approx(logprobs(other), abs=3e-2)
    assert set(gpu) == {"IntegerStack"}

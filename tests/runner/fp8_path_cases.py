"""An engine with weights in 8-bit floats as a GPU has them, on a CPU under Triton's interpreter: files of every form of
scales give what their expanded numbers give, launched kernel by kernel and captured (`test_device_path.py`). In 16
bits: float32 expands the weights."""

import os
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.layers import parted
from nanovllm.ops.opset import triton_ops
from nanovllm.ops.triton import fp8
from nanovllm.runner import build, captured_steps
from tests.moe.experts8 import as_on_a_gpu
from tests.ops.quick_interpreter import skip_overflow_checks
from tests.runner.device_path_cases import OPTIONS, logprobs, on_device
from tests.weights.quantised_samples import compressed_config, float_scheme, floats, write_folders

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"
skip_overflow_checks()

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SAMPLES = {
    "rows": floats("channel", compressed_config("float-quantized", float_scheme("channel"))),
    "blocks": floats("block", BLOCKS, "weight_scale_inv", (128, 128)),
}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7], [20, 21])]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def generate(path: Path, device: bool = False) -> list[Any]:
    backend = {} if device else {"attn_backend": "sdpa"}
    options = {**OPTIONS, "dtype": "float16", "max_num_seqs": 2, "skip_tokenizer_init": True, **backend}
    with LLM(str(path), **options) as llm:
        if device:
            on_device(llm)
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(("family", "name"), [("Llama", "rows"), ("Qwen3", "blocks")])
def test_kernels_give_what_expanded_numbers_give(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = write_folders(tmp_path, family, SIZES, SAMPLES[name])
    expected = generate(plain)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    monkeypatch.setattr(build, "choose_packing", lambda *_: None)
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(parted, "TRIED_ROWS", (1, 8))  # at the start
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    seen: list[int] = []
    product = fp8.weight_only_linear

    def noted(*args: Any, **more: Any) -> Any:
        found = product(*args, **more)
        seen.append(found.dim())
        return found

    monkeypatch.setattr(fp8, "weight_only_linear", noted)
    for device in (False, True):
        found = generate(small, device)
        for one, other in zip(found, expected):
            assert logprobs(one) == pytest.approx(logprobs(other), abs=3e-2)
        assert 2 in seen
        seen.clear()

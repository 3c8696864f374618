"""An engine with weights of integers as a GPU has them, on a CPU under Triton's interpreter: files of every format give
what their expanded numbers give, with one rank's kernels for few rows, for more, and fused (`test_device_path.py`)."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers import parted
from nanovllm.ops import integers as plain_integers
from nanovllm.ops.opset import PLAIN, triton_ops
from nanovllm.ops.triton import integers, integers_matmul
from nanovllm.runner import build, captured_steps, quantization
from tests.runner.device_path_cases import OPTIONS, logprobs, on_device
from tests.tiny_models import Variant, hf_model
from tests.weights.gguf_samples import write_model
from tests.weights.quantised_samples import awq, compressed, gptq, write_folders

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
SAMPLES = {
    "awq": awq(32),
    "gptq-act-order": gptq(32, False, act_order=True),
    "compressed": compressed(64, True),
}
GGUF = ("Q4_0", "Q4_1", "Q4_K", "Q8_0")
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7], [20, 21])]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Operators and choices of a GPU; counts the calls of each kernel's function."""
    choose = quantization.choose_scales
    # A program takes as long here, however many outputs it has.
    monkeypatch.setattr(integers, "choose_block", lambda *_: (64, 64, 1))
    monkeypatch.setattr(integers_matmul, "choose_splits", lambda *_: 2)
    monkeypatch.setattr(parted, "TRIED_ROWS", (1, 8, 301))  # at the start
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    monkeypatch.setattr(build, "choose_packing", lambda *_: None)
    monkeypatch.setattr(build, "choose_scales", lambda config, model, files, *_: choose(config, model, files, True))
    calls: dict[str, int] = {}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            calls["fused"] = calls.get("fused", 0) + bool(more.get("norm"))
            found = real(*args, **more)
            calls["in parts"] = calls.get("in parts", 0) + (found.dim() == 3)
            return found

        return call

    for name in ("integer_gemv", "integer_matmul", "expand_words"):
        monkeypatch.setattr(integers, name, counted(name, getattr(integers, name)))
    return calls


def write(folder: Path, name: str) -> Path:
    if name in SAMPLES:
        return write_folders(folder, "Llama", SIZES, SAMPLES[name])[0]
    if name in GGUF:
        sizes = WIDE if name.endswith("_K") else SIZES
        state = hf_model(Variant("Llama", {**sizes, "num_key_value_heads": 2}), 0).state_dict()
        return write_model(folder / "m.gguf", "llama", state, head_dim=sizes["head_dim"], types={"proj": name})
    hf_model(Variant("Llama", SIZES), 0).save_pretrained(folder / "plain")
    return folder / "plain"


def generate(path: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    options = {**OPTIONS, "dtype": "float16", **options}  # float32 expands the weights
    with LLM(str(path), **options, attn_backend="sdpa", skip_tokenizer_init=True) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False), llm.engine.describe()["runs_on"]


@pytest.mark.parametrize("name", [*SAMPLES, *GGUF])
def test_a_file_gives_what_its_numbers_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write(tmp_path, name)
    expected, _ = generate(path, quantization="none")
    calls = on_a_gpu(monkeypatch)
    found, facts = generate(path)
    assert ("int8-32" if name == "Q8_0" else "int4-") in facts["quantization"]
    assert calls["integer_gemv"] > 0
    assert calls["integer_matmul"] > 0
    assert (calls["in parts"] > 0) == (name in ("Q4_K", "Q8_0"))  # the others have one block of inputs
    for one, other in zip(found, expected):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=3e-2)


@pytest.mark.parametrize("wanted", ["int4", "int8"])
def test_quantised_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """The kernels give what the plain twin gives with the same weights; and these are other numbers than the file's."""
    path = write(tmp_path, "plain")
    exact, _ = generate(path, quantization="none")
    on_a_gpu(monkeypatch)
    found, facts = generate(path, quantization=wanted)
    assert f"{wanted}-32" in facts["quantization"]
    monkeypatch.setattr(build, "choose_ops", lambda *_: replace(PLAIN, linear=twin_linear))
    expected, _ = generate(path, quantization=wanted)
    for one, other, unrounded in zip(found, expected, exact):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-2)
        assert logprobs(other) != pytest.approx(logprobs(unrounded), abs=1e-2)


def twin_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = torch.nn.functional.linear if isinstance(weight, torch.Tensor) else plain_integers.integer_linear
    return product(x, weight, bias)


def test_the_device_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps and decodes, whose kernels for one and two rows are fused with norm, gate and sum (in 16 bits)."""
    path = write(tmp_path, "awq")
    expected, _ = generate(path, quantization="none", dtype="float16")
    calls = on_a_gpu(monkeypatch)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    options = {**OPTIONS, "dtype": "float16", "max_num_seqs": 2}
    with LLM(str(path), **options, skip_tokenizer_init=True) as llm:
        on_device(llm)
        calls.clear()
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert calls["fused"] > 0
    for one, other in zip(found, expected):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=5e-2)


def test_many_rows_expand_the_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path, "compressed")
    expected, _ = generate(path, quantization="none")
    monkeypatch.setattr(integers, "MATMUL_ROWS", 4)
    calls = on_a_gpu(monkeypatch)
    found, _ = generate(path)
    assert calls["expand_words"] > 0
    for one, other in zip(found, expected):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=3e-2)

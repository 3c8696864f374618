"""8-bit floats with block scales: dequantised as they are read, whole or in slices, and proved like any weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ModelError
from nanovllm.weights.safetensors_folder import SafetensorsFolder
from tests.tiny_models import TinyModel

BLOCK = (16, 32)
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # V3 keeps these in 16 bits


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(as stored, scales), each block's largest number becoming 448, the largest of its format."""
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, BLOCK))
    scales, stored = torch.empty(rows, columns), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            piece = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[piece].abs().max() / 448
            stored[piece] = weight[piece] / scales[i, j]
    return stored.to(torch.float8_e4m3fn), scales


def expanded(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = stored.shape
    return stored.float() * scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]


@pytest.fixture(scope="module")
def folders(tiny: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a tiny V3 in 8 bits, with an MTP layer; the same weights in float32)."""
    source = tiny("deepseek-v3").path
    small, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "plain"))
    quantised, exact = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        exact[name] = quantised[name] = weight
        if weight.dim() == 2 and not any(word in name for word in KEPT):
            quantised[name], scales = quantise(weight)
            quantised[f"{name}_scale_inv"] = scales
            exact[name] = expanded(quantised[name], scales)
    mtp = "model.layers.3.eh_proj.weight"
    quantised[mtp], quantised[f"{mtp}_scale_inv"] = quantise(torch.randn(48, 96))
    config = json.loads((source / "config.json").read_text())
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    for folder, weights, more in ((small, quantised, {"quantization_config": form}), (plain, exact, {})):
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    return small, plain


def answers(llm: LLM) -> Any:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    found = llm.generate([list(range(3, 40)), [5, 9]], params, use_tqdm=False)
    return [[(step.token_ids, step.logprobs) for step in output.outputs] for output in found]


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}, {"expert_placement": "offload", "expert_cache_gb": 2e-4}]
)
def test_a_model_in_8_bits_gives_what_its_numbers_give(
    make_llm: Callable[..., LLM], folders: tuple[Path, Path], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "nanovllm"):
        small, plain = (make_llm(folder, skip_tokenizer_init=True, **options) for folder in folders)
    assert answers(small) == answers(plain)
    assert caplog.text.count("multi-token prediction") == 1  # of the first, which has the layer


def test_a_slice_is_a_part_of_the_whole(folders: tuple[Path, Path]) -> None:
    small, plain = map(SafetensorsFolder, folders)
    assert not [name for name in small.names() if name.endswith("_scale_inv")]
    for name in plain.names():
        whole = small.read(name)
        assert small.shape(name) == plain.shape(name) == whole.shape
        torch.testing.assert_close(whole, plain.read(name), rtol=1e-7, atol=0)
        for dim in range(whole.dim()):
            for start, length in ((0, 1), (15, 3), (31, 2), (7, whole.shape[dim] - 7)):
                if start + length <= whole.shape[dim]:
                    assert torch.equal(small.read_slice(name, dim, start, length), whole.narrow(dim, start, length))


def damage(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> SafetensorsFolder:
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return SafetensorsFolder(folder)


def test_scales_of_another_shape_or_none_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight"

    def cut(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{name}_scale_inv"] = weights[f"{name}_scale_inv"][:-1].clone()

    with pytest.raises(
        ModelError, match=rf"{name}_scale_inv has shape \(5, 1\): .* of shape \(96, 24\) .* needs \(6, 1\)"
    ):
        damage(tmp_path, folders[0], cut).shape(name)
    with pytest.raises(ModelError, match=f"{name} in 8-bit floats needs one scale, there is neither"):
        damage(tmp_path, folders[0], lambda weights: weights.pop(f"{name}_scale_inv")).shape(name)  # type: ignore[arg-type,return-value]

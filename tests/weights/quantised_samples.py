"""Writers of quantised safetensors folders, each format by its own definition and number by number: they share nothing
with what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import Variant, hf_model

Tensors = dict[str, torch.Tensor]
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.")


@dataclass(frozen=True)
class Numbers:
    """w[o, i] = s[o, g] (q[o, i] - z[o, g]) with g = group[i]"""

    q: np.ndarray
    z: np.ndarray
    s: torch.Tensor
    group: np.ndarray

    @property
    def exact(self) -> torch.Tensor:
        shifted = torch.tensor(self.q - self.z[:, self.group]).float()
        return shifted * self.s.float()[:, torch.tensor(self.group)]


def draw(
    w: torch.Tensor,
    group_size: int | None,
    symmetric: bool,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Numbers:
    """`w` rounded to 4 bits."""
    inputs = w.shape[1]
    group = np.arange(inputs) // (group_size or inputs)
    if act_order:
        group = np.random.default_rng(3).permutation(group)
    number = int(group.max()) + 1
    z, s = np.full((len(w), number), 8), torch.empty(len(w), number, dtype=dtype)
    for g in range(number):
        piece = w[:, torch.tensor(group == g)]
        if symmetric:
            s[:, g] = piece.abs().amax(1) / 7
        else:
            low, high = piece.amin(1).clamp(max=0), piece.amax(1).clamp(min=0)
            s[:, g] = (high - low) / 15
            z[:, g] = (-low / s[:, g].float()).round().clamp(1, 15).int().numpy()
    q = (w / s.float()[:, torch.tensor(group)]).round().numpy() + z[:, group]
    return Numbers(q.clip(0, 15).astype(np.int64), z, s, group)


def word(values: Iterable[int]) -> int:
    """Up to eight numbers, the first in the lowest bits."""
    n = sum(int(value) << (4 * i) for i, value in enumerate(values))
    return n - 2**32 if n >= 2**31 else n


def words(rows: np.ndarray, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """[n, m] -> int32 [n, m / 8]; the last word of a row may be part empty."""
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    table = [[word(row[at + i] for i in order) for at in range(0, len(row), 8)] for row in rows]
    return torch.tensor(table, dtype=torch.int32)


def as_awq(n: Numbers) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(n.q.T, order), "qzeros": words(n.z.T, order), "scales": n.s.T.contiguous()}


def as_gptq(n: Numbers, less: int = 1) -> Tensors:
    found = {"qweight": words(n.q).T.contiguous(), "qzeros": words(n.z.T - less), "scales": n.s.T.contiguous()}
    return {**found, "g_idx": torch.tensor(n.group, dtype=torch.int32)}


def as_compressed(n: Numbers, symmetric: bool = False, act_order: bool = False) -> Tensors:
    found = {"weight_packed": words(n.q), "weight_scale": n.s, "weight_shape": torch.tensor(n.q.shape)}
    if not symmetric:
        found["weight_zero_point"] = words(n.z.T).T.contiguous()
    if act_order:
        found["weight_g_idx"] = torch.tensor(n.group, dtype=torch.int32)
    return found


def as_floats(w: torch.Tensor, block: tuple[int, int], suffix: str, shape: tuple[int, ...]) -> tuple[Tensors, Any]:
    """8-bit floats, the largest number of a block becoming 448, the largest of the format; and the weight."""
    rows, columns = (-(-size // part) for size, part in zip(w.shape, block))
    scale, stored, exact = torch.empty(rows, columns), torch.empty_like(w), torch.empty_like(w)
    for i in range(rows):
        for j in range(columns):
            piece = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = w[piece].abs().max() / 448
            stored[piece] = w[piece] / scale[i, j]
            exact[piece] = stored[piece].to(torch.float8_e4m3fn).float() * scale[i, j]
    return {"weight": stored.to(torch.float8_e4m3fn), suffix: scale.reshape(shape)}, exact


Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Sample:
    """A format: how a weight is written, and what config.json says."""

    pack: Pack
    config: dict[str, Any]


def awq(group: int | None, **more: Any) -> Sample:
    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n = draw(w, group, symmetric=False)
        return as_awq(n), n.exact

    size = -1 if group is None else group
    return Sample(pack, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", **more})


def gptq(group: int | None, symmetric: bool, act_order: bool = False, less: int = 1, **more: Any) -> Sample:
    """`less`: what the stored zeros lack."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n = draw(w, group, symmetric, act_order)
        return as_gptq(n, less), n.exact

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1 if group is None else group, "sym": symmetric}
    return Sample(pack, {**config, "desc_act": act_order, **more})


def compressed_config(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def compressed(group: int | None, symmetric: bool, act_order: bool = False, dtype: Any = torch.bfloat16) -> Sample:
    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n = draw(w, group, symmetric, act_order, dtype)
        return as_compressed(n, symmetric, act_order), n.exact

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "group_size": group}
    weights["strategy"] = "channel" if group is None else "group"
    weights["actorder"] = "group" if act_order else None
    return Sample(pack, compressed_config("pack-quantized", weights, ignore=["re:.*lm_head"]))


def floats(by: str, config: dict[str, Any], suffix: str = "weight_scale", block: tuple[int, int] = (16, 32)) -> Sample:
    """`by`: "tensor", "scalar" (of no dimension), "channel", "block"."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = w.shape
        forms: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
            "tensor": ((rows, columns), (1,)),
            "scalar": ((rows, columns), ()),
            "channel": ((1, columns), (rows, 1)),
            "block": (block, (-(-rows // block[0]), -(-columns // block[1]))),
        }
        size, shape = forms[by]
        return as_floats(w, size, suffix, shape)

    return Sample(pack, config)


def float_scheme(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def write_folders(
    folder: Path, family: str, sizes: dict[str, Any], sample: Sample, kept: tuple[str, ...] = KEPT, seed: int = 0
) -> tuple[Path, Path]:
    """(a random model in this format, the same numbers in float32)"""
    source, small, plain = (folder / name for name in ("source", "small", "plain"))
    hf_model(Variant(family, sizes), seed).save_pretrained(source)
    quantised, exact = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.dim() == 2 and not any(part in name for part in kept):
            parts, exact[name] = sample.pack(weight)
            quantised.update({f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()})
        else:
            quantised[name] = exact[name] = weight
    config = json.loads((source / "config.json").read_text())
    for path, tensors, more in ((small, quantised, {"quantization_config": sample.config}), (plain, exact, {})):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**config, **more}))
    return small, plain


def write_weight(folder: Path, sample: Sample, tensors: Tensors) -> Path:
    """A folder of some tensors, with no model around them."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": sample.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

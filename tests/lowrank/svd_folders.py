"""Folders of low-rank experts, made without lowrank/compress: random orthonormal U, V = U^T A. And the dense model
that they stand for, to compare with: its experts are the products of the factors."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nanovllm.lowrank.folder import teacher_hash, write_metadata
from nanovllm.lowrank.format import FOLDER, MATRICES, U_FILE, SvdMetadata, u_key, v_file, v_key
from nanovllm.model_config import ModelConfig
from nanovllm.weights.checkpoint import open_checkpoint

EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
MATRIX = {"w1": "w1", "w2": "w2", "w3": "w3", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class Choice:
    """Of one layer."""

    w1: int
    w2: int
    w3: int
    side: str = "output"


def copy_model(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(FOLDER, "*.txt"))
    return target


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0][:, :columns]


def stored(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype)).contiguous()


def full_rank(model: Path, side: str) -> Choice:
    config = ModelConfig.from_hf(open_checkpoint(model).config)
    hidden, size = config.hidden_size, config.moe.intermediate_size
    return Choice(hidden, size if side == "input" else hidden, hidden, side)


def write_svd(model: Path, choices: list[Choice], dense: Path | None = None, dtype: str = "float32") -> Path:
    """`choices` by sparse layer, the last one for the rest. `dense`: where to write the model with the experts that the
    factors give."""
    checkpoint = open_checkpoint(model)
    config = ModelConfig.from_hf(checkpoint.config)
    layers = [i for i, sparse in enumerate(config.moe.layers) if sparse]
    choice_of = {layer: choices[min(i, len(choices) - 1)] for i, layer in enumerate(layers)}
    generator = torch.Generator().manual_seed(3)
    names = {}
    for name in checkpoint.names():
        if found := EXPERT.fullmatch(name):
            names[int(found[1]), int(found[2]), MATRIX[found[3]]] = name
    folder, us, products = model / FOLDER, {}, {}
    v_file(folder, 0, 0).parent.mkdir(parents=True)
    for layer, choice in choice_of.items():
        shared = {}
        for e in range(config.moe.num_experts):
            vs = {}
            for matrix in MATRICES:
                weight = checkpoint.read(names[layer, e, matrix]).double()  # [outputs, inputs]
                outputs = matrix == "w2" and choice.side == "output"
                a = weight if outputs else weight.T
                if matrix not in shared:
                    shared[matrix] = orthonormal(len(a), getattr(choice, matrix), generator)
                    us[u_key(layer, matrix)] = stored(shared[matrix], dtype)
                u = shared[matrix]
                vs[v_key(matrix)] = stored(u.T @ a, dtype)
                product = u @ (u.T @ a)
                products[names[layer, e, matrix]] = (product if outputs else product.T).float().contiguous()
            save_file(vs, v_file(folder, layer, e))
    save_file(us, folder / U_FILE)
    metadata = SvdMetadata(
        method="pca",
        dtype=dtype,
        layer_ids=tuple(layers),
        num_experts=config.moe.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe.intermediate_size,
        svd_ranks={layer: {w: getattr(choice, w) for w in MATRICES} for layer, choice in choice_of.items()},
        w2_modes={layer: choice.side for layer, choice in choice_of.items()},
        ridge=0.0,
        teacher_hash=teacher_hash(checkpoint),
        calibration_hash=None,
        kept=0.5,
    )
    write_metadata(folder, metadata)
    checkpoint.close()
    if dense is not None:
        copy_model(model, dense)
        for file in dense.glob("*.safetensors"):
            tensors = load_file(file)
            save_file(
                {name: products.get(name, tensor.float()) for name, tensor in tensors.items()}, file, {"format": "pt"}
            )
    return folder

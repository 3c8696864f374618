"""The format of a folder of low-rank experts: names, shapes, metadata.json. Nothing is opened here, and no torch.

    svd_experts/metadata.json                                SvdMetadata
    svd_experts/U_matrices.safetensors                       layer_{l}_{w}_U
    svd_experts/V_experts/layer_{l}_expert_{e}.safetensors   w1_V, w2_V, w3_V

{l} is the model's layer index. The meaning, with a = silu(gate) * up:

    gate = (x U1) V1    up = (x U3) V3    U1, U3 [H, r], V [r, I]
    w2 "input"   y = (a U2) V2            U2 [I, r], V2 [r, H]
    w2 "output"  y = U2 (V2 a)            U2 [H, r], V2 [r, I]: the top_k experts are added in r dimensions

folder.py opens and checks such a folder, checkpoint.py gives its tensors to the loader, compress/ makes it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelError
from nanovllm.weights.expert_form import ExpertForm, round_svd_rank

FORMAT, VERSION = "nanovllm-svd-experts", 1
FOLDER, METADATA, U_FILE, V_FOLDER = "svd_experts", "metadata.json", "U_matrices.safetensors", "V_experts"
MATRICES = ("w1", "w2", "w3")
METHODS, W2_MODES, DTYPES = ("pca", "distilled"), ("input", "output"), ("float32", "bfloat16", "float16")
MODE = "shared"  # the experts of a layer share U. Version 1 had a second mode, "private": a U for every expert


def u_key(layer: int, matrix: str) -> str:
    return f"layer_{layer}_{matrix}_U"


def v_key(matrix: str) -> str:
    return f"{matrix}_V"


def v_file(folder: Path, layer: int, expert: int) -> Path:
    return folder / V_FOLDER / f"layer_{layer}_expert_{expert}.safetensors"


@dataclass(frozen=True)
class SvdMetadata:
    method: str
    dtype: str
    layer_ids: tuple[int, ...]  # the sparse layers, in order
    num_experts: int
    hidden_size: int
    intermediate_size: int
    svd_ranks: dict[int, dict[str, int]]  # layer -> matrix -> r; "ranks" in the file
    w2_modes: dict[int, str]
    ridge: float
    teacher_hash: str
    calibration_hash: str | None
    kept: float  # bytes of V and U / bytes of the dense experts
    heldout_errors: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # how it was made

    def __post_init__(self) -> None:
        def refuse(what: str, value: object, wanted: object) -> None:
            raise ModelError(f"{METADATA}: {what}={value!r} must be {wanted}")

        for name, known in (("method", METHODS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                refuse(name, getattr(self, name), f"one of {', '.join(known)}")
        for name in ("num_experts", "hidden_size", "intermediate_size"):
            if not _is_count(getattr(self, name), 2**22):
                refuse(name, getattr(self, name), "a positive integer")
        if not self.layer_ids or sorted(set(self.layer_ids)) != list(self.layer_ids) or self.layer_ids[0] < 0:
            refuse("layer_ids", self.layer_ids, "ascending layer numbers")
        for layer in self.layer_ids:
            if self.w2_modes.get(layer) not in W2_MODES:
                refuse(f"w2_modes[{layer}]", self.w2_modes.get(layer), f"one of {', '.join(W2_MODES)}")
            for matrix in MATRICES:
                svd_rank = self.svd_ranks.get(layer, {}).get(matrix)
                most = self._sides(layer, matrix)[0]  # beyond it the factors would be larger, and not better
                if not _is_count(svd_rank, most):
                    refuse(f"ranks[{layer}][{matrix}]", svd_rank, f"an integer in [1, {most}]")

    def _sides(self, layer: int, matrix: str) -> tuple[int, int]:
        """(rows of U, columns of V)."""
        on_input = matrix == "w2" and self.w2_modes[layer] == "input"
        sizes = (self.hidden_size, self.intermediate_size)
        return (sizes[1], sizes[0]) if on_input else sizes

    def u_shape(self, layer: int, matrix: str) -> tuple[int, int]:
        return (self._sides(layer, matrix)[0], self.svd_ranks[layer][matrix])

    def v_shape(self, layer: int, matrix: str) -> tuple[int, int]:
        return (self.svd_ranks[layer][matrix], self._sides(layer, matrix)[1])

    @property
    def svd_rank(self) -> int:
        return max(svd_rank for of_layer in self.svd_ranks.values() for svd_rank in of_layer.values())

    @property
    def num_dense_values(self) -> int:
        """Numbers in the experts that these stand for."""
        return 3 * self.hidden_size * self.intermediate_size * self.num_experts * len(self.layer_ids)

    def to_json(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        facts["ranks"] = facts.pop("svd_ranks")
        return {
            "format": FORMAT,
            "version": VERSION,
            "mode": MODE,
            "num_layers": len(self.layer_ids),
            "rank": self.svd_rank,
            **facts,
        }

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> SvdMetadata:
        if facts.get("format") != FORMAT or facts.get("version") != VERSION:
            raise ModelError(
                f"{METADATA}: format {facts.get('format')!r} version {facts.get('version')!r}; this version reads "
                f"{FORMAT!r} version {VERSION}"
            )
        if facts.get("mode") != MODE:
            raise ModelError(
                f"{METADATA}: mode={facts.get('mode')!r} must be {MODE!r}; 'private', a U for every expert, saved no "
                "memory and is not read any more"
            )
        try:
            known = {f.name: facts["ranks" if f.name == "svd_ranks" else f.name] for f in dataclasses.fields(cls)}
            known["layer_ids"] = tuple(int(layer) for layer in known["layer_ids"])
            known["svd_ranks"] = {int(layer): dict(of_layer) for layer, of_layer in known["svd_ranks"].items()}
            known["w2_modes"] = {int(layer): mode for layer, mode in known["w2_modes"].items()}
        except KeyError as error:
            raise ModelError(f"{METADATA}: has no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{METADATA}: damaged ({error})") from None
        return cls(**known)

    def forms(self) -> tuple[ExpertForm, ...]:
        """Of the sparse layers, in order: the sizes of their experts in memory."""

        def form(layer: int) -> ExpertForm:
            of = {matrix: round_svd_rank(svd_rank) for matrix, svd_rank in self.svd_ranks[layer].items()}
            columns = max(of["w1"], of["w3"])
            return ExpertForm(self.hidden_size, self.intermediate_size, columns, of["w2"], self.w2_modes[layer])

        return tuple(map(form, self.layer_ids))


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most

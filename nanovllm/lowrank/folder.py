"""The folder of low-rank experts: what is in it, and the proof that it belongs to the model beside it.

    svd_experts/metadata.json                                SvdMetadata
    svd_experts/U_matrices.safetensors                       layer_{l}_{w}_U, or layer_{l}_expert_{e}_{w}_U (private)
    svd_experts/V_experts/layer_{l}_expert_{e}.safetensors   w1_V, w2_V, w3_V

{l} is the model's layer index. The meaning, with a = silu(gate) * up:

    gate = (x U1) V1    up = (x U3) V3    U1, U3 [H, r], V [r, I]
    w2 "input"   y = (a U2) V2            U2 [I, r], V2 [r, H]
    w2 "output"  y = U2 (V2 a)            U2 [H, r], V2 [r, I]: the top_k experts are added in r dimensions

A folder made for other weights gives wrong text without an error, so it carries a hash of its teacher, and
`open_svd_folder` refuses what does not match, what is missing and what is cut off, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ModelError
from nanovllm.weights.expert_form import ExpertForm, padded

if TYPE_CHECKING:
    from nanovllm.weights.checkpoint import Checkpoint

FORMAT, VERSION = "nanovllm-svd-experts", 1
FOLDER, METADATA, U_FILE, V_FOLDER = "svd_experts", "metadata.json", "U_matrices.safetensors", "V_experts"
MATRICES = ("w1", "w2", "w3")
METHODS, MODES, W2_MODES = ("pca", "distilled"), ("shared", "private"), ("input", "output")
DTYPES = ("float32", "bfloat16", "float16")
HASH_ROWS, HASH_ROW_BYTES = 64, 256
HASH_FACTS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
)
REMAKE = "make it again with `nanovllm compress`, or set NANOVLLM_DISABLE_SVD=1 to use the model's own experts"


@dataclass(frozen=True)
class SvdMetadata:
    method: str
    mode: str
    dtype: str
    layer_ids: tuple[int, ...]  # the sparse layers, in order
    num_experts: int
    hidden_size: int
    intermediate_size: int
    ranks: dict[int, dict[str, int]]  # layer -> matrix -> rank
    w2_modes: dict[int, str]
    ridge: float
    teacher_hash: str
    calibration_hash: str | None
    kept: float  # bytes of V and U / bytes of the dense experts
    heldout_errors: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # how it was made; decides whether a broken run can go on

    def __post_init__(self) -> None:
        def refuse(what: str, value: object, wanted: object) -> None:
            raise ModelError(f"{METADATA}: {what}={value!r} must be {wanted}")

        for name, known in (("method", METHODS), ("mode", MODES), ("dtype", DTYPES)):
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
                rank = self.ranks.get(layer, {}).get(matrix)
                most = largest_rank(self, layer, matrix)
                if not _is_count(rank, most):
                    refuse(f"ranks[{layer}][{matrix}]", rank, f"an integer in [1, {most}]")

    @property
    def rank(self) -> int:
        return max(rank for of_layer in self.ranks.values() for rank in of_layer.values())

    def u_shape(self, layer: int, matrix: str) -> tuple[int, int]:
        on_input = matrix == "w2" and self.w2_modes[layer] == "input"
        return (self.intermediate_size if on_input else self.hidden_size, self.ranks[layer][matrix])

    def v_shape(self, layer: int, matrix: str) -> tuple[int, int]:
        to_hidden = matrix == "w2" and self.w2_modes[layer] == "input"
        return (self.ranks[layer][matrix], self.hidden_size if to_hidden else self.intermediate_size)

    def to_json(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        return {"format": FORMAT, "version": VERSION, "num_layers": len(self.layer_ids), "rank": self.rank, **facts}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> SvdMetadata:
        if facts.get("format") != FORMAT or facts.get("version") != VERSION:
            raise ModelError(
                f"{METADATA}: format {facts.get('format')!r} version {facts.get('version')!r}; this version reads "
                f"{FORMAT!r} version {VERSION}"
            )
        try:
            known = {f.name: facts[f.name] for f in dataclasses.fields(cls)}
            known["layer_ids"] = tuple(int(layer) for layer in known["layer_ids"])
            known["ranks"] = {int(layer): dict(ranks) for layer, ranks in known["ranks"].items()}
            known["w2_modes"] = {int(layer): mode for layer, mode in known["w2_modes"].items()}
        except KeyError as error:
            raise ModelError(f"{METADATA}: has no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{METADATA}: damaged ({error})") from None
        return cls(**known)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def largest_rank(metadata: SvdMetadata, layer: int, matrix: str) -> int:
    """Beyond this the factors would be larger than what they stand for, and not better."""
    on_input = matrix == "w2" and metadata.w2_modes[layer] == "input"
    return metadata.intermediate_size if on_input else metadata.hidden_size


def u_key(layer: int, matrix: str, expert: int | None = None) -> str:
    """`expert` only where every expert has its own U (mode private)."""
    return f"layer_{layer}_{matrix}_U" if expert is None else f"layer_{layer}_expert_{expert}_{matrix}_U"


def v_key(matrix: str) -> str:
    return f"{matrix}_V"


def v_file(folder: Path, layer: int, expert: int) -> Path:
    return folder / V_FOLDER / f"layer_{layer}_expert_{expert}.safetensors"


def read_metadata(folder: Path) -> SvdMetadata:
    path = folder / METADATA
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); {REMAKE}") from None
    if not isinstance(facts, dict):
        raise ModelError(f"{path}: must hold a JSON object; {REMAKE}")
    try:
        return SvdMetadata.from_json(facts)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}; {REMAKE}") from None


def write_metadata(folder: Path, metadata: SvdMetadata) -> None:
    (folder / METADATA).write_text(json.dumps(metadata.to_json(), indent=1) + "\n", encoding="utf-8")


def open_svd_folder(folder: Path, teacher: str | None) -> SvdMetadata:
    """The metadata, once every tensor is known to be there in its shape and the teacher is the given one (None:
    any)."""
    metadata = read_metadata(folder)
    if teacher is not None and metadata.teacher_hash != teacher:
        raise ModelError(f"{folder}: was made from other weights than this model's; {REMAKE}")
    shared = metadata.mode == "shared"
    names: dict[str, tuple[int, int]] = {}
    for layer in metadata.layer_ids:
        for matrix in MATRICES:
            for expert in [None] if shared else range(metadata.num_experts):
                names[u_key(layer, matrix, expert)] = metadata.u_shape(layer, matrix)
    _check_file(folder / U_FILE, names)
    for layer in metadata.layer_ids:
        shapes = {v_key(matrix): metadata.v_shape(layer, matrix) for matrix in MATRICES}
        for expert in range(metadata.num_experts):
            _check_file(v_file(folder, layer, expert), shapes)
    return metadata


def _check_file(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: missing or not whole ({error}); {REMAKE}") from None
    if found != shapes:
        name = next(name for name in (*shapes, *found) if found.get(name) != shapes.get(name))
        raise ModelError(f"{path}: {name} is {found.get(name)}, metadata.json says {shapes.get(name)}; {REMAKE}")


def is_expert_tensor(name: str) -> bool:
    """Experts and routers; a dense MLP's gate_proj is neither."""
    return ".experts." in name or name.endswith(".gate.weight")


def teacher_hash(checkpoint: Checkpoint) -> str:
    """Of names, shapes, dtypes and a sample of the numbers of all experts and routers: the first 256 bytes of 64 rows
    of each, so that 90 GB of experts are told apart by reading some megabytes."""
    digest = hashlib.blake2b(digest_size=16)
    facts = {name: checkpoint.config.get(name) for name in HASH_FACTS}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    files: dict[Path, int] = {}
    try:
        for name in sorted(filter(is_expert_tensor, checkpoint.names())):
            shape = tuple(checkpoint.shape(name))
            dtype, sample = _sample(checkpoint, name, shape, files)
            digest.update(f"{name} {shape} {dtype}\n".encode())
            digest.update(sample)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return digest.hexdigest()


def _sample(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], files: dict[Path, int]) -> tuple[str, bytes]:
    """(dtype, bytes of rows spread over the tensor)."""
    num_rows = shape[0]
    rows = sorted({i * (num_rows - 1) // max(HASH_ROWS - 1, 1) for i in range(HASH_ROWS)})
    place = checkpoint.location(name)
    if place is None:  # quantised: only whole tensors can be had
        tensor = checkpoint.read(name)
        step = max(1, HASH_ROW_BYTES // tensor.element_size())
        return str(tensor.dtype), b"".join(tensor[row].flatten()[:step].numpy().tobytes() for row in rows)
    if place.path not in files:
        files[place.path] = os.open(place.path, os.O_RDONLY)
    row_bytes = place.num_bytes // num_rows
    size = min(row_bytes, HASH_ROW_BYTES)
    pieces = [os.pread(files[place.path], size, place.offset + row * row_bytes) for row in rows]
    return str(place.dtype), b"".join(pieces)


def forms_of(metadata: SvdMetadata) -> tuple[ExpertForm, ...]:
    """Of the sparse layers, in order. Experts with a U of their own (mode private) are multiplied out when they are
    loaded, so no bytes are saved: x U would differ from expert to expert, and there is no kernel for that."""
    hidden, size = metadata.hidden_size, metadata.intermediate_size
    if metadata.mode == "private":
        return (ExpertForm.dense(hidden, size),) * len(metadata.layer_ids)
    forms = []
    for layer in metadata.layer_ids:
        ranks = metadata.ranks[layer]
        columns, rank2 = padded(max(ranks["w1"], ranks["w3"])), padded(ranks["w2"])
        forms.append(ExpertForm(hidden, size, columns, rank2, metadata.w2_modes[layer]))
    return tuple(forms)

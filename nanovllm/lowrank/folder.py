"""The folder of low-rank experts on disk: where it is looked for, and the proof that it belongs to the model beside it.

A folder made for other weights gives wrong text without an error, so it carries a hash of its teacher, the model that
it was made from. `open_svd_folder` refuses what does not match, what is missing and what is cut off, before anything is
loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nanovllm.errors import ModelError
from nanovllm.lowrank.format import FOLDER, MATRICES, METADATA, U_FILE, SvdMetadata, u_key, v_file, v_key
from nanovllm.model_config import ModelConfig
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm

DISABLE = "NANOVLLM_DISABLE_SVD"
REMAKE = f"make it again with `nanovllm compress`, or set {DISABLE}=1 to use the model's own experts"
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


def find_svd_folder(model: Path) -> Path | None:
    """The model's folder of low-rank experts, unless there is none or the user has switched it off."""
    folder = model / FOLDER
    return folder if folder.is_dir() and os.environ.get(DISABLE) != "1" else None


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


def read_svd_metadata(folder: Path, model: ModelConfig) -> SvdMetadata:
    """The metadata alone, refused if they are of a model of other sizes. Enough to estimate memory with."""
    metadata = read_metadata(folder)
    moe = model.moe
    assert moe is not None
    sparse = tuple(i for i, is_sparse in enumerate(moe.layers) if is_sparse)
    for name, wanted in (
        ("layer_ids", sparse),
        ("num_experts", moe.num_experts),
        ("hidden_size", model.hidden_size),
        ("intermediate_size", moe.intermediate_size),
    ):
        if getattr(metadata, name) != wanted:
            raise ModelError(
                f"{folder}: was made for {name}={getattr(metadata, name)}, this model has {wanted}; {REMAKE}"
            )
    return metadata


def low_rank_forms(path: Path, model: ModelConfig) -> tuple[ExpertForm, ...] | None:
    """The sizes of the experts of the model at `path`, if it would run with low-rank ones."""
    folder = None if model.moe is None else find_svd_folder(path)
    return None if folder is None else read_svd_metadata(folder, model).forms()


def open_svd_folder(folder: Path, teacher: str | None) -> SvdMetadata:
    """The metadata, after every tensor was found in its shape and the hash of the teacher was the given one (None:
    any)."""
    metadata = read_metadata(folder)
    if teacher is not None and metadata.teacher_hash != teacher:
        raise ModelError(f"{folder}: was made from other weights than this model's; {REMAKE}")
    pairs = [(layer, matrix) for layer in metadata.layer_ids for matrix in MATRICES]
    _check_file(folder / U_FILE, {u_key(*pair): metadata.u_shape(*pair) for pair in pairs})
    for layer in metadata.layer_ids:
        shapes = {v_key(matrix): metadata.v_shape(layer, matrix) for matrix in MATRICES}
        for expert in range(metadata.num_experts):
            _check_file(v_file(folder, layer, expert), shapes)
    return metadata


def _check_file(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    try:
        with safe_open(str(path), framework="np") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: missing or not whole ({error}); {REMAKE}") from None
    if found != shapes:
        name = next(name for name in (*shapes, *found) if found.get(name) != shapes.get(name))
        raise ModelError(f"{path}: {name} is {found.get(name)}, but {shapes.get(name)} by {METADATA}; {REMAKE}")


def teacher_hash(checkpoint: Checkpoint) -> str:
    """Of names, shapes, dtypes and a sample of the numbers of all experts and routers: the first 256 bytes of 64 rows
    of each. For 90 GB of experts that is some megabytes of reading."""
    digest = hashlib.blake2b(digest_size=16)
    facts = {name: checkpoint.config.get(name) for name in HASH_FACTS}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    files: dict[Path, int] = {}
    try:
        for name in sorted(checkpoint.names()):
            if ".experts." in name or name.endswith(".gate.weight"):  # a dense MLP has gate_proj.weight
                shape = tuple(checkpoint.shape(name))
                dtype, sample = _sample(checkpoint, name, shape[0], files)
                digest.update(f"{name} {shape} {dtype}\n".encode())
                digest.update(sample)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return digest.hexdigest()


def _sample(checkpoint: Checkpoint, name: str, num_rows: int, files: dict[Path, int]) -> tuple[str, bytes]:
    """(dtype, bytes of rows spread over the tensor)."""
    rows = sorted({i * (num_rows - 1) // max(HASH_ROWS - 1, 1) for i in range(HASH_ROWS)})
    location = checkpoint.location(name)
    if location is None:  # quantised: only the whole tensor can be read
        tensor = checkpoint.read(name)
        step = max(1, HASH_ROW_BYTES // tensor.element_size())
        return str(tensor.dtype), b"".join(tensor[row].flatten()[:step].numpy().tobytes() for row in rows)
    if location.path not in files:
        files[location.path] = os.open(location.path, os.O_RDONLY)
    row_bytes = location.num_bytes // num_rows
    size, file = min(row_bytes, HASH_ROW_BYTES), files[location.path]
    return str(location.dtype), b"".join(os.pread(file, size, location.offset + row * row_bytes) for row in rows)

"""SvdCheckpoint: a model's tensors with low-rank experts in place of its own, with names and forms that we choose.

    svd.{layer}.u13.{w1|w3}    svd.{layer}.u2    svd.{layer}.{expert}.{gate|up|down}

The loader thus proves and fills low-rank experts as it does any others, wherever they go (weights/loader.py); the
checkpoint's own experts are not read and may be absent. Files store V as [r, d]; the kernels want rows of one output
each, so a tensor is transposed and padded when it is read (weights/expert_form.py). Experts with a U of their own
(mode private) are multiplied out to dense ones: correct, but no bytes are saved.

An expert that stays on disk is read when it is missed, long after the engine has started, perhaps after another
`nanovllm compress`: files are opened by name then, as there may be thousands, and one that is not the file of the start
any more is refused. Reading is by `pread`: a file that shrinks is an error, not a crash.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Shard
from nanovllm.lowrank.folder import (
    FOLDER,
    REMAKE,
    U_FILE,
    SvdMetadata,
    forms_of,
    open_svd_folder,
    read_metadata,
    teacher_hash,
    u_key,
    v_file,
    v_key,
)
from nanovllm.model_config import ModelConfig
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm
from nanovllm.weights.rules import Rule
from nanovllm.weights.safetensors_folder import Location, read_locations

DISABLE = "NANOVLLM_DISABLE_SVD"
RULES = (
    Rule("svd.{i}.u13.{part:w1|w3}", "layers.{i}.mlp.experts.u13.weight"),
    Rule("svd.{i}.u2", "layers.{i}.mlp.experts.u2.weight"),
    Rule("svd.{i}.{e}.{p:gate|up}", "layers.{i}.mlp.experts.gate_up.weight", "{e}.{p}"),
    Rule("svd.{i}.{e}.down", "layers.{i}.mlp.experts.down.weight", "{e}"),
)
MATRIX_OF = {"gate": "w1", "up": "w3", "down": "w2"}


def find_svd_folder(model: Path) -> Path | None:
    """The model's folder of low-rank experts, unless there is none or the user wants the original ones."""
    folder = model / FOLDER
    return folder if folder.is_dir() and os.environ.get(DISABLE) != "1" else None


def read_svd_metadata(folder: Path, model: ModelConfig) -> SvdMetadata:
    """The metadata alone, refused unless it speaks of a model of these sizes. Enough to plan with."""
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
    """Of the model at `path`, if it would run with low-rank experts: for who wants to know sizes before it runs."""
    folder = None if model.moe is None else find_svd_folder(path)
    return None if folder is None else forms_of(read_svd_metadata(folder, model))


class SvdCheckpoint:
    """Meets `Checkpoint` (checkpoint.py). `read` of low-rank experts works after `close` too."""

    def __init__(self, teacher: Checkpoint, folder: Path, model: ModelConfig) -> None:
        self.path, self.config, self.generation_config = teacher.path, teacher.config, teacher.generation_config
        self.folder, self._teacher = folder, teacher
        read_svd_metadata(folder, model)
        names = teacher.names()
        self.has_teacher = any(".experts." in name for name in names)  # without its experts nothing can be compared
        self.metadata = open_svd_folder(folder, teacher_hash(teacher) if self.has_teacher else None)
        self._forms = dict(zip(self.metadata.layer_ids, forms_of(self.metadata)))
        self._own = [name for name in names if ".experts." not in name]
        self._shapes = {
            name: shape
            for layer, form in self._forms.items()
            for name, shape in _shapes(layer, form, self.metadata.num_experts)
        }
        files = [v_file(folder, layer, e) for layer in self._forms for e in range(self.metadata.num_experts)]
        self._stamps = {path: _stamp(path.stat()) for path in (folder / U_FILE, *files)}
        self._u_locations = read_locations(folder / U_FILE)

    def names(self) -> list[str]:
        return [*self._own, *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self._teacher.shape(name)

    def location(self, name: str) -> Location | None:
        return None if name in self._shapes else self._teacher.location(name)

    def read(self, name: str) -> torch.Tensor:
        return self._read(name, None) if name in self._shapes else self._teacher.read(name)

    def read_piece(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A rank's share: what has the intermediate size in it is cut there (weights/expert_form.py)."""
        if name not in self._shapes:
            return self._teacher.read_piece(name, dim, start, length)
        return self._read(name, Shard(dim, start, length, self._shapes[name][dim]))

    def _read(self, name: str, cut: Shard | None) -> torch.Tensor:
        layer, *rest = name.removeprefix("svd.").split(".")
        shape, number = list(self._shapes[name]), int(layer)
        if cut is not None:
            assert cut.total == self.metadata.intermediate_size, "ranks cut along nothing else"
            shape[cut.dim] = cut.length
        if rest[0] == "u13":
            found = self._u(number, rest[1]).T
        elif rest[0] == "u2":
            found = self._u(number, "w2", cut=cut)
            found = found.T if self._forms[number].side == "input" else found
        else:
            found = self._expert(number, int(rest[0]), MATRIX_OF[rest[1]], cut)
        return _pad(found, (shape[0], shape[1]))

    def _u(self, layer: int, matrix: str, expert: int | None = None, cut: Shard | None = None) -> torch.Tensor:
        """`cut`: which part of the intermediate size; in U that is only a dimension of w2's, input side: its rows."""
        shape = self.metadata.u_shape(layer, matrix)
        location = self._u_locations.get(u_key(layer, matrix, expert))
        return self._pread(location, shape, self.folder / U_FILE, cut and replace(cut, dim=0))

    def _expert(self, layer: int, expert: int, matrix: str, cut: Shard | None) -> torch.Tensor:
        """[outputs, inputs] as the kernels read it, not padded yet."""
        path = v_file(self.folder, layer, expert)
        shape = self.metadata.v_shape(layer, matrix)
        inputs_cut = matrix == "w2" and self.metadata.w2_modes[layer] == "input"  # then U has the intermediate size
        v_cut = None if inputs_cut or cut is None else replace(cut, dim=1)
        v = self._pread(read_locations(path).get(v_key(matrix)), shape, path, v_cut)
        outputs_first = matrix == "w2" and self.metadata.w2_modes[layer] == "output"
        if self.metadata.mode == "private":
            both = self._u(layer, matrix, expert, cut if inputs_cut else None).float() @ v.float()
            return both if outputs_first else both.T
        return v if outputs_first else v.T

    def _pread(self, location: Location | None, shape: tuple[int, int], path: Path, cut: Shard | None) -> torch.Tensor:
        if location is None or location.num_bytes != shape[0] * shape[1] * location.dtype.itemsize:
            raise ModelError(f"{path}: a tensor of shape {shape} is not there as plain numbers; {REMAKE}")
        size, (rows, columns) = location.dtype.itemsize, shape
        spans = [(0, rows * columns)]  # (first number, how many)
        if cut is not None and cut.dim == 0:
            spans, rows = [(cut.start * columns, cut.length * columns)], cut.length
        elif cut is not None:
            spans, columns = [(row * columns + cut.start, cut.length) for row in range(rows)], cut.length
        raw = torch.empty(rows, columns, dtype=location.dtype)
        view = memoryview(raw.flatten().view(torch.uint8).numpy())
        try:
            with path.open("rb", buffering=0) as file:
                self._check_same(path, os.fstat(file.fileno()))
                for first, count in spans:
                    self._fill(path, file.fileno(), location.offset + first * size, view[: count * size])
                    view = view[count * size :]
        except OSError as error:
            raise ModelError(f"{path}: an expert cannot be read ({error.strerror})") from error
        return raw

    def _fill(self, path: Path, file: int, offset: int, view: memoryview) -> None:
        while view:
            count = os.preadv(file, [view], offset)
            if count == 0:
                self._check_same(path, None)
            view, offset = view[count:], offset + count

    def _check_same(self, path: Path, found: os.stat_result | None) -> None:
        if found is None or _stamp(found) != self._stamps[path]:
            raise ModelError(f"{path}: was removed, cut or replaced while it is served; start the engine again")

    def load_tokenizer(self) -> Any:
        return self._teacher.load_tokenizer()

    def close(self) -> None:
        self._teacher.close()


def _shapes(layer: int, form: ExpertForm, num_experts: int) -> list[tuple[str, tuple[int, int]]]:
    found = []
    if form.is_low_rank:
        found = [(f"svd.{layer}.u13.{w}", (form.columns, form.hidden)) for w in ("w1", "w3")]
        found.append((f"svd.{layer}.u2", form.shared["u2"]))
    return found + [
        (f"svd.{layer}.{e}.{part}", shape) for e in range(num_experts) for part, shape in form.parts.items()
    ]


def _pad(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """With zeros, at the end of rows and columns."""
    if tuple(tensor.shape) == shape:
        return tensor  # turned by whoever copies it to its place
    out = tensor.new_zeros(shape)
    out[: tensor.shape[0], : tensor.shape[1]] = tensor
    return out


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns

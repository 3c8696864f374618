"""SvdCheckpoint: a model's tensors with low-rank experts in place of its own, with names and forms that we choose.

    svd.{layer}.u13.{w1|w3}    svd.{layer}.u2    svd.{layer}.{expert}.{gate|up|down}

The loader thus proves and fills low-rank experts as it does any others (weights/loader.py); the checkpoint's own
experts are not read and may be absent. Files store V as [r, d]; the kernels read rows of one output each, so a tensor
is transposed and padded when it is read (weights/expert_form.py).

An expert that stays on disk is read at its first use, long after the engine has started, perhaps after another
`nanovllm compress`. There may be thousands of files, so they are opened by name at that time, and a file that is not
the one of the start any more is refused. Reading is by `pread`: a file that shrinks is an error, not a crash.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ModelError
from nanovllm.hardware.disk_memory import bytes_of
from nanovllm.hardware.parallel import Shard
from nanovllm.lowrank.folder import REMAKE, open_svd_folder, read_svd_metadata, teacher_hash
from nanovllm.lowrank.format import U_FILE, u_key, v_file, v_key
from nanovllm.model_config import ModelConfig
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.quantised import PackedNumbers
from nanovllm.weights.rules import Rule
from nanovllm.weights.shards import Location, read_locations

RULES = (
    Rule("svd.{i}.u13.{part:w1|w3}", "layers.{i}.mlp.experts.u13.weight"),
    Rule("svd.{i}.u2", "layers.{i}.mlp.experts.u2.weight"),
    Rule("svd.{i}.{e}.{p:gate|up}", "layers.{i}.mlp.experts.gate_up.weight", "{e}.{p}"),
    Rule("svd.{i}.{e}.down", "layers.{i}.mlp.experts.down.weight", "{e}"),
)
MATRIX_OF = {"gate": "w1", "up": "w3", "down": "w2"}


class SvdCheckpoint:
    """Meets `Checkpoint` (checkpoint.py). `read` of low-rank experts works after `close` too."""

    def __init__(self, teacher: Checkpoint, folder: Path, model: ModelConfig) -> None:
        self.path, self.config, self.generation_config = teacher.path, teacher.config, teacher.generation_config
        self.folder, self._teacher = folder, teacher
        read_svd_metadata(folder, model)
        names = teacher.names()
        self.has_teacher = any(".experts." in name for name in names)  # without its experts nothing can be compared
        self.metadata = open_svd_folder(folder, teacher_hash(teacher) if self.has_teacher else None)
        self._forms = dict(zip(self.metadata.layer_ids, self.metadata.forms()))
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

    def bytes_location(self, name: str) -> Location | None:
        return None if name in self._shapes else self._teacher.bytes_location(name)

    def read(self, name: str) -> torch.Tensor:
        return self._read(name, None) if name in self._shapes else self._teacher.read(name)

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A rank's share: what has the intermediate size in it is cut there (weights/expert_form.py)."""
        if name not in self._shapes:
            return self._teacher.read_slice(name, dim, start, length)
        return self._read(name, Shard(dim, start, length, self._shapes[name][dim]))

    def _read(self, name: str, cut: Shard | None) -> torch.Tensor:
        first, *rest = name.removeprefix("svd.").split(".")
        layer, shape = int(first), list(self._shapes[name])
        if cut is not None:  # along the intermediate size: rows of U (w2 on its input side), columns of V
            assert cut.total == self.metadata.intermediate_size
            shape[cut.dim] = cut.length
        if rest[0] in ("u13", "u2"):
            matrix, path = rest[1] if rest[0] == "u13" else "w2", self.folder / U_FILE
            location, stored = self._u_locations.get(u_key(layer, matrix)), self.metadata.u_shape(layer, matrix)
            found = self._pread(location, stored, path, cut and replace(cut, dim=0))
        else:
            matrix, path = MATRIX_OF[rest[1]], v_file(self.folder, layer, int(rest[0]))
            location, stored = read_locations(path).get(v_key(matrix)), self.metadata.v_shape(layer, matrix)
            found = self._pread(location, stored, path, cut and replace(cut, dim=1))
        outputs_first = matrix == "w2" and self._forms[layer].side == "output"
        return _pad(found if outputs_first else found.T, (shape[0], shape[1]))

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
        view = bytes_of(raw.flatten())
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

    def read_blocks(self, name: str) -> StoredBlocks | None:
        return None if name in self._shapes else self._teacher.read_blocks(name)

    def quantised_types(self) -> dict[str, str]:
        return self._teacher.quantised_types()

    def read_packed(self, name: str) -> PackedNumbers | None:
        return None if name in self._shapes else self._teacher.read_packed(name)

    def packed_forms(self) -> dict[str, str]:
        return {name: form for name, form in self._teacher.packed_forms().items() if ".experts." not in name}

    def unused(self) -> list[str]:
        return self._teacher.unused()

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        return self._teacher.kv_scales()

    def load_tokenizer(self) -> Any:
        return self._teacher.load_tokenizer()

    def close(self) -> None:
        self._teacher.close()


def _shapes(layer: int, form: ExpertForm, num_experts: int) -> list[tuple[str, tuple[int, int]]]:
    shared = [(f"svd.{layer}.u13.{w}", (form.columns, form.hidden)) for w in ("w1", "w3")]
    parts = [(f"svd.{layer}.{e}.{part}", shape) for e in range(num_experts) for part, shape in form.parts.items()]
    return [*shared, (f"svd.{layer}.u2", form.shared["u2"]), *parts]


def _pad(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """With zeros, at the end of rows and columns."""
    if tuple(tensor.shape) == shape:
        return tensor  # perhaps a transposed view; the copy to its destination makes it contiguous
    out = tensor.new_zeros(shape)
    out[: tensor.shape[0], : tensor.shape[1]] = tensor
    return out


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns

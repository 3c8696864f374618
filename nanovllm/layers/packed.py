"""PackedWeight: a weight whose matrices stay quantised in memory; Packing: how a checkpoint fills all those of a model.

A layer has one in place of a parameter if `Build.packs` is set, and gives it to its operators as it would give the
parameter. Parts of one weight (q, k and v) may have different formats. A part that cannot be quantised is kept in
float32 beside the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.hardware.disk_memory import DiskMemory
from nanovllm.hardware.huge_pages import HugePages
from nanovllm.hardware.parallel import Shard
from nanovllm.layers.integers import expect_types
from nanovllm.layers.parted import FewerBits, fewer_bits
from nanovllm.ops.quant import BLOCK, FORMATS, LANES, MOVED, PackedMatrix, move_blocks, pack, quantise_matrix, stack
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.gguf_quants import StoredBlocks, split
from nanovllm.weights.loader import LoadTarget, PackedTarget, matrix_targets
from nanovllm.weights.rules import Rule, find_destination

logger = logging.getLogger("nanovllm")
MATRICES = {"int8": "Q8_0", "int4": "Q4_1"}  # what quantization= makes of a matrix
TABLES = "Q8_0"  # and of the embedding and the head


class PackedWeight(nn.Module):
    """[rows, columns], filled part by part by the loader; the parts lie below each other in their order."""

    def __init__(
        self, parts: dict[str, int], columns: int, fine: bool = False, memory: HugePages | None = None
    ) -> None:
        """`fine`: of the embedding and the head, where rounding reaches the logits directly."""
        super().__init__()
        self.fine = fine
        self.parts, self.shape = parts, (sum(parts.values()), columns)
        self.matrices: list[PackedMatrix | torch.Tensor] = []
        self.memory: HugePages | DiskMemory | None = memory  # where they are kept
        self._found: dict[str, PackedMatrix | torch.Tensor] = {}
        self._stacked: StackedExperts | None = None

    def put(self, part: str, matrix: PackedMatrix | torch.Tensor) -> None:
        assert tuple(matrix.shape) == (self.parts[part], self.shape[1])
        self._found[part] = matrix
        if len(self._found) == len(self.parts):
            self.matrices = stack(self._found.pop(name) for name in self.parts)
            if self.memory is not None:
                keep, packed = self.memory.keep, [isinstance(m, PackedMatrix) for m in self.matrices]
                found = zip(self.matrices, packed)
                self.matrices = [replace(m, data=keep(m.data)) if p else keep(m) for m, p in found]  # type: ignore

    def view(self, shape: tuple[int, int, int]) -> StackedExperts:
        if self._stacked is None:
            self._stacked = StackedExperts(self, shape)
        return self._stacked

    def rows(self, start: int, length: int) -> Iterator[PackedMatrix | torch.Tensor]:
        """Of whole parts: these begin with a panel."""
        for matrix in self.matrices:
            size = matrix.shape[0]
            first, last = max(start, 0), min(start + length, size)
            if first < last:
                yield matrix.narrow(first, last - first) if isinstance(matrix, PackedMatrix) else matrix[first:last]
            start -= size

    @property
    def num_bytes(self) -> int:
        return sum((m.data if isinstance(m, PackedMatrix) else m).nbytes for m in self.matrices)


@dataclass(frozen=True)
class ExpertRows:
    """Of one expert; no copy."""

    matrices: tuple[PackedMatrix | torch.Tensor, ...]
    shape: tuple[int, int]


class StackedExperts:
    """A PackedWeight seen as [experts, rows, columns]: what ops/moe.py:expert_pairs reads of a stack."""

    def __init__(self, weight: PackedWeight, shape: tuple[int, int, int]) -> None:
        self.shape, (number, rows, columns) = shape, shape
        self._experts = [ExpertRows(tuple(weight.rows(e * rows, rows)), (rows, columns)) for e in range(number)]

    def __getitem__(self, expert: int) -> ExpertRows:
        return self._experts[expert]


class Packing:
    """`targets` are for the loader; `report` comes after it."""

    def __init__(
        self, model: nn.Module, quantization: str, stored: Mapping[str, str], disk: DiskMemory | None = None
    ) -> None:
        """`quantization`: "int8", "int4", or "auto" for matrices as the file has them; `stored`: their types, or the
        forms of those that cannot stay as they are (`Checkpoint.quantised_types`, `packed_forms`). `disk`: for experts
        that are not to be kept in memory."""
        self._model, self._wanted, self._stored, self._disk = model, quantization, stored, disk
        for name, weight in packed_weights(model).items() if disk is not None else ():
            weight.memory = disk if ".experts." in name else weight.memory
        self._kept: dict[str, list[str]] = {}  # why they are in float32 -> tensors

    def targets(self) -> dict[str, dict[str, LoadTarget]]:
        return {name: self._parts(name, weight) for name, weight in packed_weights(self._model).items()}

    def _parts(self, name: str, weight: PackedWeight) -> dict[str, LoadTarget]:
        layer = self._model.get_submodule(name.rpartition(".")[0])
        form = format_of(self._wanted, weight)

        def make(part: str, shape: tuple[int, ...], shard: Shard | None) -> LoadTarget:
            take = partial(self._take, weight, part, form, shape[1])
            return PackedTarget(shape, shard, self._wanted == "auto", take)

        return matrix_targets(layer, weight.parts, weight.shape[1], make)

    def _take(
        self,
        weight: PackedWeight,
        part: str,
        form: str | None,
        whole_columns: int,
        name: str,
        found: torch.Tensor | StoredBlocks,
    ) -> None:
        """`whole_columns`: of all ranks together."""
        rows, columns = weight.parts[part], weight.shape[1]
        matrix: PackedMatrix | torch.Tensor
        if isinstance(found, StoredBlocks):
            raw, form = found.raw, found.kind.name
            if len(raw) < rows:
                raw = F.pad(raw, (0, 0, 0, rows - len(raw)))
            matrix = move_blocks(form, raw) if form in MOVED else pack(form, *split(raw, found.kind))
        elif form is not None and columns % BLOCK == 0:
            matrix = quantise_matrix(form, found, rows)
        else:
            why = f"a row of {columns} does not divide into blocks of {BLOCK}"
            if form is None:
                why = f"the file has {str(found.dtype).removeprefix('torch.')}"
                if name in self._stored:
                    why = self._why_expanded(self._stored[name], is_cut=columns < whole_columns)
            self._kept.setdefault(why, []).append(name)
            matrix = F.pad(found.float(), (0, 0, 0, rows - len(found)))
        weight.put(part, matrix)

    def _why_expanded(self, stored: str, is_cut: bool) -> str:
        if stored not in FORMATS:
            return f"groups of inputs in {stored} are no runs of whole blocks of {BLOCK}"
        if is_cut:
            return f"the ranks cut rows inside a block of {stored}"
        return f"the scales are too small or too large for {stored}, which has them in float16"

    def report(self) -> None:
        for why, names in self._kept.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            logger.info("%s%s: computed in float32, because %s", names[0], more, why)
        weights = packed_weights(self._model).values()
        if self._wanted != "auto":
            self._warn_of_little(formats_of(self._model))
        size = sum(weight.num_bytes for weight in weights) / 1e6
        logger.info("matrices in memory: %s, %.0f MB", ", ".join(formats_of(self._model)), size)
        if self._disk is not None:
            where = self._disk.num_bytes / 1e6, self._disk.folder
            logger.info("experts: %.0f MB of these are in a file in %s; what is used most stays in memory", *where)

    def _warn_of_little(self, formats: list[str]) -> None:
        if formats == ["float32"]:
            why = next(iter(self._kept), "there are none")
            logger.warning("quantization=%r quantises no matrix of this model: %s", self._wanted, why)
        elif self._stored:
            stored = ", ".join(sorted(set(self._stored.values())))
            text = "quantization=%r rounds weights again that the file has in %s; 'auto' rounds nothing"
            logger.warning(text, self._wanted, stored)


def format_of(quantization: str, weight: PackedWeight) -> str | None:
    """Which format its matrices get; None: that of the file."""
    return None if quantization == "auto" else TABLES if weight.fine else MATRICES[quantization]


def formats_of(model: nn.Module) -> list[str]:
    matrices = (matrix for weight in packed_weights(model).values() for matrix in weight.matrices)
    found = {m.form.name if isinstance(m, PackedMatrix) else "float32" for m in matrices}
    return sorted(found | {weight.label for weight in fewer_bits(model)})


def count_weights(model: nn.Module) -> tuple[int, int]:
    """(numbers, bytes) of a model's weights, quantised or not."""
    packed: list[PackedWeight | FewerBits] = [*packed_weights(model).values(), *fewer_bits(model)]
    plain = list(model.parameters())
    numbers = sum(rows * columns for rows, columns in (weight.shape for weight in packed))
    num_bytes = sum(weight.num_bytes for weight in packed)
    return numbers + sum(p.numel() for p in plain), num_bytes + sum(p.nbytes for p in plain)


def expected_bytes(model: nn.Module, quantization: str | None, checkpoint: Checkpoint, rules: tuple[Rule, ...]) -> int:
    """Of a model that is not loaded (built on torch's meta device): what `count_weights` will find."""
    expect_types(model, checkpoint, rules)
    size = sum(parameter.nbytes for parameter in model.parameters())
    size += sum(weight.num_bytes for weight in fewer_bits(model))
    packed = packed_weights(model)
    found: list[tuple[tuple[int, ...], str | None]] = []  # (shape, format; None: float32)
    if quantization == "auto":
        types = checkpoint.quantised_types()
        places = {name: find_destination(rules, name) for name in checkpoint.names()}
        names = [name for name, place in places.items() if place is not None and place.parameter in packed]
        found = [(checkpoint.shape(name), types.get(name)) for name in names]
    elif quantization is not None:
        found = [(weight.shape, format_of(quantization, weight)) for weight in packed.values()]
    return size + sum(matrix_bytes(rows, columns, form) for (rows, columns), form in found)


def matrix_bytes(rows: int, columns: int, form: str | None) -> int:
    """`form`: None if the file has floats."""
    if form is None or columns % BLOCK:
        return 4 * rows * columns
    return -(-rows // LANES) * FORMATS[form].panel_bytes(columns)


def mean_bytes(checkpoint: Checkpoint) -> float:
    """Of a number in the matrices of a GGUF file that stay as they are."""
    types, shapes = checkpoint.quantised_types(), {name: checkpoint.shape(name) for name in checkpoint.names()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    size = sum(matrix_bytes(*shape, types.get(name)) for name, shape in matrices.items())
    return size / sum(rows * columns for rows, columns in matrices.values())


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """By the names that they would have as parameters; of tied ones the first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}

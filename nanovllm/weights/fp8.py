"""Weights in 8-bit floats (E4M3): a number of the file times the scale that its tensor, row or block has.

    x.weight             F8_E4M3 [rows, columns]
    x.weight_scale_inv   or x.weight_scale, whichever the tool writes; both are multiplied with, despite the first name

    scale                shape                          written by
    of a tensor          [] or [1]                      "fp8" without weight_block_size, compressed-tensors
    of a row             [rows] or [rows, 1]            compressed-tensors ("channel")
    of a block           [row blocks, column blocks]    "fp8" with weight_block_size (DeepSeek-V3, Qwen3-*-FP8), and
                                                        compressed-tensors ("block"; "group" is a block of one row)

To the code all of them are blocks: of rows x columns, 1 x columns, or as config.json says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Shard
from nanovllm.quantization_config import REMEDY
from nanovllm.weights.shards import PLAIN_DTYPES, Shards

SCALES = ("weight_scale_inv", "weight_scale")
BLOCK = 128  # rows and columns of a block of ops/fp8.py


@dataclass(frozen=True)
class Fp8Blocks:
    """A weight, or a piece of one, as it is stored."""

    q: torch.Tensor  # float8_e4m3fn [rows, columns]
    scale: torch.Tensor  # [row blocks, column blocks], of those that q touches
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)  # row and column of the first block at which q begins
    shard: Shard | None = None  # which piece of the weight it is

    def expanded(self) -> torch.Tensor:
        """float32"""
        found, scale = self.q.float(), self.scale.float()
        rows, columns = ((torch.arange(n) + at) // size for n, at, size in zip(found.shape, self.first, self.block))
        if scale.shape[1] == 1:
            return found.mul_(scale[rows])
        for number in range(len(scale)):  # a whole matrix of scales would take as much room as the weight
            start, stop = (max(0, n * self.block[0] - self.first[0]) for n in (number, number + 1))
            found[start:stop] *= scale[number, columns]
        return found

    def row_scales(self) -> torch.Tensor:
        """[rows], where a row or the tensor has a scale."""
        rows = (torch.arange(len(self.q), device=self.scale.device) + self.first[0]) // self.block[0]
        return self.scale[:, 0].float()[rows]

    def cut(self, shard: Shard) -> Fp8Blocks:
        """A rank's part of a whole weight."""
        dim, start, stop = shard.dim, shard.start, shard.start + shard.length
        size, first = self.block[dim], shard.start // self.block[dim]
        scale = self.scale.narrow(dim, first, -(-stop // size) - first)
        q = self.q[start:stop] if dim == 0 else self.q[:, start:stop]
        return Fp8Blocks(q, scale, self.block, (start % size, 0) if dim == 0 else (0, start % size), shard)


class Fp8Weight:
    form = "FP8"

    def __init__(self, stored: Shards, name: str, block: tuple[int, int] | None) -> None:
        """`block`: None if a tensor or a row has a scale."""
        self._stored, self._name, self.shape = stored, name, stored.shape(name)
        scales = [f"{name.removesuffix('weight')}{suffix}" for suffix in SCALES]
        found = [scale for scale in scales if scale in stored]
        if len(found) != 1:
            what = " and ".join(found) if found else f"neither {' nor '.join(scales)}"
            raise ModelError(f"{stored.path}: {name} in 8-bit floats needs one scale, there is {what}; get it again.")
        self._scale = found[0]
        self.block = self._check(block)

    def _check(self, block: tuple[int, int] | None) -> tuple[int, int]:
        stored, shape, found = self._stored, self.shape, self._stored.shape(self._scale)
        if len(shape) != 2 or 0 in shape:
            raise ModelError(f"{stored.path}: {self._name} has shape {shape}, no matrix; get the model again.")
        if (dtype := stored.dtype(self._scale)) not in PLAIN_DTYPES:
            known = ", ".join(PLAIN_DTYPES)
            raise ModelError(f"{stored.path}: {self._scale} is stored as {dtype}, not as {known}; {REMEDY}.")
        rows, columns = shape
        if block is not None:
            wanted = [tuple(-(-size // part) for size, part in zip(shape, block))]
            said, self._scales = f"in blocks of {block}", wanted[0]
        else:
            wanted = [(), (1,), (1, 1), (rows,), (rows, 1)]
            of_rows = found in wanted[3:] and rows > 1
            said, self._scales = "with a scale for the tensor or for each row", (rows, 1) if of_rows else (1, 1)
            block = (1, columns) if of_rows else (rows, columns)
        if found not in wanted:
            raise ModelError(
                f"{stored.path}: {self._scale} has shape {found}: {self._name} of shape {shape} {said} needs "
                f"{' or '.join(map(str, wanted))}; get the model again."
            )
        return block

    @property
    def has_product(self) -> bool:
        """Products take a scale of a row, or of a block of 128 x 128."""
        return self.block[1] >= self.shape[1] or self.block == (BLOCK, BLOCK)

    def read(self, rows: slice | None = None, columns: slice | None = None) -> Fp8Blocks:
        scale = self._stored.read(self._scale).view(self._scales)
        if not bool(scale.isfinite().all()):
            raise ModelError(
                f"{self._stored.path}: {self._scale} has numbers that are not finite; get the model again."
            )
        if rows is None or columns is None:
            return Fp8Blocks(self._stored.read(self._name), scale, self.block)
        for dim, (cut, size) in enumerate(zip((rows, columns), self.block)):
            first = cut.start // size
            scale = scale.narrow(dim, first, -(-cut.stop // size) - first)
        first = rows.start % self.block[0], columns.start % self.block[1]
        return Fp8Blocks(self._stored.read(self._name, rows, columns), scale, self.block, first)

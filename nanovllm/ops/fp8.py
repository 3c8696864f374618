"""Matrices in 8-bit floats (E4M3: 4 bits of exponent, 3 of mantissa, at most 448) with scales, in plain PyTorch. Triton
twin: `ops/triton/fp8.py`.

    weight    q [rows, columns] times scale: of a row [rows], or of each block of 128 x 128 [row blocks, column blocks]
    input     quantised anew for each product: a scale for a token, or for each 128 numbers of one

An input of few rows is not quantised: there the time is that of reading the weight, and 16 bits cost nothing. Nor is
that of experts (`ops/moe.py`), however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
BLOCK = 128
EXPANDED_ROWS = 8 * BLOCK  # of an expert, at once
TINY = 1e-12  # a row of zeros has this for its largest number: no division by zero


def quantise(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] -> (q, scale [rows, groups]): a group is a run of `block` columns, 0: the whole row."""
    groups = x.float().unflatten(1, (-1, block or x.shape[1]))
    scale = groups.abs().amax(2).clamp(min=TINY) / E4M3_MAX
    return (groups / scale[..., None]).flatten(1).to(E4M3), scale


def quantise_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] -> (q, scale [row blocks, column blocks]), of 128 x 128; the last of each may be smaller."""
    rows, columns = x.shape
    whole = F.pad(x.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [row blocks, 128, column blocks, 128]
    scale = blocks.abs().amax((1, 3)).clamp(min=TINY) / E4M3_MAX
    q = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return q[:rows, :columns].to(E4M3), scale


def expand(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself. `scale` as above."""
    if scale.dim() == 1:
        return (q.float() * scale[:, None]).to(dtype)
    rows, columns = q.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (q.float() * wide).to(dtype)


@dataclass(frozen=True)
class ScaledStack:
    """The matrices of a layer's experts: one in each expert buffer, views of one pool with any stride between them."""

    q: torch.Tensor  # float8_e4m3fn [buffers, rows, columns]
    scale: torch.Tensor  # float32 [buffers, rows], or [buffers, row blocks, column blocks]
    num_parts: int = 1  # matrices of as many rows below each other (gate and up): the blocks of each begin at its row 0

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def block(self) -> int:
        """0: a row has a scale."""
        return BLOCK if self.scale.dim() == 3 else 0

    def expanded(self, buffer: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns]"""
        return torch.cat(list(self.pieces(buffer, dtype)))

    def pieces(self, buffer: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The same, some rows after the other: expanding takes several copies in float32."""
        unit = self.block or 1
        for q, scale in zip(self.q[buffer].chunk(self.num_parts), self.scale[buffer].chunk(self.num_parts)):
            for first in range(0, len(q), EXPANDED_ROWS):
                last = first + EXPANDED_ROWS
                yield expand(q[first:last], scale[first // unit : last // unit], dtype)


def scaled_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`weight`: a ScaledWeight (layers/scaled.py)."""
    plain = expand(weight.q, weight.scale, x.dtype) if weight.plain is None else weight.plain
    return F.linear(x, plain, bias)

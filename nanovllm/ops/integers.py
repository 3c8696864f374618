"""Matrices of small integers with a scale for each group of inputs, on a GPU, in plain PyTorch. Triton twins:
`ops/triton/integers.py` (few rows), `ops/triton/integers_matmul.py` (more).

    w[o, i] = scale[o, g] q[o, i] + offset[o, g]       g = i // group, q in -8 .. 7 (4 bits) or -128 .. 127 (8 bits)

One form for all files: AWQ, GPTQ, compressed-tensors and GGUF (weights/integer_groups.py). Scale and offset are two
float16 in one 32-bit word, `factors` [groups, outputs]: as q is counted from its middle, the offset is a few steps at
most, and rounding it moves a weight by less than 1/100 of a step.

Where the bits lie. A block is 16 words of 32 bits of one output: 128 inputs in 4 bits, 64 in 8 bits. Input 16 j + c of
it is at place j of column c; a word has places of two neighbouring columns, so that shifted and masked once it gives
two numbers side by side, which is how tensor cores take 16-bit numbers:

                    bits 31-28  27-24  23-20  19-16  15-12  11-8   7-4   3-0
    4 bits  word 2p    column 2p + 1: j = 3, 1, 2, 0      column 2p: j = 3, 1, 2, 0
            word 2p+1  column 2p + 1: j = 7, 5, 6, 4      column 2p: j = 7, 5, 6, 4
    8 bits  word 2p    column 2p + 1: j = 1, 0            column 2p: j = 1, 0
            word 2p+1  column 2p + 1: j = 3, 2            column 2p: j = 3, 2

Places 1 and 2 are exchanged in 4 bits: so the low halves of the four bytes of a word are places 0 and 1 of two columns,
32 neighbouring inputs share a group at least, and one instruction may add up four products (`integers.py`). A row that
is no multiple of a block is filled up with zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from nanovllm.ops.fp8 import EXPANDED_ROWS
from nanovllm.ops.quant import PIECE_ROWS, round_eight_bits, round_four_bits

BLOCK = 32  # inputs: a row has a multiple of them
COLUMNS = 16  # words of a block


def num_places(bits: int) -> int:
    return 32 // bits


def block_length(bits: int) -> int:
    """Inputs of a block, and the largest group: larger ones are several with the same factors."""
    return COLUMNS * num_places(bits)


def num_blocks(columns: int, bits: int) -> int:
    return -(-columns // block_length(bits))


def stored_group(group: int, columns: int, bits: int) -> int:
    """Inputs that share a factor in memory, where in the file `group` do."""
    return block_length(bits) if group >= columns else math.gcd(group, block_length(bits))


def place_shifts(bits: int) -> list[int]:
    """Of places 0 .. num_places - 1: the bit of column 2p's half of a word at which they begin. The first half of the
    places is in word 2p."""
    return [0, 8, 4, 12] * 2 if bits == 4 else [0, 8] * 2


def pack_words(q: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, columns], counted from 0 -> int32 [rows, blocks * 16]."""
    rows, columns = q.shape
    length, places = block_length(bits), num_places(bits)
    middle = 2 ** (bits - 1)
    padded = F.pad(q, (0, num_blocks(columns, bits) * length - columns), value=middle) ^ middle  # two's complement
    numbers = padded.view(rows, -1, places, COLUMNS // 2, 2)  # [rows, blocks, place, pair p, column 2p or 2p + 1]
    words = torch.zeros(rows, numbers.shape[1], COLUMNS // 2, 2, dtype=torch.int32, device=q.device)
    for j, shift in enumerate(place_shifts(bits)):
        for column in range(2):
            words[..., j * 2 // places] |= numbers[:, :, j, :, column].to(torch.int32) << shift + 16 * column
    return words.view(rows, -1)


def unpack_words(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int8 [rows, columns], signed."""
    pairs, middle = words.view(len(words), -1, COLUMNS // 2, 2), 2 ** (bits - 1)
    places = []
    for j, shift in enumerate(place_shifts(bits)):
        word = pairs[..., j * 2 // num_places(bits)]
        places.append(torch.stack([word >> shift + 16 * column for column in range(2)], dim=-1).flatten(2))
    found = (torch.stack(places, dim=2).flatten(1) & 2**bits - 1 ^ middle) - middle
    return found[:, :columns].to(torch.int8)


def pack_factors(scale: torch.Tensor, offset: torch.Tensor | None, number: int) -> torch.Tensor:
    """[outputs, groups] each -> int32 [number, outputs]; groups past the last are zero."""
    zero = torch.zeros_like(scale) if offset is None else offset
    both = F.pad(torch.stack((scale, zero), dim=-1).half(), (0, 0, 0, number - scale.shape[1]))
    return both.view(torch.int32).squeeze(-1).t().contiguous()


def unpack_factors(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 scale and offset [outputs, groups]."""
    scale, offset = factors.t().contiguous()[..., None].view(torch.float16).unbind(-1)
    return scale, offset


@dataclass(frozen=True)
class IntegerStack:
    """The matrices of a layer's experts: one in each expert buffer, views of one pool with any stride between them."""

    words: torch.Tensor  # int32 [buffers, rows, blocks * 16]
    factors: torch.Tensor  # int32 [buffers, groups, rows]
    bits: int
    group: int
    columns: int

    order: ClassVar[None] = None  # inputs are in their order

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.words.shape[:2], self.columns)

    def expanded(self, buffer: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns]"""
        return torch.cat(list(self.pieces(buffer, dtype)))

    def pieces(self, buffer: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The same, some rows after the other: expanding takes several copies in float32."""
        pieces = zip(self.words[buffer].split(EXPANDED_ROWS), self.factors[buffer].split(EXPANDED_ROWS, dim=1))
        for words, factors in pieces:
            facts = {"bits": self.bits, "group": self.group, "shape": (len(words), self.columns), "order": self.order}
            yield expand(SimpleNamespace(words=words, factors=factors, **facts), dtype)


def expand(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself, its columns in the order of x. `weight`: an IntegerWeight (layers/integers.py)."""
    columns = weight.shape[1]
    scale, offset = (
        part.float().repeat_interleave(weight.group, 1)[:, :columns] for part in unpack_factors(weight.factors)
    )
    found = unpack_words(weight.words, weight.bits, columns).float() * scale + offset
    if weight.order is not None:
        found[:, weight.order] = found.clone()
    return found.to(dtype)


def integer_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    plain = expand(weight, x.dtype) if weight.plain is None else weight.plain
    return F.linear(x, plain, bias)


def round_rows(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What the matrix-vector product multiplies in place of x: whole multiples of 1/32512 of the largest number of
    each block, a 16-bit integer. bfloat16 keeps 8 bits of each number."""
    rows, columns = x.shape
    length = block_length(bits)
    blocks = F.pad(x.float(), (0, num_blocks(columns, bits) * length - columns)).view(rows, -1, length)
    scale = blocks.abs().amax(2, keepdim=True).clamp(min=TINY) / LARGEST
    return (torch.floor(blocks / scale + 0.5) * scale).flatten(1)[:, :columns]


LARGEST = 32512  # 127 * 256: the upper byte stays below 128 when the lower one, -128 .. 127, is rounded off
TINY = 1e-30  # the largest number of a block of zeros: no division by zero


def quantise(w: torch.Tensor, bits: int, group: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q uint8 [rows, columns], scale [rows, groups], offset or None). In groups of 32 the numbers that
    `quantization="int4"` and `"int8"` have on a CPU too, Q4_1 and Q8_0 of ops/quant.py."""
    found: list[tuple[torch.Tensor, ...]] = []
    for rows in w.split(PIECE_ROWS):  # rounding takes several copies in float32
        x = rows.float().unflatten(1, (-1, group))
        if bits == 8:
            q, [d] = round_eight_bits(x)
            found.append(((q ^ 0x80).flatten(1), d.squeeze(-1)))
        else:
            q, [d, m] = round_four_bits(x)
            found.append((q.flatten(1), d.squeeze(-1), (m + 8 * d).squeeze(-1)))
    parts = [torch.cat(part) for part in zip(*found)]
    return parts[0], parts[1], parts[2] if bits == 4 else None

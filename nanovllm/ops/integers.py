"""Matrices of small integers with a scale for each group of inputs, on a GPU, in plain PyTorch. Triton twins:
`ops/triton/integers.py` (few rows), `ops/triton/integers_matmul.py` (more).

    w[o, i] = scale[o, g] (q[o, i] - middle) + offset[o, g]       g = i // group, middle = 8 (4 bits) or 128 (8 bits)

One form for all files: AWQ, GPTQ, compressed-tensors and GGUF (weights/integer_groups.py). The offset is absent where
every zero is the middle (Q4_0, Q8_0, symmetric GPTQ). Scale and offset are float16: as q is counted from its middle,
the offset is a few steps at most, and rounding it moves a weight by less than 1/100 of a step.

Where the bits lie. Four words of 32 bits, 16 bytes, are what one lane of a GPU reads at once. In 4 bits they hold a
run of 32 inputs, in 8 bits of 16. The number at place j of word i is input 4 j + i of the run:

    4 bits   bits 31-28   27-24   ...   7-4   3-0        8 bits   bits 31-24   23-16   15-8   7-0
    word 0       28         24           4     0         word 0       12         8       4     0
    word 1       29         25           5     1         word 1       13         9       5     1
    word 2       30         26           6     2         word 2       14        10       6     2
    word 3       31         27           7     3         word 3       15        11       7     3

So the numbers at one place of the four words are four neighbouring inputs: the kernel shifts and masks four words
alike and multiplies by four neighbouring x. Nothing is exchanged between lanes, and a lane needs one scale: a group
is one run or several."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.ops.quant import PIECE_ROWS, round_eight_bits, round_four_bits

BLOCK = 32  # inputs: a row has a multiple of them
LANE_WORDS = 4  # that a lane reads at once


def run_length(bits: int) -> int:
    """Inputs in the words that a lane reads at once; groups are multiples."""
    return LANE_WORDS * 32 // bits


def pack_words(q: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, columns], columns a multiple of BLOCK -> int32 [rows, columns * bits / 32]."""
    places = q.unflatten(1, (-1, 32 // bits, LANE_WORDS))  # [rows, runs, place j, word i]
    words = places[:, :, 0].to(torch.int32)
    for j in range(1, 32 // bits):
        words |= places[:, :, j].to(torch.int32) << bits * j
    return words.flatten(1)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse."""
    runs = words.unflatten(1, (-1, LANE_WORDS))
    places = [(runs >> bits * j) & (2**bits - 1) for j in range(32 // bits)]
    return torch.stack(places, dim=2).to(torch.uint8).flatten(1)


def expand(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself, its columns in the order of x. `weight`: an IntegerWeight (layers/integers.py)."""
    q = unpack_words(weight.words, weight.bits).float() - 2 ** (weight.bits - 1)
    found = q * _by_input(weight.scale, weight)
    if weight.offset is not None:
        found += _by_input(weight.offset, weight)
    if weight.order is not None:
        found[:, weight.order] = found.clone()
    return found.to(dtype)


def _by_input(numbers: torch.Tensor, weight: Any) -> torch.Tensor:
    return numbers.float().repeat_interleave(weight.group, 1)[:, : weight.shape[1]]


def integer_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    plain = expand(weight, x.dtype) if weight.plain is None else weight.plain
    return F.linear(x, plain, bias)


def quantise(w: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q uint8 [rows, columns], scale [rows, groups], offset or None), in groups of 32: the numbers that
    `quantization="int4"` and `"int8"` have on a CPU too, Q4_1 and Q8_0 of ops/quant.py."""
    found: list[tuple[torch.Tensor, ...]] = []
    for rows in w.split(PIECE_ROWS):  # rounding takes several copies in float32
        x = rows.float().unflatten(1, (-1, BLOCK))
        if bits == 8:
            q, [d] = round_eight_bits(x)
            found.append(((q ^ 0x80).flatten(1), d.squeeze(-1)))
        else:
            q, [d, m] = round_four_bits(x)
            found.append((q.flatten(1), d.squeeze(-1), (m + 8 * d).squeeze(-1)))
    parts = [torch.cat(part) for part in zip(*found)]
    return parts[0], parts[1], parts[2] if bits == 4 else None

"""Rows of x as integers of 16 bits, for matrix-vector products with weights of integers (twin:
`ops/integers.py:round_rows`; why: `integers.py`), and the norm before the product where there is one.

A number is a whole multiple of 1/32512 of the largest of its block, 256 hi + lo, two bytes. They are written in the
order in which a lane needs them: for each 64-bit word of the weight the hi of its numbers, then the lo. Beside them the
unit of each block and the sum of each group of x, by which an offset is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops import integers
from nanovllm.ops.triton.common import dependent_launch, next_power_of_2, start_next, wait_for_last

LARGEST, TINY = tl.constexpr(integers.LARGEST), tl.constexpr(integers.TINY)


@triton.jit
def round_kernel(
    x_ptr,
    gain_ptr,
    order_ptr,
    bytes_ptr,
    units_ptr,
    sums_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCKS blocks of one row of x. With a norm every program adds up the squares of the whole row (ROW numbers)."""
    start_next(DEPENDENT)
    PLACES: tl.constexpr = 32 // BITS
    LENGTH: tl.constexpr = 512 // BITS  # inputs of a block of 16 words
    NUM_BLOCKS: tl.constexpr = (SIZE + LENGTH - 1) // LENGTH
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    # Byte i of a block belongs to word i // (2 PLACES). There bytes are in fours: places 2 f, 2 f + 1 of two columns.
    i = tl.arange(0, LENGTH)
    word, four, byte = i // (2 * PLACES), i % (2 * PLACES) // 4, i % 4
    place = 2 * four + byte % 2
    at = block[:, None] * LENGTH + (16 * place + 2 * word + byte // 2)[None, :]
    ok = at < SIZE
    if HAS_ORDER:
        at = tl.load(order_ptr + at, mask=ok, other=0)
    if HAS_NORM:
        gain = tl.load(gain_ptr + at, mask=ok, other=0.0).to(tl.float32)
    wait_for_last(DEPENDENT)
    x_ptr += row * x_stride
    x = tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        k = tl.arange(0, ROW)
        whole_row = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(whole_row * whole_row) / SIZE + eps) * gain
    unit = tl.maximum(tl.max(tl.abs(x), axis=1), TINY) / LARGEST
    whole = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)
    hi = (whole + 128) >> 8
    to = bytes_ptr + row * (2 * NUM_BLOCKS * LENGTH) + block[:, None] * (2 * LENGTH)
    to += (word * (4 * PLACES) + i % (2 * PLACES))[None, :]
    inside = block < NUM_BLOCKS
    tl.store(to, hi.to(tl.int8), mask=inside[:, None])
    tl.store(to + 2 * PLACES, (whole - hi * 256).to(tl.int8), mask=inside[:, None])
    scaled: tl.constexpr = 16.0 if BITS == 4 else 1.0  # what is multiplied by it is 16 q in 4 bits
    tl.store(units_ptr + row * NUM_BLOCKS + block, unit / scaled, mask=inside)
    sums_ptr += row * (NUM_BLOCKS * GROUPS)
    for g in tl.static_range(GROUPS):
        of_group = tl.sum(tl.where((place * GROUPS // PLACES == g)[None, :], x, 0.0), axis=1)
        tl.store(sums_ptr + block * GROUPS + g, of_group, mask=inside)


@dataclass(frozen=True)
class RoundedRows:
    """x as `integer_gemv_kernel` reads it."""

    numbers: torch.Tensor  # int8 [rows, blocks, 2 * inputs of a block]
    units: torch.Tensor  # float32 [rows, blocks]
    sums: torch.Tensor  # float32 [rows, groups], of x


def round_rows(x: torch.Tensor, weight: Any, norm: tuple[torch.Tensor, float] | None = None) -> RoundedRows:
    """norm = (weight [K], eps): that of x in place of x."""
    rows, size = x.shape
    assert x.stride(1) == 1
    groups, length = integers.block_length(weight.bits) // weight.group, integers.block_length(weight.bits)
    blocks, dependent = integers.num_blocks(size, weight.bits), dependent_launch(x.device)
    numbers = torch.empty((rows, blocks, 2 * length), dtype=torch.int8, device=x.device)
    units = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    sums = torch.empty((rows, blocks * groups), dtype=torch.float32, device=x.device)
    tile = min(1024 // length, next_power_of_2(blocks))
    round_kernel[(rows, triton.cdiv(blocks, tile))](
        x,
        x if norm is None else norm[0],
        x if weight.order is None else weight.order,
        numbers,
        units,
        sums,
        x.stride(0),
        0.0 if norm is None else norm[1],
        SIZE=size,
        BITS=weight.bits,
        GROUPS=groups,
        BLOCKS=tile,
        ROW=next_power_of_2(size) if norm is not None else 1,
        HAS_NORM=norm is not None,
        HAS_ORDER=weight.order is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=4,
    )
    return RoundedRows(numbers, units, sums)

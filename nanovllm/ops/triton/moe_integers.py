"""Experts in integers of 4 and 8 bits (twin: `ops/moe.py`; form of the weights: `ops/integers.py`).

    a token or two    x is rounded to 16-bit integers once for all of its experts, then every pair is a matrix-vector
                      product of its own (`integers.py:integer_sums`): gate and up; the product with SiLU is rounded
                      again; down and the router's weight
    more              pairs sorted by expert (`moe_align.py`), weights unpacked in registers for the tensor cores
                      (`integers_matmul.py:unpack`): out^T = W x^T, so that the weight is the operand in registers

The promises are those of `moe_gemm.py`: a tile is one block of positions with one buffer by BLOCK_N outputs over all of
K, and nothing about a row depends on pairs of other experts. The fixed grid walks over the tiles there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.ops.integers import IntegerStack
from nanovllm.ops.triton.common import capability, dot, num_multiprocessors
from nanovllm.ops.triton.integers import choose_block, dot_form, integer_sums
from nanovllm.ops.triton.integers_matmul import COLUMNS, load_factors, unpack, unpack_form
from nanovllm.ops.triton.integers_round import RoundedRows, round_rows
from nanovllm.ops.triton.moe_align import Alignment, align
from nanovllm.ops.triton.moe_gemm import GROUP, PROGRAMS_PER_SM, find_tile
from nanovllm.ops.triton.splits import hold


@triton.jit(do_not_specialize_on_alignment=["buffers_ptr", "weights_ptr"])
def pair_gemv_kernel(
    numbers_ptr,
    units_ptr,
    sums_ptr,
    words_ptr,
    factors_ptr,
    buffers_ptr,
    weights_ptr,
    out_ptr,
    words_stride,
    factors_stride,
    OUT_SIZE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Gate and up of every pair, or (not GATED) down and the router's weight. Row pair // PAIRS_PER_ROW of x."""
    pair = tl.program_id(0)
    buffer = tl.load(buffers_ptr + pair).to(tl.int64)
    if buffer < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = (words_ptr + buffer * words_stride, factors_ptr + buffer * factors_stride)
    inputs = (numbers_ptr, units_ptr, sums_ptr)
    row = pair // PAIRS_PER_ROW
    total, up, _, _ = integer_sums(weight, inputs, n, row, OUT_SIZE, FORM, 1, BLOCK_W, GATED, False)
    result = tl.sum(total, axis=1)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * tl.sum(up, axis=1)
    else:
        result *= tl.load(weights_ptr + pair)
    place = out_ptr + pair.to(tl.int64) * OUT_SIZE + n
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=n < OUT_SIZE)


@triton.jit
def _products(
    x_ptrs, valid, words_ptr, factors_ptr, n, OUT_SIZE: tl.constexpr, FORM: tl.constexpr, GATED: tl.constexpr
):
    """Outputs n of an expert, and those of `up`, of rows at x_ptrs: [BLOCK_N, BLOCK_M] each. Rows that are not valid
    are not read: at decode they are most of the tile."""
    SIZE: tl.constexpr = FORM[0]
    LENGTH: tl.constexpr = 512 // FORM[1]  # inputs of a block of 16 words
    NUM_BLOCKS: tl.constexpr = (SIZE + LENGTH - 1) // LENGTH
    ALL_OUTPUTS: tl.constexpr = 2 * OUT_SIZE if GATED else OUT_SIZE
    word_ptrs = words_ptr + n[:, None] * (NUM_BLOCKS * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
    up_ptrs = word_ptrs + OUT_SIZE * NUM_BLOCKS * COLUMNS
    total = tl.zeros([n.shape[0], valid.shape[0]], tl.float32)
    up = tl.zeros([n.shape[0], valid.shape[0]], tl.float32)
    for i in tl.range(0, NUM_BLOCKS):
        k = i * LENGTH + tl.arange(0, LENGTH)
        ok = valid[:, None]
        if SIZE % LENGTH != 0:
            ok = ok & (k < SIZE)[None, :]
        x = tl.load(x_ptrs + k[None, :], mask=ok, other=0.0)
        factors = load_factors(factors_ptr, n, i, ALL_OUTPUTS, FORM[2])
        total += dot(unpack(tl.load(word_ptrs + i * COLUMNS), factors, x.dtype, FORM), tl.trans(x))
        total = hold(total)
        if GATED:
            factors = load_factors(factors_ptr, n + OUT_SIZE, i, ALL_OUTPUTS, FORM[2])
            up += dot(unpack(tl.load(up_ptrs + i * COLUMNS), factors, x.dtype, FORM), tl.trans(x))
            up = hold(up)
    return total, up


@triton.jit(do_not_specialize_on_alignment=["order_ptr", "blocks_ptr", "weights_ptr"])
def pair_matmul_kernel(
    x_ptr,
    words_ptr,
    factors_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    weights_ptr,
    out_ptr,
    x_stride,
    words_stride,
    factors_stride,
    OUT_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GATED: rows gathered from x, silu(gate) * up written in sorted order. Else sorted rows read, scattered to their
    pairs, times the router's weight."""
    num_blocks = tl.load(num_blocks_ptr)
    num_columns: tl.constexpr = (OUT_SIZE + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), num_blocks * num_columns, tl.num_programs(0)):
        block, column = find_tile(tile, num_blocks, num_columns, GROUP)
        buffer = tl.load(blocks_ptr + block * 3).to(tl.int64)
        row = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, BLOCK_M)
        valid = row < tl.load(blocks_ptr + block * 3 + 2)
        pair = tl.load(order_ptr + row, mask=valid, other=0)
        source = pair // TOP_K if GATED else row
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.where(n < OUT_SIZE, n, 0)  # outputs past the end read row 0: cheaper than a mask on every weight
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride
        weight = (words_ptr + buffer * words_stride, factors_ptr + buffer * factors_stride)
        total, up = _products(x_ptrs, valid, *weight, inside, OUT_SIZE, FORM, GATED)
        if GATED:
            target = row
            total = total / (1.0 + tl.exp(-total)) * up
        else:
            target = pair
            total *= tl.load(weights_ptr + pair, mask=valid, other=0.0)[None, :]
        out_ptrs = out_ptr + target.to(tl.int64)[:, None] * OUT_SIZE + n[None, :]
        ok = valid[:, None] & (n < OUT_SIZE)[None, :]
        tl.store(out_ptrs, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


class IntegerTile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def uses_gemv(num_tokens: int, top_k: int, has_cores: bool) -> bool:
    """A large top_k goes with many experts: a few tokens hardly ever meet at one."""
    return num_tokens <= (4 if top_k >= 4 else 2) or (not has_cores and num_tokens <= 8)


def choose_tile(num_tokens: int, top_k: int) -> IntegerTile:
    """By the number of tokens and top_k alone, as `moe_tiles.py` says and for its reasons: a block as tall as the batch
    reads every weight once, however few experts are chosen; with many small experts few tokens meet at one."""
    few_meet = top_k >= 4
    if num_tokens <= (64 if few_meet else 16):
        return IntegerTile(16, 64, 4, 4)
    if num_tokens <= 32:
        return IntegerTile(32, 64, 4, 4)
    if num_tokens <= (512 if few_meet else 64):
        return IntegerTile(64, 64, 4, 3)
    return IntegerTile(128, 64, 4, 2)


def integer_pairs(
    x: torch.Tensor,
    gate_up: IntegerStack,
    down: IntegerStack,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    tile: IntegerTile | None = None,
) -> torch.Tensor:
    """As `moe_experts.expert_pairs`, which checks the arguments."""
    num_tokens, top_k = buffers.shape
    has_cores = capability(x.device) >= (8, 0) or x.device.type == "cpu"
    if tile is None and uses_gemv(num_tokens, top_k, has_cores):
        active = x.new_empty((buffers.numel(), gate_up.shape[1] // 2))
        _launch_gemv(round_rows(x, gate_up), gate_up, buffers, weights, active, top_k, True)
        _launch_gemv(round_rows(active, down), down, buffers, weights, out, 1, False)
        return out
    tile = tile or choose_tile(num_tokens, top_k)
    rows = align(buffers, len(gate_up.words), tile.block_m)
    active = x.new_empty((buffers.numel(), gate_up.shape[1] // 2))
    _launch_matmul(x, gate_up, rows, weights, active, top_k, True, tile)
    _launch_matmul(active, down, rows, weights, out, top_k, False, tile)
    return out


def _launch_gemv(
    x: RoundedRows,
    stack: IntegerStack,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    pairs_per_row: int,
    gated: bool,
) -> None:
    out_size, form = stack.shape[1] // (1 + gated), dot_form(stack)
    block_n, block_w, warps = choose_block(form, 1, gated)
    pair_gemv_kernel[(buffers.numel(), triton.cdiv(out_size, block_n))](
        x.numbers.view(torch.int32),
        x.units,
        x.sums,
        stack.words.view(torch.int64),
        stack.factors,
        buffers,
        weights,
        out,
        stack.words.stride(0) // 2,
        stack.factors.stride(0),
        OUT_SIZE=out_size,
        PAIRS_PER_ROW=pairs_per_row,
        FORM=form,
        GATED=gated,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        num_warps=warps,
    )


def _launch_matmul(
    x: torch.Tensor,
    stack: IntegerStack,
    rows: Alignment,
    weights: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    gated: bool,
    tile: IntegerTile,
) -> None:
    out_size = stack.shape[1] // (1 + gated)
    most = len(rows.blocks) * triton.cdiv(out_size, tile.block_n)
    pair_matmul_kernel[(min(most, num_multiprocessors(x.device) * PROGRAMS_PER_SM),)](
        x,
        stack.words,
        stack.factors,
        rows.order,
        rows.blocks,
        rows.num_blocks,
        weights,
        out,
        x.stride(0),
        stack.words.stride(0),
        stack.factors.stride(0),
        OUT_SIZE=out_size,
        TOP_K=top_k,
        FORM=unpack_form(stack, x.dtype),
        GATED=gated,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP=GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )

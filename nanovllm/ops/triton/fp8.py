"""Products with a weight in 8-bit floats (twin and contract: `ops/fp8.py`), by the number of rows of x.

    few rows      `gemv.py` reads the weight, converts it in registers, and multiplies in fp32: x stays in 16 bits
    to 128        x is quantised (one launch), then cuBLAS's product on the tensor cores, which knows one scale for a
                  whole matrix; so it gets 1, and the scales of tokens and outputs are applied afterwards (one launch)
    more          x is quantised, then a product that applies the scales itself (CUTLASS)
    sm_80 to 88   have no such tensor cores: up to 128 rows the weight is converted in registers for those of 16 bits
                  (`weight_only_linear`); x is not rounded
    other cases   (Turing, more rows before sm_89, odd sizes) the weight is expanded piece by piece, then cuBLAS

Measured on an H200, Qwen3-8B, us: 16 bits; 8 bits with a scale a row (and a block); of these 2 quantise x:

    rows          6144 x 4096          4096 x 4096
    1             13.5;  7.4            9.6;  5.9          (76 and 64 % of the bandwidth; 24576 x 4096: 89 %)
    4             17.0; 15.1           12.8;  9.9
    64            17.2; 16.2 (17.1)    12.1; 15.9 (16.7)
    256           22.3; 17.4 (18.4)    16.6; 16.4 (17.5)
    2,048          132; 76.7 (90.0)    87.0; 54.8 (63.1)

The products alone at 64 rows: 14.3 and 14.0 us with scales of rows, 10.3 and 7.9 without, which is why these are
applied afterwards there. Sums of products of 8-bit floats reach 448 * 448 * K at most, far below the largest bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.fp8 import BLOCK, E4M3, E4M3_MAX, TINY, expand
from nanovllm.ops.linear import linear_in_pieces
from nanovllm.ops.triton.common import (
    capability,
    dependent_launch,
    dot,
    next_power_of_2,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.e4m3 import BY_CARD, BY_SHIFTS, FP8_UNITS, from_e4m3
from nanovllm.ops.triton.gemv import gemv

GEMV_WEIGHTS = 6144 * 4096  # for four rows the matrix-vector product is the faster one up to this size

SEPARATE_ROWS = 128  # up to so many, scales are applied after the product

WEIGHT_ONLY_ROWS, TENSOR_CORES = 128, (8, 0)
TILE_N, TILE_K = 64, 64  # of the weight; TILE_K divides a block of 128


@triton.jit
def quantise_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    scale_stride,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), TINY) / MOST
    tl.store(q_ptr + row * SIZE + i, (x / scale[:, None]).to(q_ptr.dtype.element_ty), mask=i < SIZE)
    tl.store(scale_ptr + g * scale_stride + row, scale, mask=g * GROUP < SIZE)


@triton.jit
def rescale_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    bias_ptr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    scale = tl.load(columns_ptr + i, mask=i < SIZE, other=0.0)
    wait_for_last(DEPENDENT)
    x_ptr += row * SIZE
    x = tl.load(x_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32) * (tl.load(rows_ptr + row) * scale)
    if HAS_BIAS:
        x += tl.load(bias_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(x_ptr + i, x.to(x_ptr.dtype.element_ty), mask=i < SIZE)


def rescale(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, m] times rows [n] and columns [m], and the bias added; in place."""
    (number, size), tile, dependent = x.shape, 1024, dependent_launch(x.device)
    facts = {"SIZE": size, "TILE": tile, "HAS_BIAS": bias is not None, "DEPENDENT": dependent, "launch_pdl": dependent}
    assert x.is_contiguous()
    grid = (number, triton.cdiv(size, tile))
    rescale_kernel[grid](x, rows, columns, x if bias is None else bias, **facts, num_warps=4)
    return x


def quantise(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of a group of all rows lie next to each other, as the product wants them."""
    rows, size = x.shape
    assert x.stride(1) == 1
    tile = next_power_of_2(size)
    group = block or tile
    q = torch.empty((rows, size), dtype=E4M3, device=x.device)
    scale = torch.empty((triton.cdiv(size, group), rows), dtype=torch.float32, device=x.device)
    facts: dict[str, Any] = {"SIZE": size, "GROUPS": tile // group, "GROUP": group, "MOST": E4M3_MAX, "TINY": TINY}
    facts["DEPENDENT"] = facts["launch_pdl"] = dependent_launch(x.device)
    if rows:
        quantise_kernel[(rows,)](x, q, scale, x.stride(0), rows, **facts, num_warps=min(8, max(1, tile // 512)))
    return q, scale.t()


@triton.jit(do_not_specialize=["num_rows"])
def weight_only_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    x_stride,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
):
    """out^T = W x^T: BLOCK_N outputs of BLOCK_M rows. SCALED: 1 = a scale for each row of the weight, applied at the
    end; 128 = for each block, applied to the sum of each step, which is within one."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    row = tl.where(n < out_size, n, 0)  # outputs past the end read row 0, rows past the end the first ones
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * SIZE + k[None, :]
    x_ptrs = x_ptr + (m % num_rows).to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K):
        x = tl.load(x_ptrs + start)
        product = dot(from_e4m3(tl.load(q_ptrs + start), x.dtype, FORM), tl.trans(x))
        if SCALED > 1:
            product *= tl.load(scale_ptr + row // SCALED * tl.cdiv(SIZE, SCALED) + start // SCALED)[:, None]
        total += product
    if SCALED == 1:
        total *= tl.load(scale_ptr + row)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    ok = (m < num_rows)[:, None] & (n < out_size)[None, :]
    offsets = m.to(tl.int64)[:, None] * out_size + n[None, :]
    tl.store(out_ptr + offsets, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


def weight_only_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [1..128, K] of 16 bits, K a multiple of TILE_K; weight: a ScaledWeight (layers/scaled.py) [N, K]."""
    (rows, size), out_size = x.shape, weight.q.shape[0]
    assert x.stride(1) == 1
    assert 1 <= rows <= WEIGHT_ONLY_ROWS
    assert size % TILE_K == 0
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
    block_m = max(16, next_power_of_2(min(rows, 64)))
    weight_only_kernel[(triton.cdiv(out_size, TILE_N), triton.cdiv(rows, block_m))](
        x,
        weight.q.view(torch.uint8),
        weight.scale,
        x if bias is None else bias,
        out,
        rows,
        out_size,
        x.stride(0),
        SIZE=size,
        SCALED=weight.block or 1,
        BLOCK_M=block_m,
        BLOCK_N=TILE_N,
        BLOCK_K=TILE_K,
        HAS_BIAS=bias is not None,
        FORM=BY_CARD if capability(x.device) >= FP8_UNITS else BY_SHIFTS,
        num_warps=4,
        num_stages=3,
    )
    return out


def expanded_rows(weight: Any, dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
    """Rows first .. last of the weight itself; where there are blocks of 128, `first` begins one."""
    scale = weight.scale[first // BLOCK : -(-last // BLOCK)] if weight.block else weight.scale[first:last]
    return expand(weight.q[first:last], scale, dtype)


def scaled_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, K], weight: a ScaledWeight (layers/scaled.py) [N, K]."""
    rows, (out_size, size) = len(x), weight.q.shape
    if x.dtype != torch.float32 and prefers_gemv(rows, out_size, size):
        return gemv(x, weight, bias)
    card, is_half = capability(x.device), x.dtype != torch.float32
    if TENSOR_CORES <= card < FP8_UNITS and is_half and 0 < rows <= WEIGHT_ONLY_ROWS and size % TILE_K == 0:
        return weight_only_linear(x, weight, bias)
    if card < FP8_UNITS or size % 16 or out_size % 16 or (weight.block and size % BLOCK):
        return linear_in_pieces(x, weight.q.shape, lambda *some: expanded_rows(weight, x.dtype, *some), bias)
    q, scale = quantise(x, weight.block)
    if not weight.block and rows <= SEPARATE_ROWS and x.dtype == torch.bfloat16:
        raw = torch._scaled_mm(q, weight.q.t(), scale_a=weight.unit, scale_b=weight.unit, out_dtype=x.dtype)
        return rescale(raw, scale, weight.scale, bias)
    columns = weight.scale.t() if weight.block else weight.scale.view(1, -1)
    out = torch._scaled_mm(q, weight.q.t(), scale_a=scale, scale_b=columns, out_dtype=torch.bfloat16).to(x.dtype)
    return out if bias is None else out + bias


def prefers_gemv(rows: int, out_size: int, size: int) -> bool:
    """Of the batch sizes that decode graphs are captured for, as in `gemv.py`."""
    return rows in (1, 2) or (rows == 4 and out_size * size <= GEMV_WEIGHTS)

"""Products with a weight in 8-bit floats (twin and contract: `ops/fp8.py`), by the number of rows of x.

    1 and 2       `gemv.py` reads the weight, converts it in registers, and multiplies in fp32: x stays in 16 bits
    3 to 128      scales of rows, bfloat16: x is quantised (one launch), then cuBLAS's product on the tensor cores,
                  which knows one scale for a whole matrix; so it gets 1, and the scales of tokens and outputs are
                  applied afterwards (one launch)
    3 to 32       scales of blocks, or float16: the weight is converted in registers for the tensor cores of 16 bits
                  (`weight_only_linear`), and x is not rounded
    more          x is quantised, then a product that applies the scales itself (CUTLASS)
    elsewhere     sm_80 to 88 have no tensor cores for 8 bits, and PyTorch has a product with scales of blocks on Hopper
                  only. There 3 to 128 rows are those of `weight_only_linear`, and for more (on Turing for all from 3
                  on, for odd sizes, for float32) the weight is expanded piece by piece, then cuBLAS

Measured on an H200, Qwen3-8B, us, with a scale a row (and a block), alone; * is `weight_only_linear`:

    rows    6144 x 4096      4096 x 4096      24576 x 4096     4096 x 12288
    1        7.8 ( 8.3)       6.0 ( 6.6)      28.8 (30.5)      16.1 (25.9)      73, 63, 79, 70 % of the bandwidth
    2       10.4 (14.6)       6.9 ( 8.5)      35.1 (48.3)      23.8 (29.5)
    8       15.9*(15.3*)     13.2*(12.8*)     44.0*(44.5*)     25.6*(25.5*)
    32      15.7*(15.2*)     14.9*(14.8*)     43.1*(44.2*)     32.3*(32.6*)
    64      12.6 (16.5)       9.9 (16.2)      36.4 (40.9)      20.3 (39.5)
    256     16.8 (17.6)      16.1 (16.9)      49.8 (52.1)      38.0 (41.4)
    2,048     85 (  90)        60 (  63)       312 ( 335)       166 ( 178)

`weight_only_linear` is hardly faster than 16 bits of twice the bytes (8 rows: 16, 10, 52 and 26 us, `matmul.py`), and
costs more in a step than alone: with scales of rows a step of 8 rows takes 4.82 ms with it and 3.54 ms with x
quantised, one of 32 rows 5.32 and 4.02. With scales of blocks a layer's four products take 98 us with it at 8 rows and
107 at 32, CUTLASS's take 113 at 64; steps, and float16, were not measured.

At 64 rows the product that applies the scales itself takes 14.3 us for the first shape and 14.0 for the second, without
scales 10.3 and 7.9, which is why these are applied afterwards there. Sums of products of 8-bit floats reach
448 * 448 * K at most, far below the largest bf16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.fp8 import BLOCK, E4M3, E4M3_MAX, TINY, expand
from nanovllm.ops.linear import linear_in_pieces
from nanovllm.ops.triton.common import (
    INTERPRETED,
    capability,
    dependent_launch,
    dot,
    next_power_of_2,
    num_multiprocessors,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.e4m3 import BY_CARD, BY_SHIFTS, FP8_UNITS, from_e4m3
from nanovllm.ops.triton.gemv import gemv
from nanovllm.ops.triton.splits import add_splits, choose_splits, empty_parts, hold

MAX_GEMV_ROWS = 2
GEMV_WEIGHTS = 6144 * 4096  # four rows of what nothing else takes: the matrix-vector product, up to this size

SEPARATE_ROWS = 128  # up to so many, scales are applied after the product

WEIGHT_ONLY_ROWS, FEW_ROWS, TENSOR_CORES = 128, 32, (8, 0)  # FEW_ROWS: beside CUTLASS's product
TILE_N, SHORT_STEP, LONG_STEP = 64, 64, 128  # outputs, and inputs of a step; a step is within a block of 128


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
    """The scales of a group of all rows lie next to each other, as the product wants them; those of blocks at multiples
    of 16 bytes, so there are up to three rows more, of which nothing is written."""
    rows, size = x.shape
    assert x.stride(1) == 1
    tile, padded = next_power_of_2(size), triton.cdiv(rows, 4) * 4 if block else rows
    group = block or tile
    q = torch.empty((padded, size), dtype=E4M3, device=x.device)
    scale = torch.empty((triton.cdiv(size, group), padded), dtype=torch.float32, device=x.device)
    facts: dict[str, Any] = {"SIZE": size, "GROUPS": tile // group, "GROUP": group, "MOST": E4M3_MAX, "TINY": TINY}
    facts["DEPENDENT"] = facts["launch_pdl"] = dependent_launch(x.device)
    if rows:
        quantise_kernel[(rows,)](x, q, scale, x.stride(0), padded, **facts, num_warps=min(8, max(1, tile // 512)))
    return q, scale.t()


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def weight_only_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    x_stride,
    num_steps,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out^T = W x^T: BLOCK_N outputs of BLOCK_M rows, num_steps steps of the inputs. SCALED: 1 = a scale for each row
    of the weight, applied at the end; 128 = for each block, applied to the sum of each step, which is within one."""
    start_next(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * num_steps * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    row = tl.where(n < out_size, n, 0)  # outputs past the end read row 0, rows past the end the first ones
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * SIZE + k[None, :]
    x_ptrs = x_ptr + (m % num_rows).to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_last(DEPENDENT)
    for start in tl.range(first, tl.minimum(first + num_steps * BLOCK_K, SIZE), BLOCK_K):
        x = tl.load(x_ptrs + start)
        product = hold(dot(from_e4m3(tl.load(q_ptrs + start), x.dtype, FORM), tl.trans(x)))
        if SCALED > 1:
            product *= tl.load(scale_ptr + row // SCALED * tl.cdiv(SIZE, SCALED) + start // SCALED)[:, None]
        total += product
    if SCALED == 1:
        total *= tl.load(scale_ptr + row)[:, None]
    if HAS_BIAS:  # of the first piece
        total += tl.load(bias_ptr + row, mask=row < tl.where(first == 0, out_size, 0), other=0.0).to(tl.float32)[
            :, None
        ]
    out_ptr += tl.program_id(2).to(tl.int64) * num_rows * out_size
    ok = (m < num_rows)[:, None] & (n < out_size)[None, :]
    offsets = m.to(tl.int64)[:, None] * out_size + n[None, :]
    tl.store(out_ptr + offsets, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


def weight_only_linear(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    in_parts: bool = False,
    splits: int | None = None,
) -> torch.Tensor:
    """x [1..128, K] of 16 bits, K a multiple of SHORT_STEP; weight: a ScaledWeight (layers/scaled.py) [N, K] -> [rows,
    N], or with `in_parts`, if there are splits, [splits, rows, N] in fp32. `splits` overrides the choice."""
    (rows, size), out_size = x.shape, weight.q.shape[0]
    assert x.stride(1) == 1
    assert 1 <= rows <= WEIGHT_ONLY_ROWS
    assert size % SHORT_STEP == 0
    block_m, block_k, stages = choose_tile(rows, size)
    steps, tiles = size // block_k, triton.cdiv(out_size, TILE_N) * triton.cdiv(rows, block_m)
    splits = min(steps, splits or choose_splits(tiles, steps, num_multiprocessors(x.device)))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)  # no empty ones
    out, dependent = empty_parts(splits, out_size, x), dependent_launch(x.device)
    weight_only_kernel[(triton.cdiv(out_size, TILE_N), triton.cdiv(rows, block_m), splits)](
        x,
        weight.q.view(torch.uint8),
        weight.scale,
        x if bias is None else bias,
        out,
        rows,
        out_size,
        x.stride(0),
        per_split,
        SIZE=size,
        SCALED=weight.block or 1,
        BLOCK_M=block_m,
        BLOCK_N=TILE_N,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        FORM=BY_CARD if capability(x.device) >= FP8_UNITS else BY_SHIFTS,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=4,
        num_stages=stages,
    )
    return out if splits == 1 or in_parts else add_splits(out, x)


def choose_tile(rows: int, size: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_K, stages). An H200 reads 34 KB a multiprocessor in the microsecond that a load takes: three
    programs with three stages of 8 KB on their way are twice that."""
    block_m = max(16, next_power_of_2(min(rows, 64)))
    return (block_m, LONG_STEP, 4) if block_m <= 32 and size % LONG_STEP == 0 else (block_m, SHORT_STEP, 3)


def expanded_rows(weight: Any, dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
    """Rows first .. last of the weight itself; where there are blocks of 128, `first` begins one."""
    scale = weight.scale[first // BLOCK : -(-last // BLOCK)] if weight.block else weight.scale[first:last]
    return expand(weight.q[first:last], scale, dtype)


@cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether PyTorch has a product with scales of blocks there. From 2.9 to 2.13 only Hopper has, with CUDA 12.9 or
    newer; so it is asked."""
    q, scale_a = torch.zeros(BLOCK, 4 * BLOCK, device=device).to(E4M3), torch.ones(4, BLOCK, device=device).t()
    scale_b = torch.ones(1, 4, device=device).t()
    try:
        torch._scaled_mm(q, q.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):
        return False
    return True


def rounds_inputs(x: torch.Tensor, weight: Any) -> bool:
    """Whether these can be multiplied on tensor cores for 8-bit floats. Scales of blocks: a row of them must be a
    multiple of 16 bytes."""
    out_size, size = weight.q.shape
    if x.dtype == torch.float32 or capability(x.device) < FP8_UNITS or size % 16 or out_size % 16:
        return False
    return not weight.block or (size % (4 * BLOCK) == 0 and multiplies_blocks(x.device))


def scales_afterwards(x: torch.Tensor, weight: Any) -> bool:
    """Not in float16, which does not hold the sums before."""
    return not weight.block and x.dtype == torch.bfloat16 and len(x) <= SEPARATE_ROWS


def reads_weight_alone(x: torch.Tensor, weight: Any) -> bool:
    """Whether a product with these rows is that of `weight_only_linear`."""
    most = WEIGHT_ONLY_ROWS
    if rounds_inputs(x, weight):
        most = 0 if scales_afterwards(x, weight) else FEW_ROWS
    fits = x.dtype != torch.float32 and weight.q.shape[1] % SHORT_STEP == 0
    return MAX_GEMV_ROWS < len(x) <= most and fits and (INTERPRETED or capability(x.device) >= TENSOR_CORES)


def linear_in_parts(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """None: `scaled_linear` multiplies these in another way."""
    return weight_only_linear(x, weight, bias, in_parts=True) if reads_weight_alone(x, weight) else None


def scaled_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, K], weight: a ScaledWeight (layers/scaled.py) [N, K]."""
    rows, rounds = len(x), rounds_inputs(x, weight)
    if reads_weight_alone(x, weight):
        return weight_only_linear(x, weight, bias)
    is_small = rows == 4 and not rounds and weight.q.numel() <= GEMV_WEIGHTS
    if x.dtype != torch.float32 and (1 <= rows <= MAX_GEMV_ROWS or is_small):
        return gemv(x, weight, bias)
    if not rounds:
        return linear_in_pieces(x, weight.q.shape, lambda *some: expanded_rows(weight, x.dtype, *some), bias)
    q, scale = quantise(x, weight.block)
    if scales_afterwards(x, weight):
        raw = torch._scaled_mm(q, weight.q.t(), scale_a=weight.unit, scale_b=weight.unit, out_dtype=x.dtype)
        return rescale(raw, scale, weight.scale, bias)
    columns = weight.scale.t() if weight.block else weight.scale.view(1, -1)
    out = torch._scaled_mm(q, weight.q.t(), scale_a=scale, scale_b=columns, out_dtype=torch.bfloat16)[:rows].to(x.dtype)
    return out if bias is None else out + bias

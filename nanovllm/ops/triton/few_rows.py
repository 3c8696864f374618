"""A linear map of 3 to 8 rows at the speed of memory: out = epilogue(prologue(x) @ weight.T), on the tensor cores.

With so few rows a product is still bound by reading its weight, and everything that does not read is lost time: a
launch, the wait for the kernel before, a second launch that adds up partial sums. So, as in `gemv.py`, a program
requests its weights before it waits for the kernel before it, and norm, gate and residual are parts of the product.

out^T = W x^T, because the instruction takes 16 outputs and as few as 8 rows. A program owns BLOCK_N outputs of all
rows. Its warps share the *inputs*: warp s multiplies slice s of every step, [BLOCK_N, BLOCK_K] by [BLOCK_K, rows], and
at the end the SLICES sums are added through shared memory, in the order of the slices:

    columns of a step     | slice 0 | slice 1 | ... |      a step is SLICES * BLOCK_K columns
    warp                       0         1               one product of three dimensions: [slices, outputs, columns]

So even 1024 outputs, 64 programs, keep 512 warps reading, and no partial sum leaves the multiprocessor: no second
kernel, no atomic addition, and a result that does not depend on which program ends first.

The norm (RMSNorm of x) is a factor a row, as in `gemv.py`: g[k] x[k] is rounded to x's dtype, multiplied and summed,
and the sum is multiplied by the factor. g x may be larger than x: bfloat16 can hold it, float16 perhaps not, so that a
model in float16 does not come here.

Measured on an H200, Qwen3-0.6B, one step with 768 tokens of context, us: 4 rows 924, 8 rows 1,015; with the products of
`matmul.py`, and norms by themselves, 974 and 1,050; with cuBLAS 1,165 and 1,360. At 16 rows 1,516 against 1,283.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import dependent_launch, dot, start_next, wait_for_last
from nanovllm.ops.triton.gemv import finish

MOST_ROWS = 8
RUN = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    x_stride,
    weight_stride,
    out_size,
    eps,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    STEP: tl.constexpr = SLICES * BLOCK_K
    k = _columns(SLICES, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(0) * BLOCK_N + _rows(BLOCK_N)
    at = tl.where(at < out_size, at, 0).to(tl.int64)  # outputs past the end read row 0: cheaper than a mask
    weight_ptrs = weight_ptr + at * weight_stride + k
    up_ptrs = weight_ptrs + out_size.to(tl.int64) * weight_stride
    # Rows past the end read the first ones; they are not stored.
    x_ptrs = x_ptr + (_rows(BLOCK_M) % num_rows).to(tl.int64) * x_stride + k
    total = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M // 8, SLICES, 8], tl.float32)
    sums = (total, up_total, squares)
    LAST: tl.constexpr = (SIZE - 1) // STEP * STEP
    pointers = (weight_ptrs, up_ptrs, norm_weight_ptr + k)
    weights = _load_weights(pointers, k, 0, SIZE, STEP, GATED, HAS_NORM)
    wait_for_last(DEPENDENT)  # the first weights are on their way meanwhile
    for start in tl.range(0, LAST, STEP):
        # The weights of the next step are on their way while these are multiplied.
        following = _load_weights(pointers, k, start + STEP, SIZE, STEP, GATED, HAS_NORM)
        sums = _add_products(sums, weights, x_ptrs, k, start, SIZE, STEP, GATED, HAS_NORM)
        weights = following
    total, up_total, squares = _add_products(sums, weights, x_ptrs, k, LAST, SIZE, STEP, GATED, HAS_NORM)
    total, up_total = tl.sum(total, axis=0), tl.sum(up_total, axis=0)
    squares = tl.reshape(tl.sum(squares, axis=1), (BLOCK_M,))
    rest = (bias_ptr, residual_ptr, out_ptr)
    finish(total, up_total, squares, n, rest, out_size, eps, SIZE, num_rows, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL)


@triton.jit
def _columns(SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of a step, in the order [chunks, 1, slices, 1, RUN]."""
    chunk, run = tl.arange(0, BLOCK_K // RUN) * RUN, tl.arange(0, RUN)
    return (tl.arange(0, SLICES) * BLOCK_K)[None, None, :, None, None] + chunk[:, None, None, None, None] + run


@triton.jit
def _rows(NUMBER: tl.constexpr):
    """[1, NUMBER / 8, 1, 8, 1]"""
    return (tl.arange(0, NUMBER // 8) * 8)[None, :, None, None, None] + tl.arange(0, 8)[None, None, None, :, None]


@triton.jit
def _operand(tile):
    """[chunks, rows / 8, slices, 8, RUN] -> [slices, rows, columns]. A lane loads eight neighbouring columns, 16 bytes;
    the instruction wants two neighbouring columns of each of four places from a lane. Both operands have their columns
    in this order, and a sum of products does not depend on it, so no lane needs what another one loaded."""
    C: tl.constexpr = tile.shape[0]
    H: tl.constexpr = tile.shape[1]
    S: tl.constexpr = tile.shape[2]
    parts = tl.reshape(tile, (C, H, S, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (2, 1, 3, 0, 5, 6, 4, 7)), (S, H * 8, C * RUN))


@triton.jit
def _load(ptrs, columns, start, SIZE: tl.constexpr, STEP: tl.constexpr):
    if SIZE % STEP == 0:
        return tl.load(ptrs + start)
    else:
        return tl.load(ptrs + start, mask=columns < SIZE - start, other=0.0)


@triton.jit
def _load_weights(
    pointers, k, start, SIZE: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Of the step that begins at column `start`: the weight, its other half if gated, and the norm's weight."""
    weight_ptrs, up_ptrs, norm_ptrs = pointers
    w = _load(weight_ptrs, k, start, SIZE, STEP)
    up, gain = w, w
    if GATED:
        up = _load(up_ptrs, k, start, SIZE, STEP)
    if HAS_NORM:
        gain = _load(norm_ptrs, k, start, SIZE, STEP)
    return w, up, gain


@triton.jit
def _add_products(
    sums, weights, x_ptrs, k, start, SIZE: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr
):
    total, up_total, squares = sums
    w, up, gain = weights
    x = _load(x_ptrs, k, start, SIZE, STEP)
    if HAS_NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(tl.sum(wide * wide, axis=4), axis=0)
        x = (wide * gain.to(tl.float32)).to(x.dtype)
    x = tl.permute(_operand(x), (0, 2, 1))
    total += dot(_operand(w), x)
    if GATED:
        up_total += dot(_operand(up), x)
    return total, up_total, squares


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """As `gemv.gemv`, for x [1..8, K] in bfloat16. `tile` = (BLOCK_N, BLOCK_K, SLICES) overrides the choice."""
    rows, size = x.shape
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 1 <= rows <= MOST_ROWS
    assert weight.stride(1) == 1
    assert x.stride(1) == 1
    assert norm is None or x.dtype != torch.float16
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
    block_n, block_k, slices = tile or choose_tile(out_size, size)
    dependent = dependent_launch(x.device)
    few_rows_kernel[(triton.cdiv(out_size, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm[0],
        x if residual is None else residual,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        out_size,
        0.0 if norm is None else norm[1],
        SIZE=size,
        BLOCK_M=8,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SLICES=slices,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=slices,
    )
    return out


def choose_tile(out_size: int, size: int) -> tuple[int, int, int]:
    if out_size >= 65536:
        return 16, 512, 2
    return (16, 256, 4) if size <= 1024 else (16, 512, 4) if size <= 2048 else (16, 256, 8)


def prefers_few_rows(rows: int, out_size: int, size: int) -> bool:
    """Whether it beats cuBLAS by itself, without a norm, gate or sum: the head of a small model, 83 us against 89."""
    return 2 < rows <= MOST_ROWS and out_size >= 65536 and size <= 1024

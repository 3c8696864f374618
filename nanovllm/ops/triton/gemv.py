"""A linear map of 1 to 8 rows at the speed of memory: out = epilogue(prologue(x) @ weight.T).

At batch 1 a linear layer reads every weight for one multiplication. A GEMM kernel cut for tensor cores leaves most of
the bandwidth unused there (cuBLAS on an H200: 0.3-2.1 TB/s of 4.4 on Qwen3-0.6B's shapes): it has too few programs and
too few bytes in flight. Here a program is one warp and owns BLOCK_N rows of the weight: its lanes read 16 bytes each,
neighbouring lanes neighbouring bytes, BLOCK_K columns at a time, multiply by the same columns of x in fp32 and add up;
one shuffle tree a chunk gives the row's dot product. A single warp needs no shared memory and no barrier, the 1-D tile
of x lies in the lanes exactly as the weight's columns do, and no two programs share an output, so the result does not
depend on timing. To hide a latency of 0.7 us at 4.4 TB/s some 24 KB must be in flight on every multiprocessor: with
1024 outputs (8 warps on each) a warp must request 4 KB before it waits, which is why few outputs need a long BLOCK_K.

A program computes its outputs for all rows of x. Fusions, each a constexpr, make a batch-1 layer seven kernels:

- norm_weight (prologue): RMSNorm of x. The norm is a scalar factor per row, so it need not come first:
      sum_k W[n,k] g[k] x[k] s = s * sum_k W[n,k] (g[k] x[k]),   s = rsqrt(mean x^2 + eps),
  and the squares are summed in the same loop that multiplies. Every program repeats that sum; x is in the cache.
- gated (epilogue): weight holds gate and up stacked, [2 * size, K]; a program computes both rows of its outputs and
  writes silu(gate) * up.
- residual (epilogue): added to the output, which is then the new residual stream. It may be `out` itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import capability, dependent_launch, next_power_of_2, start_next, wait_for_last
from nanovllm.ops.triton.e4m3 import FP8_UNITS, from_e4m3

MAX_ROWS = 8  # beyond, a warp multiplies more than it reads, and tensor cores win


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    x_stride, weight_stride, out_size, eps,
    SIZE: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < out_size
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    weight_ptrs = weight_ptr + tl.where(inside, n, 0).to(tl.int64)[:, None] * weight_stride
    up_ptrs = weight_ptrs + out_size.to(tl.int64) * weight_stride
    start_next(DEPENDENT)
    first = tl.program_id(0) * BLOCK_N
    if SCALED > 1:  # all outputs of a program are in the same row of blocks
        up_scale_ptr = scale_ptr + (out_size + first) // SCALED * tl.cdiv(SIZE, SCALED)
        scale_ptr += first // SCALED * tl.cdiv(SIZE, SCALED)
    else:
        up_scale_ptr = scale_ptr + out_size
    pointers = (weight_ptrs, up_ptrs, norm_weight_ptr, scale_ptr, up_scale_ptr)
    r = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up_total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    sums = (total, up_total, squares)
    k = tl.arange(0, BLOCK_K)
    weights = _load_weights(pointers, k, SIZE, BLOCK_K, GATED, HAS_NORM, SCALED)
    wait_for_last(DEPENDENT)  # the first weights are on their way meanwhile
    sums = _add_products(sums, weights, x_ptr, x_stride, k, r, SIZE, NUM_ROWS, GATED, HAS_NORM, SCALED)
    for start in tl.range(BLOCK_K, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        weights = _load_weights(pointers, k, SIZE, BLOCK_K, GATED, HAS_NORM, SCALED)
        sums = _add_products(sums, weights, x_ptr, x_stride, k, r, SIZE, NUM_ROWS, GATED, HAS_NORM, SCALED)
    total, up_total, squares = sums
    if SCALED == 1:
        total *= tl.load(scale_ptr + n, mask=inside, other=0.0)[:, None]
        if GATED:
            up_total *= tl.load(up_scale_ptr + n, mask=inside, other=0.0)[:, None]
    rest = (bias_ptr, residual_ptr, out_ptr)
    finish(total, up_total, squares, n, rest, out_size, eps, SIZE, NUM_ROWS, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL)


@triton.jit
def finish(
    total,
    up_total,
    squares,
    n,
    pointers,
    out_size,
    eps,
    SIZE: tl.constexpr,
    num_rows,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Sums [BLOCK_N, ROWS] to outputs n of all rows: the norm's factor, bias, gate, residual."""
    bias_ptr, residual_ptr, out_ptr = pointers
    inside = n < out_size
    r = tl.arange(0, total.shape[1])
    if HAS_NORM:
        scale = tl.rsqrt(squares / SIZE + eps)[None, :]
        total *= scale
        up_total *= scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias_ptr + out_size + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    offsets = r[None, :] * out_size + n[:, None]
    ok = inside[:, None] & (r[None, :] < num_rows)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _load_weights(
    pointers,
    k,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Columns k of the weight, of its other half, of the norm's weight and of the scales of blocks, where there are."""
    ptrs, up_ptrs, norm_ptr, scale_ptr, up_scale_ptr = pointers
    w = _load_columns(ptrs, k, SIZE, BLOCK_K)
    up, gain, scale, up_scale = w, w, w, w
    if GATED:
        up = _load_columns(up_ptrs, k, SIZE, BLOCK_K)
    if HAS_NORM:
        gain = tl.load(norm_ptr + k, mask=k < SIZE, other=0.0)
    if SCALED > 1:
        scale = tl.load(scale_ptr + k // SCALED, mask=k < SIZE, other=0.0)
        if GATED:
            up_scale = tl.load(up_scale_ptr + k // SCALED, mask=k < SIZE, other=0.0)
    return w, up, gain, scale, up_scale


@triton.jit
def _load_columns(ptrs, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """evict_first: a weight is read once a step, and need not stay in the cache."""
    if SIZE % BLOCK_K == 0:
        return tl.load(ptrs + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(ptrs + k[None, :], mask=k[None, :] < SIZE, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_products(
    sums, weights, x_ptr, x_stride, k, r,
    SIZE: tl.constexpr, NUM_ROWS: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    total, up_total, squares = sums
    w, up, gain, scale, up_scale = weights
    for i in tl.static_range(NUM_ROWS):
        x = tl.load(x_ptr + i * x_stride + k, mask=k < SIZE, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.where(r == i, tl.sum(x * x, axis=0), 0.0)
            x *= gain.to(tl.float32)
        scaled, up_scaled = x, x
        if SCALED > 1:  # a product with x is a product with each output of the program
            scaled = x * scale
            if GATED:
                up_scaled = x * up_scale
        total += tl.where(r[None, :] == i, tl.sum(_widen(w) * scaled[None, :], axis=1)[:, None], 0.0)
        if GATED:
            up_total += tl.where(r[None, :] == i, tl.sum(_widen(up) * up_scaled[None, :], axis=1)[:, None], 0.0)
    return total, up_total, squares


@triton.jit
def _widen(w):
    """To fp32. Bytes are 8-bit floats on a card that cannot convert them."""
    if w.dtype == tl.uint8:
        return from_e4m3(w, tl.float32, 1)  # BY_SHIFTS
    else:
        return w.to(tl.float32)


def gemv(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x [1..8, K], weight [N, K] -> [rows, N], or [rows, N / 2] when gated. norm = (weight [K], eps); residual
    [rows, N] contiguous. `block` = (BLOCK_N, BLOCK_K) overrides the choice. The weight may be a ScaledWeight
    (layers/scaled.py): then `q` and its scales are read.
    """
    rows, size = x.shape
    scale, scaled = x, 0
    if not isinstance(weight, torch.Tensor):
        weight, scale, scaled = weight.q, weight.scale, weight.block or 1
        if (0, 0) < capability(x.device) < FP8_UNITS:
            weight = weight.view(torch.uint8)
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 1 <= rows <= MAX_ROWS
    assert weight.stride(1) == 1
    assert x.stride(1) == 1
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device) if out is None else out
    block_n, block_k = block or choose_block(rows, size, out_size, gated, scaled > 0)
    dependent = dependent_launch(x.device)
    gemv_kernel[(triton.cdiv(out_size, block_n),)](
        x, weight, scale, x if bias is None else bias, x if norm is None else norm[0],
        x if residual is None else residual, out,
        x.stride(0), weight.stride(0), out_size, 0.0 if norm is None else norm[1],
        SIZE=size, NUM_ROWS=rows, ROWS=next_power_of_2(rows), BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, GATED=gated, HAS_RESIDUAL=residual is not None,
        SCALED=scaled, DEPENDENT=dependent, launch_pdl=dependent, num_warps=1,
    )  # fmt: skip
    return out


def choose_block(rows: int, size: int, out_size: int, gated: bool, eight_bits: bool = False) -> tuple[int, int]:
    """(outputs a program, columns a step): 8 KB of weights before the first wait, in long runs where outputs are few.

    Measured on an H200 in a captured chain of dependent launches, the best of 1x512, 1x1024, 1x2048, 2x512, 2x1024,
    2x2048, 4x512 and 4x1024, us; then this rule's where it is another, then 1x1024:

                         one row                          two rows                    four rows
        4096 x 1024      4x1024 3.14, -, 3.7              4x1024 3.36
        1024 x 2048      2x2048 2.15, -, 2.45             2x2048 2.64                 2x2048 3.13 (4x512: 5.39)
        6144 x 1024, g   2x1024 3.83, -, 4.95             4x1024 4.59, 4.81
        1024 x 3072      1x1024 3.08, 3.13                1x512 3.92, 3.93
        6144 x 4096      2x1024 13.5, -, 13.9             2x2048 14.3, 15.5
        4096 x 4096      2x2048 9.55                      2x1024 9.98
        24576 x 4096, g  1x2048 48.4
        4096 x 12288     1x1024 25.8, 26.7                2x1024 26.6
        2048 x 2048      2x2048 3.08, -, 3.8              1x2048 3.60, 3.61
        5632 x 2048, g   2x1024 6.37, -, 6.84             2x1024 7.44
        151936 x 1024    4x512 71.3, 71.6 (2x1024: 94.2)  4x512 73.0, 74.3            4x1024 76.1
        102400 x 2048    2x1024 94.5 (1x2048: 127)        2x1024 95.4

    In 8 bits a row is half as long, so more outputs: 6144 x 4096 4x2048 7.38 (2x2048: 8.36), 4096 x 4096 4x2048
    5.90, 24576 x 4096 gated 2x2048 25.3; but 4096 x 12288 2x2048 15.7 (4x2048: 17.3). Two rows: 2x1024 10.2, 4x2048
    6.88, 2x1024 32.8 (2x2048: 37.0).
    """
    if eight_bits and size > 1024 and rows <= 4:
        if rows > 1 and (gated or out_size > 4096):
            return 2, 1024
        return (2 if gated or size > 8192 else 4), 2048 if rows < 4 else 1024
    if rows > 4:  # x is read from the L1 once a program: more outputs share it, short steps stay within the registers
        block_n, block_k = 4, 512
    elif size <= 1024:
        block_n, block_k = (2 if gated or out_size <= 2048 else 4), 1024
    elif gated:
        block_n, block_k = (2, 1024) if size <= 2048 else (1, 2048)
    else:
        block_n, block_k = 2, 2048 if out_size <= 4096 else 1024
    return block_n, min(block_k, next_power_of_2(size))


def prefers_gemv(rows: int, out_size: int, size: int) -> bool:
    """Whether `gemv` beats cuBLAS, as measured on an H200 (us, gemv / cuBLAS; out x in):

        rows   4096x1024  1024x2048  1024x3072  151936x1024  6144x4096  4096x4096  24576x4096  4096x12288
        1       4.1/5.4   3.2/12.7   3.8/6.7      80/88      14.2/16.3  10.8/13.1   58/58        26/31
        2       4.2/5.3   4.0/12.8   4.4/6.8        -        15.1/16.5  11.8/12.8   61/58        28/31
        4       5.2/5.3   6.5/8.6    8.1/6.8      85/88      17.9/16.5  14.6/12.9   79/58        38/31
        8       7.3/5.3   9.7/5.9     16/6.8        -          40/17      23/13    126/62        63/32

    Only the batch sizes that decode graphs are captured for (1, 2, 4): any other would be compiled in mid-run.
    """
    if rows == 1:
        return True
    if rows == 2:
        return size <= 2048 or out_size <= 16384
    if rows == 4:
        return out_size * size <= 1024 * 2048 or (out_size >= 65536 and size <= 1024)
    return False

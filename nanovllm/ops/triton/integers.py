"""Products with a weight of small integers (twin, form and place of the bits: `ops/integers.py`), by the rows of x.

    1 and 2        `integer_gemv` below: one warp, sums in fp32
    3 to 256       `integers_matmul.py`: the weight is unpacked in registers for the tensor cores
    more           the weight is expanded to 16 bits in a buffer, then cuBLAS: see MATMUL_ROWS
    before sm_80   `integer_gemv` up to 8 rows, two at a time, then the buffer: Triton's dot products run on ordinary
                   cores there

None of the kernels has been timed on a card yet; the constants are reasoned, and the reasons stand beside them.

The matrix-vector product. A program is one warp and owns BLOCK_N outputs; it requests BLOCK_W words of each (16 bytes a
lane, neighbouring lanes neighbouring bytes) before it waits: 4 KB as chosen below, and the next 4 KB, whose loads the
compiler moves up. With 8 warps on a multiprocessor, as many as 255 registers a lane leave room for, that is more than
the 24 KB that hide the memory's latency (gemv.py). No two programs share an output, and nothing goes through shared
memory: the only exchange between lanes is the last sum.

In 4 bits instructions are as scarce as bytes. An H200 starts 3e13 instructions of a lane a second; at 70 % of its
bandwidth 6.2e12 weights arrive, so a weight may cost 4.8. An integer becomes a float without a conversion, which would
cost two: its bits are put at the top of the mantissa of 1.0 (a shift, and one LOP3 for mask and exponent together), so

    v = 1 + q / 2^bits        w = scale (q - middle) + offset = a v + b,    a = 2^bits scale,  b = offset - 1.5 a

and over the inputs of four words, which share a and b:  sum_i w[i] x[i] = a sum_i v[i] x[i] + b sum_i x[i]. The inner
loop is the shift, the LOP3 and a multiply-add. Scale and offset cost a few instructions for 32 weights, the offset next
to nothing. The sum of x and its conversion are shared by the BLOCK_N outputs: 4.2 instructions a weight in all, as
compiled for sm_90. v is between 1 and 2 and w is found as a difference, which loses four of fp32's 24 bits, on sums of
products with 8 or 11.

Two rows cost one more multiply-add a weight. From three on the tensor cores multiply.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.ops.triton.common import capability, dependent_launch, next_power_of_2, start_next, wait_for_last
from nanovllm.ops.triton.gemv import MAX_ROWS, finish
from nanovllm.ops.triton.integers_matmul import (
    LANE_WORDS,
    expand_words,
    factors,
    first_input,
    form_of,
    integer_matmul,
    mantissa,
    tensors_of,
)

GEMV_ROWS = 2
# Expanding reads 0.5 and writes 2 bytes a weight, which cuBLAS reads again: some 4.5 ms for the 7e9 weights of
# Qwen3-8B. If `integer_matmul` multiplies at half of cuBLAS's speed (350 against 700 TFLOP/s on an H200), it loses as
# much at 225 rows.
MATMUL_ROWS = 256
TENSOR_CORES = (8, 0)


@triton.jit
def integer_gemv_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    norm_weight_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    out_size,
    eps,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    NUM_WORDS: tl.constexpr = SIZE * BITS // 32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    rows = tl.where(n < out_size, n, 0).to(tl.int64)
    pointers = (words_ptr, scale_ptr, offset_ptr)
    none = tl.zeros([BLOCK_N, BLOCK_W // LANE_WORDS], tl.float32)
    sums = (none, none, none, none, tl.zeros([BLOCK_W], tl.float32), tl.zeros([BLOCK_W], tl.float32))
    w = tl.arange(0, BLOCK_W)
    weights = _load_words(pointers, rows, out_size, 0, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET, GATED)
    wait_for_last(DEPENDENT)  # the first weights are on their way meanwhile
    inputs = (x_ptr, norm_weight_ptr, x_stride)
    sums = _add_products(sums, weights, inputs, w, SIZE, BITS, NUM_ROWS, GATED, HAS_NORM)
    for start in tl.range(BLOCK_W, NUM_WORDS, BLOCK_W, loop_unroll_factor=2):
        weights = _load_words(pointers, rows, out_size, start, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET, GATED)
        sums = _add_products(sums, weights, inputs, start + w, SIZE, BITS, NUM_ROWS, GATED, HAS_NORM)
    is_second = tl.arange(0, NUM_ROWS) == 1
    total = _of_rows(tl.sum(sums[0], axis=1), tl.sum(sums[1], axis=1), is_second)
    up_total = _of_rows(tl.sum(sums[2], axis=1), tl.sum(sums[3], axis=1), is_second)
    squares = tl.where(is_second, tl.sum(sums[5], axis=0), tl.sum(sums[4], axis=0))
    rest = (bias_ptr, residual_ptr, out_ptr)
    finish(total, up_total, squares, n, rest, out_size, eps, SIZE, NUM_ROWS, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL)


@triton.jit
def _of_rows(first, second, is_second):
    return tl.where(is_second[None, :], second[:, None], first[:, None])


@triton.jit
def _load_words(
    pointers,
    rows,
    out_size,
    start,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GATED: tl.constexpr,
):
    """BLOCK_W words of these outputs, and of the other half of a gated weight; a and b for each four of them."""
    half = _load_half(pointers, rows, start, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET)
    up = half
    if GATED:
        up = _load_half(pointers, rows + out_size, start, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET)
    return half, up


@triton.jit
def _load_half(
    pointers,
    rows,
    start,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """evict_first: a weight is read once a step and need not stay in the cache. Past the end scale and offset are 0."""
    words_ptr, scale_ptr, offset_ptr = pointers
    NUM_WORDS: tl.constexpr = SIZE * BITS // 32
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    w = start + tl.arange(0, BLOCK_W)
    quad = start + tl.arange(0, BLOCK_W // LANE_WORDS) * LANE_WORDS
    place = rows[:, None] * NUM_WORDS + w[None, :]
    of_group = rows[:, None] * NUM_GROUPS + (first_input(quad, BITS) // GROUP)[None, :]
    if NUM_WORDS % BLOCK_W == 0:
        words = tl.load(words_ptr + place, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + of_group)
        offset = tl.load(offset_ptr + of_group) if HAS_OFFSET else scale
    else:
        ok = (quad < NUM_WORDS)[None, :]
        words = tl.load(words_ptr + place, mask=(w < NUM_WORDS)[None, :], other=0, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + of_group, mask=ok, other=0.0)
        offset = tl.load(offset_ptr + of_group, mask=ok, other=0.0) if HAS_OFFSET else scale
    a, b = factors(scale, offset, BITS, HAS_OFFSET)
    return words, a, b


@triton.jit
def _add_products(
    sums,
    weights,
    inputs,
    w,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A number is unpacked once for both rows of x. The rows are written out: a sum for each is a tile of its own."""
    total, total2, up_total, up_total2, squares, squares2 = sums
    half, up = weights
    words, a, b = half
    up_words, up_a, up_b = up
    x_ptr, norm_weight_ptr, x_stride = inputs
    k = first_input(w, BITS)
    none, nothing = tl.zeros(words.shape, tl.float32), tl.zeros(w.shape, tl.float32)
    products, products2, up_products, up_products2, x_sum, x_sum2 = none, none, none, none, nothing, nothing
    for j in tl.static_range(32 // BITS):
        at = k + LANE_WORDS * j
        gain = nothing
        if HAS_NORM:
            gain = tl.load(norm_weight_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
        v, up_v = mantissa(words, j, BITS), mantissa(up_words, j, BITS)
        x, squares = _load_x(x_ptr, at, gain, squares, SIZE, HAS_NORM)
        x_sum += x
        products += v * x[None, :]
        if GATED:
            up_products += up_v * x[None, :]
        if NUM_ROWS == 2:
            x, squares2 = _load_x(x_ptr + x_stride, at, gain, squares2, SIZE, HAS_NORM)
            x_sum2 += x
            products2 += v * x[None, :]
            if GATED:
                up_products2 += up_v * x[None, :]
    total += a * _of_lanes(products) + b * _of_lane(x_sum)[None, :]
    if GATED:
        up_total += up_a * _of_lanes(up_products) + up_b * _of_lane(x_sum)[None, :]
    if NUM_ROWS == 2:
        total2 += a * _of_lanes(products2) + b * _of_lane(x_sum2)[None, :]
        if GATED:
            up_total2 += up_a * _of_lanes(up_products2) + up_b * _of_lane(x_sum2)[None, :]
    return total, total2, up_total, up_total2, squares, squares2


@triton.jit
def _load_x(x_ptr, k, gain, squares, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):
    x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= gain
    return x, squares


@triton.jit
def _of_lanes(tile):
    """[BLOCK_N, BLOCK_W] -> [BLOCK_N, BLOCK_W / 4]: the four words that a lane read at once, which stay in it."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // LANE_WORDS, LANE_WORDS]), axis=2)


@triton.jit
def _of_lane(row):
    return tl.sum(tl.reshape(row, [row.shape[0] // LANE_WORDS, LANE_WORDS]), axis=1)


def integer_gemv(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """As `gemv.gemv`, with an IntegerWeight (layers/integers.py). `block` = (BLOCK_N, RUNS) overrides the choice."""
    (rows, size), dependent = x.shape, dependent_launch(x.device)
    if weight.order is not None:
        x, norm = x[:, weight.order], norm and (norm[0][weight.order], norm[1])
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 1 <= rows <= GEMV_ROWS
    assert x.stride(1) == 1
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device) if out is None else out
    block_n, block_w = block or choose_block(rows, size * weight.bits // 32, gated)
    integer_gemv_kernel[(triton.cdiv(out_size, block_n),)](
        x,
        *tensors_of(weight),
        x if bias is None else bias,
        x if norm is None else norm[0],
        x if residual is None else residual,
        out,
        x.stride(0),
        out_size,
        0.0 if norm is None else norm[1],
        **form_of(weight),
        NUM_ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=1,
    )
    return out


def choose_block(rows: int, num_words: int, gated: bool) -> tuple[int, int]:
    """(outputs a program, words a step): 4 KB of words a step. Each takes a register of its lane, and so does each of
    their sums, for every row of x: for two rows and for a gated weight half as many outputs."""
    block_w = min(256, max(32, next_power_of_2(num_words)))
    return max(1, min(8, 1024 // block_w) // rows // (2 if gated else 1)), block_w


def integer_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, K], weight: an IntegerWeight (layers/integers.py) [N, K]."""
    rows, has_cores = len(x), capability(x.device) >= TENSOR_CORES or x.device.type == "cpu"
    if 1 <= rows <= (GEMV_ROWS if has_cores else MAX_ROWS):
        parts = [integer_gemv(some, weight, bias) for some in x.split(GEMV_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if weight.order is not None:
        x = x[:, weight.order]
    if 1 <= rows <= MATMUL_ROWS and has_cores:
        return integer_matmul(x, weight, bias)
    return F.linear(x, expand_words(weight, x.dtype), bias)

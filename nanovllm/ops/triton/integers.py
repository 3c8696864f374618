"""Products with a weight of small integers (twin, form and place of the bits: `ops/integers.py`), by the rows of x.

    1 and 2        `integer_gemv` below: one warp, sums in fp32
    3 to 255       `integers_matmul.py`: the weight is unpacked in registers for the tensor cores
    256 and more   the weight is expanded to 16 bits in a buffer, then cuBLAS: see EXPANDED_ROWS
    before sm_80   `integer_gemv` up to 8 rows, then the buffer: Triton's dot products run on ordinary cores there

None of the kernels has been timed on a card yet; the constants are reasoned, and the reasons stand beside them.

The matrix-vector product. A program is one warp and owns BLOCK_N outputs; it reads RUNS runs of 32 inputs of each at
once (16 bytes a lane in 4 bits, neighbouring lanes neighbouring runs) before it waits: BLOCK_N * RUNS * 16 bytes in
flight, 4 KB as chosen below, 8 to 16 warps on a multiprocessor. Half of the 24 KB that hide the memory's latency come
from the next step, whose loads the compiler moves up.

In 4 bits the arithmetic is as scarce as the bytes. An H200 starts 3e13 instructions of a lane a second; at 70 % of its
bandwidth 6.2e12 weights arrive, so a weight may cost 4.8. An integer becomes a float without a conversion, which would
cost two: its bits are put at the top of the mantissa of 1.0 (a shift, and one LOP3 for mask and exponent together), so

    v = 1 + q / 2^bits        w = scale (q - middle) + offset = a v + b,    a = 2^bits scale,  b = offset - 1.5 a

and over a run, whose inputs share a and b:  sum_i w[i] x[i] = a sum_i v[i] x[i] + b sum_i x[i]. The inner loop is the
shift, the LOP3 and a multiply-add; scale and offset cost a few instructions for 32 weights, and an offset next to
nothing. The sum of x and its conversion are shared by the BLOCK_N outputs. v is between 1 and 2 and w is found as a
difference, which loses four bits of fp32's 24, on sums of products that have 8 or 11.

Two rows cost one more multiply-add a weight. From three on the tensor cores multiply.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.ops.integers import RUN
from nanovllm.ops.triton.common import capability, dependent_launch, next_power_of_2, start_next, wait_for_last
from nanovllm.ops.triton.gemv import MAX_ROWS, finish
from nanovllm.ops.triton.integers_matmul import (
    INPUTS,
    expand_words,
    factors,
    form_of,
    integer_matmul,
    mantissa,
    tensors_of,
)

GEMV_ROWS = 2
# Expanding reads 0.5 and writes 2 bytes a weight, which cuBLAS reads again: some 4.5 ms for the 7e9 weights of Qwen3-8B.
# If `integer_matmul` multiplies at half of cuBLAS's speed (350 against 700 TFLOP/s on an H200), it loses as much at 225 rows.
MATMUL_ROWS = 256
TENSOR_CORES = (8, 0)


@triton.jit
def integer_gemv_kernel(
    x_ptr, words_ptr, scale_ptr, offset_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr, x_stride, out_size, eps,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, RUNS: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    rows = tl.where(n < out_size, n, 0).to(tl.int64)
    pointers = (words_ptr, scale_ptr, offset_ptr)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up_total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    sums = (total, up_total, squares)
    run = tl.arange(0, RUNS)
    weights = _load_runs(pointers, rows, out_size, run, SIZE, BITS, GROUP, RUNS, HAS_OFFSET, GATED)
    wait_for_last(DEPENDENT)  # the first weights are on their way meanwhile
    inputs = (x_ptr, norm_weight_ptr, x_stride)
    sums = _add_products(sums, weights, inputs, run, SIZE, BITS, NUM_ROWS, ROWS, GATED, HAS_NORM)
    for start in tl.range(RUNS, SIZE // INPUTS, RUNS):
        run = start + tl.arange(0, RUNS)
        weights = _load_runs(pointers, rows, out_size, run, SIZE, BITS, GROUP, RUNS, HAS_OFFSET, GATED)
        sums = _add_products(sums, weights, inputs, run, SIZE, BITS, NUM_ROWS, ROWS, GATED, HAS_NORM)
    total, up_total, squares = sums
    rest = (bias_ptr, residual_ptr, out_ptr)
    finish(total, up_total, squares, n, rest, out_size, eps, SIZE, NUM_ROWS, HAS_BIAS, HAS_NORM, GATED, HAS_RESIDUAL)


@triton.jit
def _load_runs(
    pointers, rows, out_size, run,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RUNS: tl.constexpr, HAS_OFFSET: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Of these outputs, and of the other half of a gated weight: words [BLOCK_N, RUNS, words of a run], a and b."""
    half = _load_half(pointers, rows, run, SIZE, BITS, GROUP, RUNS, HAS_OFFSET)
    up = half
    if GATED:
        up = _load_half(pointers, rows + out_size, run, SIZE, BITS, GROUP, RUNS, HAS_OFFSET)
    return half, up


@triton.jit
def _load_half(
    pointers, rows, run,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RUNS: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """evict_first: a weight is read once a step, and need not stay in the cache. Past the end scale and offset are 0."""
    words_ptr, scale_ptr, offset_ptr = pointers
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    i = tl.arange(0, BITS)
    place = rows[:, None, None] * (SIZE * BITS // 32) + run[None, :, None] * BITS + i[None, None, :]
    of_group = rows[:, None] * NUM_GROUPS + (run * INPUTS // GROUP)[None, :]
    if SIZE // INPUTS % RUNS == 0:
        words = tl.load(words_ptr + place, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + of_group)
        offset = tl.load(offset_ptr + of_group) if HAS_OFFSET else scale
    else:
        ok = run < SIZE // INPUTS
        words = tl.load(words_ptr + place, mask=ok[None, :, None], other=0, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + of_group, mask=ok[None, :], other=0.0)
        offset = tl.load(offset_ptr + of_group, mask=ok[None, :], other=0.0) if HAS_OFFSET else scale
    a, b = factors(scale, offset, BITS, HAS_OFFSET)
    return words, a, b


@triton.jit
def _add_products(
    sums, weights, inputs, run,
    SIZE: tl.constexpr, BITS: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The sums over one step. A number is unpacked once for all rows of x."""
    total, up_total, squares = sums
    (words, a, b), (up_words, up_a, up_b) = weights
    x_ptr, norm_weight_ptr, x_stride = inputs
    r, i = tl.arange(0, ROWS), tl.arange(0, BITS)
    products = tl.zeros([words.shape[0], ROWS, words.shape[1], BITS], tl.float32)
    up_products = products
    x_sum = tl.zeros([ROWS, words.shape[1], BITS], tl.float32)
    for j in tl.static_range(32 // BITS):
        k = run[:, None] * INPUTS + (BITS * j + i)[None, :]
        ok = (k < SIZE)[None, :, :] & (r < NUM_ROWS)[:, None, None]
        x = tl.load(x_ptr + r[:, None, None] * x_stride + k[None, :, :], mask=ok, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(tl.sum(x * x, axis=2), axis=1)
            x *= tl.load(norm_weight_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)[None, :, :]
        x_sum += x
        products += mantissa(words, j, BITS)[:, None, :, :] * x[None, :, :, :]
        if GATED:
            up_products += mantissa(up_words, j, BITS)[:, None, :, :] * x[None, :, :, :]
    of_runs = tl.sum(x_sum, axis=2)[None, :, :]
    total += tl.sum(a[:, None, :] * tl.sum(products, axis=3) + b[:, None, :] * of_runs, axis=2)
    if GATED:
        up_total += tl.sum(up_a[:, None, :] * tl.sum(up_products, axis=3) + up_b[:, None, :] * of_runs, axis=2)
    return total, up_total, squares


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
    assert 1 <= rows <= MAX_ROWS
    assert x.stride(1) == 1
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device) if out is None else out
    block_n, runs = block or choose_block(rows, size, gated, weight.bits)
    integer_gemv_kernel[(triton.cdiv(out_size, block_n),)](
        x, *tensors_of(weight), x if bias is None else bias, x if norm is None else norm[0],
        x if residual is None else residual, out, x.stride(0), out_size, 0.0 if norm is None else norm[1],
        **form_of(weight), NUM_ROWS=rows, ROWS=next_power_of_2(rows), BLOCK_N=block_n, RUNS=runs,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, GATED=gated, HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent, launch_pdl=dependent, num_warps=1,
    )  # fmt: skip
    return out


def choose_block(rows: int, size: int, gated: bool, bits: int) -> tuple[int, int]:
    """(outputs a program, runs a step): 4 KB of words a step at one row. Words and sums take a register each for every
    16 bytes of the step a lane has, and x shares the rest of 255: at more rows fewer outputs. The 256 words of a step
    are 64 runs of 4 outputs, or 32 of 8 where a row is short; in 8 bits a run has twice the words."""
    runs = min(64 if bits == 4 else 32, next_power_of_2(size // RUN))
    outputs = 256 // runs * 4 // bits
    return max(1, min(8, outputs) // next_power_of_2(rows) // (2 if gated else 1)), runs


def integer_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, K], weight: an IntegerWeight (layers/integers.py) [N, K]."""
    rows, has_cores = len(x), capability(x.device) >= TENSOR_CORES or x.device.type == "cpu"
    if 1 <= rows <= (GEMV_ROWS if has_cores else MAX_ROWS):
        return integer_gemv(x, weight, bias)
    if weight.order is not None:
        x = x[:, weight.order]
    if 1 <= rows <= MATMUL_ROWS and has_cores:
        return integer_matmul(x, weight, bias)
    return F.linear(x, expand_words(weight, x.dtype), bias)

"""Products with a weight of small integers (twin, form and place of the bits: `ops/integers.py`), by the rows of x.

    1 and 2        `integer_gemv` below: one row of integers times another
    3 to 256       `integers_matmul.py`: the weight is unpacked in registers for the tensor cores
    more           the weight is expanded to 16 bits, piece by piece, then cuBLAS: see MATMUL_ROWS
    before sm_80   `integer_gemv` up to 8 rows, two at a time, then expanded: Triton's dot products run on ordinary
                   cores there
    float32        expanded: none of the kernels computes in more than 16 bits

The matrix-vector product. In 4 bits instructions are as scarce as bytes: an H200 starts 3e13 instructions of a lane a
second, and at 70 % of its bandwidth 6.2e12 weights arrive, so a weight may cost 4.8. Multiplying in floats took 4.2 and
reached 53 %. So x is rounded to integers first, as on a CPU (decision 20): 16 bits for each number, in units of 1/32512
of the largest in its block, in two bytes 256 hi + lo. `dp4a` multiplies four bytes by four and adds up:

    sum_i w[i] x[i] = scale * unit * (256 sum q hi + sum q lo) + offset * sum x

A word of 4 bits becomes two operands by a shift and two masks (16 q: the number stays in the upper half of its byte),
and each takes two `dp4a`: an instruction a weight, 1.4 with all around it. bfloat16 keeps 8 bits of a number, so 16
lose nothing that matters, whatever the other numbers of the block are.

A program is one warp or two and owns BLOCK_N outputs; it requests BLOCK_W words of 64 bits of each (16 bytes a lane,
neighbouring lanes neighbouring bytes) before it waits for x. No two programs share an output, and nothing goes through
shared memory but the last sum.

Rounding x is a launch of its own (1.2 us, `integers_round.py`), which also computes the norm before the product where
there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.ops import integers
from nanovllm.ops.linear import linear_in_pieces
from nanovllm.ops.triton.common import (
    INTERPRETED,
    capability,
    dependent_launch,
    next_power_of_2,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.gemv import MAX_ROWS, finish
from nanovllm.ops.triton.integers_matmul import expand_words, halves, integer_matmul
from nanovllm.ops.triton.integers_round import RoundedRows, round_rows

GEMV_ROWS = 2
# Expanding reads 0.5 and writes 2 bytes a weight, which cuBLAS reads again: some 4.5 ms for the 7e9 weights of
# Qwen3-8B. At 256 rows `integer_matmul` takes 1.2 times as long as cuBLAS (35 us more for a layer's four matrices,
# 1.3 ms for all).
MATMUL_ROWS = 256
TENSOR_CORES = (8, 0)


def dot_form(weight: Any) -> tuple[int, int, int, str, str]:
    """FORM of the kernels: (inputs, bits, groups of a block, PTX that multiplies, its constraints). `weight`: an
    IntegerWeight or an IntegerStack."""
    groups = integers.block_length(weight.bits) // weight.group
    return weight.shape[-1], weight.bits, groups, *dot_code(weight.bits, groups)


def dot_code(bits: int, groups: int) -> tuple[str, str]:
    """PTX that multiplies the numbers of a 64-bit word by those of x: for each group 256 times the sum of products with
    hi, and that with lo. Its inputs: the word, then the fours of hi, then those of lo."""
    fours = integers.num_places(bits) // 2
    lines = ["{ .reg .b32 w0, w1, t, h, l;", f"mov.b64 {{w0, w1}}, ${groups};"]
    for group in range(groups):
        lines.append("mov.b32 h, 0; mov.b32 l, 0;")
        first, last = group * fours // groups, ((group + 1) * fours - 1) // groups
        for four in range(first, last + 1):
            hi, lo = f"${groups + 1 + four}", f"${groups + 1 + fours + four}"
            word = f"w{2 * four // fours}"
            if bits == 4 and four % 2 == 0:
                lines += [f"shl.b32 t, {word}, 4;", "and.b32 t, t, 0xf0f0f0f0;"]
            elif bits == 4:
                lines.append(f"and.b32 t, {word}, 0xf0f0f0f0;")
            elif groups > fours:  # groups of 16: a place of the two
                lines.append(f"and.b32 t, {word}, {'0xff00ff00' if group % 2 else '0x00ff00ff'};")
            else:
                lines.append(f"mov.b32 t, {word};")
            lines += [f"dp4a.s32.s32 h, t, {hi}, h;", f"dp4a.s32.s32 l, t, {lo}, l;"]
        lines.append(f"shl.b32 h, h, 8; add.s32 ${group}, h, l;")
    constraints = ["=r"] * groups + ["l"] + ["r"] * 2 * fours
    return "\n".join([*lines, "}"]), ",".join(constraints)


@triton.jit
def _plain_products(words, x, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """What the PTX computes, for the interpreter."""
    FOURS: tl.constexpr = 16 // BITS
    found = ()
    for group in tl.static_range(GROUPS):
        total = tl.zeros(words.shape, tl.int32)
        for four in tl.static_range(FOURS):
            for byte in tl.static_range(4):
                if (four * GROUPS // FOURS if GROUPS <= FOURS else 2 * four + byte % 2) == group:
                    place: tl.constexpr = 32 * (2 * four // FOURS) + 8 * byte
                    if BITS == 4:
                        up = ((words >> (place + four % 2 * 4)) << 60) >> 56  # 16 q
                    else:
                        up = (words >> place) << 56 >> 56
                    hi = (x[four] << (24 - 8 * byte)) >> 24
                    lo = (x[FOURS + four] << (24 - 8 * byte)) >> 24
                    total += up.to(tl.int32) * (256 * hi + lo)
        found = found + (total,)
    return found


@triton.jit
def _fours(numbers_ptr, quad, PART: tl.constexpr, PLACES: tl.constexpr):
    """Four int32 of each pair of 64-bit words, as four vectors; PART of 16 bytes."""
    x = tl.load(numbers_ptr + quad[:, None] * (2 * PLACES) + PART * 4 + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _of_both(first, second):
    """Of the two words that a lane has, side by side: [1, 2 * lanes]."""
    return tl.reshape(tl.join(first, second), (1, 2 * first.shape[0]))


@triton.jit
def _load_numbers(numbers_ptr, quad, BITS: tl.constexpr):
    """hi and lo of x for each 64-bit word, in the order of `dot_code`: 2 fours of each in 8 bits, 4 in 4 bits."""
    PLACES: tl.constexpr = 32 // BITS
    found = ()
    if BITS == 4:
        for part in tl.static_range(2):
            first = _fours(numbers_ptr, quad, part, PLACES)
            second = _fours(numbers_ptr, quad, 2 + part, PLACES)
            for j in tl.static_range(4):
                found = found + (_of_both(first[j], second[j]),)
    else:
        first, second = _fours(numbers_ptr, quad, 0, PLACES), _fours(numbers_ptr, quad, 1, PLACES)
        for j in tl.static_range(4):
            found = found + (_of_both(first[j], second[j]),)
    return found


@triton.jit
def _load_words(weight, row, start, all_outputs, FORM: tl.constexpr, BLOCK_W: tl.constexpr):
    """BLOCK_W words of these outputs; of each pair of words the factors of its block's groups, a tuple of
    [BLOCK_N, BLOCK_W / 2]. evict_first: a weight is read once a step and need not stay in the cache."""
    words_ptr, factors_ptr = weight
    GROUPS: tl.constexpr = FORM[2]
    NUM_BLOCKS: tl.constexpr = (FORM[0] * FORM[1] + 511) // 512
    WORDS: tl.constexpr = NUM_BLOCKS * 8
    w = start + tl.arange(0, BLOCK_W)
    block = (start // 2 + tl.arange(0, BLOCK_W // 2)) // 4
    place = words_ptr + row.to(tl.int64)[:, None] * WORDS + w[None, :]
    factors = ()
    if WORDS % BLOCK_W == 0:
        words = tl.load(place, eviction_policy="evict_first")
    else:
        words = tl.load(place, mask=(w < WORDS)[None, :], other=0, eviction_policy="evict_first")
    for g in tl.static_range(GROUPS):
        at = factors_ptr + (block * GROUPS + g)[:, None] * all_outputs + row[None, :]
        factors = factors + (tl.trans(tl.load(at, mask=(block < NUM_BLOCKS)[:, None], other=0)),)
    return words, factors


@triton.jit
def _load_step(weight, row, start, out_size, FORM: tl.constexpr, BLOCK_W: tl.constexpr, GATED: tl.constexpr):
    """Of these outputs, and of the other half of a gated weight."""
    all_outputs = out_size * 2 if GATED else out_size
    words, factors = _load_words(weight, row, start, all_outputs, FORM, BLOCK_W)
    up, up_factors = words, factors
    if GATED:
        up, up_factors = _load_words(weight, row + out_size, start, all_outputs, FORM, BLOCK_W)
    return words, factors, up, up_factors


@triton.jit
def _add_products(total, words, factors, inputs, start, x_row, FORM: tl.constexpr):
    """total [BLOCK_N, BLOCK_W / 2]: a lane's part of the sums of each output."""
    numbers_ptr, units_ptr, sums_ptr = inputs
    BITS: tl.constexpr = FORM[1]
    GROUPS: tl.constexpr = FORM[2]
    NUM_BLOCKS: tl.constexpr = (FORM[0] * BITS + 511) // 512
    N: tl.constexpr = words.shape[0]
    PAIRS: tl.constexpr = words.shape[1] // 2
    pair = start // 2 + tl.arange(0, PAIRS)
    block = tl.minimum(pair // 4, NUM_BLOCKS - 1)  # words past the end are zeros
    numbers_ptr += x_row * (NUM_BLOCKS * 256 // BITS)  # of four bytes
    x = _load_numbers(numbers_ptr, tl.minimum(pair, NUM_BLOCKS * 4 - 1), BITS)
    unit = tl.load(units_ptr + x_row * NUM_BLOCKS + block)
    if INTERPRETED:
        products = _plain_products(words, x, BITS, GROUPS)
    else:
        kind = unit.to(tl.int32).dtype
        given = (words,) + x
        products = tl.inline_asm_elementwise(FORM[3], FORM[4], given, dtype=(kind,) * GROUPS, is_pure=True, pack=1)
    for g in tl.static_range(GROUPS):
        scale, offset = halves(factors[g])
        both = tl.sum(tl.reshape(products[g], (N, PAIRS, 2)), axis=2)
        total += both.to(tl.float32) * (scale.to(tl.float32) * unit[None, :])
        # The sum of a group is added by the first lane of the four that have its block.
        of_group = tl.load(sums_ptr + x_row * (NUM_BLOCKS * GROUPS) + block * GROUPS + g)
        total += offset.to(tl.float32) * tl.where(pair % 4 == 0, of_group, 0.0)[None, :]
    return total


@triton.jit
def _add_step(sums, step, inputs, start, x_row, FORM: tl.constexpr, NUM_ROWS: tl.constexpr, GATED: tl.constexpr):
    first, up_first, second, up_second = sums
    words, factors, up, up_factors = step
    first = _add_products(first, words, factors, inputs, start, x_row, FORM)
    if GATED:
        up_first = _add_products(up_first, up, up_factors, inputs, start, x_row, FORM)
    if NUM_ROWS == 2:
        second = _add_products(second, words, factors, inputs, start, x_row + 1, FORM)
        if GATED:
            up_second = _add_products(up_second, up, up_factors, inputs, start, x_row + 1, FORM)
    return first, up_first, second, up_second


@triton.jit
def integer_sums(
    weight,
    inputs,
    n,
    x_row,
    out_size,
    FORM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Outputs n of rows x_row and, if NUM_ROWS is 2, the next: each lane's part of (those of the first row, of the
    other half of a gated weight, then of the second row), [BLOCK_N, BLOCK_W / 2] each. weight = (words, factors),
    inputs = (numbers, units, sums)."""
    row = tl.where(n < out_size, n, 0)  # outputs past the end read row 0: cheaper than a mask on every weight
    NUM_WORDS: tl.constexpr = (FORM[0] * FORM[1] + 511) // 512 * 8
    none = tl.zeros([n.shape[0], BLOCK_W // 2], tl.float32)
    sums = (none, none, none, none)
    step = _load_step(weight, row, 0, out_size, FORM, BLOCK_W, GATED)
    wait_for_last(DEPENDENT)  # the first words are on their way meanwhile
    for start in tl.range(0, NUM_WORDS - BLOCK_W, BLOCK_W, loop_unroll_factor=2):
        # The words of the next step are on their way while these are multiplied.
        following = _load_step(weight, row, start + BLOCK_W, out_size, FORM, BLOCK_W, GATED)
        sums = _add_step(sums, step, inputs, start, x_row, FORM, NUM_ROWS, GATED)
        step = following
    last: tl.constexpr = (NUM_WORDS - 1) // BLOCK_W * BLOCK_W
    return _add_step(sums, step, inputs, last, x_row, FORM, NUM_ROWS, GATED)


@triton.jit
def integer_gemv_kernel(
    numbers_ptr,
    units_ptr,
    sums_ptr,
    words_ptr,
    factors_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_size,
    FORM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight, inputs = (words_ptr, factors_ptr), (numbers_ptr, units_ptr, sums_ptr)
    first, up_first, second, up_second = integer_sums(
        weight, inputs, n, 0, out_size, FORM, NUM_ROWS, BLOCK_W, GATED, DEPENDENT
    )
    is_second = tl.arange(0, NUM_ROWS) == 1
    total = _of_rows(first, second, is_second)
    up_total = _of_rows(up_first, up_second, is_second)
    rest, no_norm = (bias_ptr, residual_ptr, out_ptr), tl.zeros([NUM_ROWS], tl.float32)
    finish(total, up_total, no_norm, n, rest, out_size, 0.0, FORM[0], NUM_ROWS, HAS_BIAS, False, GATED, HAS_RESIDUAL)


@triton.jit
def _of_rows(first, second, is_second):
    return tl.where(is_second[None, :], tl.sum(second, axis=1)[:, None], tl.sum(first, axis=1)[:, None])


def integer_gemv(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """As `gemv.gemv`, with an IntegerWeight (layers/integers.py). `block` = (BLOCK_N, BLOCK_W, warps) overrides the
    choice."""
    return rounded_gemv(round_rows(x, weight, norm), weight, x.dtype, bias, gated, residual, out, block)


def rounded_gemv(
    x: RoundedRows,
    weight: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    rows, dependent = len(x.numbers), dependent_launch(x.numbers.device)
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 1 <= rows <= GEMV_ROWS
    out = torch.empty((rows, out_size), dtype=dtype, device=x.numbers.device) if out is None else out
    form = dot_form(weight)
    block_n, block_w, warps = block or choose_block(form, rows, gated)
    integer_gemv_kernel[(triton.cdiv(out_size, block_n),)](
        x.numbers.view(torch.int32),
        x.units,
        x.sums,
        weight.words.view(torch.int64),
        weight.factors,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        out_size,
        FORM=form,
        NUM_ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        HAS_BIAS=bias is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=warps,
    )
    return out


def choose_block(form: tuple[Any, ...], rows: int, gated: bool) -> tuple[int, int, int]:
    """(outputs a program, 64-bit words a step, warps). H200, us without rounding x, the best of a dozen (share of a
    plain read of 4.46 TB/s); the others are up to twice as slow:

                                6144 x 4096     4096 x 4096     24576 x 4096, gated  4096 x 12288
        int4-128, one row       8x256/4  5.2    4x256/4  4.0    4x256/2 15.4         8x256/4   8.4
                                (58 %)          (50 %)          (78 %)               (71 %)
        the rule                                8x256/4  4.3
        two rows                8x128/2  6.2    8x128/2  5.3    4x64/1  18.2         8x128/2  11.7
        int4-32, one row        8x128/2  7.2    4x128/2  5.7    4x64/1  23.8         8x128/2  13.6
        int8-32, one row        4x128/2  8.9    4x128/2  7.5    8x128/2 31.8         4x128/2  17.5
    """
    _, bits, groups = form[:3]
    if (bits, groups, rows) == (4, 1, 1):
        block_n, block_w, warps = (4, 256, 2) if gated else (8, 256, 4)
    elif gated:
        block_n, block_w, warps = 4, 64, 1
    else:
        block_n, block_w, warps = 8 if bits == 4 else 4, 128, 2
    most = max(64, next_power_of_2(integers.num_blocks(form[0], bits) * 8))
    return (block_n, block_w, warps) if most >= block_w else (block_n, most, max(1, warps * most // block_w))


def takes_tensor_cores(x: torch.Tensor) -> bool:
    """Whether a product with these rows is that of integers_matmul.py."""
    has_cores = capability(x.device) >= TENSOR_CORES or x.device.type == "cpu"
    return GEMV_ROWS < len(x) <= MATMUL_ROWS and x.dtype != torch.float32 and has_cores


def integer_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, K], weight: an IntegerWeight (layers/integers.py) [N, K]."""
    rows, uses_cores = len(x), takes_tensor_cores(x)
    is_half = x.dtype != torch.float32
    if is_half and 1 <= rows <= MAX_ROWS and not uses_cores:
        parts = [integer_gemv(some, weight, bias) for some in x.split(GEMV_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if weight.order is not None:
        x = x[:, weight.order]
    if uses_cores:
        return integer_matmul(x, weight, bias)
    if is_half:
        return linear_in_pieces(x, weight.shape, lambda *some: expand_words(weight, x.dtype, *some), bias)
    return F.linear(x, integers.expand(weight, x.dtype) if weight.order is None else _in_order(weight), bias)


def linear_in_parts(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """None: `integer_linear` is as fast."""
    if not takes_tensor_cores(x):
        return None
    return integer_matmul(x if weight.order is None else x[:, weight.order], weight, bias, in_parts=True)


def _in_order(weight: Any) -> torch.Tensor:
    return integers.expand(weight, torch.float32)[:, weight.order]

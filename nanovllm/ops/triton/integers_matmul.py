"""Products of some rows with a weight of small integers on the tensor cores, and the weight expanded for many rows
(form and place of the bits: `ops/integers.py`; who calls: `integers.py`).

out^T = W x^T: the weight is the left operand, because that one may stay in registers; Hopper's instruction takes the
right one from shared memory only.

A program owns BLOCK_N outputs of BLOCK_M rows. A step reads BLOCK_W words of each output and goes through the places of
a word: place j of BLOCK_W words is a tile [BLOCK_N, BLOCK_W] of numbers, and the inputs that they belong to are a tile
[BLOCK_M, BLOCK_W] of x, in pieces of four neighbours. So a step is eight products (four in 8 bits). Words are copied to
shared memory packed, several steps ahead, and unpacked where the tensor cores want them:

    v = 1 + q / 2^bits (a shift and a LOP3, `integers.py`), w = a v + b in fp32, then x's dtype (half an instruction)

A weight is rounded to the same number that expanding it gives; the work does not grow with the rows up to BLOCK_M. With
groups of 128 a step of 16 words is one group in 4 bits: a and b are one number an output. With smaller groups each word
loads its own.

Few outputs leave multiprocessors idle: 4096 outputs are 64 programs, an H200 has 132 multiprocessors. Then the inputs
are cut into pieces, each program writes its sums in fp32, and a second kernel adds them in the order of the pieces and
rounds once. So the output does not depend on which program ends first, as it would with atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops import integers
from nanovllm.ops.triton.common import (
    INTERPRETED,
    dependent_launch,
    dot,
    next_power_of_2,
    num_multiprocessors,
    start_next,
    wait_for_last,
)

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
LANE_WORDS = tl.constexpr(integers.LANE_WORDS)


@triton.jit
def mantissa(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    """1 + q / 2^BITS of the numbers at one place of the words, fp32. LOP3 masks and sets the exponent at once; the
    compiler makes two instructions of `&` and `|` with constants."""
    SHIFT: tl.constexpr = 23 - BITS - BITS * PLACE
    if SHIFT >= 0:
        moved = words << SHIFT
    else:
        moved = words >> -SHIFT  # what an arithmetic shift brings in from above is masked
    if INTERPRETED:
        bits = (moved & ((2**BITS - 1) << (23 - BITS))) | ONE
    elif BITS == 4:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x780000, 0x3F800000, 0xEA;", "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x7F8000, 0x3F800000, 0xEA;", "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_input(w, BITS: tl.constexpr):
    """The input at place 0 of word w; that at place j is LANE_WORDS * j further."""
    return w // LANE_WORDS * (LANE_WORDS * 32 // BITS) + w % LANE_WORDS


@triton.jit
def factors(scale, offset, BITS: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """a and b of w = a mantissa + b."""
    a = scale.to(tl.float32) * (2**BITS)
    b = -1.5 * a
    if HAS_OFFSET:
        b += offset.to(tl.float32)
    return a, b


@triton.jit
def _load_tile(
    pointers,
    n,
    w,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """Words w of outputs n, and their a and b, which are [BLOCK_N, 1] where a step lies within one group."""
    words_ptr, scale_ptr, offset_ptr = pointers
    NUM_WORDS: tl.constexpr = SIZE * BITS // 32
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    GROUP_WORDS: tl.constexpr = GROUP * BITS // 32
    if NUM_WORDS % BLOCK_W == 0:
        words = tl.load(words_ptr + n[:, None] * NUM_WORDS + w[None, :], eviction_policy="evict_first")
    else:  # x is 0 there
        words = tl.load(words_ptr + n[:, None] * NUM_WORDS + w[None, :], mask=w[None, :] < NUM_WORDS, other=0)
    if GROUP_WORDS % BLOCK_W == 0:
        place = n[:, None] * NUM_GROUPS + (tl.min(w, axis=0) // GROUP_WORDS)
        scale = tl.load(scale_ptr + place)
        offset = tl.load(offset_ptr + place) if HAS_OFFSET else scale
    else:
        place = n[:, None] * NUM_GROUPS + (first_input(w, BITS) // GROUP)[None, :]
        ok = w[None, :] < NUM_WORDS
        scale = tl.load(scale_ptr + place, mask=ok, other=0.0)
        offset = tl.load(offset_ptr + place, mask=ok, other=0.0) if HAS_OFFSET else scale
    a, b = factors(scale, offset, BITS, HAS_OFFSET)
    return words, a, b


@triton.jit(do_not_specialize=["num_rows", "split_steps"])
def integer_matmul_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    x_stride,
    split_steps,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    NUM_WORDS: tl.constexpr = SIZE * BITS // 32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    NUM_STEPS: tl.constexpr = (NUM_WORDS + BLOCK_W - 1) // BLOCK_W
    first = tl.program_id(2) * split_steps
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    rows = tl.where(n < out_size, n, 0).to(tl.int64)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, tl.minimum(first + split_steps, NUM_STEPS)):
        w = step * BLOCK_W + tl.arange(0, BLOCK_W)  # a multiple of 16 begins it: loads are as wide as can be
        pointers = (words_ptr, scale_ptr, offset_ptr)
        words, a, b = _load_tile(pointers, rows, w, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET)
        k = first_input(w, BITS)
        ok = (m < num_rows)[:, None]
        if NUM_WORDS % BLOCK_W != 0:
            ok = ok & (w < NUM_WORDS)[None, :]
        for j in tl.static_range(32 // BITS):
            x = tl.load(x_ptrs + (k + LANE_WORDS * j)[None, :], mask=ok, other=0.0)
            weight = (mantissa(words, j, BITS) * a + b).to(x.dtype)
            total += dot(weight, tl.trans(x))
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
    out_ptr += tl.program_id(2).to(tl.int64) * num_rows * out_size
    offsets = m.to(tl.int64)[:, None] * out_size + n[None, :]
    ok = (m < num_rows)[:, None] & (n < out_size)[None, :]
    tl.store(out_ptr + offsets, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num", "num_splits"])
def add_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num,
    num_splits,
    out_size,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(num_splits):
        total += tl.load(partial_ptr + i, mask=i < num, other=0.0)
        partial_ptr += num
    if HAS_BIAS:
        total += tl.load(bias_ptr + i % out_size, mask=i < num, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < num)


@triton.jit
def expand_kernel(
    words_ptr,
    scale_ptr,
    offset_ptr,
    out_ptr,
    out_size,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = tl.where(n < out_size, n, 0).to(tl.int64)
    pointers = (words_ptr, scale_ptr, offset_ptr)
    words, a, b = _load_tile(pointers, rows, w, SIZE, BITS, GROUP, BLOCK_W, HAS_OFFSET)
    wait_for_last(DEPENDENT)  # the buffer may be in use until here
    k = first_input(w, BITS)
    ok = (n < out_size)[:, None] & (w < SIZE * BITS // 32)[None, :]
    for j in tl.static_range(32 // BITS):
        weight = mantissa(words, j, BITS) * a + b
        tl.store(
            out_ptr + rows[:, None] * SIZE + (k + LANE_WORDS * j)[None, :], weight.to(out_ptr.dtype.element_ty), mask=ok
        )


def form_of(weight: Any) -> dict[str, Any]:
    """What every kernel is told about the weight."""
    facts = {"SIZE": weight.shape[1], "BITS": weight.bits, "GROUP": weight.group}
    return {**facts, "HAS_OFFSET": weight.offset is not None}


def tensors_of(weight: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.words, weight.scale, weight.scale if weight.offset is None else weight.offset


def expand_words(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """[N, K], columns in the order of the words (`IntegerWeight.order`)."""
    out_size, size = weight.shape
    out = torch.empty((out_size, size), dtype=dtype, device=weight.words.device)
    block_n, block_w, dependent = 8, 64, dependent_launch(out.device)
    grid = (triton.cdiv(out_size, block_n), triton.cdiv(weight.words.shape[1], block_w))
    options = {"BLOCK_N": block_n, "BLOCK_W": block_w, "DEPENDENT": dependent, "launch_pdl": dependent}
    expand_kernel[grid](*tensors_of(weight), out, out_size, **form_of(weight), **options, num_warps=4)
    return out


def integer_matmul(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, splits: int | None = None
) -> torch.Tensor:
    """x [rows, K], weight: an IntegerWeight (layers/integers.py) [N, K]. `splits` overrides the choice."""
    (rows, size), out_size = x.shape, weight.shape[0]
    assert x.stride(1) == 1
    block_m, block_n, block_w = choose_tile(rows)
    steps = triton.cdiv(size * weight.bits // 32, block_w)
    tiles = triton.cdiv(out_size, block_n) * triton.cdiv(rows, block_m)
    splits = min(steps, splits or choose_splits(tiles, steps, num_multiprocessors(x.device)))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)  # no empty ones
    dependent = dependent_launch(x.device)
    launch = {"DEPENDENT": dependent, "launch_pdl": dependent}
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
    partial = out if splits == 1 else torch.empty((splits, rows, out_size), dtype=torch.float32, device=x.device)
    pointer = x if bias is None else bias
    integer_matmul_kernel[(triton.cdiv(out_size, block_n), triton.cdiv(rows, block_m), splits)](
        x,
        *tensors_of(weight),
        pointer,
        partial,
        rows,
        out_size,
        x.stride(0),
        per_split,
        **form_of(weight),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        HAS_BIAS=bias is not None and splits == 1,
        num_warps=choose_warps(block_m),
        num_stages=choose_stages(block_m),
        **launch,
    )
    if splits > 1:
        tile, num = 512, rows * out_size
        grid = (triton.cdiv(num, tile),)
        add_splits_kernel[grid](
            partial, pointer, out, num, splits, out_size, TILE=tile, HAS_BIAS=bias is not None, **launch, num_warps=4
        )
    return out


def choose_tile(rows: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_W). 16 words an output are 64 bytes, whole sectors of memory, and in 4 bits a group of
    128. Every program reads all rows of x: at 64 rows and 64 outputs a program that is four times the bytes of the
    weight, from the L2 cache, so outputs are twice as many where rows are."""
    block_m = min(128, max(16, next_power_of_2(rows)))
    return block_m, 64 if block_m == 16 else 128, 16


def choose_warps(block_m: int) -> int:
    """Four for each 64 outputs, which is what Hopper's instruction takes at once."""
    return 4 if block_m == 16 else 8


def choose_stages(block_m: int) -> int:
    """Steps in flight. A step is 64 bytes an output and 256 bytes a row: 8 KB at 16 rows and 64 outputs, 40 KB at 128
    and 128. As many as leave room for two programs or more in the 227 KB of a multiprocessor (H200), and for one in 99
    KB (RTX 4090)."""
    return {16: 5, 32: 4, 64: 3}.get(block_m, 2)


def choose_splits(tiles: int, steps: int, num_multiprocessors: int) -> int:
    """Two programs for each multiprocessor where there are fewer tiles, but at least 8 steps (1,024 inputs in 4 bits) a
    program: a split costs 4 bytes an output to write and to read, and the second launch."""
    return max(1, min(2 * num_multiprocessors // tiles, steps // 8))

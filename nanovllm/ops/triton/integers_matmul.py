"""Products of some rows with a weight of small integers on the tensor cores, and the weight expanded for many rows
(form and place of the bits: `ops/integers.py`; who calls: `integers.py`).

out^T = W x^T: the weight is the left operand, because that one may stay in registers; Hopper's instruction takes the
right one from shared memory only.

A program owns BLOCK_N outputs of BLOCK_M rows. A step reads a block of words of each output, copied to shared memory
packed, several steps ahead, and unpacks it where the tensor cores want it. A register there holds two neighbouring
numbers of 16 bits, and so does every word when it is shifted to a place and masked:

    4 bits   (word & 0x000f000f) ^ 0x43084308 are two bfloat16 128 + (q + 8): q + 8 lies in the lowest bits of the
             mantissa of 128. Less 136, exactly; then times the scale, plus the offset
    8 bits   the lower seven bits likewise, and the sign decides what is subtracted: 128 or 256

So two weights take a shift, a LOP3 and two HFMA2 (one LOP3 more in 8 bits): 1.9 instructions a weight. fp32 arithmetic
and one weight at a time took 4.5. Scale and offset are rounded to x's dtype first, so a weight is within a rounding or
two of what expanding it gives. As the numbers come out in the order of the inputs, a step is one product of 128 inputs
(64), whatever the groups are. The work does not grow with the rows up to BLOCK_M.

Few outputs leave multiprocessors idle: 4096 outputs are 64 programs, an H200 has 132 multiprocessors. Then the inputs
are cut into pieces, and each program writes its sums in fp32 (`splits.py`).

Hopper's product is asynchronous, and reads its left operand from registers while the program goes on. Triton 3.6 lets
seven of the eight products of a step run on into the next one, which overwrites these registers: of 400 runs with 8
warps on an H200 60 gave another result. `splits.py:hold` makes the sums an input of something else, which waits for all
of them.

Measured on an H200, int4 in groups of 128, us (16 bits by cuBLAS):

    rows          6144 x 4096      4096 x 4096      24576 x 4096     4096 x 12288
    64            13.1 (17.5)      10.2 (12.2)       35.2 (52.2)      20.3 (33.1)
    128           19.9             14.5              59.7             30.4
    256           32.4 (24)        21.8 (18)        102   (80)        50.4 (49)

With groups of 32: 64 rows 14.7, 10.8, 39.6, 22.7; 256 rows 36.5, 24.0, 111, 58.5.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.ops import integers
from nanovllm.ops.triton.common import (
    INTERPRETED,
    dependent_launch,
    dot,
    has_copy_engine,
    next_power_of_2,
    num_multiprocessors,
    start_next,
    wait_for_last,
    with_room,
)
from nanovllm.ops.triton.splits import add_splits, choose_splits, empty_parts, hold

COLUMNS = tl.constexpr(integers.COLUMNS)
DESC_ROWS = 64  # x in tiles of so many rows is copied by the bulk copy engine


def unpack_form(weight: Any, dtype: torch.dtype) -> tuple[int, int, int, str, str]:
    """FORM of the kernels: (inputs, bits, groups of a block, PTX that unpacks, its constraints). `weight`: an
    IntegerWeight or an IntegerStack."""
    groups = integers.block_length(weight.bits) // weight.group
    return weight.shape[-1], weight.bits, groups, *unpack_code(weight.bits, groups, dtype)


def unpack_code(bits: int, groups: int, dtype: torch.dtype) -> tuple[str, str]:
    """PTX that makes two numbers of each place of words 2p and 2p + 1, [places] registers, of these two words, then
    `groups` scales and `groups` offsets, each twice in a register (and each register twice, for the two words)."""
    places = integers.num_places(bits)
    name, one = ("bf16x2", "0x3f803f80") if dtype == torch.bfloat16 else ("f16x2", "0x3c003c00")
    large = 0x43004300 if dtype == torch.bfloat16 else 0x64006400  # 128 and 1024: the lowest bit of the mantissa is 1
    lines = ["{ .reg .b32 t, u, one;", f"mov.b32 one, {one};"]
    for j, shift in enumerate(integers.place_shifts(bits)):
        word, group = places + j * 2 // places, j * groups // places
        scale, offset = places + 2 + 2 * group, places + 2 + 2 * (groups + group)
        lines.append(f"shr.u32 t, ${word}, {shift};" if shift else f"mov.b32 t, ${word};")
        if bits == 4:
            lines.append(f"mov.b32 u, {(large | 0x80008000) + 0x00080008:#x};")  # less 136
            lines.append(f"lop3.b32 t, t, 0x000f000f, {large + 0x00080008:#x}, 0x6a;")  # (t & mask) ^ number
        else:
            lines.append(f"lop3.b32 u, t, 0x00800080, {large | 0x80008000:#x}, 0xea;")  # (t & mask) | number
            lines.append(f"lop3.b32 t, t, 0x007f007f, {large:#x}, 0xea;")
        lines.append(f"fma.rn.{name} t, t, one, u;")
        lines.append(f"fma.rn.{name} ${j}, t, ${scale}, ${offset};")
    constraints = ["=r"] * places + ["r"] * (2 + 4 * groups)
    return "\n".join([*lines, "}"]), ",".join(constraints)


@triton.jit
def halves(factors):
    """Scale and offset of `factors`, float16."""
    scale = (factors & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return scale, (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _twice(half, FLOAT: tl.constexpr, BLOCK_N: tl.constexpr):
    """float16 [BLOCK_N] -> two FLOAT in each int32 of [BLOCK_N, COLUMNS]."""
    bits = half.to(FLOAT).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.broadcast_to((bits | (bits << 16))[:, None], (BLOCK_N, COLUMNS))


@triton.jit
def _plain_places(words, PLACES: tl.constexpr, BITS: tl.constexpr):
    """What the PTX makes, before scale and offset, in a tuple: for the interpreter, which has no PTX."""
    first, second = tl.split(tl.reshape(words, (words.shape[0], COLUMNS // 2, 2)))
    found = ()
    for j in tl.static_range(PLACES):
        # place_shifts of ops/integers.py
        shift: tl.constexpr = (j % 2) * 8 + (j % 4) // 2 * 4 if BITS == 4 else (j % 2) * 8
        word = first if 2 * j < PLACES else second
        left = (word << (32 - BITS - shift)) >> (32 - BITS)
        right = (word << (16 - BITS - shift)) >> (32 - BITS)
        found = found + (tl.reshape(tl.join(left, right), words.shape),)
    return found


@triton.jit
def unpack(words, factors, FLOAT: tl.constexpr, FORM: tl.constexpr):
    """Words [BLOCK_N, 16] of a block and the factors of its groups, a tuple of [BLOCK_N] -> the weights of FLOAT,
    [BLOCK_N, inputs of the block]."""
    N: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = FORM[2]
    PLACES: tl.constexpr = 32 // FORM[1]
    if INTERPRETED:
        found = ()
        numbers = _plain_places(words, PLACES, FORM[1])
        for j in tl.static_range(PLACES):
            scale, offset = halves(factors[j * GROUPS // PLACES])
            scale, offset = scale.to(FLOAT).to(tl.float32), offset.to(FLOAT).to(tl.float32)
            found = found + ((numbers[j].to(tl.float32) * scale[:, None] + offset[:, None]).to(FLOAT),)
    else:
        scales, offsets = (), ()
        for g in tl.static_range(GROUPS):
            scale, offset = halves(factors[g])
            scales = scales + (_twice(scale, FLOAT, N),)
            offsets = offsets + (_twice(offset, FLOAT, N),)
        given = (words,) + scales + offsets
        kind = tl.zeros([1], FLOAT).dtype  # FLOAT itself is a constexpr, which a tuple may not hold
        found = tl.inline_asm_elementwise(FORM[3], FORM[4], given, dtype=(kind,) * PLACES, is_pure=True, pack=2)
    if PLACES == 8:
        even = tl.join(tl.join(found[0], found[4]), tl.join(found[2], found[6]))
        odd = tl.join(tl.join(found[1], found[5]), tl.join(found[3], found[7]))
        whole = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    else:
        whole = tl.permute(tl.join(tl.join(found[0], found[2]), tl.join(found[1], found[3])), (0, 2, 3, 1))
    return tl.reshape(whole, (N, COLUMNS * PLACES))


@triton.jit
def load_factors(factors_ptr, n, block, out_size, GROUPS: tl.constexpr):
    found = ()
    for g in tl.static_range(GROUPS):
        found = found + (tl.load(factors_ptr + (block * GROUPS + g) * out_size + n),)
    return found


@triton.jit(do_not_specialize=["num_rows", "split_blocks"])
def integer_matmul_kernel(
    x_ptr,
    words_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    x_stride,
    split_blocks,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_DESC: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    SIZE: tl.constexpr = FORM[0]
    LENGTH: tl.constexpr = 512 // FORM[1]  # inputs of a block of 16 words
    NUM_BLOCKS: tl.constexpr = (SIZE + LENGTH - 1) // LENGTH
    # Programs with the same weights and other rows run beside each other: the second finds them in the cache.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * split_blocks
    row = tl.where(n < out_size, n, 0)  # outputs past the end read row 0: cheaper than a mask on every weight
    word_ptrs = words_ptr + row.to(tl.int64)[:, None] * (NUM_BLOCKS * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
    k = tl.arange(0, LENGTH)
    # Rows past the end read the first ones: they are not stored, and a mask would cost two instructions a load. Not the
    # last one: so many reads of one line made a product of 96 rows take twice as long as one of 128.
    if not USE_DESC:
        x_ptrs = x_ptr + (m % num_rows).to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, tl.minimum(first + split_blocks, NUM_BLOCKS)):
        words = tl.load(word_ptrs + block * COLUMNS)
        factors = load_factors(factors_ptr, row, block, out_size, FORM[2])
        if USE_DESC:
            x = x_ptr.load([tl.program_id(0) * BLOCK_M, block * LENGTH])
        elif SIZE % LENGTH == 0:
            x = tl.load(x_ptrs + block * LENGTH)
        else:
            x = tl.load(x_ptrs + block * LENGTH, mask=(k < SIZE - block * LENGTH)[None, :], other=0.0)
        weight = unpack(words, factors, x.dtype, FORM)
        total = hold(total + dot(weight, tl.trans(x)))
    if HAS_BIAS:  # of the first piece
        has_bias = (n < out_size) & (first == 0)
        total += tl.load(bias_ptr + n, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    out_ptr += tl.program_id(2).to(tl.int64) * num_rows * out_size
    offsets = m.to(tl.int64)[:, None] * out_size + n[None, :]
    ok = (m < num_rows)[:, None] & (n < out_size)[None, :]
    tl.store(out_ptr + offsets, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["first"])
def expand_kernel(
    words_ptr,
    factors_ptr,
    out_ptr,
    first,
    num,
    out_size,
    FORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    SIZE: tl.constexpr = FORM[0]
    LENGTH: tl.constexpr = 512 // FORM[1]
    NUM_BLOCKS: tl.constexpr = (SIZE + LENGTH - 1) // LENGTH
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, block = first + tl.where(n < num, n, 0), tl.program_id(1)
    word_ptrs = words_ptr + row.to(tl.int64)[:, None] * (NUM_BLOCKS * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
    words = tl.load(word_ptrs + block * COLUMNS)
    factors = load_factors(factors_ptr, row, block, out_size, FORM[2])
    wait_for_last(DEPENDENT)  # the buffer may be in use until here
    weight = unpack(words, factors, out_ptr.dtype.element_ty, FORM)
    k = block * LENGTH + tl.arange(0, LENGTH)
    ok = (n < num)[:, None] & (k < SIZE)[None, :]
    tl.store(out_ptr + n.to(tl.int64)[:, None] * SIZE + k[None, :], weight, mask=ok)


def expand_words(weight: Any, dtype: torch.dtype, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Outputs first .. last (None: all), [outputs, K], columns in the order of the words (`IntegerWeight.order`).
    dtype: 16 bits."""
    out_size, size = weight.shape
    num = (out_size if last is None else last) - first
    out = torch.empty((num, size), dtype=dtype, device=weight.words.device)
    dependent = dependent_launch(out.device)
    options = {"FORM": unpack_form(weight, dtype), "BLOCK_N": 64, "DEPENDENT": dependent, "launch_pdl": dependent}
    grid = (triton.cdiv(num, 64), integers.num_blocks(size, weight.bits))
    expand_kernel[grid](weight.words, weight.factors, out, first, num, out_size, **options, num_warps=4)
    return out


def integer_matmul(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    in_parts: bool = False,
    tile: tuple[int, int, int, int] | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """x [rows, K] of 16 bits, weight: an IntegerWeight (layers/integers.py) [N, K] -> [rows, N], or with `in_parts`, if
    there are splits, [splits, rows, N] in fp32. `tile` = (BLOCK_M, BLOCK_N, warps, stages) and `splits` override the
    choice."""
    (rows, size), out_size = x.shape, weight.shape[0]
    assert x.stride(1) == 1
    block_m, block_n, warps, stages = tile or choose_tile(rows, out_size, size)
    blocks = integers.num_blocks(size, weight.bits)
    tiles = triton.cdiv(out_size, block_n) * triton.cdiv(rows, block_m)
    splits = min(blocks, splits or choose_splits(tiles, blocks, num_multiprocessors(x.device)))
    per_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, per_split)  # no empty ones
    dependent, out = dependent_launch(x.device), empty_parts(splits, out_size, x)
    use_desc = has_copy_engine(x.device) and block_m >= DESC_ROWS and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    box = [block_m, integers.block_length(weight.bits)]
    integer_matmul_kernel[(triton.cdiv(rows, block_m), triton.cdiv(out_size, block_n), splits)](
        TensorDescriptor.from_tensor(with_room(x, block_m), box) if use_desc else x,
        weight.words,
        weight.factors,
        x if bias is None else bias,
        out,
        rows,
        out_size,
        x.stride(0),
        per_split,
        FORM=unpack_form(weight, x.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HAS_BIAS=bias is not None,
        USE_DESC=use_desc,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=warps,
        num_stages=stages,
    )
    return out if splits == 1 or in_parts else add_splits(out, x)


def choose_tile(rows: int, out_size: int, size: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages), the best of a dozen for each size of the table above. Four warps for each 64
    outputs are what Hopper's instruction takes at once. Tiles of 8 rows, with an instruction that warps execute alone,
    were fast by themselves (8 rows: 9.6, 7.3, 23.3, 14.3 us) and slow in a model: a step of Qwen3-8B with 8 rows and
    384 tokens of context took 4.26 ms, with tiles of 16 rows 3.20."""
    block_m = min(128, max(16, next_power_of_2(rows)))
    if block_m == 16 or (block_m == 32 and out_size > 4096):
        return block_m, 128, 4, 4 if block_m == 16 else 3
    if block_m == 64 and size > 8192:
        return 64, 128, 4, 3
    if block_m <= 64:
        return block_m, 64, 4, 4 if block_m == 32 or out_size <= 4096 else 3
    if 128 < rows <= 192:  # three times 64, not twice 128
        return 64, 64, 4, 3
    return 128, 64, 4, 2 if rows <= 128 and out_size >= 16384 else 3

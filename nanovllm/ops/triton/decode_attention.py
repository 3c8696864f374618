"""Paged attention for one query a sequence: flash attention split over the keys (twin: `ops/attention.py`).

With one query there is nothing to reuse: every key and value is read once, for a handful of multiplications, so the
kernel's only job is to keep the memory busy. Four decisions follow.

Pack the heads. The GROUP query heads that share a kv head are the rows of one tile, padded to 16 because a tensor-core
product has at least 16 rows. Keys are read once for all of them; the padding rows cost nothing, since memory is
the limit, not arithmetic.

Split the keys. Batch * num_kv_heads programs are too few to fill a card at small batch, so a sequence's keys are cut
into `num_splits` ranges, each owned by one program, which runs the online softmax (derived in `prefill_attention.py`)
over its range and writes acc / l and its log-sum-exp L = m + log(l). Softmax over a union is a weighted mean of the
softmaxes over its parts, since acc_i / l_i is weighted by l_i exp(m_i) = exp(L_i):

    out = sum_i w_i (acc_i / l_i),   w_i = exp(L_i - max L) / sum_j exp(L_j - max L).

A second kernel merges, one program a (row, head). Merging in the program that happens to finish last (a counter, an
atomic addition) did not pay: 18.7 against 18.1 us at 8 rows x 1024 keys; at 1 x 1024 8.0 against 8.5, which tiles of
64 keys instead of 32 bring too (8.1).

Fix the grid. A captured graph replays one launch for every context length, so the grid depends on batch and num_splits
only; lengths are read on the device. A split is at least MIN_KEYS long, so short contexts use fewer splits and the rest
return at once. A row with context 0 is graph padding: all its splits are empty and its output is zero.

Keep the memory busy. A program computes on one tile of keys while the next is copied to shared memory, and other
programs of the multiprocessor hide the rest of the latency. Page ids are carried round the loop, loaded one tile ahead:
then the pipeliner sees keys with known addresses, instead of spending a stage on the chain "page id, then keys".

Longest first. Programs start in the order of the rows, and the runner sorts these by their length, so that the card
ends on small pieces of work (H200, a whole step of Qwen3-0.6B with the lengths of `main`, us, as they come / sorted:
128 rows 5,167 / 4,746, 192 rows 5,826 / 5,563, 256 rows 6,370 / 6,159).

Tried, and not better. Every program takes an equal share of all tiles of all rows, which may end in the middle of a
row: 2 to 9 % faster than unsorted rows where lengths vary, which is what sorting gains too, and 2 to 5 % slower where
they do not. Halves of a batch on two streams, so that one's products run beside the other's attention: 1 % faster at
128 rows, 2 to 12 % slower elsewhere.

Measured on an H200 (bf16, 16/8 heads x 128, blocks of 64 slots; share of a plain read's 4.46 TB/s):

    keys a tile, warps, stages      256 rows x 840 keys     64 x 1024, 4 splits
    64, 4, 2 (the default)            209.7 us  94.2 %         74.4 us  80.9 % (no split: 66.2, 90.9 %)
    64, 4, 3                          208.0 us  95.0 %         75.5 us  79.7 %
    32, 2, 4                          208.6 us  94.7 %         75.9 us  79.3 %
    32, 2, 3                      209 to 233 us                75.0 us  80.3 %
    32, 1, 3                          216.4 us  91.3 %         80.4 us  74.9 %
    16, 1, 3                          213.6 us  92.4 %         73.8 us  81.6 %
    16, 1, 4                          223.4 us  88.4 %         78.5 us  76.7 %
    32, 2, 2, page ids not ahead      210.8 us  93.7 %

A limit of 128 registers a thread changed nothing. Nor did blocks stored head by head ([heads, block_size, head_dim]):
strides are arguments, so such a cache works, as a transposed view, but it is not faster.

One compilation serves every batch and context: what varies from step to step (num_splits, table width) is an argument
that Triton does not specialise on. A compilation in the middle of a run costs half a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import (
    LOG2E,
    LOWEST,
    capability,
    dependent_launch,
    dot,
    next_power_of_2,
    num_multiprocessors,
    prefetch,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.e4m3 import beside_e4m3, form_of, from_e4m3
from nanovllm.ops.triton.prefill_attention import check_paged, key_offsets, page_ids, softmax_step

MIN_KEYS = 64  # a split shorter than this costs more to merge than it saves
MERGE_TILE = 16  # parts that the merge adds at a time
PER_SM = {2: 2, 4: 4, 2**31: 16}  # rows -> programs for each multiprocessor, see choose_launch


@triton.jit
def split_range(context_len, num_splits, WINDOW: tl.constexpr, STEP: tl.constexpr):
    """(first key of the sequence that counts, keys per split), both multiples of STEP; splits may be empty."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0) // STEP * STEP
    per_split = tl.cdiv(tl.cdiv(context_len - begin, num_splits), STEP) * STEP
    return begin, tl.maximum(per_split, STEP)


@triton.jit(
    do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=["context_lens_ptr", "tables_ptr"]
)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, scales_ptr, out_ptr, parts_ptr, logsums_ptr, context_lens_ptr, tables_ptr,
    scale, q_stride, block_stride, slot_stride, head_stride, table_stride, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
    FORM: tl.constexpr, PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    head = tl.program_id(0) % NUM_KV_HEADS
    row = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + row)
    begin, per_split = split_range(context_len, num_splits, WINDOW, STEP)
    lo = begin + split * per_split
    hi = tl.minimum(lo + per_split, context_len)
    if (lo >= hi) & (split > 0):  # split 0 of an empty row stays, to write its zeros; and to wait
        return
    table_ptr = tables_ptr + row * table_stride
    pages = page_ids(table_ptr, lo, hi, BLOCK_SIZE, BLOCK_N)
    if PREFETCH:
        LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, (D + LINE - 1) // LINE)[None, :] * LINE, HEAD_DIM - 1)
        first = key_offsets(pages, lo, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N) + line + head * head_stride
        prefetch(k_ptr + first)
        prefetch(v_ptr + first)
    wait_for_last(DEPENDENT)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    inside = (g[:, None] < GROUP) & (d < HEAD_DIM)
    q = tl.load(q_ptr + row * q_stride + (head * GROUP + g[:, None]) * HEAD_DIM + d, mask=inside, other=0.0)
    if FORM:  # all keys have one scale, and so all scores; all values too
        scale *= tl.load(scales_ptr)
        q = beside_e4m3(q)
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        offsets = key_offsets(pages, start, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N) + d
        pages = page_ids(table_ptr, start + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)
        n = start + tl.arange(0, BLOCK_N)
        visible = n < hi
        if WINDOW > 0:
            visible &= n >= context_len - WINDOW
        exists = visible[:, None] & (d < HEAD_DIM)
        k = tl.load(k_ptr + offsets, mask=exists, other=0)
        if FORM:
            k = from_e4m3(k, q.dtype, FORM)
        scores = tl.where(visible[None, :], dot(q, tl.trans(k)), float("-inf"))
        v = tl.load(v_ptr + offsets, mask=exists, other=0)
        if FORM:
            v = from_e4m3(v, q.dtype, FORM)
        acc, peak, total = softmax_step(acc, peak, total, scores, v, scale)

    result = acc / tl.maximum(total, 1e-30)[:, None]
    if FORM:
        result *= tl.load(scales_ptr + 1)
    row_head = (row * NUM_KV_HEADS + head) * GROUP + g
    if num_splits == 1:
        tl.store(out_ptr + row_head[:, None] * HEAD_DIM + d, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = row_head * num_splits + split
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + d, result, mask=inside)
        tl.store(logsums_ptr + part, peak + tl.log2(tl.maximum(total, 1e-30)), mask=g < GROUP)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["context_lens_ptr"])
def merge_kernel(
    parts_ptr,
    logsums_ptr,
    out_ptr,
    context_lens_ptr,
    num_splits,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row_head = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row_head // NUM_Q_HEADS)
    wait_for_last(DEPENDENT)
    out = merge_parts(parts_ptr, logsums_ptr, row_head, context_len, num_splits, HEAD_DIM, D, STEP, WINDOW, TILE)
    d = tl.arange(0, D)
    tl.store(out_ptr + row_head * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def merge_parts(
    parts_ptr,
    logsums_ptr,
    row_head,
    context_len,
    num_splits,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weighted mean of one (row, q head)'s parts, TILE at a time, with the recurrence of the online softmax: [D]."""
    begin, per_split = split_range(context_len, num_splits, WINDOW, STEP)
    num_used = tl.maximum(tl.cdiv(context_len - begin, per_split), 1)
    d = tl.arange(0, D)
    peak = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for first in tl.range(0, num_used, TILE):
        s = first + tl.arange(0, TILE)
        used = s < num_used
        logsum = tl.load(logsums_ptr + row_head * num_splits + s, mask=used, other=LOWEST)
        offsets = (row_head * num_splits + s)[:, None] * HEAD_DIM + d[None, :]
        part = tl.load(parts_ptr + offsets, mask=used[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        new_peak = tl.maximum(peak, tl.max(logsum, axis=0))
        weight = tl.where(used, tl.exp2(logsum - new_peak), 0.0)
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        peak = new_peak
    return acc / tl.maximum(total, 1e-30)


@dataclass(frozen=True)
class DecodeLaunch:
    """What is fixed when a graph is captured. Every field but num_splits is a compilation of its own."""

    num_splits: int
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    prefetch: bool = False  # the first keys are asked for before the kernel before has ended


def choose_launch(batch: int, num_kv_heads: int, max_context_len: int, num_sms: int) -> DecodeLaunch:
    """No split where the programs fill the card at least three and a half times over, else so many that `PER_SM`
    programs a multiprocessor are reached, none under MIN_KEYS of the longest context.

    Splits let a long row share its work, but their parts are written, read and merged by a second kernel. Measured on
    an H200 as whole steps of Qwen3-0.6B, us, of rows with 768 to 800 tokens / with lengths as they are in the workload
    `main`, longest first (b: tiles of 32 keys, 2 warps, 3 stages; else the default):

        rows    1 split        2 splits       4              8              16             32 or 64
        1                                                                   622 / 671      616 / 648    646 / 679
        2                                                                   726 / 824      741 / 848    762 / 860
        4                                                    955 / 1,063    969 / 1,011    971 / 1,048  974 / 1,065
        16                                    1,276 / 1,546  1,262 / 1,518  1,284 / 1,527
        32      1,636 / 2,531b 1,687 / 2,179  1,678 / 2,160  1,663 / 2,147
        48      2,043 / 3,000b 2,186 / 2,832  2,170 / 2,808
        64      2,369 / 3,429  2,545 / 3,383
        72      3,157 / 3,862  2,904 / 3,897  b: 2,910 / 4,155
        96      3,352 / 4,382  3,343 / 4,438  b: 3,202 / 4,562
        128     3,886 / 4,917  4,043 / 5,106  b: 4,267 / 5,128
        160     4,887 / 5,630  4,910 / 5,699  b: 5,268 / 5,596
        256     6,837 / 5,765  7,091 / 6,090  b: 7,412 / 5,778

    Splits are a power of two, so that the graphs of neighbouring batch sizes add in the same order. One or two rows ask
    for their first keys before they wait (616 instead of 621 us for one, 726 instead of 732 for two); with more rows
    that is slower.
    """
    programs = batch * num_kv_heads
    if 2 * programs >= 7 * num_sms:
        return DecodeLaunch(1)
    return DecodeLaunch(_choose_splits(batch, programs, max_context_len, num_sms), prefetch=batch <= 2)


def _choose_splits(batch: int, programs: int, max_context_len: int, num_sms: int) -> int:
    per_sm = next(number for rows, number in PER_SM.items() if batch <= rows)
    return previous_power_of_2(max(1, min(per_sm * num_sms // programs, max_context_len // MIN_KEYS)))


def previous_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def fit_launch(launch: DecodeLaunch, head_dim: int, element_size: int, arch: tuple[int, int]) -> DecodeLaunch:
    """The same launch with tiles that fit shared memory: key and value tiles, num_stages of them in flight."""
    d = next_power_of_2(head_dim)
    if element_size == 4 or arch < (8, 0):  # no tensor cores: the product's operands lie in registers
        return replace(launch, block_n=16, num_warps=4, num_stages=1)
    limit = 160 * 1024 if arch in ((8, 0), (9, 0), (10, 0)) else 80 * 1024
    block_n = launch.block_n
    while 2 * block_n * d * element_size * launch.num_stages > limit and block_n > 16:
        block_n //= 2
    return replace(launch, block_n=block_n)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of the splits, fp32. Inside a captured graph `allocate` costs nothing: the graph's pool hands out
    the same memory layer after layer."""

    parts: torch.Tensor
    logsums: torch.Tensor

    @staticmethod
    def allocate(batch: int, num_q_heads: int, launch: DecodeLaunch, head_dim: int, device) -> DecodeWorkspace:
        rows = batch * num_q_heads * launch.num_splits if launch.num_splits > 1 else 0
        parts = torch.empty((rows, head_dim), dtype=torch.float32, device=device)
        logsums = torch.empty(rows, dtype=torch.float32, device=device)
        return DecodeWorkspace(parts, logsums)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    launch: DecodeLaunch,
    window: int | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [batch, num_q_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim] with any
    strides but the last, int32 context_lens [batch] (0 = padding) and block_tables [batch, max_blocks]. `launch` from
    choose_launch, then fit_launch. The workspace may be larger than needed and shared by all layers of a graph, whose
    kernels run one after another. `scales`: of caches in 8-bit floats (`ops/kv_cache.py`).
    """
    batch, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_paged(q, k_cache, v_cache, out)
    splits = launch.num_splits
    workspace = workspace or DecodeWorkspace.allocate(batch, num_q_heads, launch, head_dim, q.device)
    shared = {"HEAD_DIM": head_dim, "D": next_power_of_2(head_dim), "WINDOW": window or 0}
    shared["STEP"] = max(MIN_KEYS, launch.block_n)
    shared["DEPENDENT"] = shared["launch_pdl"] = dependent_launch(q.device)
    decode_kernel[(batch * num_kv_heads, splits)](
        q, k_cache, v_cache, scales, out, workspace.parts, workspace.logsums, context_lens, block_tables,
        scale * LOG2E, q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        splits, NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=max(16, next_power_of_2(group)), BLOCK_SIZE=block_size,
        BLOCK_N=launch.block_n, FORM=form_of(k_cache, scales), PREFETCH=launch.prefetch, **shared,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if splits > 1:
        parts = (workspace.parts, workspace.logsums)
        merge_kernel[(batch * num_q_heads,)](
            *parts, out, context_lens, splits, NUM_Q_HEADS=num_q_heads, **shared, TILE=MERGE_TILE, num_warps=2
        )
    return out


def launch_for(q: torch.Tensor, num_kv_heads: int, max_context_len: int, is_e4m3: bool = False) -> DecodeLaunch:
    """choose_launch and fit_launch for a query tensor [batch, num_q_heads, head_dim] on its device.

    With a cache of 8-bit floats a program computes more than it reads: small tiles are best, but for few rows, and
    splits at any batch that they bring to 16 programs a multiprocessor (H200, steps of Qwen3-8B in ms, even / uneven:
    64 rows 4.89 / 5.76 with 4 splits, 5.07 / 6.95 without; 128 rows 6.41 / 7.31 with 2, 6.56 / 7.44 without; 256 rows
    10.3 with 2, 9.8 without).
    """
    (batch, _, head_dim), num_sms = q.shape, num_multiprocessors(q.device)
    launch = choose_launch(batch, num_kv_heads, max_context_len, num_sms)
    if is_e4m3 and batch > 4:
        splits = _choose_splits(batch, batch * num_kv_heads, max_context_len, num_sms)
        launch = DecodeLaunch(splits, block_n=32, num_warps=2, num_stages=3)
    return fit_launch(launch, head_dim, q.element_size(), capability(q.device))

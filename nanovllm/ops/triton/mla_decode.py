"""Latent attention for one query a sequence, absorbed, split over the keys (twin: `latent_decode` of `ops/mla.py`).

Key [c | k_pe] and value c of a token are the same 576 numbers for all heads, so a tile of them is read from memory
once, kept in shared memory, and used three times: as keys (512 + 64, two products) and as values (512), by all heads of
a group. The heads are the rows of the tiles, at least 16 as a tensor-core product needs; a model with more than HEADS
of them reads the latents once for each group. The rest is as in `decode_attention.py`, where the reasons are: splits
with a merge in a fixed order, a grid that depends on no length, page ids one tile ahead, rows without context (graph
padding) that give zeros.

The accumulator, [16, 512] in fp32, takes 64 registers of each of 128 threads, a tile of 32 keys 36 KB of shared memory,
the queries 18. Two tiles are on their way while a third is used.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from nanovllm.ops.mla import per_head
from nanovllm.ops.triton.common import (
    LOG2E,
    LOWEST,
    capability,
    dependent_launch,
    dot,
    next_power_of_2,
    num_multiprocessors,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.decode_attention import (
    MIN_KEYS,
    DecodeLaunch,
    DecodeWorkspace,
    merge_kernel,
    previous_power_of_2,
    split_range,
)
from nanovllm.ops.triton.mla_absorb import FEW_ROWS, project
from nanovllm.ops.triton.prefill_attention import key_offsets, page_ids, softmax_step

HEADS = 16  # of one program
MERGE_TILE = 8  # parts that the merge adds at a time: [8, 512] in fp32
MOST_SPLITS = 32  # more take longer to merge than they save


@triton.jit(
    do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=["context_lens_ptr", "tables_ptr"]
)
def latent_decode_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    out_ptr,
    parts_ptr,
    logsums_ptr,
    context_lens_ptr,
    tables_ptr,
    scale,
    q_stride,
    q_head_stride,
    pe_stride,
    pe_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    C: tl.constexpr,
    ROPE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    num_groups: tl.constexpr = (NUM_HEADS + ROWS - 1) // ROWS
    row = (tl.program_id(0) // num_groups).to(tl.int64)
    head = tl.program_id(0) % num_groups * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + row)
    _, per_split = split_range(context_len, num_splits, 0, STEP)
    lo = split * per_split
    hi = tl.minimum(lo + per_split, context_len)
    table_ptr = tables_ptr + row * table_stride
    pages = page_ids(table_ptr, lo, hi, BLOCK_SIZE, BLOCK_N)
    wait_for_last(DEPENDENT)
    if (lo >= hi) & (split > 0):  # split 0 of an empty row stays, to write its zeros
        return

    c = tl.arange(0, C)[None, :]
    r = tl.arange(0, R)[None, :]
    real = head[:, None] < NUM_HEADS
    q_ptr += row * q_stride
    q_pe_ptr += row * pe_stride
    q = tl.load(q_ptr + head[:, None] * q_head_stride + c, mask=real & (c < RANK), other=0.0)
    q_pe = tl.load(q_pe_ptr + head[:, None] * pe_head_stride + r, mask=real & (r < ROPE), other=0.0)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, C], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        offsets = key_offsets(pages, start, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N)
        pages = page_ids(table_ptr, start + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)
        visible = start + tl.arange(0, BLOCK_N) < hi
        latent = tl.load(cache_ptr + offsets + c, mask=visible[:, None] & (c < RANK), other=0.0)
        k_pe = tl.load(cache_ptr + RANK + offsets + r, mask=visible[:, None] & (r < ROPE), other=0.0)
        scores = dot(q, tl.trans(latent)) + dot(q_pe, tl.trans(k_pe))
        scores = tl.where(visible[None, :], scores, float("-inf"))
        acc, peak, total = softmax_step(acc, peak, total, scores, latent, scale)

    result = acc / tl.maximum(total, 1e-30)[:, None]
    row_head = row * NUM_HEADS + head
    inside = real & (c < RANK)
    if num_splits == 1:
        tl.store(out_ptr + row_head[:, None] * RANK + c, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = row_head * num_splits + split
        tl.store(parts_ptr + part[:, None] * RANK + c, result, mask=inside)
        tl.store(logsums_ptr + part, peak + tl.log2(tl.maximum(total, 1e-30)), mask=head < NUM_HEADS)


def choose_launch(programs: int, max_context_len: int, num_sms: int) -> DecodeLaunch:
    """So many splits, a power of two, that one program a multiprocessor fills the card; none under MIN_KEYS. Where
    there are more programs than multiprocessors, smaller tiles, so that two share one.

    Measured on an H200, 16 heads, blocks of 64 slots; us with the merge, and the share of a plain read's 4.46 TB/s
    (tile, warps, stages; splits in brackets):

                       32, 4, 2           32, 4, 3           64, 4, 3           64, 8, 3
        32 x 4096   60.6 (8)  56 %     48.6 (8)  70 %     46.1 (4)  73 %     47.7 (4)  71 %
        64 x 800    37.7 (4)  35 %     29.4 (4)  45 %     26.3 (2)  50 %     27.3 (2)  48 %
        256 x 800   88.4 (1)  60 %     63.3 (1)  84 %     70.0 (1)  76 %     72.7 (1)  73 %
        16 x 400    13.4 (16)          11.9 (16)           9.7 (8)            9.9 (8)
        1 x 4000    23.6 (64)          17.5 (32)          16.7 (32)          17.3 (32), 2 stages

    Keys as the rows of the products and heads as the columns (a warp group's instruction then reads both operands from
    shared memory, and the queries need no registers) was not faster: 49.9 us at 32 x 4096, 68.7 at 256 x 800.
    """
    if programs > num_sms:
        return DecodeLaunch(1, block_n=32, num_warps=4, num_stages=3)
    longest = max(1, max_context_len // MIN_KEYS)
    splits = previous_power_of_2(min(num_sms // programs, longest, MOST_SPLITS))
    return DecodeLaunch(splits, block_n=64, num_warps=4, num_stages=3)


def fit_launch(launch: DecodeLaunch, element_size: int, arch: tuple[int, int]) -> DecodeLaunch:
    """fp32 has no tensor cores: operands lie in registers. 163 KB of shared memory (A100) hold three tiles of 32 keys
    and the queries, 99 KB (sm_86, sm_89, sm_120) two of 16."""
    if element_size == 4:
        return replace(launch, block_n=16, num_warps=8, num_stages=1)
    if arch == (8, 0):
        return replace(launch, block_n=32)
    return launch if arch in ((0, 0), (9, 0), (10, 0)) else replace(launch, block_n=16, num_stages=2)


def latent_decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_context_len: int,
    launch: DecodeLaunch | None = None,
    to_v: torch.Tensor | None = None,
) -> torch.Tensor:
    """q_latent [batch, heads, kv_rank] and q_pe with any strides but the last; `max_context_len` is an upper bound that
    stays when a graph is replayed. `to_v`: W_UV [heads, v_dim, kv_rank], which the result is to be multiplied by."""
    batch, heads, rank = q_latent.shape
    rope, block_size = q_pe.shape[2], cache.shape[1]
    assert q_latent.stride(2) == q_pe.stride(2) == cache.stride(2) == 1
    assert cache.shape[2] == rank + rope
    rows = min(HEADS, max(16, next_power_of_2(heads)))
    programs = batch * triton.cdiv(heads, rows)
    if launch is None:
        launch = choose_launch(programs, max_context_len, num_multiprocessors(cache.device))
        launch = fit_launch(launch, cache.element_size(), capability(cache.device))
    out = torch.empty((batch, heads, rank), dtype=cache.dtype, device=cache.device)
    parts = DecodeWorkspace.allocate(batch, heads, launch, rank, cache.device)
    pointers = (q_latent, q_pe, cache, out, parts.parts, parts.logsums, context_lens, block_tables)
    strides = (*q_latent.stride()[:2], *q_pe.stride()[:2], *cache.stride()[:2], block_tables.stride(0))
    sizes = {"RANK": rank, "C": max(16, next_power_of_2(rank)), "ROPE": rope, "R": max(16, next_power_of_2(rope))}
    dependent = dependent_launch(cache.device)
    shared = {"STEP": max(MIN_KEYS, launch.block_n), "DEPENDENT": dependent, "launch_pdl": dependent}
    latent_decode_kernel[(programs, launch.num_splits)](
        *pointers,
        scale * LOG2E,
        *strides,
        launch.num_splits,
        NUM_HEADS=heads,
        ROWS=rows,
        **sizes,
        BLOCK_SIZE=block_size,
        BLOCK_N=launch.block_n,
        **shared,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if launch.num_splits > 1:
        if to_v is not None and batch <= FEW_ROWS:
            return project(parts, context_lens, launch.num_splits, to_v, {**shared, "TILE": MERGE_TILE})
        facts = {"NUM_Q_HEADS": heads, "HEAD_DIM": rank, "D": sizes["C"], "WINDOW": 0, **shared}
        merged = (parts.parts, parts.logsums, out, context_lens, launch.num_splits)
        merge_kernel[(batch * heads,)](*merged, **facts, TILE=MERGE_TILE, num_warps=4)
    return out if to_v is None else per_head(out, to_v.transpose(1, 2))

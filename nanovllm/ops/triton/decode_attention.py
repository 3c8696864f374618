"""Paged attention for one query a sequence: flash attention turned on its side (twin: `ops/attention.py`).

With one query there is nothing to reuse: every key and value is read once, for a handful of multiplications, so the
kernel's only job is to keep the memory busy. Three decisions follow.

Pack the heads. The GROUP query heads that share a kv head are the rows of one tile, padded to 16 because a tensor-core
product has at least 16 rows. Keys are read once for all of them; the padding rows cost nothing, the cores are idle.

Split the keys. Batch * num_kv_heads programs are too few to fill a card at small batch, so a sequence's keys are cut
into `num_splits` ranges, each owned by one program, which runs the online softmax (derived in `prefill_attention.py`)
over its range and writes acc / l and its log-sum-exp L = m + log(l). Softmax over a union is a weighted mean of the
softmaxes over its parts, since acc_i / l_i is weighted by l_i exp(m_i) = exp(L_i):

    out = sum_i w_i (acc_i / l_i),   w_i = exp(L_i - max L) / sum_j exp(L_j - max L).

Merge either in a second kernel, one program a (row, head), or in the program that finishes last: each adds one to a
counter when its part is written, and the one that finds the others done merges and resets the counter.

Fix the grid. A captured graph replays one launch for every context length, so the grid depends on batch and num_splits
only; lengths are read on the device. A split is at least MIN_KEYS long, so short contexts use fewer splits and the rest
return at once. A row with context 0 is graph padding: all its splits are empty and its output is zero.

Measured on an H200 (bf16, 8 kv heads, head_dim 128, 2 q heads each): 4.14 TB/s at 256 rows x 840 keys without splits,
tiles of 32 keys and 2 warps, 93 % of what a plain read reaches; block sizes 16, 64 and 256 make no difference.
"""
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import LOG2E, LOWEST, capability, dot, next_power_of_2, num_multiprocessors
from nanovllm.ops.triton.prefill_attention import key_offsets, softmax_step

MIN_KEYS = 64  # a split shorter than this costs more to merge than it saves


@triton.jit
def split_range(context_len, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, STEP: tl.constexpr):
    """(first key of the sequence that counts, keys per split), both multiples of STEP; splits may be empty."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0) // STEP * STEP
    per_split = tl.cdiv(tl.cdiv(context_len - begin, NUM_SPLITS), STEP) * STEP
    return begin, tl.maximum(per_split, STEP)


@triton.jit
def merge_parts(
    parts_ptr, logsums_ptr, out_ptr, row_head, num_used,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of one (row, q head)'s first num_used parts. ".cg" reads past the L1, where a part may be stale."""
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    used = s < num_used
    logsum = tl.load(logsums_ptr + row_head * NUM_SPLITS + s, mask=used, other=LOWEST, cache_modifier=".cg")
    weight = tl.where(used, tl.exp2(logsum - tl.max(logsum, axis=0)), 0.0)
    offsets = (row_head * NUM_SPLITS + s)[:, None] * HEAD_DIM + d[None, :]
    inside = used[:, None] & (d[None, :] < HEAD_DIM)
    part = tl.load(parts_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    out = tl.sum(part * weight[:, None], axis=0) / tl.maximum(tl.sum(weight, axis=0), 1e-30)
    tl.store(out_ptr + row_head * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, logsums_ptr, counters_ptr, context_lens_ptr, tables_ptr,
    scale, q_stride, block_stride, slot_stride, head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr, FUSED_MERGE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % NUM_KV_HEADS
    row = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + row)
    begin, per_split = split_range(context_len, WINDOW, NUM_SPLITS, STEP)
    lo = begin + split * per_split
    hi = tl.minimum(lo + per_split, context_len)
    if (lo >= hi) & (split > 0):  # split 0 of an empty row stays, to write its zeros
        return

    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    inside = (g[:, None] < GROUP) & (d < HEAD_DIM)
    q = tl.load(q_ptr + row * q_stride + (head * GROUP + g[:, None]) * HEAD_DIM + d, mask=inside, other=0.0)
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    table_ptr = tables_ptr + row * table_stride
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        visible = n < hi
        if WINDOW > 0:
            visible &= n >= context_len - WINDOW
        offsets = key_offsets(table_ptr, start, hi, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N) + d
        exists = visible[:, None] & (d < HEAD_DIM)
        k = tl.load(k_ptr + offsets, mask=exists, other=0.0)
        scores = tl.where(visible[None, :], dot(q, tl.trans(k)), float("-inf"))
        v = tl.load(v_ptr + offsets, mask=exists, other=0.0)
        acc, peak, total = softmax_step(acc, peak, total, scores, v, scale)

    result = acc / tl.maximum(total, 1e-30)[:, None]
    row_head = (row * NUM_KV_HEADS + head) * GROUP + g
    if NUM_SPLITS == 1:
        tl.store(out_ptr + row_head[:, None] * HEAD_DIM + d, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = row_head * NUM_SPLITS + split
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + d, result, mask=inside)
        tl.store(logsums_ptr + part, peak + tl.log2(tl.maximum(total, 1e-30)), mask=g < GROUP)
        if FUSED_MERGE:
            num_used = tl.maximum(tl.cdiv(context_len - begin, per_split), 1)
            tl.debug_barrier()  # all warps have stored before one thread says so
            counter = counters_ptr + tl.program_id(0)
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_used - 1:
                tl.debug_barrier()
                for i in tl.static_range(GROUP):
                    one = (row * NUM_KV_HEADS + head) * GROUP + i
                    merge_parts(parts_ptr, logsums_ptr, out_ptr, one, num_used, HEAD_DIM, D, NUM_SPLITS, SPLITS)
                tl.store(counter, 0)


@triton.jit
def merge_kernel(
    parts_ptr, logsums_ptr, out_ptr, context_lens_ptr, NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_lens_ptr + row_head // NUM_Q_HEADS)
    begin, per_split = split_range(context_len, WINDOW, NUM_SPLITS, STEP)
    num_used = tl.maximum(tl.cdiv(context_len - begin, per_split), 1)
    merge_parts(parts_ptr, logsums_ptr, out_ptr, row_head, num_used, HEAD_DIM, D, NUM_SPLITS, SPLITS)


@dataclass(frozen=True)
class DecodeLaunch:
    """What is fixed when a graph is captured."""

    num_splits: int
    block_n: int = 32
    num_warps: int = 2
    num_stages: int = 3
    fused_merge: bool = False


def choose_launch(batch: int, num_kv_heads: int, max_context_len: int, num_sms: int) -> DecodeLaunch:
    """Enough programs to fill the card about four times over, no split under MIN_KEYS of the longest context.

    About 4 programs of 2 warps live on a multiprocessor at once. One round of them leaves the card half empty while the
    longest rows finish (64 rows x 8 heads in one round: 8,650 tok/s at context 2,000 against 9,500 wanted), so
    the aim is 16 a multiprocessor. At batch 256 with 8 kv heads that is no split at all.
    """
    programs = batch * num_kv_heads
    wanted = 16 * num_sms // programs
    longest = max(1, max_context_len // MIN_KEYS)
    num_splits = max(1, min(wanted, longest, 64))
    if num_splits == 1:
        return DecodeLaunch(1, num_stages=2)
    if programs <= 4 * num_sms:
        return DecodeLaunch(num_splits, block_n=64, num_warps=4)
    return DecodeLaunch(num_splits)


def fit_launch(launch: DecodeLaunch, head_dim: int, element_size: int, arch: tuple[int, int]) -> DecodeLaunch:
    """The same launch with tiles that fit shared memory: key and value tiles, num_stages of them in flight."""
    d = next_power_of_2(head_dim)
    if element_size == 4 or arch < (8, 0):  # no tensor cores: the product's operands lie in registers
        return DecodeLaunch(launch.num_splits, 16, 4, 1, launch.fused_merge)
    limit = 160 * 1024 if arch in ((8, 0), (9, 0), (10, 0)) else 80 * 1024
    block_n, stages = launch.block_n, launch.num_stages
    while 2 * block_n * d * element_size * stages > limit and (stages > 2 or block_n > 32):
        block_n, stages = (block_n, stages - 1) if stages > 2 else (block_n // 2, stages)
    return DecodeLaunch(launch.num_splits, block_n, launch.num_warps, stages, launch.fused_merge)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of the splits, fp32, and the counters of the fused merge (zero before and after every launch)."""

    parts: torch.Tensor  # [batch * num_q_heads * num_splits, head_dim]
    logsums: torch.Tensor  # [batch * num_q_heads * num_splits]
    counters: torch.Tensor  # int32 [batch * num_kv_heads]

    @staticmethod
    def allocate(
        batch: int, num_q_heads: int, num_splits: int, head_dim: int, device: torch.device
    ) -> "DecodeWorkspace":
        rows = batch * num_q_heads * num_splits
        return DecodeWorkspace(
            torch.empty((rows, head_dim), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(batch * num_q_heads, dtype=torch.int32, device=device),
        )


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
) -> torch.Tensor:
    """q [batch, num_q_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim], int32 context_lens
    [batch] (0 = padding) and block_tables [batch, max_blocks]. `launch` from choose_launch, then fit_launch. The
    workspace may be larger than needed and shared by all layers of a graph, whose kernels run one after another.
    """
    batch, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert q.stride(2) == 1
    assert q.stride(1) == head_dim
    assert out.is_contiguous()
    splits = launch.num_splits
    if workspace is None:
        workspace = DecodeWorkspace.allocate(batch if splits > 1 else 0, num_q_heads, splits, head_dim, q.device)
    step = max(MIN_KEYS, launch.block_n)
    shared = {"HEAD_DIM": head_dim, "D": next_power_of_2(head_dim), "STEP": step, "WINDOW": window or 0,
              "NUM_SPLITS": splits, "SPLITS": next_power_of_2(splits)}  # fmt: skip
    decode_kernel[(batch * num_kv_heads, splits)](
        q, k_cache, v_cache, out, workspace.parts, workspace.logsums, workspace.counters, context_lens, block_tables,
        scale * LOG2E, q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=max(16, next_power_of_2(group)), BLOCK_SIZE=block_size,
        BLOCK_N=launch.block_n, FUSED_MERGE=launch.fused_merge and splits > 1, **shared,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if splits > 1 and not launch.fused_merge:
        merge_kernel[(batch * num_q_heads,)](
            workspace.parts, workspace.logsums, out, context_lens, NUM_Q_HEADS=num_q_heads, **shared,
            num_warps=2 if splits > 8 else 1,
        )  # fmt: skip
    return out


def launch_for(q: torch.Tensor, num_kv_heads: int, max_context_len: int) -> DecodeLaunch:
    """choose_launch and fit_launch for a query tensor [batch, num_q_heads, head_dim] on its device."""
    launch = choose_launch(q.shape[0], num_kv_heads, max_context_len, num_multiprocessors(q.device))
    return fit_launch(launch, q.shape[2], q.element_size(), capability(q.device))

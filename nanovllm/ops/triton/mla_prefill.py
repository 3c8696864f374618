"""Flash attention of prompts over expanded keys and values (twin: `latent_piece` of `ops/mla.py`).

The recurrence, and how a program finds its queries without the host, are those of `prefill_attention.py`. What differs:

- keys have two parts, k_nope of each head beside its value in the product of W_UK and W_UV, [keys, heads, nope + v],
  and k_pe, which all heads share: the kernel reads both where they lie, and the scores are two products. No key of 192
  numbers is ever written;
- keys are dense and a sequence's own: rows key_starts[s] to key_starts[s + 1];
- the log-sum-exp of each row is written too, so that pieces of a context can be merged.

A tile of 128 numbers is whole; 192 would be padded to 256.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import LOG2E, LOWEST, capability, dot, next_power_of_2
from nanovllm.ops.triton.prefill_attention import PrefillTile, find_tile, softmax_step

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_dense(
    state,
    q,
    q_pe,
    pointers,
    strides,
    seen,
    lo,
    hi,
    num_keys,
    scale,
    SIZES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CUT: tl.constexpr,
):
    """Adds keys lo .. hi (rounded up to tiles) to the running softmax. CUT: some rows do not see some of them."""
    acc, peak, total = state
    kv_ptr, pe_ptr = pointers
    kv_stride, pe_stride = strides
    NOPE: tl.constexpr = SIZES[0]
    ROPE: tl.constexpr = SIZES[1]
    V: tl.constexpr = SIZES[2]
    N_TILE: tl.constexpr = SIZES[3]
    R_TILE: tl.constexpr = SIZES[4]
    V_TILE: tl.constexpr = SIZES[5]
    n_dim, r_dim, v_dim = tl.arange(0, N_TILE)[None, :], tl.arange(0, R_TILE)[None, :], tl.arange(0, V_TILE)[None, :]
    NEEDS_MASK: tl.constexpr = CUT or NOPE < N_TILE or ROPE < R_TILE or V < V_TILE
    for start in tl.range(lo, hi, BLOCK_N, num_stages=1 if CUT else None):
        n = start + tl.arange(0, BLOCK_N)
        at, at_pe = kv_ptr + n.to(tl.int64)[:, None] * kv_stride, pe_ptr + n.to(tl.int64)[:, None] * pe_stride
        if NEEDS_MASK:
            exists = (n < num_keys)[:, None]
            k = tl.load(at + n_dim, mask=exists & (n_dim < NOPE), other=0.0)
            k_pe = tl.load(at_pe + r_dim, mask=exists & (r_dim < ROPE), other=0.0)
            v = tl.load(at + NOPE + v_dim, mask=exists & (v_dim < V), other=0.0)
        else:
            k, k_pe, v = tl.load(at + n_dim), tl.load(at_pe + r_dim), tl.load(at + NOPE + v_dim)
        scores = dot(q, tl.trans(k)) + dot(q_pe, tl.trans(k_pe))
        if CUT:
            scores = tl.where(n[None, :] < seen[:, None], scores, float("-inf"))
        acc, peak, total = softmax_step(acc, peak, total, scores, v, scale)
    return acc, peak, total


@triton.jit(
    do_not_specialize=["num_seqs", "num_tiles"], do_not_specialize_on_alignment=["query_starts_ptr", "key_starts_ptr"]
)
def latent_piece_kernel(
    q_ptr,
    q_pe_ptr,
    kv_ptr,
    pe_ptr,
    out_ptr,
    logsum_ptr,
    query_starts_ptr,
    key_starts_ptr,
    scale,
    num_seqs,
    num_tiles,
    q_stride,
    q_head_stride,
    q_pe_stride,
    q_pe_head_stride,
    kv_stride,
    pe_stride,
    NUM_HEADS: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    NOPE: tl.constexpr = SIZES[0]
    V: tl.constexpr = SIZES[2]
    N_TILE: tl.constexpr = SIZES[3]
    R_TILE: tl.constexpr = SIZES[4]
    V_TILE: tl.constexpr = SIZES[5]
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    tile = num_tiles - 1 - tl.program_id(0) // NUM_HEADS
    seq, query_start, num_queries, first = find_tile(query_starts_ptr, tile, num_seqs, BLOCK_M)
    if (first < 0) | (first >= num_queries):
        return

    key_start = tl.load(key_starts_ptr + seq)
    num_keys = tl.load(key_starts_ptr + seq + 1) - key_start
    query = first + tl.arange(0, BLOCK_M)
    row, valid = (query_start + query).to(tl.int64)[:, None], (query < num_queries)[:, None]
    n_dim, r_dim, v_dim = tl.arange(0, N_TILE)[None, :], tl.arange(0, R_TILE)[None, :], tl.arange(0, V_TILE)[None, :]
    q = tl.load(q_ptr + row * q_stride + head * q_head_stride + n_dim, mask=valid & (n_dim < NOPE), other=0.0)
    at_pe = q_pe_ptr + row * q_pe_stride + head * q_pe_head_stride + r_dim
    q_pe = tl.load(at_pe, mask=valid & (r_dim < SIZES[1]), other=0.0)
    pointers = (
        kv_ptr + key_start.to(tl.int64) * kv_stride + head * (NOPE + V),
        pe_ptr + key_start.to(tl.int64) * pe_stride,
    )
    strides, peak = (kv_stride, pe_stride), tl.full([BLOCK_M], LOWEST, tl.float32)
    state = (tl.zeros([BLOCK_M, V_TILE], tl.float32), peak, tl.zeros([BLOCK_M], tl.float32))
    seen = tl.zeros([BLOCK_M], tl.int32) + num_keys  # by each row
    if CAUSAL:
        seen += query + 1 - num_queries
    whole, last = tl.min(seen, axis=0) // BLOCK_N * BLOCK_N, tl.minimum(tl.max(seen, axis=0), num_keys)
    state = _attend_dense(state, q, q_pe, pointers, strides, seen, 0, whole, num_keys, scale, SIZES, BLOCK_N, False)
    state = _attend_dense(state, q, q_pe, pointers, strides, seen, whole, last, num_keys, scale, SIZES, BLOCK_N, True)
    acc, peak, total = state
    out = (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * NUM_HEADS + head) * V + v_dim, out, mask=valid & (v_dim < V))
    logsum = tl.where(total > 0, (peak + tl.log2(tl.maximum(total, 1e-30))) * LN2, float("-inf"))
    tl.store(logsum_ptr + (query_start + query).to(tl.int64) * NUM_HEADS + head, logsum, mask=query < num_queries)


def choose_tile(sizes: tuple[int, ...], element_size: int, arch: tuple[int, int]) -> PrefillTile:
    """As `prefill_attention.choose_tile`, for keys of two parts."""
    if element_size == 4:
        return PrefillTile(32, 16, 4, 1)
    if arch in ((8, 0), (9, 0), (10, 0)):
        return PrefillTile(128, 64, 8, 2)
    return PrefillTile(64, 32, 4, 2)


def latent_piece(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    causal: bool,
    tile: PrefillTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any strides but the last; kv [keys, heads, nope_dim + v_dim] dense in its last two."""
    (num_tokens, heads, nope), rope, v = q_nope.shape, q_pe.shape[2], kv.shape[2] - q_nope.shape[2]
    assert q_nope.stride(2) == q_pe.stride(2) == kv.stride(2) == k_pe.stride(1) == 1
    assert kv.stride(1) == kv.shape[2]
    out = torch.empty((num_tokens, heads, v), dtype=q_nope.dtype, device=kv.device)
    logsum = torch.empty((num_tokens, heads), dtype=torch.float32, device=kv.device)
    num_seqs = len(query_starts) - 1
    sizes = (nope, rope, v, *(max(16, next_power_of_2(size)) for size in (nope, rope, v)))
    tile = tile or choose_tile(sizes, kv.element_size(), capability(kv.device))
    num_tiles = num_tokens // tile.block_m + num_seqs
    tensors = (q_nope, q_pe, kv, k_pe, out, logsum, query_starts, key_starts)
    strides = (*q_nope.stride()[:2], *q_pe.stride()[:2], kv.stride(0), k_pe.stride(0))
    latent_piece_kernel[(num_tiles * heads,)](
        *tensors,
        scale * LOG2E,
        num_seqs,
        num_tiles,
        *strides,
        NUM_HEADS=heads,
        SIZES=sizes,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=causal,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, logsum

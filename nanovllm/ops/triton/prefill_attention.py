"""Flash attention over the paged cache for any mix of prefill chunks and decodes (twin: `ops/attention.py`).

Why flash. Attention of n queries over n keys needs the n x n scores only to reduce them: softmax(q K^T) V. Written to
memory they cost n^2 reads and writes; kept in a tile they cost nothing. The obstacle is that softmax divides by a sum
over all keys. The online softmax removes it. For one query, walk over the keys in tiles and keep three things:

    m = the largest score so far,   l = sum of exp(s_j - m),   acc = sum of exp(s_j - m) v_j.

When a tile raises the maximum from m to m', every term so far was scaled by exp(-m) and should have been by exp(-m'),
so both sums are multiplied by exp(m - m') and the tile's own terms added:

    m'   = max(m, max_j s_j)
    l'   = l exp(m - m')   + sum_j exp(s_j - m')
    acc' = acc exp(m - m') + sum_j exp(s_j - m') v_j.

After the last tile the answer is acc / l, exactly softmax(s) V: the maximum cancels. It is there for range only (exp of
a large score overflows). Masked scores are -inf and m starts at a finite -1e30, so a row that has seen no key keeps
l = 0 and never computes inf - inf.

What one program owns: BLOCK_Q consecutive queries of one sequence, for all GROUP query heads that share one kv head,
packed as BLOCK_M = BLOCK_Q * GROUP rows of one tile (row r is query r // GROUP, head r % GROUP). The keys and values
it reads serve all those heads, and a decode (one query) still fills GROUP rows.

Which sequence: sequence s is given query_starts[s + 1] // BLOCK_Q - query_starts[s] // BLOCK_Q + 1 program slots,
enough for its tiles however it is aligned, so tile t belongs to the largest s with query_starts[s] // BLOCK_Q + s <= t.
A program finds it by binary search over query_starts; slots without work return. The host needs no lengths and uploads
nothing. Programs are numbered from the last tile to the first: the last tiles of a sequence see the most keys, and
the card should end on small pieces of work.

Keys in tiles of BLOCK_N: first the tiles that every row sees whole (no masks at all), then those the causal diagonal or
the end of the context cuts. With a sliding window the tiles cut by its left edge come before both. If a block of the
cache holds whole tiles (block_size % BLOCK_N == 0), a tile's address is one block-table entry and the rest is affine;
otherwise each key looks its block up. Values past the end of the context are masked on load, not only in the scores:
0 * NaN is NaN, and a freed block may hold anything.
"""
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import LOG2E, LOWEST, capability, dot, next_power_of_2


@triton.jit
def key_offsets(
    table_ptr, start, limit, block_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Offsets into the cache of keys start .. start + BLOCK_N, int64 [BLOCK_N, 1]; from `limit` on, of block 0."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        # The tile-wide part does not change from tile to tile, so only one scalar is added to the pointers.
        return block * block_stride + (start % BLOCK_SIZE) * slot_stride + tl.arange(0, BLOCK_N)[:, None] * slot_stride
    else:
        n = start + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=n < limit, other=0).to(tl.int64)
        return (block * block_stride + (n % BLOCK_SIZE) * slot_stride)[:, None]


@triton.jit
def softmax_step(acc, peak, total, scores, v, scale):
    """The recurrence of the module docstring, with scale > 0 holding log2(e) so that exp becomes exp2.

    The maximum is taken of the raw scores: scale and subtraction are then one fused multiply-add an element, and the
    arithmetic between the two dot products is what limits this kernel on a fast card.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    probs = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(probs, axis=1)
    acc = acc * shrink[:, None] + dot(probs.to(v.dtype), v)
    return acc, new_peak, total


@triton.jit
def _attend(
    acc, peak, total, q, position, lo, hi, context_len,
    k_ptr, v_ptr, k_desc, v_desc, table_ptr, head, block_stride, slot_stride, scale,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, USE_DESC: tl.constexpr,
):  # fmt: skip
    """Adds the keys of tiles lo .. hi (multiples of BLOCK_N, hi rounded up) to the running softmax."""
    d = tl.arange(0, D)[None, :]
    for start in tl.range(lo, hi, BLOCK_N):
        if USE_DESC and not MASKED:
            block = tl.load(table_ptr + start // BLOCK_SIZE)
            row = block * BLOCK_SIZE + start % BLOCK_SIZE
            k = k_desc.load([row, head * HEAD_DIM])
        else:
            offsets = key_offsets(table_ptr, start, context_len, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N)
            if MASKED:
                exists = (start + tl.arange(0, BLOCK_N)[:, None] < context_len) & (d < HEAD_DIM)
                k = tl.load(k_ptr + offsets + d, mask=exists, other=0.0)
            elif HEAD_DIM < D:
                k = tl.load(k_ptr + offsets + d, mask=d < HEAD_DIM, other=0.0)
            else:
                k = tl.load(k_ptr + offsets + d)
        scores = dot(q, tl.trans(k))
        if MASKED:
            n = start + tl.arange(0, BLOCK_N)[None, :]
            visible = n <= position[:, None]
            if WINDOW > 0:
                visible &= n > position[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        if USE_DESC and not MASKED:
            v = v_desc.load([row, head * HEAD_DIM])
        elif MASKED:
            v = tl.load(v_ptr + offsets + d, mask=exists, other=0.0)
        elif HEAD_DIM < D:
            v = tl.load(v_ptr + offsets + d, mask=d < HEAD_DIM, other=0.0)
        else:
            v = tl.load(v_ptr + offsets + d)
        acc, peak, total = softmax_step(acc, peak, total, scores, v, scale)
    return acc, peak, total


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, query_starts_ptr, context_lens_ptr, tables_ptr,
    scale, num_seqs, num_tiles, q_stride, block_stride, slot_stride, head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    USE_DESC: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    first, last = 0, num_seqs - 1  # the answer lies in first .. last
    while first < last:
        middle = (first + last + 1) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_Q + middle <= tile:
            first = middle
        else:
            last = middle - 1
    seq = first
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    first_query = (tile - query_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= num_queries:
        return

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    valid = (query < num_queries) & (row < BLOCK_Q * GROUP)
    d = tl.arange(0, D)[None, :]
    q_head = head * GROUP + row % GROUP
    offsets = (query_start + query).to(tl.int64) * q_stride + q_head * HEAD_DIM
    inside = valid[:, None] & (d < HEAD_DIM)
    q = tl.load(q_ptr + offsets[:, None] + d, mask=inside, other=0.0)

    context_len = tl.load(context_lens_ptr + seq)
    position = context_len - num_queries + query
    lowest = context_len - num_queries + first_query
    highest = context_len - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    # Tile n .. n + BLOCK_N is whole for every row if n + BLOCK_N - 1 <= lowest and, in a window, n > highest - WINDOW.
    whole_end = tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    if WINDOW > 0:
        whole_begin = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(whole_begin, whole_end)
        acc, peak, total = _attend(
            acc, peak, total, q, position, begin, whole_begin, context_len, k_ptr, v_ptr, k_desc, v_desc, table_ptr,
            head, block_stride, slot_stride, scale, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, True, USE_DESC,
        )  # fmt: skip
        begin = whole_begin
    acc, peak, total = _attend(
        acc, peak, total, q, position, begin, whole_end, context_len, k_ptr, v_ptr, k_desc, v_desc, table_ptr,
        head, block_stride, slot_stride, scale, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, False, USE_DESC,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q, position, whole_end, highest + 1, context_len, k_ptr, v_ptr, k_desc, v_desc, table_ptr,
        head, block_stride, slot_stride, scale, HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, True, USE_DESC,
    )  # fmt: skip
    # A padded sequence (context 0) has seen no key: acc is 0 and so is its output.
    out = acc / tl.maximum(total, 1e-30)[:, None]
    out_offsets = ((query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + q_head) * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrefillTile:
    """How a launch is cut: rows and keys of a tile, warps, pipeline stages, and tensor descriptors (TMA) for keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    use_desc: bool = False


def choose_tile(head_dim: int, element_size: int, block_size: int, arch: tuple[int, int]) -> PrefillTile:
    """The largest tile that fits registers and shared memory (64 KB on sm_75, 99 on sm_86/89/120, 163 on sm_80)."""
    d = next_power_of_2(head_dim)
    if element_size == 4 or arch < (8, 0):
        # Products on the ordinary cores, operands in registers: fp32 anywhere, and everything on Turing, whose tensor
        # cores Triton has not used since 3.3 (64 x 64 at head_dim 128 spilled 32 KB a thread there).
        return PrefillTile(32, 16, 4, 1) if d <= 128 else PrefillTile(16, 16, 4, 1)
    if arch[0] in (9, 10):
        if d > 128:
            return PrefillTile(128, 64, 8, 2)
        return PrefillTile(128, 128 if block_size % 128 == 0 else 64, 8, 2)
    if d > 128:
        return PrefillTile(64, 32, 4, 2)
    return PrefillTile(128, 64 if d <= 64 else 32, 4 if d <= 64 else 8, 2)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
) -> torch.Tensor:
    """q [tokens, num_q_heads, head_dim] flattened over sequences; arguments as in `paged_attention_reference`.

    query_starts int32 [num_seqs + 1], context_lens int32 [num_seqs], block_tables int32 [num_seqs, max_blocks].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert q.stride(2) == 1
    assert q.stride(1) == head_dim
    assert out.is_contiguous()
    tile = tile or choose_tile(head_dim, q.element_size(), block_size, capability(q.device))
    block_m = max(tile.block_m, next_power_of_2(group))
    use_desc = tile.use_desc and block_size % tile.block_n == 0 and head_dim == next_power_of_2(head_dim)
    k_desc, v_desc = _descriptors(k_cache, v_cache, tile.block_n) if use_desc else (k_cache, v_cache)
    num_tiles = num_tokens // (block_m // group) + num_seqs
    prefill_kernel[(num_tiles * num_kv_heads,)](
        q, k_cache, v_cache, k_desc, v_desc, out, query_starts, context_lens, block_tables,
        scale * LOG2E, num_seqs, num_tiles, q.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, D=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=tile.block_n, WINDOW=window or 0, USE_DESC=use_desc,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _descriptors(k_cache: torch.Tensor, v_cache: torch.Tensor, block_n: int) -> tuple:
    """The caches as matrices [slots, num_kv_heads * head_dim], read by the copy engine in boxes of one head's tile."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    box = [block_n, k_cache.shape[3]]
    as_matrix = (k_cache.shape[0] * k_cache.shape[1], k_cache.shape[2] * k_cache.shape[3])
    return tuple(TensorDescriptor.from_tensor(cache.view(as_matrix), box) for cache in (k_cache, v_cache))

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

Which sequence: sequence s has query_starts[s + 1] // BLOCK_Q - query_starts[s] // BLOCK_Q + 1 programs (a kv head),
enough for its tiles however it is aligned, so tile t belongs to the largest s with query_starts[s] // BLOCK_Q + s <= t.
A program finds it by binary search over query_starts; programs without work return. The host needs no lengths and
uploads nothing. Programs are numbered from the last tile to the first: the last tiles of a sequence see the most keys,
and the card should end on small pieces of work.

Keys in tiles of BLOCK_N. Most tiles are seen whole by every row and need no mask: they run in a loop of their own, with
copies overlapping arithmetic. The few that the causal diagonal, the left edge of a sliding window or the end of the
context cuts run in a second loop. There values past the end are masked on load, not only in the scores, since 0 * NaN
is NaN and a freed block may hold anything. If a block of the cache holds whole tiles (block_size % BLOCK_N == 0), a
tile's address is one block-table entry and the rest is affine, which lets the copy engine (TMA) fetch it; otherwise
each key looks its block up.

Counts that vary from step to step are not specialised on, nor is the alignment of index tensors, which callers slice.

Measured on an H200 (bf16, 16/8 heads x 128, causal; share of 780 TFLOP/s; blocks of 64 slots except where given):

    sequences x tokens                      8 x 2048    2 x 8192    64 x 1024    1 x 1024
    128x64, 4 warps, 2 stages, TMA            55.6 %      69.5 %       46.4 %      16.5 %    (the rule on sm_90)
      one loop that masks if cut              54.4        67.7         47.2        17.0
      3 stages                                43.9        57.0         33.9        18.2
    64x64, 4 warps, 3 stages, TMA             54.9        66.0         44.5        22.0
    128x128, 8 warps, 2 stages, one loop      42.7        48.9         35.7        18.2
    128x64, 8 warps, blocks of 16             38.3        46.1         32.5                  (the rule there)
    SDPA on dense tensors                     65.3        77.2         60.8

With 4 warps two programs share a multiprocessor, and one's softmax hides behind the other's products; a third stage
leaves room for one. Two runs differ by up to 1.5 points. Blocks of 256 slots, or blocks stored head by head, are no
faster (54.6 and 55.3 % at 8 x 2048).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import LOG2E, LOWEST, capability, dot, next_power_of_2
from nanovllm.ops.triton.e4m3 import beside_e4m3, form_of, from_e4m3


@triton.jit
def page_ids(table_ptr, start, limit, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks that hold keys start .. start + BLOCK_N: one number if a block holds whole tiles, else one a key."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
    else:
        n = start + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + n // BLOCK_SIZE, mask=n < limit, other=0)


@triton.jit
def key_offsets(pages, start, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets into the cache of keys start .. start + BLOCK_N, int64 [BLOCK_N, 1]."""
    pages = pages.to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile-wide part does not change from tile to tile, so only one scalar is added to the pointers.
        return pages * block_stride + (start % BLOCK_SIZE) * slot_stride + tl.arange(0, BLOCK_N)[:, None] * slot_stride
    else:
        n = start + tl.arange(0, BLOCK_N)
        return (pages * block_stride + (n % BLOCK_SIZE) * slot_stride)[:, None]


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
    state, q, position, lo, hi, context_len, kv, table_ptr, head, strides, scale,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, USE_DESC: tl.constexpr, FORM: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Adds the keys of tiles lo .. hi (multiples of BLOCK_N, hi rounded up) to the running softmax `state`.

    CUT: some rows do not see some keys, and the context may end in a tile.
    """
    acc, peak, total = state
    k_ptr, v_ptr, k_desc, v_desc = kv
    block_stride, slot_stride = strides
    d = tl.arange(0, D)[None, :]
    pages = page_ids(table_ptr, lo, context_len, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=1 if CUT else None):  # cut tiles are few
        if USE_DESC and not CUT:
            row, column = pages * BLOCK_SIZE + start % BLOCK_SIZE, head * HEAD_DIM
            k = k_desc.load([row, column])
            v = v_desc.load([row, column])
        else:
            offsets = key_offsets(pages, start, block_stride, slot_stride, BLOCK_SIZE, BLOCK_N) + d
            if CUT:
                exists = (start + tl.arange(0, BLOCK_N)[:, None] < context_len) & (d < HEAD_DIM)
                k = tl.load(k_ptr + offsets, mask=exists, other=0)
                v = tl.load(v_ptr + offsets, mask=exists, other=0)
            elif HEAD_DIM < D:
                k = tl.load(k_ptr + offsets, mask=d < HEAD_DIM, other=0)
                v = tl.load(v_ptr + offsets, mask=d < HEAD_DIM, other=0)
            else:
                k = tl.load(k_ptr + offsets)
                v = tl.load(v_ptr + offsets)
        # One tile ahead, or the pipeliner gives a stage to this load (see `decode_attention.py`).
        pages = page_ids(table_ptr, start + BLOCK_N, context_len, BLOCK_SIZE, BLOCK_N)
        if FORM:
            k, v = from_e4m3(k, q.dtype, FORM), from_e4m3(v, q.dtype, FORM)
        scores = dot(q, tl.trans(k))
        if CUT:
            scores = _masked(scores, start, position, BLOCK_N, WINDOW)
        acc, peak, total = softmax_step(acc, peak, total, scores, v, scale)
    return acc, peak, total


@triton.jit
def _masked(scores, start, position, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    n = start + tl.arange(0, BLOCK_N)[None, :]
    visible = n <= position[:, None]
    if WINDOW > 0:
        visible &= n > position[:, None] - WINDOW
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def find_tile(query_starts_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """(sequence, its first row of q, its number of queries, first query of the tile) of tile number `tile`."""
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
    return seq, query_start, num_queries, (tile - query_start // BLOCK_Q - seq) * BLOCK_Q


@triton.jit(
    do_not_specialize=["num_seqs", "num_tiles", "table_stride"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "tables_ptr"],
)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, scales_ptr, out_ptr, query_starts_ptr, context_lens_ptr, tables_ptr,
    scale, num_seqs, num_tiles, q_stride, block_stride, slot_stride, head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    USE_DESC: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    seq, query_start, num_queries, first_query = find_tile(query_starts_ptr, tile, num_seqs, BLOCK_Q)
    if (first_query < 0) | (first_query >= num_queries):
        return

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    valid = (query < num_queries) & (row < BLOCK_Q * GROUP)
    d = tl.arange(0, D)[None, :]
    q_head = head * GROUP + row % GROUP
    offsets = (query_start + query).to(tl.int64) * q_stride + q_head * HEAD_DIM
    inside = valid[:, None] & (d < HEAD_DIM)
    q = tl.load(q_ptr + offsets[:, None] + d, mask=inside, other=0.0)

    if FORM:  # all keys have one scale, and so all scores; all values too
        scale *= tl.load(scales_ptr)
        q = beside_e4m3(q)
    context_len = tl.load(context_lens_ptr + seq)
    position = context_len - num_queries + query
    lowest = context_len - num_queries + first_query
    highest = context_len - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    state = (tl.zeros([BLOCK_M, D], tl.float32), peak, tl.zeros([BLOCK_M], tl.float32))
    kv = (k_ptr + head * head_stride, v_ptr + head * head_stride, k_desc, v_desc)
    strides = (block_stride, slot_stride)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    # Tile n .. n + BLOCK_N is whole if n + BLOCK_N - 1 <= lowest and, in a window, n > highest - WINDOW.
    end = tl.maximum(tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N, begin)
    if WINDOW > 0:
        whole = tl.minimum(tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, end)
        state = _attend(
            state, q, position, begin, whole, context_len, kv, table_ptr, head, strides, scale,
            HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, USE_DESC, FORM, True,
        )  # fmt: skip
        begin = whole
    state = _attend(
        state, q, position, begin, end, context_len, kv, table_ptr, head, strides, scale,
        HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, USE_DESC, FORM, False,
    )  # fmt: skip
    acc, _, total = _attend(
        state, q, position, end, highest + 1, context_len, kv, table_ptr, head, strides, scale,
        HEAD_DIM, D, BLOCK_SIZE, BLOCK_N, WINDOW, USE_DESC, FORM, True,
    )  # fmt: skip
    # A padded sequence (context 0) has seen no key: acc is 0 and so is its output.
    out = acc / tl.maximum(total, 1e-30)[:, None]
    if FORM:
        out *= tl.load(scales_ptr + 1)
    out_offsets = ((query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + q_head) * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrefillTile:
    """How a launch is cut: rows and keys of a tile, warps, pipeline stages, and tensor descriptors (TMA) for keys and
    values where the cache allows them."""

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
        if arch[0] == 9 and head_dim == d and block_size % 64 == 0:
            return PrefillTile(128, 64, 4, 2, use_desc=True)
        return PrefillTile(128, 128 if block_size % 128 == 0 else 64, 8, 2)
    if d > 128:
        return PrefillTile(64, 32, 4, 2)
    return PrefillTile(128, 64 if d <= 64 else 32, 4 if d <= 64 else 8, 2)


def check_paged(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    """What the attention kernels assume of strides."""
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert q.stride(2) == 1
    assert q.stride(1) == q.shape[2]
    assert out.is_contiguous()


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
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, num_q_heads, head_dim] flattened over sequences; arguments as in `paged_attention_reference`.

    query_starts int32 [num_seqs + 1], context_lens int32 [num_seqs], block_tables int32 [num_seqs, max_blocks]. Rows
    of q before query_starts[0] are the decodes of a mixed step: they are neither read nor written. `scales`: of
    caches in 8-bit floats (`ops/kv_cache.py`).
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    check_paged(q, k_cache, v_cache, out)
    tile = tile or choose_tile(head_dim, q.element_size(), block_size, capability(q.device))
    block_m = max(tile.block_m, next_power_of_2(group))
    use_desc = tile.use_desc and scales is None and _suits_descriptors(k_cache, tile.block_n)  # 8 bits: not measured
    k_desc, v_desc = _descriptors(k_cache, v_cache, tile.block_n) if use_desc else (k_cache, v_cache)
    num_tiles = num_tokens // (block_m // group) + num_seqs
    prefill_kernel[(num_tiles * num_kv_heads,)](
        q, k_cache, v_cache, k_desc, v_desc, scales, out, query_starts, context_lens, block_tables,
        scale * LOG2E, num_seqs, num_tiles, q.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, D=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=tile.block_n, WINDOW=window or 0, USE_DESC=use_desc,
        FORM=form_of(k_cache, scales), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _suits_descriptors(cache: torch.Tensor, block_n: int) -> bool:
    head_dim = cache.shape[3]
    return cache.is_contiguous() and cache.shape[1] % block_n == 0 and head_dim == next_power_of_2(head_dim)


def _descriptors(k_cache: torch.Tensor, v_cache: torch.Tensor, block_n: int) -> tuple:
    """The caches as matrices [slots, num_kv_heads * head_dim], read by the copy engine in boxes of one head's tile.

    Made anew by every call, some 10 us of host time each: a captured graph pays once, and a step too large for a graph
    computes for milliseconds meanwhile. Keeping them would tie a kernel's argument to the life of a cache.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    box = [block_n, k_cache.shape[3]]
    width = k_cache.shape[2] * k_cache.shape[3]
    return tuple(TensorDescriptor.from_tensor(cache.view(-1, width), box) for cache in (k_cache, v_cache))

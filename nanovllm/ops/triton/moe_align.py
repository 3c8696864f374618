"""Pairs sorted by expert, without asking the host: the order in which the expert kernels read their rows.

A pair is (token, j-th choice), numbered token * k + j; `buffers[pair]` is the number of the expert buffer
that holds its weights, or -1 for none now. `align` gives, all on the device:

    order [P]          the pairs, stably sorted by buffer, those without one left out (the tail is not written)
    ends [S]           buffer s owns positions ends[s - 1] .. ends[s] of `order`: the `offs` of torch's grouped product
    blocks [B, 3]      tiles of at most BLOCK_M positions with one buffer: (buffer, first position, end of the buffer)
    num_blocks [1]     how many of those there are; B is the most there could be, a size that the host has

It is a counting sort. A position is (pairs of lower buffers) + (pairs of this buffer before it):
1. every program counts the buffers of its own stretch of pairs, CHUNK at a time, as a one-hot matrix [CHUNK, S];
2. every program adds up the counts of all (S numbers a program, so this is cheap to repeat) and scans them over S:
   where each buffer begins; with the counts of the programs before it, where it begins itself in each buffer;
3. it walks its stretch again. The cumulative sum of the one-hot matrix numbers the pairs of a chunk within a buffer.
No atomics, so the order is the same every time. Up to ONE_PROGRAM pairs (a decode step) one program does all of it in
one launch; beyond, two launches of at most MAX_PROGRAMS programs: 131,072 pairs and 128 buffers are 512 pairs a
program, 8 chunks in each launch, in front of about 2 ms of products.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import next_power_of_2

ONE_PROGRAM = 512
PAIRS_PER_PROGRAM = 256
MAX_PROGRAMS = 256
ONE_HOT = 8192  # elements of the one-hot matrix: 32 registers of each of 256 threads


@dataclass(frozen=True)
class Alignment:
    order: torch.Tensor
    ends: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor


@triton.jit
def _count(buffers_ptr, begin, end, BUFFERS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the pairs begin .. end want each buffer, int32 [BUFFERS]."""
    s = tl.arange(0, BUFFERS)
    total = tl.zeros([BUFFERS], tl.int32)
    for start in tl.range(begin, end, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        buffer = tl.load(buffers_ptr + pair, mask=pair < end, other=-1)
        total += tl.sum((buffer[:, None] == s[None, :]).to(tl.int32), axis=0)
    return total


@triton.jit(
    do_not_specialize=["num_pairs", "num_buffers", "pairs_per_program"], do_not_specialize_on_alignment=["buffers_ptr"]
)
def count_kernel(
    buffers_ptr, counts_ptr, num_pairs, num_buffers, pairs_per_program, BUFFERS: tl.constexpr, CHUNK: tl.constexpr
):
    begin = tl.program_id(0) * pairs_per_program
    total = _count(buffers_ptr, begin, tl.minimum(begin + pairs_per_program, num_pairs), BUFFERS, CHUNK)
    s = tl.arange(0, BUFFERS)
    tl.store(counts_ptr + tl.program_id(0) * num_buffers + s, total, mask=s < num_buffers)


@triton.jit
def _add_counts(counts_ptr, num_buffers, BUFFERS: tl.constexpr, ROWS: tl.constexpr):
    """(counts of all programs, counts of those before this one), int32 [BUFFERS] each."""
    s = tl.arange(0, BUFFERS)
    total = tl.zeros([BUFFERS], tl.int32)
    before = tl.zeros([BUFFERS], tl.int32)
    for start in tl.range(0, tl.num_programs(0), ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < tl.num_programs(0))[:, None] & (s < num_buffers)[None, :]
        counts = tl.load(counts_ptr + i[:, None] * num_buffers + s[None, :], mask=inside, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((i < tl.program_id(0))[:, None], counts, 0), axis=0)
    return total, before


@triton.jit(
    do_not_specialize=["num_pairs", "num_buffers", "pairs_per_program"], do_not_specialize_on_alignment=["buffers_ptr"]
)
def place_kernel(
    buffers_ptr, counts_ptr, order_ptr, ends_ptr, blocks_ptr, num_blocks_ptr, num_pairs, num_buffers, pairs_per_program,
    BUFFERS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    s = tl.arange(0, BUFFERS)
    if COUNTED:
        total, before = _add_counts(counts_ptr, num_buffers, BUFFERS, ROWS)
    else:
        total = _count(buffers_ptr, 0, num_pairs, BUFFERS, CHUNK)
        before = tl.zeros([BUFFERS], tl.int32)
    ends = tl.cumsum(total, axis=0)
    starts = ends - total

    # The table of blocks: programs take turns, or one expert that takes all would keep one program busy.
    owned = tl.cdiv(total, BLOCK_M)
    last_block = tl.cumsum(owned, axis=0)
    for i in tl.range(program, tl.max(owned, axis=0), tl.num_programs(0)):
        entry = blocks_ptr + (last_block - owned + i) * 3
        tl.store(entry, s, mask=i < owned)
        tl.store(entry + 1, starts + i * BLOCK_M, mask=i < owned)
        tl.store(entry + 2, ends, mask=i < owned)
    if program == 0:
        tl.store(ends_ptr + s, ends, mask=s < num_buffers)
        tl.store(num_blocks_ptr, tl.sum(owned, axis=0))

    begin = program * pairs_per_program
    end = tl.minimum(begin + pairs_per_program, num_pairs)
    following = starts + before  # where the next pair of each buffer goes
    for start in tl.range(begin, end, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        buffer = tl.load(buffers_ptr + pair, mask=pair < end, other=-1)
        mine = (buffer[:, None] == s[None, :]).to(tl.int32)
        earlier = tl.cumsum(mine, axis=0) - 1
        place = tl.sum(mine * (earlier + following[None, :]), axis=1)
        tl.store(order_ptr + place, pair, mask=buffer >= 0)
        following += tl.sum(mine, axis=0)


def max_blocks(num_pairs: int, num_buffers: int, block_m: int) -> int:
    """Each buffer has at most one block that is not full: so at most one block a buffer beside the full ones."""
    return min(num_pairs, num_buffers + num_pairs // block_m)


def align(buffers: torch.Tensor, num_buffers: int, block_m: int) -> Alignment:
    """buffers int32 [T, k] in -1 .. num_buffers - 1."""
    assert buffers.is_contiguous()
    num_pairs, device = buffers.numel(), buffers.device
    order, ends, blocks, num_blocks = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in (num_pairs, num_buffers, (max_blocks(num_pairs, num_buffers, block_m), 3), 1)
    )
    padded = next_power_of_2(num_buffers)
    chunk = max(16, min(128, ONE_HOT // padded))
    sizes = {"BUFFERS": padded, "CHUNK": chunk, "num_warps": 4 if padded * chunk <= 2048 else 8}
    num_programs, stretch, counts = 1, num_pairs, ends
    if num_pairs > ONE_PROGRAM:
        stretch = max(PAIRS_PER_PROGRAM, chunk * triton.cdiv(num_pairs, MAX_PROGRAMS * chunk))
        num_programs = triton.cdiv(num_pairs, stretch)
        counts = torch.empty((num_programs, num_buffers), dtype=torch.int32, device=device)
        count_kernel[(num_programs,)](buffers, counts, num_pairs, num_buffers, stretch, **sizes)
    tables = (buffers, counts, order, ends, blocks, num_blocks, num_pairs, num_buffers, stretch)
    sizes |= {"ROWS": 16, "BLOCK_M": block_m, "COUNTED": num_programs > 1}
    place_kernel[(num_programs,)](*tables, **sizes)
    return Alignment(order, ends, blocks, num_blocks)

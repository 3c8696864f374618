"""Pairs sorted by expert, without asking the host: the order in which the expert kernels read their rows.

A pair is (token, j-th choice), numbered token * k + j; `slots[pair]` says whose weights it wants, or -1 for none now.
`align` gives, all on the device:

    order [P]          the pairs, stably sorted by slot, those without one left out (the tail is not written)
    ends [S]           slot s owns positions ends[s - 1] .. ends[s] of `order`: the `offs` of torch's grouped product
    blocks [B, 3]      tiles of at most BLOCK_M positions with one slot: (slot, first position, end of the slot)
    num_blocks [1]     how many of those there are; B is what there could be, so grids need not know

It is a counting sort. A position is (pairs of lower slots) + (pairs of this slot before it):
1. every program counts the slots of its own stretch of pairs, CHUNK at a time, as a one-hot matrix [CHUNK, S];
2. every program adds up the counts of all (S numbers a program, so this is cheap to repeat) and scans them over S:
   where each slot begins; the counts of the programs before it say where it begins in each slot itself;
3. it walks its stretch again. The cumulative sum of the one-hot matrix ranks the pairs of a chunk within their slots.
No atomics, so the order is the same every time. Up to ONE_PROGRAM pairs (a decode step) one program does all of it in
one launch; beyond, two launches of at most MAX_PROGRAMS programs: 131,072 pairs and 128 slots are 512 pairs a program,
8 chunks in each launch, in front of about 2 ms of products.
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
def _count(slots_ptr, begin, end, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the pairs begin .. end want each slot, int32 [SLOTS]."""
    s = tl.arange(0, SLOTS)
    total = tl.zeros([SLOTS], tl.int32)
    for start in tl.range(begin, end, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        slot = tl.load(slots_ptr + pair, mask=pair < end, other=-1)
        total += tl.sum((slot[:, None] == s[None, :]).to(tl.int32), axis=0)
    return total


@triton.jit(
    do_not_specialize=["num_pairs", "num_slots", "pairs_per_program"], do_not_specialize_on_alignment=["slots_ptr"]
)
def count_kernel(
    slots_ptr, counts_ptr, num_pairs, num_slots, pairs_per_program, SLOTS: tl.constexpr, CHUNK: tl.constexpr
):
    begin = tl.program_id(0) * pairs_per_program
    total = _count(slots_ptr, begin, tl.minimum(begin + pairs_per_program, num_pairs), SLOTS, CHUNK)
    s = tl.arange(0, SLOTS)
    tl.store(counts_ptr + tl.program_id(0) * num_slots + s, total, mask=s < num_slots)


@triton.jit
def _add_counts(counts_ptr, num_slots, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """(counts of all programs, counts of those before this one), int32 [SLOTS] each."""
    s = tl.arange(0, SLOTS)
    total = tl.zeros([SLOTS], tl.int32)
    before = tl.zeros([SLOTS], tl.int32)
    for start in tl.range(0, tl.num_programs(0), ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < tl.num_programs(0))[:, None] & (s < num_slots)[None, :]
        counts = tl.load(counts_ptr + i[:, None] * num_slots + s[None, :], mask=inside, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((i < tl.program_id(0))[:, None], counts, 0), axis=0)
    return total, before


@triton.jit(
    do_not_specialize=["num_pairs", "num_slots", "pairs_per_program"], do_not_specialize_on_alignment=["slots_ptr"]
)
def place_kernel(
    slots_ptr, counts_ptr, order_ptr, ends_ptr, blocks_ptr, num_blocks_ptr, num_pairs, num_slots, pairs_per_program,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    s = tl.arange(0, SLOTS)
    if COUNTED:
        total, before = _add_counts(counts_ptr, num_slots, SLOTS, ROWS)
    else:
        total = _count(slots_ptr, 0, num_pairs, SLOTS, CHUNK)
        before = tl.zeros([SLOTS], tl.int32)
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
        tl.store(ends_ptr + s, ends, mask=s < num_slots)
        tl.store(num_blocks_ptr, tl.sum(owned, axis=0))

    begin = program * pairs_per_program
    end = tl.minimum(begin + pairs_per_program, num_pairs)
    following = starts + before  # where the next pair of each slot goes
    for start in tl.range(begin, end, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        slot = tl.load(slots_ptr + pair, mask=pair < end, other=-1)
        mine = (slot[:, None] == s[None, :]).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - 1
        place = tl.sum(mine * (rank + following[None, :]), axis=1)
        tl.store(order_ptr + place, pair, mask=slot >= 0)
        following += tl.sum(mine, axis=0)


def max_blocks(num_pairs: int, num_slots: int, block_m: int) -> int:
    """Every slot that has a pair fills whole blocks but for one: no more than a block a slot and the whole blocks."""
    return min(num_pairs, num_slots + num_pairs // block_m)


def align(slots: torch.Tensor, num_slots: int, block_m: int) -> Alignment:
    """slots int32 [T, k] in -1 .. num_slots - 1."""
    assert slots.is_contiguous()
    num_pairs, device = slots.numel(), slots.device
    order, ends, blocks, num_blocks = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in (num_pairs, num_slots, (max_blocks(num_pairs, num_slots, block_m), 3), 1)
    )
    padded = next_power_of_2(num_slots)
    chunk = max(16, min(128, ONE_HOT // padded))
    sizes = {"SLOTS": padded, "CHUNK": chunk, "num_warps": 4 if padded * chunk <= 2048 else 8}
    num_programs, stretch, counts = 1, num_pairs, ends
    if num_pairs > ONE_PROGRAM:
        stretch = max(PAIRS_PER_PROGRAM, chunk * triton.cdiv(num_pairs, MAX_PROGRAMS * chunk))
        num_programs = triton.cdiv(num_pairs, stretch)
        counts = torch.empty((num_programs, num_slots), dtype=torch.int32, device=device)
        count_kernel[(num_programs,)](slots, counts, num_pairs, num_slots, stretch, **sizes)
    place_kernel[(num_programs,)](
        slots,
        counts,
        order,
        ends,
        blocks,
        num_blocks,
        num_pairs,
        num_slots,
        stretch,
        ROWS=16,
        BLOCK_M=block_m,
        COUNTED=num_programs > 1,
        **sizes,
    )
    return Alignment(order, ends, blocks, num_blocks)

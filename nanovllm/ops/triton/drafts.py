"""Guessed tokens in a captured decode step: `propose` or `feed` before the forward pass, `accept` after the draw.

A *lane* is a running sequence; a graph of NUM guesses computes 1 + NUM rows for each lane, the newest token and the
guesses, as if each were the decode of a sequence of its own (runner/verify.py says why that is right). All that a step
needs and changes stays on the device: the text of every sequence (`history`), where it ends, the sampled tokens.

`propose` finds where the end of the text occurs before (twin: `ops/ngram.py:find`, whose integer key orders the places
so that a maximum over tiles is the best place). One program owns one lane and reads its text once: 4,096 tokens are
16 KB, from the L2 cache. Guesses that do not exist become padding rows: row -1, context length 0, slot -1. Guesses are
also written to the `recent` of the sampler's state, where penalties and bad words of the rows behind them look.

`feed` makes rows of tokens that lie in the text, at places counted from its end; guesses of a draft model are written
there one by one, behind the end, as they are drawn (and the draw itself has written them to `recent`).

`accept` keeps the first drawn token and those after right guesses, writes them behind the text, counts them for
penalties, and moves the end. Each lane counts its own steps, so no program waits for another.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.ngram import PLACES
from nanovllm.ops.sampler_state import COUNTED, FLAG_PENALTIES, NUM_INTS, RECENT, ROW_FLAGS, SamplerState
from nanovllm.ops.triton.common import next_power_of_2

_PENALTIES: tl.constexpr = tl.constexpr(FLAG_PENALTIES)
_INTS: tl.constexpr = tl.constexpr(NUM_INTS)
_FLAGS: tl.constexpr = tl.constexpr(ROW_FLAGS)
_COUNTED: tl.constexpr = tl.constexpr(COUNTED)
_RECENT: tl.constexpr = tl.constexpr(RECENT)
_PLACES: tl.constexpr = tl.constexpr(PLACES)
TILE = 1024


@triton.jit(do_not_specialize=["history_stride", "table_stride", "table_width"])
def propose_kernel(
    lanes_ptr,
    ends_ptr,
    history_ptr,
    tables_ptr,
    recent_ptr,
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    history_stride,
    table_stride,
    table_width,
    NUM: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes_ptr + lane).to(tl.int64)
    live = row >= 0
    end = tl.load(ends_ptr + lane)  # the place of the newest token
    text = history_ptr + row * history_stride
    best = tl.full([], -1, dtype=tl.int64)
    if live:
        newest = tl.load(text + end)
        for start in range(0, end, TILE):
            place = start + tl.arange(0, TILE)
            same = place < end
            same = same & (tl.load(text + place, mask=same, other=-1) == newest)
            matches = same.to(tl.int64)
            for back in tl.static_range(1, LONGEST):
                same = same & (place >= back)
                before = tl.load(text + end - back, mask=end >= back, other=-1)
                same = same & (tl.load(text + place - back, mask=same, other=-2) == before)
                matches += same.to(tl.int64)
            enough = place + NUM <= end
            key = matches * (2 * _PLACES) + tl.where(enough, _PLACES + place, _PLACES - 1 - place)
            best = tl.maximum(best, tl.max(tl.where(matches >= SHORTEST, key, -1), axis=0))
    found = best % (2 * _PLACES)
    first = tl.where(found >= _PLACES, found - _PLACES, _PLACES - 1 - found) + 1
    i = tl.arange(0, GROUP)
    active = live & ((i == 0) | ((best >= 0) & (i <= NUM) & (first + i - 1 <= end)))
    position = end + i
    token = tl.load(text + tl.where(i == 0, end, first + i - 1), mask=active, other=0)
    tl.store(recent_ptr + row * _RECENT + position % _RECENT, token, mask=active & (i > 0))
    reserved = active & (position < table_width * BLOCK_SIZE)
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=reserved, other=0).to(tl.int64)
    here = lane * (1 + NUM) + i
    ours = i <= NUM
    tl.store(rows_ptr + here, tl.where(active, row, -1).to(tl.int32), mask=ours)
    tl.store(tokens_ptr + here, token.to(tl.int64), mask=ours)
    tl.store(positions_ptr + here, tl.where(active, position, 0).to(tl.int64), mask=ours)
    tl.store(lens_ptr + here, tl.where(active, position + 1, 0).to(tl.int32), mask=ours)
    slot = tl.where(reserved, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots_ptr + here, slot, mask=ours)


@triton.jit(do_not_specialize=["history_stride", "history_width", "table_stride", "table_width"])
def feed_kernel(
    lanes_ptr,
    ends_ptr,
    history_ptr,
    tables_ptr,
    drawn_ptr,
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    history_stride,
    history_width,
    table_stride,
    table_width,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes_ptr + lane).to(tl.int64)
    live = row >= 0
    end = tl.load(ends_ptr + lane)
    i = tl.arange(0, GROUP)
    position = end + FIRST + i
    active = live & (position >= 0) & (position < history_width) & (i < COUNT)
    text = history_ptr + row * history_stride
    token = tl.load(text + position, mask=active, other=0).to(tl.int64)
    if HAS_DRAWN:  # the newest guess, which is not in the text yet
        newest = tl.load(drawn_ptr + lane)
        token = tl.where(i == COUNT - 1, newest, token)
        tl.store(text + position, newest.to(tl.int32), mask=active & (i == COUNT - 1))
    reserved = active & (position < table_width * BLOCK_SIZE)
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=reserved, other=0).to(tl.int64)
    here, ours = lane * COUNT + i, i < COUNT
    tl.store(rows_ptr + here, tl.where(active, row, -1).to(tl.int32), mask=ours)
    tl.store(tokens_ptr + here, tl.where(active, token, 0), mask=ours)
    tl.store(positions_ptr + here, tl.where(active, position, 0), mask=ours)
    tl.store(lens_ptr + here, tl.where(active, position + 1, 0).to(tl.int32), mask=ours)
    tl.store(slots_ptr + here, tl.where(reserved, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=ours)


@triton.jit(do_not_specialize=["history_stride", "history_width", "out_stride", "vocab"])
def accept_kernel(
    lanes_ptr,
    ends_ptr,
    steps_ptr,
    history_ptr,
    rows_ptr,
    tokens_ptr,
    drawn_ptr,
    samples_ptr,
    kept_ptr,
    guessed_ptr,
    ints_ptr,
    counts_ptr,
    history_stride,
    history_width,
    out_stride,
    vocab,
    NUM: tl.constexpr,
    GROUP: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes_ptr + lane).to(tl.int64)
    if row < 0:
        return
    end = tl.load(ends_ptr + lane)
    step = tl.load(steps_ptr + lane)
    i = tl.arange(0, GROUP)
    here = lane * (1 + NUM) + i
    drawn = tl.load(drawn_ptr + here, mask=i <= NUM, other=0)
    guessed = (i < NUM) & (tl.load(rows_ptr + here + 1, mask=i < NUM, other=-1) >= 0)
    right = guessed & (tl.load(tokens_ptr + here + 1, mask=i < NUM, other=-1) == drawn)
    wrong = tl.min(tl.where(right, GROUP, i), axis=0)  # the first place whose guess is wrong, or where there is none
    kept = wrong + 1
    tl.store(samples_ptr + here * out_stride + step, drawn, mask=i <= NUM)
    tl.store(kept_ptr + lane * out_stride + step, kept)
    tl.store(guessed_ptr + lane * out_stride + step, tl.sum(guessed.to(tl.int32), axis=0))
    place = end + 1 + i
    tl.store(history_ptr + row * history_stride + place, drawn.to(tl.int32), mask=(i < kept) & (place < history_width))
    tl.store(ends_ptr + lane, end + kept)
    tl.store(steps_ptr + lane, step + 1)
    if tl.load(ints_ptr + row * _INTS + _FLAGS) & _PENALTIES != 0:
        # A token may have been kept twice: each of its places adds all of them to the same count, and writes the same.
        j = tl.arange(0, GROUP)
        other = tl.load(drawn_ptr + lane * (1 + NUM) + j, mask=j <= NUM, other=0)
        times = tl.sum(((drawn[:, None] == other[None, :]) & (j < kept)[None, :]).to(tl.int32), axis=1)
        at = counts_ptr + row * vocab + drawn
        before = tl.load(at, mask=i < kept, other=0)
        tl.debug_barrier()  # a place must not read what another one has written
        tl.store(at, before + times.to(tl.int16), mask=i < kept)
        tl.store(ints_ptr + row * _INTS + _COUNTED, (end + kept).to(tl.int32))


Lanes = tuple[torch.Tensor, torch.Tensor]
Rows = tuple[torch.Tensor, ...]  # five: row, token, position, context length, slot


def propose(
    lanes: Lanes,
    history: torch.Tensor,
    tables: torch.Tensor,
    recent: torch.Tensor,
    rows: Rows,
    lookup: tuple[int, int],
    num: int,
    block_size: int,
) -> None:
    """lanes = (row of each sequence int32, -1: padding; place of its newest token int64); history int32 and tables
    int32 by row; recent: of the SamplerState. Writes rows = (row int32, token int64, position int64, context length
    int32, slot int64), 1 + num for each lane."""
    shortest, longest = lookup
    strides = (history.stride(0), tables.stride(0), tables.shape[1])
    facts = {"NUM": num, "GROUP": next_power_of_2(1 + num), "SHORTEST": shortest, "LONGEST": longest}
    facts |= {"BLOCK_SIZE": block_size, "TILE": TILE}
    propose_kernel[(len(lanes[0]),)](*lanes, history, tables, recent, *rows, *strides, **facts, num_warps=4)


def feed(
    lanes: Lanes,
    history: torch.Tensor,
    tables: torch.Tensor,
    drawn: torch.Tensor | None,
    places: range,
    block_size: int,
    rows: Rows,
) -> None:
    """Writes `rows`, as `propose` does, of the tokens at these places, counted from the newest one, for each lane.
    `drawn` int64 [lanes]: the token at the last of the places."""
    strides = (history.stride(0), history.shape[1], tables.stride(0), tables.shape[1])
    facts = {"FIRST": places.start, "COUNT": len(places), "GROUP": next_power_of_2(len(places))}
    facts |= {"HAS_DRAWN": drawn is not None, "BLOCK_SIZE": block_size}
    pointer = history if drawn is None else drawn
    feed_kernel[(len(lanes[0]),)](*lanes, history, tables, pointer, *rows, *strides, **facts, num_warps=1)


def accept(
    lanes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    history: torch.Tensor,
    rows: Rows,
    drawn: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: SamplerState,
    num: int,
) -> None:
    """lanes = (row, place of the newest token, step int32 [lanes]). out = (samples int64 [lanes * (1 + num), steps],
    kept int32 [lanes, steps], guessed int32 [lanes, steps]), a column for each step."""
    tensors = (*lanes, history, rows[0], rows[1], drawn, *out, state.ints, state.counts)
    sizes = (history.stride(0), history.shape[1], out[0].stride(0), state.vocab_size)
    accept_kernel[(len(lanes[0]),)](*tensors, *sizes, NUM=num, GROUP=next_power_of_2(1 + num), num_warps=1)

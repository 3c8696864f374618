"""Logits to tokens on the device: edits, filters, draw and logprobs for any mix of rows (derivation: docs/sampling.md;
plain twin: `sampling/sampler.py`).

The parameters of a request are data in a `SamplerState`, one row of it for each running sequence, so that a captured
graph serves every mix of requests. Three launches, and a fourth for logprobs; none of them sorts the vocabulary:

    tiles   a program owns TILES tiles of one lane: the maximum and the sum of exponentials of each tile
    pick    a program owns one lane. Greedy: the first maximum. No filter: a tile by its mass, then a column of it.
            Filters: the k-th largest of the tiles' maxima is a bound, because k tiles have an element at least as
            large: the k most likely tokens lie at or above it, in the few tiles whose maximum reaches it. Only these
            are read again. Their tokens at or above the bound are sorted by (logit, lower id), cut and drawn from
    search  a program owns one lane that such a list does not settle (a flat distribution under top_p, many equal
            logits, top_k above CANDIDATES); others end at once. It draws from the whole row, and draws again among the
            more likely tokens while what it drew is not kept
    report  a program owns one lane whose request has logprobs: the token's own, its position among all tokens by
            logit, and the most likely tokens

What they share is in `sampler_common.py`, search and report in files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.sampler_state import SamplerState
from nanovllm.ops.triton.common import LOWEST
from nanovllm.ops.triton.sampler_common import (
    _CAP,
    _FIRST_K,
    _FLAGS,
    _FLOATS,
    _INTS,
    _LEAST,
    _LEVEL_COLUMN,
    _LEVEL_TILE,
    _LN2,
    _LOG2E,
    _MIN_P,
    _NUM_LOGPROBS,
    _SUB,
    _TEMPERATURE,
    _TILE,
    _TOP_K,
    _TOP_P,
    _UNSETTLED,
    SUB,
    UNALIGNED,
    all_tiles,
    edited,
    edited_logits,
    kth_largest,
    list_above,
    noise_at,
    noise_run,
    order,
    raw_logits,
    record,
    scale_of,
    scratch,
    sorted_list,
    totals,
    unorder,
)
from nanovllm.ops.triton.sampling_search import SEARCH_BLOCK, SEARCH_WARPS, search_kernel

TILES = 4  # of a program of tiles_kernel


# ---- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def tiles_kernel(
    logits_ptr, rows_ptr, masks_ptr, positions_ptr, peaks_ptr, sums_ptr, raw_peaks_ptr, raw_sums_ptr, stride, vocab,
    num_tiles, floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr,
    TILES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * _SUB + tl.arange(0, _SUB)[None, :]
    wanted = column < vocab
    # Three waits for memory in a row are what this kernel's time is made of. So the logits are loaded before the row is
    # known, and all that is read of the row at once: after the first store the compiler may move no load before it.
    raw = raw_logits(logits_ptr + lane * stride, column, wanted)
    row = tl.load(rows_ptr + lane)
    if row < 0:
        return
    position = tl.load(positions_ptr + lane)
    has_edits = tl.load(ints_ptr + row * _INTS + _FLAGS) != 0
    has_logprobs = tl.load(ints_ptr + row * _INTS + _NUM_LOGPROBS) >= 0
    scale = scale_of(row, floats_ptr) * _LOG2E
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr, masks_ptr, lane)
    x = raw
    if has_edits:
        x = edited(raw, column, wanted, row, position, vocab, state)
    peak = tl.max(x, axis=1)
    total = tl.sum(tl.exp2((x - tl.maximum(peak, LOWEST)[:, None]) * scale), axis=1)
    here = lane * num_tiles + tile
    tl.store(peaks_ptr + here, peak)
    tl.store(sums_ptr + here, total)
    if has_logprobs:
        peak = tl.max(raw, axis=1)
        total = tl.sum(tl.exp2((raw - tl.maximum(peak, LOWEST)[:, None]) * _LOG2E), axis=1)
        tl.store(raw_peaks_ptr + here, peak)
        tl.store(raw_sums_ptr + here, total)


# ---- pick ------------------------------------------------------------------------------------------------------------


@triton.jit
def draw_plain(logits_ptr, row, position, seed, vocab, peaks, sums, state, ALL_TILES: tl.constexpr):
    """No filter: a tile of TILE columns by its mass, then a column of it. Greedy: by the maxima, without noise."""
    WIDTH: tl.constexpr = _TILE // _SUB
    greedy = tl.load(state[0] + row * _FLOATS + _TEMPERATURE) == 0
    scale = scale_of(row, state[0])
    logs = tl.where(peaks > LOWEST, peaks * scale + tl.log2(tl.maximum(sums, 1e-37)) * _LN2, LOWEST)
    logs = tl.reshape(logs, [ALL_TILES // WIDTH, WIDTH])
    top = tl.max(logs, axis=1)
    mass = top + tl.log2(tl.sum(tl.exp2((logs - top[:, None]) * _LOG2E), axis=1)) * _LN2
    best = tl.max(tl.reshape(peaks, [ALL_TILES // WIDTH, WIDTH]), axis=1)
    noise = noise_at(seed, tl.arange(0, ALL_TILES // WIDTH), position, _LEVEL_TILE)
    score = tl.where(greedy, best, tl.where(best > float("-inf"), mass + noise, float("-inf")))
    first = tl.argmax(score, axis=0) * _TILE
    column = first + tl.arange(0, _TILE)
    x = edited_logits(logits_ptr, column, column < vocab, row, position, vocab, state)
    noise = noise_run(seed, first, position, _LEVEL_COLUMN, _TILE)
    return first + tl.argmax(tl.where(greedy, x, x * scale + noise), axis=0)


@triton.jit
def draw_from_list(logits_ptr, row, position, seed, vocab, peaks, sums, near_ptr, values_ptr, ids_ptr, state):
    """A filtered draw from the listed candidates; UNSETTLED if they do not settle it."""
    top_k = tl.load(state[1] + row * _INTS + _TOP_K)
    top_p = tl.load(state[0] + row * _FLOATS + _TOP_P)
    min_p = tl.load(state[0] + row * _FLOATS + _MIN_P)
    peak, whole, lowest, scale = totals(row, peaks, sums, state)
    k = tl.where(top_k > 0, top_k, _FIRST_K)
    bound = tl.maximum(kth_largest(order(peaks), k), lowest)
    found = tl.full([], _CAP + 1, dtype=tl.int32)
    if (k <= _CAP) & ((bound > _LEAST) | (vocab <= _CAP)):
        found = list_above(logits_ptr, row, position, vocab, peaks, bound, near_ptr, values_ptr, ids_ptr, state, True)
    keys, ids = sorted_list(values_ptr, ids_ptr, tl.minimum(found, _CAP))
    c = tl.arange(0, _CAP)
    z = (unorder(keys) - peak) * scale
    live = (c < found) & (keys >= lowest) & ((top_k == 0) | (c < top_k))
    weight = tl.where(live, tl.exp2(z), 0.0)
    listed = tl.sum(weight, axis=0)
    # Are all tokens that survive min_p and top_k listed? If not, top_p may still end inside the list.
    complete = (top_k > 0) | (bound == lowest)
    total = tl.where(complete, listed, whole)
    token = tl.full([], _UNSETTLED, dtype=tl.int32)
    if (found <= _CAP) & (complete | ((min_p == 0) & (listed >= top_p * total))):
        live = live & (tl.cumsum(weight, axis=0) - weight < top_p * total)
        score = tl.where(live, z * _LN2 + noise_at(seed, ids, position, _LEVEL_COLUMN), float("-inf"))
        token = tl.sum(tl.where(c == tl.argmax(score, axis=0), ids, 0), axis=0)
    return token


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def pick_kernel(
    logits_ptr, rows_ptr, masks_ptr, positions_ptr, peaks_ptr, sums_ptr, near_ptr, values_ptr, ids_ptr, tokens_ptr,
    stride, vocab, num_tiles, seeds_ptr, floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr,
    words_ptr, ALL_TILES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    if row < 0:
        return
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr, masks_ptr, lane)
    logits_ptr += lane * stride
    position = tl.load(positions_ptr + lane)
    seed = tl.load(seeds_ptr + row)
    top_p, min_p = tl.load(floats_ptr + row * _FLOATS + _TOP_P), tl.load(floats_ptr + row * _FLOATS + _MIN_P)
    filtered = (tl.load(ints_ptr + row * _INTS + _TOP_K) > 0) | (top_p < 1.0) | (min_p > 0.0)
    token = tl.zeros([], dtype=tl.int32)
    if filtered & (tl.load(floats_ptr + row * _FLOATS + _TEMPERATURE) > 0):
        near_ptr += lane * num_tiles
        values_ptr += lane * _CAP
        ids_ptr += lane * _CAP
        token = draw_from_list(
            logits_ptr, row, position, seed, vocab, peaks, sums, near_ptr, values_ptr, ids_ptr, state
        )
    else:
        token = draw_plain(logits_ptr, row, position, seed, vocab, peaks, sums, state, ALL_TILES)
    if token == _UNSETTLED:
        tl.store(tokens_ptr + lane, token.to(tl.int64))
    else:
        any_left = tl.max(peaks, axis=0) > float("-inf")
        record(token, lane, row, position, vocab, any_left, tokens_ptr, state)


# ---- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What `draw` leaves: the tokens, and the maxima and sums of the tiles of raw logits where logprobs are wanted."""

    tokens: torch.Tensor  # int64 [lanes]; of a lane without a row: anything
    raw_peaks: torch.Tensor
    raw_sums: torch.Tensor


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplerState,
    masks: torch.Tensor | None = None,
) -> Drawn:
    """logits [lanes, >= vocab], rows int32 (-1: no token), positions of the tokens drawn. They are counted in the
    state, unless there are `masks` (int32, the line of state.mask of each lane): then guesses may lie before these
    positions, and the tokens may be dropped. The kernels are compiled without masks and with them: tiles_kernel spills
    more registers where it looks for guesses."""
    lanes, vocab, device = len(logits), state.vocab_size, logits.device
    assert logits.stride(1) == 1
    # A multiple of TILES keeps the rows of `peaks` on 16 bytes, so that one compilation serves every number of lanes.
    num_tiles = triton.cdiv(vocab, TILES * SUB) * TILES
    peaks, sums, raw_peaks, raw_sums = torch.empty((4, lanes, num_tiles), dtype=torch.float32, device=device)
    drawn = Drawn(torch.empty(lanes, dtype=torch.int64, device=device), raw_peaks, raw_sums)
    if lanes == 0:
        return drawn
    data = [state.floats, state.ints, state.mask, state.counts, state.prompt, state.recent]
    data += [state.edits_address, state.words_address]
    sizes = (logits.stride(0), vocab, num_tiles)
    found = (logits, rows, masks, positions, peaks, sums)
    # The branches for edits would take 150 registers, so that few programs fit on a processor at once: 256 rows of
    # 151,936 columns took 51 us. With at most 64 registers (what is spilled is used by edits only) 38 us.
    tiles_kernel[(lanes, num_tiles // TILES)](
        *found, raw_peaks, raw_sums, *sizes, *data, TILES=TILES, num_warps=2, maxnreg=64
    )
    lists, rest = scratch(lanes, num_tiles, device), (drawn.tokens, *sizes, state.seeds, *data)
    padded = all_tiles(num_tiles)
    pick_kernel[(lanes,)](*found, *lists, *rest, ALL_TILES=padded, num_warps=8)
    search_kernel[(lanes,)](*found, *rest, ALL_TILES=padded, BLOCK=SEARCH_BLOCK, num_warps=SEARCH_WARPS)
    return drawn

"""Draws that a list of candidates does not settle: from the whole row, and again among the more likely tokens while
what was drawn is not kept (docs/sampling.md, section 5)."""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.ops.triton.sampler_common import (
    _ALL_IDS,
    _FLOATS,
    _INTS,
    _LEAST,
    _LEVEL_COLUMN,
    _LN2,
    _TOP_K,
    _TOP_P,
    _UNSETTLED,
    UNALIGNED,
    edited_logits,
    noise_run,
    order,
    record,
    totals,
    unorder,
)

SEARCH_BLOCK, SEARCH_WARPS = 8192, 32


@triton.jit
def count_above(logits_ptr, row, position, vocab, pivots, state, BLOCK: tl.constexpr):
    """For each of 16 pivots the number of tokens at or above it."""
    count = tl.zeros([BLOCK, 16], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = edited_logits(logits_ptr, column, column < vocab, row, position, vocab, state)
        count += ((order(x)[:, None] >= pivots[None, :]) & (x > float("-inf"))[:, None]).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def top_k_cut(logits_ptr, row, position, vocab, k, state, BLOCK: tl.constexpr):
    """(key, id) of the k-th token by falling logit and rising id. Four bits of the key a pass: the 16 keys that differ
    in the next four bits are tried at once."""
    t = tl.zeros([], dtype=tl.uint32)
    above = tl.zeros([], dtype=tl.int32)  # tokens whose key is larger than t, as far as t is known
    j = tl.arange(0, 16)
    for digit in range(8):
        count = count_above(logits_ptr, row, position, vocab, t | (j.to(tl.uint32) << (28 - 4 * digit)), state, BLOCK)
        last = tl.max(tl.where((count >= k) | (j == 0), j, 0), axis=0)
        above = tl.where(last < 15, tl.sum(tl.where(j == last + 1, count, 0), axis=0), above)
        t = t | (last.to(tl.uint32) << (28 - 4 * digit))
    cut, seen = tl.zeros([], dtype=tl.int32), above
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = edited_logits(logits_ptr, column, column < vocab, row, position, vocab, state)
        equal = ((column < vocab) & (order(x) == t)).to(tl.int32)
        place = seen + tl.cumsum(equal, axis=0)
        cut = tl.maximum(cut, tl.max(tl.where((equal == 1) & (place == k), column, 0), axis=0))
        seen += tl.sum(equal, axis=0)
    return t, cut


@triton.jit
def mass_before(logits_ptr, row, position, vocab, key, token, peak, scale, state, BLOCK: tl.constexpr):
    """The weight of the tokens that come before this one by falling logit and rising id."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = edited_logits(logits_ptr, column, column < vocab, row, position, vocab, state)
        own = order(x)
        mass += tl.where((own > key) | ((own == key) & (column < token)), tl.exp2((x - peak) * scale), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def best_before(logits_ptr, row, position, seed, vocab, key, token, peak, scale, state, BLOCK: tl.constexpr):
    """(key, id) of the best draw among the tokens up to this one by falling logit and rising id."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    ids = tl.zeros([BLOCK], dtype=tl.int32)
    keys = tl.zeros([BLOCK], dtype=tl.uint32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = edited_logits(logits_ptr, column, column < vocab, row, position, vocab, state)
        own = order(x)
        score = (x - peak) * scale * _LN2 + noise_run(seed, start, position, _LEVEL_COLUMN, BLOCK)
        better = ((own > key) | ((own == key) & (column <= token))) & (score > best)
        best, ids, keys = tl.where(better, score, best), tl.where(better, column, ids), tl.where(better, own, keys)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, _ALL_IDS), axis=0)
    return tl.max(tl.where(ids == token, keys, 0), axis=0), token


@triton.jit
def draw_from_row(logits_ptr, row, position, seed, vocab, peak, whole, lowest, scale, state, BLOCK: tl.constexpr):
    """Of the tokens that survive min_p and top_k, the best by logit plus noise; if the mass before it has reached
    top_p, neither it nor anything after it is kept, so the best of those before it is next. What is found is the best
    of all that are kept, after 1 / top_p tries on average or fewer."""
    top_k = tl.load(state[1] + row * _INTS + _TOP_K)
    top_p = tl.load(state[0] + row * _FLOATS + _TOP_P)
    key, token, total = lowest, tl.full([], _ALL_IDS, dtype=tl.int32), whole
    if top_k > 0:
        t, cut = top_k_cut(logits_ptr, row, position, vocab, top_k, state, BLOCK // 4)
        if t >= key:
            key, token = t, cut
    has_total = (top_p >= 1.0) | (key == _LEAST)  # else the first mass is that of all survivors
    searching = tl.full([], 1, dtype=tl.int32)
    while searching != 0:
        if has_total:
            key, token = best_before(logits_ptr, row, position, seed, vocab, key, token, peak, scale, state, BLOCK)
        if top_p < 1.0:
            mass = mass_before(logits_ptr, row, position, vocab, key, token, peak, scale, state, BLOCK)
            if has_total:
                if mass >= top_p * total:
                    token -= 1  # those before it: equal ones of lower id, and all of larger key
                else:
                    searching = tl.zeros([], dtype=tl.int32)
            else:
                total = mass + tl.where(token == _ALL_IDS, 0.0, tl.exp2((unorder(key) - peak) * scale))
                has_total = top_p < 1.0
        else:
            searching = tl.zeros([], dtype=tl.int32)
    return token


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def search_kernel(
    logits_ptr, rows_ptr, masks_ptr, positions_ptr, peaks_ptr, sums_ptr, tokens_ptr, stride, vocab, num_tiles,
    seeds_ptr, floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr,
    ALL_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    if row < 0:
        return
    if tl.load(tokens_ptr + lane) != _UNSETTLED:
        return
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr, masks_ptr, lane)
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    peak, whole, lowest, scale = totals(row, peaks, sums, state)
    position = tl.load(positions_ptr + lane)
    token = tl.zeros([], dtype=tl.int32)
    any_left = tl.max(peaks, axis=0) > float("-inf")
    if any_left:
        token = draw_from_row(
            logits_ptr + lane * stride,
            row,
            position,
            tl.load(seeds_ptr + row),
            vocab,
            peak,
            whole,
            lowest,
            scale,
            state,
            BLOCK,
        )
    record(token, lane, row, position, vocab, any_left, tokens_ptr, state)

"""Logits to tokens on the device: edits, filters, draw and logprobs for any mix of rows (derivation: docs/sampling.md;
plain twin: `sampling/sampler.py`).

What a request asks for is data in a `SamplerState`, one row of it for each running sequence, so that a captured graph
serves every mix of requests. Three launches, and a fourth for logprobs; none of them sorts the vocabulary:

    tiles   a program owns TILES tiles of one lane: the maximum and the sum of exponentials of each tile
    pick    a program owns one lane. Greedy: the first maximum. No filter: a tile by its mass, then a column of it.
            Filters: the k-th largest of the tiles' maxima is a bound, because k tiles have an element at least as
            large: the k most likely tokens lie at or above it, in the few tiles whose maximum reaches it. Only these
            are read again. Their tokens at or above the bound are sorted by (logit, lower id), cut and drawn from
    search  a program owns one lane that such a list does not settle (a flat distribution under top_p, many equal
            logits, top_k above CANDIDATES); others end at once. It draws from the whole row, and draws again among the
            more likely tokens while what it drew is not kept
    report  a program owns one lane that wants logprobs: the token's own, its rank, and the most likely tokens

A lane is a line of logits; rows[lane] is its row of the state, -1 for padding. Comparisons are made on `order`, the
bits of a float as an unsigned number that sorts alike. A kernel that reads logits again edits them again (`edited`).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops import sampler_state as spec
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.ops.sampling import LEVEL_COLUMN, LEVEL_TILE, TILE
from nanovllm.ops.triton.common import LOG2E, LOWEST, next_power_of_2

SUB = 256  # columns whose maximum is kept: a vocabulary of 32,000 has 125 such tiles, so top_k = 100 has a bound
CANDIDATES = 256
FIRST_K = 64  # the bound of a row with top_p or min_p but no top_k
CHUNK = 16  # tiles read again at once
SEARCH_BLOCK, SEARCH_WARPS = 8192, 32
MAX_LOGPROBS = 20

_SUB, _TILE, _CAP, _FIRST_K, _CHUNK = (tl.constexpr(n) for n in (SUB, TILE, CANDIDATES, FIRST_K, CHUNK))
_LEVEL_TILE, _LEVEL_COLUMN = tl.constexpr(LEVEL_TILE), tl.constexpr(LEVEL_COLUMN)
_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(1.0 / LOG2E)
_FLOATS, _INTS, _RECENT = tl.constexpr(spec.NUM_FLOATS), tl.constexpr(spec.NUM_INTS), tl.constexpr(spec.RECENT)
_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(spec.TEMPERATURE), tl.constexpr(spec.TOP_P), tl.constexpr(spec.MIN_P)
_REPETITION, _PRESENCE = tl.constexpr(spec.REPETITION), tl.constexpr(spec.PRESENCE)
_FREQUENCY, _TOP_K = tl.constexpr(spec.FREQUENCY), tl.constexpr(spec.TOP_K)
_FLAGS, _NUM_LOGPROBS = tl.constexpr(spec.ROW_FLAGS), tl.constexpr(spec.NUM_LOGPROBS)
_START_EDITS, _NUM_EDITS = tl.constexpr(spec.START_EDITS), tl.constexpr(spec.NUM_EDITS)
_MASK, _EDITS = tl.constexpr(spec.FLAG_MASK), tl.constexpr(spec.FLAG_EDITS)
_PENALTIES = tl.constexpr(spec.FLAG_PENALTIES)
_HUGE = tl.constexpr(1.0e30)
_ALL_IDS = tl.constexpr(2**31 - 1)
_UNSETTLED = tl.constexpr(-1)
_LEAST = tl.constexpr(0x00800000)  # order(-inf) + 1: the least key of a token that may be drawn


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def order(x):
    """uint32 that sorts like the float; -0.0 like 0.0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def unorder(key):
    return tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def gumbel(bits):
    """-log(-log(u)): u has 23 bits and lies strictly between 0 and 1."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def noise_at(seed, index, position, LEVEL: tl.constexpr):
    """Gumbel noise of any indices: four neighbours share a call of Philox, which gives four words."""
    zero = tl.zeros_like(index).to(tl.uint32)
    a, b, c, d = tl.philox(seed, (index // 4).to(tl.uint32), zero + position.to(tl.uint32), zero + LEVEL, zero)
    word = index % 4
    return gumbel(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def noise_run(seed, first, position, LEVEL: tl.constexpr, COUNT: tl.constexpr):
    """The same for indices first .. first + COUNT, first a multiple of 4: a quarter of the calls."""
    index = first // 4 + tl.arange(0, COUNT // 4)
    zero = tl.zeros_like(index).to(tl.uint32)
    a, b, c, d = tl.philox(seed, index.to(tl.uint32), zero + position.to(tl.uint32), zero + LEVEL, zero)
    return gumbel(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNT]))


@triton.jit
def kth_largest(keys, k):
    """A key t with at least k keys >= t, and no larger one whose lower 16 bits are 0; 0 if there are fewer keys.
    A bound may be too low; 16 bits say all of a bf16 number."""
    t = tl.zeros([], dtype=tl.uint32)
    for i in range(16):
        candidate = t | (tl.full([], 0x80000000, dtype=tl.uint32) >> i)
        t = tl.where(tl.sum((keys >= candidate).to(tl.int32), axis=0) >= k, candidate, t)
    return t


# ---- logits ----------------------------------------------------------------------------------------------------------


@triton.jit
def raw_logits(logits_ptr, column, wanted):
    x = tl.load(logits_ptr + column, mask=wanted, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, tl.minimum(x, _HUGE), float("-inf"))  # a NaN must not win every comparison


@triton.jit
def edited(x, column, wanted, row, position, vocab, state):
    """Bans and biases, then penalties, in the order of vLLM. Most rows have none: their branches are not taken."""
    floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr = state
    flags = tl.load(ints_ptr + row * _INTS + _FLAGS)
    words = tl.cdiv(vocab, 32)
    if flags & _MASK != 0:
        word = tl.load(mask_ptr + row * words + column // 32, mask=wanted, other=0)
        x = tl.where((word >> (column % 32)) & 1 != 0, x, float("-inf"))
    if flags & _EDITS != 0:
        # An edit is (token, bias, position before which it holds, start, length and earliest place of a word).
        edits = tl.load(edits_ptr).to(tl.pointer_type(tl.int32))  # the address is data: the lists may move and grow
        first = tl.load(ints_ptr + row * _INTS + _START_EDITS)
        for i in range(first, first + tl.load(ints_ptr + row * _INTS + _NUM_EDITS)):
            token = tl.load(edits + i * 8)
            bias = tl.load(edits + i * 8 + 1).to(tl.float32, bitcast=True)
            holds = position < tl.load(edits + i * 8 + 2)
            length = tl.load(edits + i * 8 + 4)
            if length > 0:  # a bad word: its other tokens must be the newest ones of the output
                other = tl.load(words_ptr).to(tl.pointer_type(tl.int32)) + tl.load(edits + i * 8 + 3)
                j = tl.arange(0, _RECENT)
                at = position - length + j
                inside = (j < length) & (at >= tl.load(edits + i * 8 + 5))
                newest = tl.load(recent_ptr + row * _RECENT + at % _RECENT, mask=inside, other=-1)
                same = inside & (tl.load(other + j, mask=j < length, other=0) == newest)
                holds = holds & (tl.sum(same.to(tl.int32), axis=0) == length)
            x = tl.where(holds & (column == token), x + bias, x)
    if flags & _PENALTIES != 0:
        count = tl.load(counts_ptr + row.to(tl.int64) * vocab + column, mask=wanted, other=0).to(tl.float32)
        word = tl.load(prompt_ptr + row * words + column // 32, mask=wanted, other=0)
        seen = (count > 0) | ((word >> (column % 32)) & 1 != 0)
        factor = tl.where(seen, tl.load(floats_ptr + row * _FLOATS + _REPETITION), 1.0)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= tl.load(floats_ptr + row * _FLOATS + _FREQUENCY) * count
        x -= tl.where(count > 0, tl.load(floats_ptr + row * _FLOATS + _PRESENCE), 0.0)
    return x


@triton.jit
def edited_logits(logits_ptr, column, wanted, row, position, vocab, state):
    return edited(raw_logits(logits_ptr, column, wanted), column, wanted, row, position, vocab, state)


@triton.jit
def scale_of(row, floats_ptr):
    """1 / temperature; greedy rows are not scaled."""
    temperature = tl.load(floats_ptr + row * _FLOATS + _TEMPERATURE)
    return tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)


# ---- tiles -----------------------------------------------------------------------------------------------------------

UNALIGNED = ["rows_ptr", "positions_ptr", "tokens_ptr", "floats_ptr", "ints_ptr", "seeds_ptr", "mask_ptr",
             "counts_ptr", "prompt_ptr", "recent_ptr", "edits_ptr", "words_ptr"]  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def tiles_kernel(
    logits_ptr, rows_ptr, positions_ptr, peaks_ptr, sums_ptr, raw_peaks_ptr, raw_sums_ptr, stride, vocab, num_tiles,
    floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr, TILES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * _SUB + tl.arange(0, _SUB)[None, :]
    wanted = column < vocab
    raw = raw_logits(logits_ptr + lane * stride, column, wanted)  # before the row is known: one wait, not two
    row = tl.load(rows_ptr + lane)
    if row < 0:
        return
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr)
    x = edited(raw, column, wanted, row, tl.load(positions_ptr + lane), vocab, state)
    scale = scale_of(row, floats_ptr) * _LOG2E
    peak = tl.max(x, axis=1)
    total = tl.sum(tl.exp2((x - tl.maximum(peak, LOWEST)[:, None]) * scale), axis=1)
    here = lane * num_tiles + tile
    tl.store(peaks_ptr + here, peak, mask=tile < num_tiles)
    tl.store(sums_ptr + here, total, mask=tile < num_tiles)
    if tl.load(ints_ptr + row * _INTS + _NUM_LOGPROBS) >= 0:
        peak = tl.max(raw, axis=1)
        total = tl.sum(tl.exp2((raw - tl.maximum(peak, LOWEST)[:, None]) * _LOG2E), axis=1)
        tl.store(raw_peaks_ptr + here, peak, mask=tile < num_tiles)
        tl.store(raw_sums_ptr + here, total, mask=tile < num_tiles)


# ---- pick ------------------------------------------------------------------------------------------------------------


@triton.jit
def list_above(logits_ptr, row, position, vocab, peaks, bound, near_ptr, values_ptr, ids_ptr, state,
               EDIT: tl.constexpr):  # fmt: skip
    """Lists the tokens at or above the bound, which lie in tiles whose maximum reaches it; their number, or one above
    CANDIDATES if there are more."""
    near = order(peaks) >= bound
    place = tl.cumsum(near.to(tl.int32), axis=0) - 1
    num_near = tl.sum(near.to(tl.int32), axis=0)
    tl.store(near_ptr + place, tl.arange(0, peaks.shape[0]), mask=near)
    tl.debug_barrier()
    start, found = tl.zeros([], dtype=tl.int32), tl.zeros([], dtype=tl.int32)
    while (start < num_near) & (found <= _CAP):
        i = start + tl.arange(0, _CHUNK)
        tile = tl.load(near_ptr + i, mask=i < num_near, other=0)
        column = tl.reshape(tile[:, None] * _SUB + tl.arange(0, _SUB)[None, :], [_CHUNK * _SUB])
        listed = tl.reshape((i < num_near)[:, None] & (tl.arange(0, _SUB) >= 0)[None, :], [_CHUNK * _SUB])
        wanted = listed & (column < vocab)
        x = raw_logits(logits_ptr, column, wanted)
        if EDIT:
            x = edited(x, column, wanted, row, position, vocab, state)
        keep = wanted & (order(x) >= bound)
        at = found + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(values_ptr + at, x, mask=keep & (at < _CAP))
        tl.store(ids_ptr + at, column, mask=keep & (at < _CAP))
        found += tl.sum(keep.to(tl.int32), axis=0)
        start += _CHUNK
    tl.debug_barrier()
    return found


@triton.jit
def sorted_list(values_ptr, ids_ptr, found):
    """(keys, ids) of what was listed, by falling logit, equal ones by rising id; then keys of 0."""
    c = tl.arange(0, _CAP)
    key = order(tl.load(values_ptr + c, mask=c < found, other=0.0)).to(tl.uint64)
    ids = tl.load(ids_ptr + c, mask=c < found, other=0)
    both = tl.sort(tl.where(c < found, (key << 32) | (0x7FFFFFFF - ids).to(tl.uint64), 0), descending=True)
    return (both >> 32).to(tl.uint32), 0x7FFFFFFF - (both & 0xFFFFFFFF).to(tl.int32)


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
def totals(row, peaks, sums, state):
    """(largest logit, mass of all tokens, key that min_p demands, log2(e) / temperature)"""
    min_p = tl.load(state[0] + row * _FLOATS + _MIN_P)
    scale = scale_of(row, state[0]) * _LOG2E
    peak = tl.maximum(tl.max(peaks, axis=0), LOWEST)
    whole = tl.sum(tl.where(peaks > LOWEST, sums * tl.exp2((peaks - peak) * scale), 0.0), axis=0)
    lowest = tl.where(min_p > 0, peak + tl.log2(tl.maximum(min_p, 1e-37)) / scale, float("-inf"))
    return peak, whole, tl.maximum(order(lowest), _LEAST), scale


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


@triton.jit
def record(token, lane, row, position, vocab, any_left, tokens_ptr, state):
    """The token, and what the row remembers of it. If all is banned or not a number, the token is 0."""
    token = tl.where(any_left, tl.minimum(token, vocab - 1), 0)
    tl.store(tokens_ptr + lane, token.to(tl.int64))
    if tl.load(state[1] + row * _INTS + _FLAGS) & _PENALTIES != 0:
        at = state[3] + row.to(tl.int64) * vocab + token
        tl.store(at, tl.load(at) + 1)
    tl.store(state[5] + row * _RECENT + position % _RECENT, token)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def pick_kernel(
    logits_ptr, rows_ptr, positions_ptr, peaks_ptr, sums_ptr, near_ptr, values_ptr, ids_ptr, tokens_ptr, stride, vocab,
    num_tiles, seeds_ptr, floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr,
    ALL_TILES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    if row < 0:
        return
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr)
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
        record(token, lane, row, position, vocab, tl.max(peaks, axis=0) > float("-inf"), tokens_ptr, state)


# ---- search ----------------------------------------------------------------------------------------------------------


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
    logits_ptr, rows_ptr, positions_ptr, peaks_ptr, sums_ptr, tokens_ptr, stride, vocab, num_tiles,
    seeds_ptr, floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr,
    ALL_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    if row < 0:
        return
    if tl.load(tokens_ptr + lane) != _UNSETTLED:
        return
    state = (floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr)
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    peak, whole, lowest, scale = totals(row, peaks, sums, state)
    position = tl.load(positions_ptr + lane)
    token = tl.zeros([], dtype=tl.int32)
    any_left = tl.max(peaks, axis=0) > float("-inf")
    if any_left:
        token = draw_from_row(logits_ptr + lane * stride, row, position, tl.load(seeds_ptr + row), vocab, peak, whole,
                              lowest, scale, state, BLOCK)  # fmt: skip
    record(token, lane, row, position, vocab, any_left, tokens_ptr, state)


# ---- report ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["out_stride", "step"], do_not_specialize_on_alignment=UNALIGNED)
def report_kernel(
    logits_ptr, rows_ptr, tokens_ptr, raw_peaks_ptr, raw_sums_ptr, near_ptr, values_ptr, ids_ptr, step,
    out_logprobs_ptr, out_ids_ptr, out_stride, stride, vocab, num_tiles, ints_ptr,
    ALL_TILES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Column 0 of the output: the token's logprob, and its rank instead of an id; then the most likely tokens."""
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    if row < 0:
        return
    num_top = tl.load(ints_ptr + row * _INTS + _NUM_LOGPROBS)
    if num_top < 0:
        return
    num_top = tl.minimum(num_top, WIDTH - 1)
    logits_ptr += lane * stride
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(raw_peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(raw_sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    peak = tl.maximum(tl.max(peaks, axis=0), LOWEST)
    whole = tl.sum(tl.where(peaks > LOWEST, sums * tl.exp2((peaks - peak) * _LOG2E), 0.0), axis=0)
    log_total = peak + tl.log2(whole) * _LN2
    token = tl.load(tokens_ptr + lane)
    own = raw_logits(logits_ptr, token, token < vocab)
    larger = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        larger += (raw_logits(logits_ptr, column, column < vocab) > own).to(tl.int32)
    values_ptr += lane * _CAP
    ids_ptr += lane * _CAP
    found = tl.full([], _CAP + 1, dtype=tl.int32)
    bound = tl.maximum(kth_largest(order(peaks), num_top), _LEAST)
    if (num_top > 0) & ((bound > _LEAST) | (vocab <= _CAP)):
        state = (0, 0, 0, 0, 0, 0, 0, 0)
        found = list_above(logits_ptr, row, row, vocab, peaks, bound, near_ptr + lane * num_tiles, values_ptr, ids_ptr,
                           state, False)  # fmt: skip
    out = lane * out_stride + step * WIDTH
    keys, ids = sorted_list(values_ptr, ids_ptr, tl.minimum(found, _CAP))
    c = tl.arange(0, _CAP)
    if found <= _CAP:
        tl.store(out_ids_ptr + out + 1 + c, ids, mask=c < num_top)
        tl.store(out_logprobs_ptr + out + 1 + c, tl.where(c < found, unorder(keys) - log_total, float("-inf")),
                 mask=c < num_top)  # fmt: skip
    else:  # more equal logits than fit: the next one in order, num_top times
        last_key, last_id = tl.full([], 0xFFFFFFFF, dtype=tl.uint32), tl.full([], -1, dtype=tl.int32)
        for n in range(num_top):
            best_key, best_id = tl.zeros([], dtype=tl.uint32), tl.zeros([], dtype=tl.int32)
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                key = order(raw_logits(logits_ptr, column, column < vocab))
                later = (key < last_key) | ((key == last_key) & (column > last_id))
                key = tl.where(later & (column < vocab), key, 0)
                here = tl.max(key, axis=0)
                first = tl.min(tl.where(key == here, column, vocab), axis=0)
                best_id = tl.where(here > best_key, first, best_id)
                best_key = tl.maximum(here, best_key)
            last_key, last_id = best_key, best_id
            tl.store(out_ids_ptr + out + 1 + n, last_id)
            tl.store(out_logprobs_ptr + out + 1 + n, unorder(last_key) - log_total)
    tl.store(out_logprobs_ptr + out, own - log_total)
    tl.store(out_ids_ptr + out, 1 + tl.sum(larger, axis=0))


# ---- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What `draw` leaves: the tokens, and the maxima and sums of the tiles of raw logits where logprobs are wanted."""

    tokens: torch.Tensor  # int64 [lanes]; of a lane without a row: anything
    raw_peaks: torch.Tensor
    raw_sums: torch.Tensor


def draw(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, state: SamplerState) -> Drawn:
    """logits [lanes, >= vocab], rows int32 (-1: no token), positions of the tokens drawn. Counts them in the state."""
    lanes, vocab, where = len(logits), state.vocab_size, {"device": logits.device}
    assert logits.stride(1) == 1
    num_tiles = triton.cdiv(vocab, SUB)
    tiles = min(4 if lanes <= 8 else 16, next_power_of_2(num_tiles))  # few rows: more programs
    peaks, sums, raw_peaks, raw_sums = torch.empty((4, lanes, num_tiles), dtype=torch.float32, **where)
    drawn = Drawn(torch.empty(lanes, dtype=torch.int64, **where), raw_peaks, raw_sums)
    if lanes == 0:
        return drawn
    data = (state.floats, state.ints, state.mask, state.counts, state.prompt, state.recent, state.edits_address,
            state.words_address)  # fmt: skip
    sizes = (logits.stride(0), vocab, num_tiles)
    tiles_kernel[(lanes, triton.cdiv(num_tiles, tiles))](
        logits, rows, positions, peaks, sums, raw_peaks, raw_sums, *sizes, *data, TILES=tiles, num_warps=4
    )
    pick_kernel[(lanes,)](
        logits, rows, positions, peaks, sums, *_scratch(lanes, num_tiles, logits.device), drawn.tokens, *sizes,
        state.seeds, *data, ALL_TILES=_all_tiles(num_tiles), num_warps=8,
    )  # fmt: skip
    search_kernel[(lanes,)](
        logits, rows, positions, peaks, sums, drawn.tokens, *sizes, state.seeds, *data,
        ALL_TILES=_all_tiles(num_tiles), BLOCK=SEARCH_BLOCK, num_warps=SEARCH_WARPS,
    )  # fmt: skip
    return drawn


def _scratch(lanes: int, num_tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Near tiles, and the values and ids of the candidates."""
    return (
        torch.empty((lanes, num_tiles), dtype=torch.int32, device=device),
        torch.empty((lanes, CANDIDATES), dtype=torch.float32, device=device),
        torch.empty((lanes, CANDIDATES), dtype=torch.int32, device=device),
    )


def _all_tiles(num_tiles: int) -> int:
    return max(next_power_of_2(num_tiles), TILE // SUB)


@dataclass(frozen=True)
class Reports:
    """Logprobs of some steps: [lanes, steps, 1 + MAX_LOGPROBS]; column 0 is the token's own, and its rank."""

    logprobs: torch.Tensor  # float32
    ids: torch.Tensor  # int32

    @classmethod
    def allocate(cls, num_lanes: int, num_steps: int, device: torch.device) -> Reports:
        shape = (num_lanes, num_steps, 1 + MAX_LOGPROBS)
        return cls(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device))


def report(
    logits: torch.Tensor, rows: torch.Tensor, drawn: Drawn, state: SamplerState, reports: Reports, step: int
) -> None:
    """Logprobs of the tokens just drawn, for the lanes that want them, as those of this step."""
    lanes, num_tiles = len(reports.ids), drawn.raw_peaks.shape[1]
    report_kernel[(lanes,)](
        logits, rows, drawn.tokens, drawn.raw_peaks, drawn.raw_sums, *_scratch(lanes, num_tiles, logits.device), step,
        reports.logprobs, reports.ids, reports.logprobs.stride(0), logits.stride(0), state.vocab_size, num_tiles,
        state.ints, ALL_TILES=_all_tiles(num_tiles), BLOCK=4096, WIDTH=1 + MAX_LOGPROBS, num_warps=8,
    )  # fmt: skip

"""What the sampler's kernels share: numbers that sort, noise, edited logits, lists of candidates.

A lane is a line of logits; rows[lane] is its row of the SamplerState, -1 for padding. Several lanes may have the same
row: the newest token of a sequence, and guesses after it. Comparisons are made on `order`, the bits of a float as an
unsigned number that sorts alike. A kernel that reads logits again edits them again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.ops import sampler_state as spec
from nanovllm.ops.sampling import LEVEL_COLUMN, LEVEL_TILE, TILE
from nanovllm.ops.triton.common import LOG2E, LOWEST, next_power_of_2
from nanovllm.sampling_params import MAX_BAD_WORD

SUB = 256  # columns whose maximum is kept: a vocabulary of 32,000 has 125 such tiles, so top_k = 100 has a bound
CANDIDATES = 256
FIRST_K = 64  # the bound of a row with top_p or min_p but no top_k
CHUNK = 16  # tiles read again at once
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
_PENALTIES, _COUNTED = tl.constexpr(spec.FLAG_PENALTIES), tl.constexpr(spec.COUNTED)
_MAX_BAD_WORD = tl.constexpr(MAX_BAD_WORD)
_HUGE = tl.constexpr(1.0e30)
_ALL_IDS = tl.constexpr(2**31 - 1)
_UNSETTLED = tl.constexpr(-1)
_LEAST = tl.constexpr(0x00800000)  # order(-inf) + 1: the least key of a token that may be drawn
UNALIGNED = ["rows_ptr", "masks_ptr", "positions_ptr", "tokens_ptr", "floats_ptr", "ints_ptr", "seeds_ptr", "mask_ptr",
             "counts_ptr", "prompt_ptr", "recent_ptr", "edits_ptr", "words_ptr"]  # fmt: skip


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
    A bound may be too low; 16 bits are all of a bf16 number."""
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
    """Bans and biases, then penalties, in the order of vLLM. Most rows have none: their branches are not taken.
    `state`: pointers of the SamplerState, then that to the lines of `mask` which lanes have, and the lane. Without the
    former the line is the row, and there are no guesses."""
    floats_ptr, ints_ptr, mask_ptr, counts_ptr, prompt_ptr, recent_ptr, edits_ptr, words_ptr, masks_ptr, lane = state
    flags = tl.load(ints_ptr + row * _INTS + _FLAGS)
    words = tl.cdiv(vocab, 32)
    if flags & _MASK != 0:
        line = row
        if masks_ptr is not None:
            line = tl.load(masks_ptr + lane)
        word = tl.load(mask_ptr + line * words + column // 32, mask=wanted, other=0)
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
                j = tl.arange(0, _MAX_BAD_WORD)
                at = position - length + j
                inside = (j < length) & (at >= tl.load(edits + i * 8 + 5))
                newest = tl.load(recent_ptr + row * _RECENT + at % _RECENT, mask=inside, other=-1)
                same = inside & (tl.load(other + j, mask=j < length, other=0) == newest)
                holds = holds & (tl.sum(same.to(tl.int32), axis=0) == length)
            x = tl.where(holds & (column == token), x + bias, x)
    if flags & _PENALTIES != 0:
        count = tl.load(counts_ptr + row.to(tl.int64) * vocab + column, mask=wanted, other=0).to(tl.float32)
        if masks_ptr is not None:
            num_guesses = position - tl.load(ints_ptr + row * _INTS + _COUNTED) - 1  # they are not counted
            for back in range(1, num_guesses + 1):
                count += (column == tl.load(recent_ptr + row * _RECENT + (position - back) % _RECENT)).to(tl.float32)
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


# ---- candidates ------------------------------------------------------------------------------------------------------


@triton.jit
def list_above(
    logits_ptr, row, position, vocab, peaks, bound, near_ptr, values_ptr, ids_ptr, state, EDIT: tl.constexpr
):
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
    """(keys, ids) of what was listed, by falling logit, equal ones by rising id; then keys of 0. A candidate's place is
    the number of candidates before it, counted 16 at a time: there are few, and tl.sort of 256 takes 36 steps whatever
    their number (and half of the time to compile the kernel that calls it)."""
    c = tl.arange(0, _CAP)
    key = order(tl.load(values_ptr + c, mask=c < found, other=0.0))
    ids = tl.load(ids_ptr + c, mask=c < found, other=0)
    place = tl.zeros([_CAP], dtype=tl.int32)
    for start in range(0, found, 16):
        j = start + tl.arange(0, 16)
        other = order(tl.load(values_ptr + j, mask=j < found, other=0.0))[None, :]
        other_id = tl.load(ids_ptr + j, mask=j < found, other=0)[None, :]
        before = (other > key[:, None]) | ((other == key[:, None]) & (other_id < ids[:, None]))
        place += tl.sum((before & (j < found)[None, :]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(values_ptr + place, unorder(key), mask=c < found)
    tl.store(ids_ptr + place, ids, mask=c < found)
    tl.debug_barrier()
    key = order(tl.load(values_ptr + c, mask=c < found, other=0.0))
    return tl.where(c < found, key, 0), tl.load(ids_ptr + c, mask=c < found, other=0)


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
def record(token, lane, row, position, vocab, any_left, tokens_ptr, state):
    """The token, and what the row remembers of it. If all is banned or not a number, the token is 0. Where guesses are
    verified, a token is certain later (ops/triton/drafts.py:accept_kernel): another lane of the same row may read
    `recent` here while this one writes it, and then either finds the guess that it follows, or that guess was wrong and
    what the other lane draws is dropped."""
    token = tl.where(any_left, tl.minimum(token, vocab - 1), 0)
    tl.store(tokens_ptr + lane, token.to(tl.int64))
    if state[8] is None:  # noqa: SIM102
        if tl.load(state[1] + row * _INTS + _FLAGS) & _PENALTIES != 0:
            at = state[3] + row.to(tl.int64) * vocab + token
            tl.store(at, tl.load(at) + 1)
            tl.store(state[1] + row * _INTS + _COUNTED, position)
    tl.store(state[5] + row * _RECENT + position % _RECENT, token)


def scratch(lanes: int, num_tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Near tiles, and the values and ids of the candidates."""
    return (
        torch.empty((lanes, num_tiles), dtype=torch.int32, device=device),
        torch.empty((lanes, CANDIDATES), dtype=torch.float32, device=device),
        torch.empty((lanes, CANDIDATES), dtype=torch.int32, device=device),
    )


def all_tiles(num_tiles: int) -> int:
    return max(next_power_of_2(num_tiles), TILE // SUB)

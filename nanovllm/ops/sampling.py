"""Drawing one token a row from temperature-scaled logits, with noise that depends on nothing but the row.

`gumbel_argmax_reference(logits, temperatures, seeds, positions) -> tokens` int64 [rows]: logits [rows, vocab], fp32
temperatures [rows] (0 = greedy), int64 seeds [rows], integer positions [rows] of the token being drawn.

The Gumbel trick: with g = -log(-log(u)), u uniform, argmax(x + g) is distributed as softmax(x). Noise for every column
costs more than reading the logits (about 100 integer operations and two logarithms a column, V = 151,936), so the draw
is made in two levels, which gives the same distribution: P(column) = P(tile) * P(column | tile).

    1. a tile of TILE columns: argmax over tiles of logsumexp(x of the tile) + g, one draw a tile;
    2. a column of that tile:  argmax over its columns of x + g, one draw a column.

Greedy rows take the maximum instead of the logsumexp and no noise; ties go to the lowest column, as in torch.argmax.
The noise is a counter-based generator, Philox4x32-10 with the row's seed as key and (index, position, level, 0) as
counter, so a row draws the same token whatever batch it is in and however often it is recomputed. A column at -inf is
never drawn as long as one is finite; a row of NaN or -inf only gives some column in range, never an invalid index.
Triton twin: `ops/triton/sampling.py`, equal except where two candidates lie within rounding.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 2048  # part of the definition: another tile size draws other tokens
LEVEL_TILE, LEVEL_COLUMN = 0, 1
_MASK = 0xFFFFFFFF

# Columns of SamplerState.floats and .ints
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = 0, 1, 2, 3, 4, 5, 8
TOP_K, ROW_FLAGS, NUM_LOGPROBS, START_EDITS, NUM_EDITS, NUM_INTS = 0, 1, 2, 3, 4, 8
FLAG_MASK, FLAG_EDITS, FLAG_PENALTIES = 1, 2, 4
EDIT_FIELDS = 8  # token, bits of the bias, position before which it holds; start, length and earliest place of a word
RECENT = 64  # tokens of the output that a row remembers; a bad word has no more


@dataclass(frozen=True)
class SamplerState:
    """What the running sequences ask of the sampler, as data on the device: one row each, and one for padding."""

    vocab_size: int
    floats: torch.Tensor  # float32 [rows, NUM_FLOATS]
    ints: torch.Tensor  # int32 [rows, NUM_INTS]
    seeds: torch.Tensor  # int64 [rows]
    mask: torch.Tensor  # int32 [rows, words]: a bit for each token that may be sampled
    counts: torch.Tensor  # int16 [rows, vocab]: how often a token is in the output, for rows with penalties
    prompt: torch.Tensor  # int32 [rows, words]: a bit for each token of the prompt
    recent: torch.Tensor  # int32 [rows, RECENT]: the newest tokens of the output, at position % RECENT
    edits_address: torch.Tensor  # int64 [1]: where the lists of edits are, int32 [edits, EDIT_FIELDS]
    words_address: torch.Tensor  # int64 [1]: where the tokens of the bad words are, int32

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int) -> int:
        return num_rows * (2 * vocab_size + 8 * -(-vocab_size // 32) + 4 * (NUM_FLOATS + NUM_INTS + RECENT) + 8)

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> SamplerState:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        words = -(-vocab_size // 32)
        return cls(
            vocab_size, zeros(num_rows, NUM_FLOATS, dtype=torch.float32), zeros(num_rows, NUM_INTS, dtype=torch.int32),
            zeros(num_rows, dtype=torch.int64), zeros(num_rows, words, dtype=torch.int32),
            zeros(num_rows, vocab_size, dtype=torch.int16), zeros(num_rows, words, dtype=torch.int32),
            zeros(num_rows, RECENT, dtype=torch.int32), zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64),
        )  # fmt: skip


def philox(key: torch.Tensor, index: torch.Tensor, position: torch.Tensor, level: int) -> torch.Tensor:
    """First 32-bit word of Philox4x32-10, as int64 in [0, 2**32); the arguments broadcast.

    The products of two 32-bit numbers wrap in int64, but their 64 bits are all there: `>> 32` then the mask is umulhi.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = index & _MASK, position & _MASK, torch.full_like(index, level), torch.zeros_like(index)
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (high >> 32) & _MASK ^ c1 ^ k0, high & _MASK
        c2, c3 = (low >> 32) & _MASK ^ c3 ^ k1, low & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """23 random bits to the middle of their interval: u is exact in fp32 and neither 0 nor 1, so g is finite."""
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def gumbel_argmax_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    rows, vocab = logits.shape
    greedy = (temperatures == 0).unsqueeze(1)
    scale = torch.where(greedy, 1.0, 1.0 / temperatures.float().unsqueeze(1))
    num_tiles = -(-vocab // TILE)
    scaled = logits.float() * scale
    padded = torch.nn.functional.pad(scaled, (0, num_tiles * TILE - vocab), value=float("-inf"))
    tiles = padded.view(rows, num_tiles, TILE)
    key, position = seeds.long().unsqueeze(1), positions.long().unsqueeze(1)

    tile_index = torch.arange(num_tiles, device=logits.device).expand(rows, -1)
    noise = gumbel(philox(key, tile_index, position, LEVEL_TILE))
    mass = torch.where(greedy, tiles.amax(-1), tiles.logsumexp(-1) + noise)
    tile = mass.nan_to_num(nan=float("-inf")).argmax(-1, keepdim=True)  # [rows, 1]

    column = tile * TILE + torch.arange(TILE, device=logits.device)  # [rows, TILE]
    noise = gumbel(philox(key, column, position, LEVEL_COLUMN)).masked_fill(greedy, 0.0)
    candidates = padded.gather(1, column) + noise
    best = candidates.nan_to_num(nan=float("-inf")).argmax(-1)
    return (tile.squeeze(1) * TILE + best).clamp_max(vocab - 1)

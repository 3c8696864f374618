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
import torch

TILE = 2048  # part of the definition: another tile size draws other tokens
LEVEL_TILE, LEVEL_COLUMN = 0, 1
_MASK = 0xFFFFFFFF


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

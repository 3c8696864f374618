"""Temperature and greedy sampling in one pass over the logits (twin and derivation: `ops/sampling.py`).

Softmax, cumulative sum and search would read the [rows, vocab] logits several times; noise for every column would cost
ten times the read. Drawing first a tile of TILE columns and then a column inside it needs the logits once, plus one
tile a row again:

    1. `tile_kernel`: a program owns TILES tiles of one row and stores for each the logsumexp of its scaled logits plus
       one Gumbel draw (greedy rows: the maximum).
    2. `pick_kernel`: a program owns one row, takes the best tile, reads it again and takes its best column.

Logits stay in the dtype of the LM head; temperatures, seeds and positions are read on the device, so a captured graph
serves any mix of rows. Noise depends on (seed, position, column), not on the row's place in the batch.
"""
import torch
import triton
import triton.language as tl

from nanovllm.ops.sampling import LEVEL_COLUMN, LEVEL_TILE, TILE
from nanovllm.ops.triton.common import LOG2E, LOWEST, next_power_of_2

_LEVEL_TILE, _LEVEL_COLUMN = tl.constexpr(LEVEL_TILE), tl.constexpr(LEVEL_COLUMN)
_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(1.0 / LOG2E)


@triton.jit
def gumbel(seed, index, position, LEVEL: tl.constexpr):
    """-log(-log(u)) for one Philox word per index; u has 23 bits and lies strictly between 0 and 1."""
    zero = tl.zeros_like(index).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, index.to(tl.uint32), zero + position.to(tl.uint32), zero + LEVEL, zero)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def scaled_logits(logits_ptr, column, vocab, temperature):
    scale = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)
    x = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32) * scale
    return tl.where(x == x, x, float("-inf"))  # a NaN must not win every comparison


@triton.jit(do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr", "positions_ptr"])
def tile_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, mass_ptr, stride, vocab, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    temperature = tl.load(temperatures_ptr + row)
    x = scaled_logits(logits_ptr + row * stride, column, vocab, temperature)
    peak = tl.maximum(tl.max(x, axis=1), LOWEST)  # finite, so that a tile of -inf gives log(0) and not NaN
    total = tl.sum(tl.exp2((x - peak[:, None]) * _LOG2E), axis=1)
    noise = gumbel(tl.load(seeds_ptr + row), tile, tl.load(positions_ptr + row), _LEVEL_TILE)
    mass = tl.where(temperature > 0, peak + tl.log2(total) * _LN2 + noise, peak)
    tl.store(mass_ptr + row * num_tiles + tile, mass, mask=tile < num_tiles)


@triton.jit(do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr", "positions_ptr", "tokens_ptr"])
def pick_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, mass_ptr, tokens_ptr, stride, vocab, num_tiles,
    TILE: tl.constexpr, ALL_TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ALL_TILES)
    mass = tl.load(mass_ptr + row * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    tile = tl.argmax(mass, axis=0)
    column = tile * TILE + tl.arange(0, TILE)
    temperature = tl.load(temperatures_ptr + row)
    x = scaled_logits(logits_ptr + row * stride, column, vocab, temperature)
    noise = gumbel(tl.load(seeds_ptr + row), column, tl.load(positions_ptr + row), _LEVEL_COLUMN)
    best = tile * TILE + tl.argmax(tl.where(temperature > 0, x + noise, x), axis=0)
    tl.store(tokens_ptr + row, tl.minimum(best, vocab - 1).to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tiles_per_program: int = 4,
) -> torch.Tensor:
    """int64 tokens [rows]. logits [rows, >= vocab_size], fp32 temperatures (0 = greedy), int64 seeds, int positions.

    `vocab_size` leaves out the padded columns of an LM head rounded up for its GEMM.
    """
    rows, columns = logits.shape
    vocab = columns if vocab_size is None else vocab_size
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows == 0:
        return out
    assert logits.stride(1) == 1
    num_tiles = triton.cdiv(vocab, TILE)
    mass = torch.empty((rows, num_tiles), dtype=torch.float32, device=logits.device)
    tiles = min(tiles_per_program, next_power_of_2(num_tiles))
    tile_kernel[(rows, triton.cdiv(num_tiles, tiles))](
        logits, temperatures, seeds, positions, mass, logits.stride(0), vocab, num_tiles,
        TILE=TILE, TILES=tiles, num_warps=4,
    )  # fmt: skip
    pick_kernel[(rows,)](
        logits, temperatures, seeds, positions, mass, out, logits.stride(0), vocab, num_tiles,
        TILE=TILE, ALL_TILES=next_power_of_2(num_tiles), num_warps=4,
    )  # fmt: skip
    return out

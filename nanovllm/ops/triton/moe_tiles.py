"""How the expert kernels are cut, by the number of tokens: a table of measured tiles (moe_tiles.json), else a rule.

A TileChoice may depend on T, top_k, the sizes of an expert, the dtype and the card: on nothing else. Not on the number
of buffers: a model whose experts are all on the card (S = experts) and one that computes them in turns from a pool
(S = buffers of the pool) must run the same tiles to give the same bits.

The table is a list of entries, each the TileChoice for up to `max_tokens` tokens on one card and one size of expert:

    {"device": "NVIDIA H200", "hidden": 4096, "size": 14336, "top_k": 2, "element_size": 2, "max_tokens": 16,
     "kind": "tiles", "block_m": 16, "gate_up": [32, 128, 4, 4], "down": [32, 256, 4, 4]}

where a tile is [block_n, block_k, num_warps, num_stages] and kind is one of
    gemv      one matrix-vector product per pair (`moe_gemv.py`); block_n and block_k count, the rest is ignored
    tiles     sorted rows through the kernels of `moe_gemm.py`
    grouped   sorted rows through PyTorch's grouped product (`moe_grouped.py`); tiles are ignored
`nanovllm bench moe --tune` measures and writes entries. Tokens beyond the last entry take the rule.
"""

import functools
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops.triton.common import capability, next_power_of_2
from nanovllm.ops.triton.gemv import choose_block

TABLE = Path(__file__).with_name("moe_tiles.json")
KEY = ("device", "hidden", "size", "top_k", "element_size", "max_tokens")  # of an entry of the table
KINDS = ("gemv", "tiles", "grouped")
KB = 1024
# Shared memory of a program by architecture, less a little for what the compiler adds.
SHARED = {(8, 0): 160 * KB, (9, 0): 224 * KB, (10, 0): 224 * KB}
LEAST_SHARED = 96 * KB  # sm_86, sm_89, sm_120
GROUPED_PAIRS, GROUPED_SIZE = 6144, 4096  # see uses_grouped


@dataclass(frozen=True)
class Tile:
    block_n: int  # of GEMM 1: outputs, so twice as many rows of the weight
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class TileChoice:
    kind: str
    block_m: int = 16
    gate_up: Tile = Tile(32, 128)
    down: Tile = Tile(32, 256)


@dataclass(frozen=True)
class MoeShape:
    """What a TileChoice may depend on, besides the number of tokens and the card."""

    hidden: int
    size: int  # intermediate size of one expert
    top_k: int
    dtype: torch.dtype
    down: tuple[int, int] | None = None  # low-rank experts: outputs and columns of the second product
    eight_bits: bool = False  # of a weight; `dtype` is that of x

    @property
    def element_size(self) -> int:
        return 1 if self.eight_bits else self.dtype.itemsize


def choose_tiles(num_tokens: int, shape: MoeShape, device: torch.device) -> TileChoice:
    for max_tokens, choice in _entries(shape, device):
        if num_tokens <= max_tokens:
            return choice
    return default_tiles(num_tokens, shape, capability(device))


def default_tiles(num_tokens: int, shape: MoeShape, arch: tuple[int, int]) -> TileChoice:
    """The rule, from an H200's measurements (us of one layer's experts in bf16; all tokens want the same two experts /
    every token draws its own; `nanovllm bench moe`):

        Mixtral      gate_up, BLOCK_M 64, 64x64x4x4    gate_up, 128, 128x64x8x3     gate_up, 32, 32x128x4x4
        64 tokens          121 / 436                                                     206 / 448
        128                164 / 440                         140 / 470
        256                283 / 499                         237 / 505
                     down, 64, 64x256x4x3              down, 64, 128x128x8x3        down, 128, 128x64x8x4
        64                  63 / 235                          86 / 225
        128                 98 / 236                          81 / 225                   104 / 240
        256                                                  146 / 269                   106 / 255

    A block as tall as the batch reads every weight once, however few experts are chosen. With many small experts
    (top_k 4 and more stand for that: S may not count) few tokens meet at one, and BLOCK_M 16 stays best up to 64
    tokens: Qwen3-30B-A3B, 64 tokens: 185 + 100 us with 16, 195 + 101 with 32 or 64.
    """
    few_meet = shape.top_k >= 4
    if num_tokens <= (4 if few_meet else 2):
        return _gemv_tiles(shape)
    if uses_grouped(num_tokens, shape, arch):
        return TileChoice("grouped", 128)
    if shape.dtype == torch.float32 or arch < (8, 0):
        # Ordinary cores, operands in registers (see `prefill_attention.choose_tile`).
        return TileChoice("tiles", 16 if num_tokens <= 16 else 32, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    if few_meet and num_tokens <= 64:
        choice = TileChoice("tiles", 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 4))
    elif few_meet and num_tokens <= 512:
        choice = TileChoice("tiles", 64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))
    elif num_tokens <= 16:
        choice = TileChoice("tiles", 16, Tile(32, 128, 4, 4), Tile(32, 256, 4, 4))
    elif num_tokens <= 64:
        choice = TileChoice("tiles", 64, Tile(64, 64, 4, 4), Tile(64, 256, 4, 3))
    elif num_tokens <= 128:
        choice = TileChoice("tiles", 64, Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
    elif num_tokens <= 512:
        choice = TileChoice("tiles", 128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 4))
    else:
        choice = TileChoice("tiles", 128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))
    if shape.eight_bits:
        choice = _eight_bits(choice)
    limit = SHARED.get(arch, LEAST_SHARED)
    rows = choice.block_m * (1 if shape.down is None else 2)  # low-rank: gate and up read rows of their own
    gate_up, down = fit(choice.gate_up, rows, 2, limit), fit(choice.down, choice.block_m, 1, limit)
    return TileChoice("tiles", choice.block_m, gate_up, down)


def _eight_bits(choice: TileChoice) -> TileChoice:
    """Not measured yet: cut so that registers hardly spill (ptxas: 52 bytes on sm_80, none on sm_90). If blocks have
    scales, the sum of a step lies in registers beside the whole one, and converted numbers do in any case: so gate and
    up take 64 outputs at most, and 64 columns where rows are many. Elsewhere 128 columns are the bytes of 64 numbers of
    16 bits. `fit` counts 16 bits a weight: what bytes leave of that is the room for a tile that is converted."""
    gate_up, down = choice.gate_up, choice.down
    columns = 128 if choice.block_m < 64 else 64
    return TileChoice(
        choice.kind,
        choice.block_m,
        Tile(min(gate_up.block_n, 64), columns, gate_up.num_warps, gate_up.num_stages),
        Tile(min(down.block_n, 128), 128, down.num_warps, down.num_stages),
    )


def _gemv_tiles(shape: MoeShape) -> TileChoice:
    """A large top_k goes with many experts: few tokens then hardly ever meet at one. Small experts take two outputs a
    warp (Qwen3-30B-A3B, one token: 15.5 + 9.1 us against 17.0 + 12.8)."""
    outputs, columns = shape.down or (shape.hidden, shape.size)
    blocks = (
        choose_block(1, shape.hidden, shape.size, True, shape.eight_bits),
        choose_block(1, columns, outputs, False, shape.eight_bits),
    )
    if shape.size <= 1024 and shape.eight_bits:  # the same bytes; not measured yet
        blocks = (2, min(2048, next_power_of_2(shape.hidden))), (4, min(512, next_power_of_2(columns)))
    elif shape.size <= 1024:
        blocks = (2, min(1024, next_power_of_2(shape.hidden))), (2, min(512, next_power_of_2(columns)))
    return TileChoice("gemv", 1, *(Tile(*block, 1, 1) for block in blocks))


def uses_grouped(num_tokens: int, shape: MoeShape, arch: tuple[int, int]) -> bool:
    """PyTorch's grouped product beats our tiles on Hopper where there are many rows of large experts (torch 2.11, one
    layer, TFLOP/s, tiles / grouped: Mixtral with 2,048 tokens 516 / 510, 4,096 551 / 611, 8,192 562 / 625; but
    Qwen3-30B-A3B with 8,192 tokens 491 / 416). Elsewhere it takes other dtypes or reads the sizes of the groups on the
    host, which cannot be captured. It needs rows of whole 16 bytes, gate and up that read the same ones, and weights in
    the dtype of x."""
    if shape.down is not None or shape.eight_bits:
        return False
    whole = shape.hidden % 8 == 0 and shape.size % 8 == 0 and shape.size >= GROUPED_SIZE
    return arch == (9, 0) and shape.dtype == torch.bfloat16 and whole and num_tokens * shape.top_k >= GROUPED_PAIRS


def fit(tile: Tile, block_m: int, num_weights: int, limit: int) -> Tile:
    """The tile with stages, then outputs, then columns cut until its 16-bit stages fit the shared memory."""
    n, k, stages = tile.block_n, tile.block_k, tile.num_stages
    while stages * (block_m + num_weights * n) * k * 2 > limit:
        if stages > 3:
            stages -= 1
        elif n > 64:
            n //= 2
        elif k > 32:
            k //= 2
        else:
            stages -= 1
    return Tile(n, k, tile.num_warps, stages)


def sizes_to_warm(max_tokens: int, shape: MoeShape, device: torch.device) -> list[int]:
    """A number of tokens for every TileChoice up to max_tokens, largest first: running these compiles every kernel."""
    first: dict[TileChoice, int] = {}
    for num_tokens in range(1, max_tokens + 1):
        first.setdefault(choose_tiles(num_tokens, shape, device), num_tokens)
    return sorted(first.values(), reverse=True)


# ---- the table -----------------------------------------------------------------------------------------------------


@functools.cache
def _entries(shape: MoeShape, device: torch.device) -> tuple[tuple[int, TileChoice], ...]:
    """(max_tokens, choice) of this shape on this card, in the order of tokens; none were measured for low-rank ones.
    `element_size` of experts in 8-bit floats is 1."""
    if device.type != "cuda" or shape.down is not None:
        return ()
    key = (torch.cuda.get_device_name(device), shape.hidden, shape.size, shape.top_k, shape.element_size)
    found = [(tokens, choice) for entry_key, tokens, choice in read_table(TABLE) if entry_key == key]
    return tuple(sorted(found, key=lambda pair: pair[0]))


def read_table(path: Path) -> list[tuple[tuple[str, int, int, int, int], int, TileChoice]]:
    """(device, hidden, size, top_k, element_size), max_tokens, choice; a wrong entry is refused by its number."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); restore it or write it anew with bench moe --tune") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: must be a list of entries, is {type(entries).__name__}")
    return [_parse(entry, f"{path}: entry {i}") for i, entry in enumerate(entries)]


def _parse(entry: object, where: str) -> tuple[tuple[str, int, int, int, int], int, TileChoice]:
    if not isinstance(entry, dict) or not isinstance(entry.get("device"), str) or entry.get("kind") not in KINDS:
        raise ConfigError(f"{where}: needs a device and a kind of {', '.join(KINDS)}, is {entry!r}")
    counts = [_integer(entry, name, where, 1, 1 << 30) for name in KEY[1:]]
    block_m = _integer(entry, "block_m", where, 1, 256)
    tiles = [_parse_tile(entry.get(name), entry["kind"], f"{where}, {name}") for name in ("gate_up", "down")]
    if block_m != next_power_of_2(block_m) or (entry["kind"] == "tiles" and block_m < 16):
        raise ConfigError(f"{where}: block_m={block_m} must be a power of two, at least 16 for tiles")
    return (entry["device"], *counts[:4]), counts[4], TileChoice(entry["kind"], block_m, *tiles)


def _integer(entry: dict[str, Any], name: str, where: str, least: int, most: int) -> int:
    value = entry.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{where}: {name}={value!r} must be an integer from {least} to {most}")
    return value


def _parse_tile(value: object, kind: str, where: str) -> Tile:
    names, least = ("block_n", "block_k", "num_warps", "num_stages"), (16, 16, 1, 1) if kind == "tiles" else (1,) * 4
    if not isinstance(value, list) or len(value) != len(names):
        raise ConfigError(f"{where}: must be [{', '.join(names)}], is {value!r}")
    most = (512, 4096, 16, 8)
    found = [_integer({name: v}, name, where, low, high) for name, v, low, high in zip(names, value, least, most)]
    if any(v != next_power_of_2(v) for v in found[:3]):
        raise ConfigError(f"{where}: {value} must be powers of two but for the stages")
    return Tile(*found)


def entry_of(device: str, shape: MoeShape, max_tokens: int, choice: TileChoice) -> dict[str, Any]:
    """What the table holds of a TileChoice: the inverse of reading it."""
    key = (device, shape.hidden, shape.size, shape.top_k, shape.element_size, max_tokens)
    tiles = {"gate_up": list(astuple(choice.gate_up)), "down": list(astuple(choice.down))}
    return {**dict(zip(KEY, key)), "kind": choice.kind, "block_m": choice.block_m, **tiles}


def write_table(path: Path, entries: list[dict[str, Any]]) -> None:
    """Adds entries; those of the same card, shape and number of tokens are replaced. One a line."""
    old = json.loads(path.read_text()) if path.exists() else []
    kept = {tuple(entry[name] for name in KEY): entry for entry in (*old, *entries)}
    for i, entry in enumerate(kept.values()):
        _parse(entry, f"new entry {i}")
    lines = ",\n".join(json.dumps(kept[key]) for key in sorted(kept))
    path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")
    _entries.cache_clear()  # calls after this one in this process use the new entries

"""Tensor types of GGUF: their size in bytes, and how to turn them into float32.

A quantised tensor is a row of blocks. A block holds a fixed number of weights as small integers `q` and the scale
(and, for some types, the minimum) they share, so one weight is `d * q` or `d * q + m`. Every function here takes
`[blocks, bytes per block]` uint8 and returns `[blocks, weights per block]` float32, on the device of its input.

Two families:
  Qx_0, Qx_1   32 weights. `_0` has a scale only and centres q on zero; `_1` has a scale and a minimum.
  Qx_K         256 weights in sub-blocks of 16 or 32 whose own small scales are quantised too, under one float16 each.

All numbers are little endian, as is every machine PyTorch supports, so bytes are reinterpreted, not swapped.
Measured on two cores: 0.45 s (0.75 s on one) for the 135 million weights of SmolLM2 (Q4_1 with a Q8_0 embedding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.hardware.parallel import Shard


def _numbers(blocks: torch.Tensor, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes start..end of every block as numbers of `dtype`, widened to float32. The copy makes them contiguous."""
    return blocks[:, start:end].contiguous().view(dtype).float()


def _nibbles(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., bytes] -> [..., 2, bytes]: all low nibbles come first, then all high nibbles (ggml's order)."""
    out = torch.empty(*packed.shape[:-1], 2, packed.shape[-1], dtype=dtype, device=packed.device)
    out[..., 0, :] = packed & 0x0F
    out[..., 1, :] = packed >> 4
    return out


def _bits(packed: torch.Tensor, shifts: list[int], mask: int) -> torch.Tensor:
    """[..., bytes] -> [..., len(shifts), bytes]: the field of each byte that sits at each shift."""
    shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shift) & mask


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d f16 | 16 bytes of nibbles = 18 bytes, 32 weights: d * (q - 8)."""
    d = _numbers(blocks, 0, 2, torch.float16)
    return _nibbles(blocks[:, 2:]).flatten(1).sub_(8).mul_(d)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """d f16, m f16 | 16 bytes of nibbles = 20 bytes, 32 weights: d * q + m."""
    dm = _numbers(blocks, 0, 4, torch.float16)
    return _nibbles(blocks[:, 4:]).flatten(1).mul_(dm[:, :1]).add_(dm[:, 1:])


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """4 bytes -> [blocks, 32] of 0 or 16: bit i of the little-endian word is the fifth bit of weight i."""
    bits = _bits(high, list(range(8)), 1)  # [blocks, 8 bits, 4 bytes]
    return bits.transpose(1, 2).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """d f16 | fifth bits, 4 bytes | 16 bytes of nibbles = 22 bytes, 32 weights: d * (q - 16)."""
    d = _numbers(blocks, 0, 2, torch.float16)
    q = _nibbles(blocks[:, 6:]).flatten(1).add_(_fifth_bits(blocks[:, 2:6]))
    return q.sub_(16).mul_(d)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """d f16, m f16 | fifth bits, 4 bytes | 16 bytes of nibbles = 24 bytes, 32 weights: d * q + m."""
    dm = _numbers(blocks, 0, 4, torch.float16)
    q = _nibbles(blocks[:, 8:]).flatten(1).add_(_fifth_bits(blocks[:, 4:8]))
    return q.mul_(dm[:, :1]).add_(dm[:, 1:])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d f16 | 32 x int8 = 34 bytes, 32 weights: d * q."""
    d = _numbers(blocks, 0, 2, torch.float16)
    return _numbers(blocks, 2, 34, torch.int8).mul_(d)


def _six_bit(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes of 6-bit numbers -> scale and minimum of the 8 sub-blocks, each uint8 [blocks, 8].

    12 bytes x 8 bits = 16 numbers x 6 bits. Call the bytes a[0:4], b[0:4], c[0:4]. Sub-blocks 0-3 have their scale in
    the low six bits of a, their minimum in the low six bits of b. Sub-blocks 4-7 have the low four bits of scale
    and minimum in the two nibbles of c, and their top two bits in what a and b left over.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    return scale, torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)


def _sub_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d f16, dmin f16, 12 bytes of 6-bit numbers -> scale and minimum of the 8 sub-blocks, each [blocks, 8, 1]."""
    d = _numbers(blocks, 0, 4, torch.float16)
    scale, minimum = (part.float() for part in _six_bit(blocks[:, 4:16]))
    return scale.mul_(d[:, :1]).unsqueeze(-1), minimum.mul_(d[:, 1:]).unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """d f16, dmin f16, 12 bytes of scales | 128 bytes of nibbles = 144 bytes, 256 weights in 8 sub-blocks of 32.

    32 bytes of nibbles hold two sub-blocks: the low nibbles are the even one, the high nibbles the odd one.
    """
    scale, minimum = _sub_scales(blocks)
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1, 2)  # [blocks, 8, 32]
    return q.mul_(scale).sub_(minimum).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K with 32 bytes of fifth bits before the nibbles: 176 bytes. Bit j of byte i: weight i of sub-block j."""
    scale, minimum = _sub_scales(blocks)
    q = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1, 2)
    q.add_(_bits(blocks[:, 16:48], list(range(8)), 1) << 4)
    return q.mul_(scale).sub_(minimum).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of nibbles | 64 bytes of 2-bit tops | 16 x int8 scales | d f16 = 210 bytes, 256 weights.

    Weights come in two halves of 128; a half owns 64 bytes of nibbles and 32 of tops. Weights 0-63 of a half
    are the low nibbles, 64-127 the high ones; byte i of the tops has bits 0-1 for weight i, 2-3 for i + 32, 4-5 for
    i + 64, 6-7 for i + 96. Each 16 weights share one scale: d * scale * (q - 32).
    """
    scale = _numbers(blocks, 192, 208, torch.int8).mul_(_numbers(blocks, 208, 210, torch.float16))
    q = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)  # [blocks, 2 halves x 2 nibbles x 64]
    tops = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), [0, 2, 4, 6], 3)  # [blocks, 2 halves, 4, 32]
    q.add_(tops.flatten(1) << 4).sub_(32)
    return q.unflatten(1, (16, 16)).mul_(scale.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True)
class TensorType:
    """`dtype` is set for plain numbers, `unpack` for quantised blocks; never both."""

    name: str
    block_len: int  # weights in a block
    block_bytes: int
    dtype: torch.dtype | None = None
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None


# The keys are the numbers ggml gives its types in the file.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, torch.float32),
    1: TensorType("F16", 1, 2, torch.float16),
    30: TensorType("BF16", 1, 2, torch.bfloat16),
    2: TensorType("Q4_0", 32, 18, unpack=_q4_0),
    3: TensorType("Q4_1", 32, 20, unpack=_q4_1),
    6: TensorType("Q5_0", 32, 22, unpack=_q5_0),
    7: TensorType("Q5_1", 32, 24, unpack=_q5_1),
    8: TensorType("Q8_0", 32, 34, unpack=_q8_0),
    12: TensorType("Q4_K", 256, 144, unpack=_q4_k),
    13: TensorType("Q5_K", 256, 176, unpack=_q5_k),
    14: TensorType("Q6_K", 256, 210, unpack=_q6_k),
}

# Known only to be refused by name.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def decode(raw: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Raw bytes -> a new flat tensor: plain types as stored, quantised types as float32."""
    assert raw.dtype == torch.uint8
    assert raw.dim() == 1
    assert raw.numel() % kind.block_bytes == 0
    if kind.dtype is not None:
        return raw.clone().view(kind.dtype)  # clone first: a fresh buffer is aligned for any dtype
    assert kind.unpack is not None
    return kind.unpack(raw.view(-1, kind.block_bytes)).flatten()


@dataclass(frozen=True)
class StoredBlocks:
    """A quantised matrix as its file has it: uint8 [rows, bytes of a row]."""

    kind: TensorType
    raw: torch.Tensor

    def cut(self, shard: Shard) -> StoredBlocks | None:
        """Some of its rows or columns; None if that would cut blocks."""
        start, length = shard.start, shard.length
        if shard.dim == 1:
            if start % self.kind.block_len or length % self.kind.block_len:
                return None
            start, length = (n // self.kind.block_len * self.kind.block_bytes for n in (start, length))
        return StoredBlocks(self.kind, self.raw.narrow(shard.dim, start, length))


def split(raw: torch.Tensor, kind: TensorType) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows of a quantised tensor, uint8 [rows, bytes of a row], as what they are made of: the small integers q, uint8
    [rows, weights] (those of Q8_0 are int8 as bits), and the numbers that a block shares, in the order of the functions
    above, each uint8 [rows, blocks, bytes]; the 6-bit ones of Q4_K and Q5_K as a byte each."""
    rows, name = len(raw), kind.name
    blocks = raw.reshape(-1, kind.block_bytes)
    if name == "Q6_K":
        q = _nibbles(blocks[:, :128].unflatten(1, (2, 64)), torch.uint8).flatten(1)
        q |= _bits(blocks[:, 128:192].unflatten(1, (2, 32)), [0, 2, 4, 6], 3).flatten(1) << 4
        shared = [blocks[:, 208:210], blocks[:, 192:208]]
    elif name.endswith("_K"):
        q = _nibbles(blocks[:, -128:].unflatten(1, (4, 32)), torch.uint8).flatten(1, 2)
        if name == "Q5_K":
            q |= _bits(blocks[:, 16:48], list(range(8)), 1) << 4
        shared = [blocks[:, 0:2], blocks[:, 2:4], *_six_bit(blocks[:, 4:16])]
    else:
        first = 4 if name.endswith("_1") else 2
        shared = [blocks[:, at : at + 2] for at in range(0, first, 2)]
        if name.startswith("Q5"):
            q = _nibbles(blocks[:, first + 4 :], torch.uint8).flatten(1) | _fifth_bits(blocks[:, first : first + 4])
        else:
            q = blocks[:, first:] if name == "Q8_0" else _nibbles(blocks[:, first:], torch.uint8)
    return q.reshape(rows, -1), [part.reshape(rows, -1, part.shape[1]) for part in shared]

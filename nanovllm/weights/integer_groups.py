"""IntegerGroups: a weight of any file of small integers in the one form that a GPU computes with (ops/integers.py).

    file                        bits  group            offset, in steps
    AWQ, GPTQ, compressed       4     the file's       8 - zero; none where every zero is 8
    Q4_0                        4     32               none
    Q4_1                        4     32               m / d + 8
    Q4_K                        4     32, sub-blocks   8 - (dmin minimum) / (d scale)
    Q8_0                        8     32               none
    Q5_0, Q5_1, Q5_K            8     32               as in 4 bits; the fields have room to spare, which costs memory
    Q6_K                        8     16               none

Groups are runs of inputs. Where they are not (GPTQ's act-order), the inputs are sorted by group and `order` says where
each came from: x gets the same order before the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanovllm.weights.four_bits import BLOCK, MAX_SHIFT, MIDDLE, Grouped, in_blocks
from nanovllm.weights.gguf_quants import StoredBlocks, split

# GGUF's type -> bits here, and the q that means zero or, with a minimum, the middle
KINDS = {"Q4_0": (4, 8), "Q4_1": (4, 8), "Q4_K": (4, 8), "Q8_0": (8, 0)}
KINDS |= {"Q5_0": (8, 16), "Q5_1": (8, 16), "Q5_K": (8, 16), "Q6_K": (8, 32)}


@dataclass(frozen=True)
class IntegerGroups:
    """w[o, i] = scale[o, i // group] (q[o, i] - 2^(bits - 1)) + offset[o, i // group]"""

    bits: int
    group: int  # inputs, a multiple of 32 (of 16 in 8 bits); the last group may have fewer
    q: torch.Tensor  # uint8 [outputs, inputs]
    scale: torch.Tensor  # float32 [outputs, groups]
    offset: torch.Tensor | None
    order: torch.Tensor | None = None  # int64 [inputs]: column i of q is input order[i] of the file

    def expanded(self) -> torch.Tensor:
        """float32, with columns as in the file"""

        def by_input(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.repeat_interleave(self.group, 1)[:, : self.q.shape[1]]

        found = (self.q.float() - 2 ** (self.bits - 1)) * by_input(self.scale)
        if self.offset is not None:
            found += by_input(self.offset)
        if self.order is not None:
            found[:, self.order] = found.clone()
        return found

    def columns(self, start: int, length: int) -> IntegerGroups:
        """Of a weight whose columns are in the file's order; both numbers are multiples of 32."""
        whole = self if start % self.group == 0 else self.in_groups(BLOCK)
        groups = slice(start // whole.group, -(-(start + length) // whole.group))
        offset = None if whole.offset is None else whole.offset[:, groups]
        return replace(whole, q=whole.q[:, start : start + length], scale=whole.scale[:, groups], offset=offset)

    def in_groups(self, size: int) -> IntegerGroups:
        """Smaller ones, by repeating scales: `size` divides `group`, or a row is one group."""
        if size == self.group:
            return self
        inputs = torch.arange(0, self.q.shape[1], size, device=self.q.device)
        scale, offset = (None if n is None else n[:, inputs // self.group] for n in (self.scale, self.offset))
        assert scale is not None
        return replace(self, group=size, scale=scale, offset=offset)

    def in_bits(self, bits: int) -> IntegerGroups:
        """The same numbers in a wider field."""
        return replace(self, bits=bits, q=self.q + (2 ** (bits - 1) - 2 ** (self.bits - 1)))

    @property
    def fits_half(self) -> bool:
        """Whether scale and offset in float16 leave the weights where they are (four_bits.py). Of types with 8 bits in
        use the scale is float16 in the file; those with 6 have at most 32 steps on each side."""
        steps, reach = self.scale.norm(), MIDDLE if self.bits == 4 else 32
        moved = (self.scale.half().float() - self.scale).abs() * reach
        if self.offset is not None:
            moved = moved + (self.offset.half().float() - self.offset).abs()
        return bool(moved.norm() <= MAX_SHIFT * steps)  # NaN: no


def from_grouped(found: Grouped) -> IntegerGroups | str:
    """A reason where groups are no runs, also after sorting."""
    if why := why_no_runs(found.group):
        return f"expanded: {why}"
    group, q, order = found.group, found.q, None
    if not found.is_in_order:
        order = torch.argsort(group, stable=True)
        group, q = group[order], q[:, order]
    runs = group[::BLOCK]
    size = int((runs == runs[0]).sum())  # blocks of the first group
    if torch.equal(runs, runs[0] + torch.arange(len(runs)) // size):
        runs = runs[::size]
    else:  # a rank's piece may begin within a group
        size = 1
    scale, zero = found.scale.float()[:, runs], found.zero.float()[:, runs]
    offset = None if bool((zero == MIDDLE).all()) else (MIDDLE - zero) * scale
    return IntegerGroups(4, size * BLOCK, q, scale, offset, order)


def why_no_runs(group: torch.Tensor) -> str:
    """Empty: sorted by group, inputs are runs of whole blocks."""
    if len(group) % BLOCK:
        return f"a row of {len(group)} is no multiple of {BLOCK}"
    if in_blocks(group) or in_blocks(group.sort().values):  # most files are in order
        return ""
    return f"its groups of {int((group == group.min()).sum())} inputs cut blocks of {BLOCK}"


def from_blocks(found: StoredBlocks) -> IntegerGroups:
    name = found.kind.name
    bits, middle = KINDS[name]
    q, header = split(found.raw, found.kind)
    d, *minimum = (_halves(part) for part in header[: 1 if name == "Q6_K" else 2])
    scale, offset = d, None
    if name == "Q6_K":
        scale = (d[..., None] * header[1].view(torch.int8).float()).flatten(1)  # [outputs, blocks, 16]
    elif name.endswith("_K"):
        scale, least = (part.float() for part in header[2:])  # [outputs, blocks, 8]
        scale = (d[..., None] * scale).flatten(1)
        offset = middle * scale - (minimum[0][..., None] * least).flatten(1)
    elif name.endswith("_1"):
        offset = minimum[0] + middle * d
    if (shift := 2 ** (bits - 1) - middle) != 0:
        q = q + shift  # of Q8_0, whose bytes have a sign, modulo 256
    return IntegerGroups(bits, q.shape[1] // scale.shape[1], q, scale, offset)


def _halves(part: torch.Tensor) -> torch.Tensor:
    """[outputs, blocks, 2 bytes] -> float32 [outputs, blocks]"""
    return part.contiguous().view(torch.float16).squeeze(-1).float()

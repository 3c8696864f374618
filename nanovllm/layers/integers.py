"""IntegerWeight: a weight of integers of 4 or 8 bits with a scale for each group of inputs, on a GPU (ops/integers.py).

Parts of one weight (q, k and v) may come in different forms: the wider bits and the smaller groups serve all. It
becomes an ordinary one where a row is no multiple of 32, where ranks cut it elsewhere, where the parts have their
inputs in different orders (act-order), or where scales are beyond float16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.parted import PartedWeight
from nanovllm.ops import integers
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.four_bits import Grouped
from nanovllm.weights.integer_groups import KINDS, IntegerGroups, from_blocks, from_grouped
from nanovllm.weights.loader import PackedTarget


@dataclass(frozen=True)
class IntegerForm:
    """Of the weights of a model. Those that a file has in another form take that one when they are loaded."""

    bits: int = 4
    group: int | None = 32  # inputs that share a scale; None: a whole row
    has_offset: bool = True
    quantises: bool = False  # whatever the file has is quantised, in groups of 32; otherwise floats stay

    @classmethod
    def of_gguf(cls, types: list[str]) -> IntegerForm:
        """That of most matrices: kernels are compiled for it while the file is read."""
        name = max(types, key=types.count)
        return cls(KINDS[name][0], 16 if name == "Q6_K" else 32, name.endswith(("_1", "4_K", "5_K")))

    def weight(self, parts: dict[str, int], columns: int, dtype: torch.dtype, device: torch.device) -> PartedWeight:
        return IntegerWeight(parts, columns, self, dtype, device)


@dataclass(frozen=True)
class Expanded:
    """A part that the form cannot hold."""

    numbers: torch.Tensor
    why: str

    def expanded(self) -> torch.Tensor:
        return self.numbers


@dataclass(frozen=True)
class IntegerTarget(PackedTarget):
    """Reads integers as they are stored, and cuts a rank's part out of them."""

    def fill(self, name: str, checkpoint: Checkpoint) -> None:
        packed = checkpoint.read_packed(name) if self.as_stored else None
        shard, found = self.shard, None
        if isinstance(packed, Grouped):
            if shard is not None:
                cut = slice(shard.start, shard.start + shard.length)
                packed = packed.narrow(cut, slice(None)) if shard.dim == 0 else packed.narrow(slice(None), cut)
            made = from_grouped(packed)
            found = Expanded(packed.expanded(), made) if isinstance(made, str) else made
        elif self.as_stored and packed is None and (blocks := checkpoint.read_blocks(name)) is not None:
            if shard is not None and shard.dim == 0:
                blocks = blocks.cut(shard) or blocks
            found = from_blocks(blocks)
            if shard is not None and shard.dim == 1:
                found = self._columns(found, shard.start, shard.length)
        if found is None:
            super().fill(name, checkpoint)
        else:
            self.take(name, found)  # type: ignore[arg-type]

    def _columns(self, found: IntegerGroups, start: int, length: int) -> IntegerGroups | Expanded:
        if start % integers.BLOCK == 0 and length % integers.BLOCK == 0:
            return found.columns(start, length)
        why = f"expanded: a rank has columns {start} to {start + length}, no multiples of {integers.BLOCK}"
        return Expanded(found.expanded()[:, start : start + length], why)


class IntegerWeight(PartedWeight):
    words: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    order: torch.Tensor | None  # x has its columns in this order before the product; None: as they are
    kind, target = "integers", IntegerTarget

    def __init__(
        self, parts: dict[str, int], columns: int, form: IntegerForm, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parts, columns, dtype, device)
        self._quantises, self.bits, self.group = form.quantises, form.bits, form.group or columns
        self.as_stored = not form.quantises
        groups = (self.shape[0], -(-columns // self.group))

        def empty(sizes: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        # Before loading too: kernels are compiled meanwhile, by their shapes.
        self.register_buffer("words", empty((self.shape[0], columns * self.bits // 32), torch.int32), persistent=False)
        self.register_buffer("scale", empty(groups, torch.float16), persistent=False)
        offset = empty(groups, torch.float16) if form.has_offset else None
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("order", None, persistent=False)

    def _prepare(self, found: IntegerGroups | Expanded | torch.Tensor) -> IntegerGroups | Expanded:
        """On the device at once: a file's numbers in a byte each are small, those of all parts in floats are not."""
        rest = self.shape[1] % integers.BLOCK
        if rest:
            numbers = found if isinstance(found, torch.Tensor) else found.expanded()
            return Expanded(numbers, f"expanded: a row of {self.shape[1]} is no multiple of {integers.BLOCK}")
        if isinstance(found, torch.Tensor):
            if not self._quantises:
                return Expanded(found, f"the file has {str(found.dtype).removeprefix('torch.')}")
            q, scale, offset = integers.quantise(found.to(self._device), self.bits)
            return IntegerGroups(self.bits, integers.BLOCK, q, scale, offset)
        if isinstance(found, IntegerGroups) and not found.fits_half:
            return Expanded(found.expanded(), "expanded: its scales are too small or too large for float16")
        return found

    def _fill(self, parts: list[Any]) -> str:
        plain = [part.why for part in parts if isinstance(part, Expanded)]
        if plain:
            return str(plain[0])
        orders = [part.order for part in parts]
        same = [order is orders[0] or (order is not None and torch.equal(order, orders[0])) for order in orders[1:]]
        if not all(same):
            return "expanded: its parts have their inputs in different orders (act-order)"
        bits = max(part.bits for part in parts)
        wide = [part if part.bits == bits else part.in_bits(bits) for part in parts]
        group = math.gcd(*(part.group for part in parts))
        wide = [part.in_groups(group) for part in wide]
        self.bits, self.group, self.order = bits, group, self._moved(orders[0])
        # One part after the other, straight to where it stays: no second copy of the whole.
        self.words = self._stack(self.words, [integers.pack_words(part.q.to(self._device), bits) for part in wide])
        self.scale = self._stack(self.scale, [part.scale for part in wide])
        if all(part.offset is None for part in wide):
            self.offset = None
        else:
            offsets = [torch.zeros_like(p.scale) if p.offset is None else p.offset for p in wide]
            self.offset = self._stack(self.offset, offsets)
        return ""

    def _moved(self, order: torch.Tensor | None) -> torch.Tensor | None:
        return None if order is None else order.to(self._device)

    def _stack(self, memory: torch.Tensor | None, parts: list[torch.Tensor]) -> torch.Tensor:
        """In the memory that is there, where it has the shape."""
        rows, columns = sum(map(len, parts)), parts[0].shape[1]
        if memory is None or memory.shape != (rows, columns):
            dtype = torch.float16 if memory is None else memory.dtype
            memory = torch.empty((rows, columns), dtype=dtype, device=self._device)
        start = 0
        for part in parts:
            memory[start : start + len(part)].copy_(part)
            start += len(part)
        return memory

    def _empty(self) -> None:
        self.words, self.scale, self.offset, self.order = self.words.new_empty(0), self.scale.new_empty(0), None, None

    @property
    def form(self) -> str:
        if self.plain is not None:
            return str(self.plain.dtype).removeprefix("torch.")
        return f"int{self.bits}-{self.group}"

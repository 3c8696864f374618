"""ScaledWeight: a weight in 8-bit floats with scales, on a GPU (ops/fp8.py).

It becomes an ordinary one where a part is in 16 bits in the file, or where the blocks of its parts do not meet at a
row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from nanovllm.layers.parted import PartedWeight
from nanovllm.ops import fp8
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.loader import PackedTarget


@dataclass(frozen=True)
class Scales:
    """How the weights of a model are scaled."""

    block: int = 0  # a scale for each block of so many rows and columns; 0: for each row
    quantises: bool = False  # numbers of a file in 16 or 32 bits are quantised; otherwise they stay
    experts: bool = False  # those of a mixture of experts too (moe/scaled.py)

    name: ClassVar[str] = "fp8"  # in memory/facts.py

    def weight(self, parts: dict[str, int], columns: int, dtype: torch.dtype, device: torch.device) -> PartedWeight:
        return ScaledWeight(parts, columns, self, dtype, device)


@dataclass(frozen=True)
class ScaledTarget(PackedTarget):
    """Reads 8-bit floats as they are stored."""

    def fill(self, name: str, checkpoint: Checkpoint) -> None:
        found = checkpoint.read_packed(name)
        if isinstance(found, Fp8Blocks):
            self.take(name, found if self.shard is None else found.cut(self.shard))  # type: ignore[arg-type]
        else:
            super().fill(name, checkpoint)


class ScaledWeight(PartedWeight):
    q: torch.Tensor
    scale: torch.Tensor
    unit: torch.Tensor  # 1: for products whose scales are applied afterwards
    kind, target = "fp8", ScaledTarget

    def __init__(
        self, parts: dict[str, int], columns: int, scales: Scales, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parts, columns, dtype, device)
        self._scales, self.block = scales, scales.block
        rows, block = self.shape[0], self.block
        sizes = (-(-rows // block), -(-columns // block)) if block else (rows,)
        # Before loading too: kernels are compiled meanwhile, by their shapes.
        self.register_buffer("q", torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=device), persistent=False)
        self.register_buffer("scale", torch.empty(sizes, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("unit", torch.ones((), dtype=torch.float32, device=device), persistent=False)

    def _prepare(self, found: Fp8Blocks | torch.Tensor) -> Fp8Blocks | torch.Tensor:
        if not isinstance(found, torch.Tensor) or not self._scales.quantises:
            return found
        if self.block:
            return Fp8Blocks(*fp8.quantise_blocks(found.to(self.q.device)), (self.block, self.block))
        return Fp8Blocks(*fp8.quantise(found.to(self.q.device), 0), (1, self.shape[1]))

    def _fill(self, parts: list[Any]) -> str:
        starts = list(accumulate(self.parts.values(), initial=0))
        if not all(isinstance(p, Fp8Blocks) for p in parts):
            return "not in 8 bits in the file"
        if not all(self._fits(p, start) for p, start in zip(parts, starts)):
            return f"expanded: {self._why_not(parts)}"
        for p, start in zip(parts, starts):
            self._copy(p, start)
        return ""

    def _why_not(self, parts: list[Fp8Blocks]) -> str:
        """Where one rank would have them in blocks: which cut is not at a border of theirs."""
        cuts, size = [p.shard for p in parts if p.shard is not None], self.block
        meets = size and all(cut.dim == 1 or cut.total % size == 0 for cut in cuts[:-1])
        if not cuts or not meets:
            what = f"{size} x {size}" if size else f"1 x {self.shape[1]}"
            return f"its parts, of {list(self.parts.values())} rows, do not begin and end where blocks of {what} do"
        num_ranks = max(cut.num_ranks for cut in cuts)
        if cuts[0].dim == 0:  # how many would not depends on the heads as well
            return f"{num_ranks} ranks cut {' + '.join(str(cut.total) for cut in cuts)} rows within blocks of {size}"
        good = cuts[0].good_ranks(size)
        what = f"{cuts[0].total} inputs within blocks of {size}"
        return f"{num_ranks} ranks cut {what}; numbers of ranks that keep it: {good}"

    def _empty(self) -> None:
        self.q = self.scale = self.q.new_empty(0)

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.block,)

    @property
    def label(self) -> str:
        return "FP8" if self.plain is None else str(self.plain.dtype).removeprefix("torch.")

    def expanded(self, places: torch.Tensor | None = None) -> torch.Tensor:
        if places is None:
            return fp8.expand(self.q, self.scale, self._dtype)
        q = self.q.view(torch.uint8)[places].view(self.q.dtype)  # not every PyTorch indexes 8-bit floats
        if not self.block:
            return fp8.expand(q, self.scale[places], self._dtype)
        wide = self.scale[places // self.block].repeat_interleave(self.block, 1)[:, : self.shape[1]]
        return (q.float() * wide).to(self._dtype)

    def set_rows(self, first: int, numbers: torch.Tensor) -> None:
        if not self.block:
            q, scale = fp8.quantise(numbers, 0)
            self.q[first:].copy_(q)
            self.scale[first:].copy_(scale[:, 0])
            return
        begin = first // self.block * self.block  # a block has rows before them, too
        before = self.expanded(torch.arange(begin, first, device=self.q.device))
        q, scale = fp8.quantise_blocks(torch.cat((before.float(), numbers.float())))
        self.q[begin:].copy_(q)
        self.scale[begin // self.block :].copy_(scale)

    def _fits(self, part: Fp8Blocks, start: int) -> bool:
        if not self.block:
            return part.first[1] + self.shape[1] <= part.block[1]
        return part.block == (self.block, self.block) and part.first == (0, 0) and start % self.block == 0

    def _copy(self, part: Any, start: int) -> None:
        self.q[start : start + len(part.q)].copy_(part.q)
        if self.block:
            first = start // self.block
            self.scale[first : first + len(part.scale)].copy_(part.scale)
        else:
            self.scale[start : start + len(part.q)].copy_(part.row_scales())

    @property
    def num_bytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes if self.plain is None else self.plain.nbytes

"""ScaledWeight: a weight in 8-bit floats with scales, on a GPU (ops/fp8.py); ScaledLoading: how a checkpoint fills
all those of a model.

A layer has one in place of a parameter if `Build.scaling` is set, and gives it to its operators as it would give the
parameter. What does not fit (a part that the file has in 16 bits, parts whose blocks do not meet at a row) makes the
whole weight an ordinary one, exact, with a line in the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from nanovllm.hardware.parallel import Shard
from nanovllm.ops import fp8
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.loader import LoadTarget, PackedTarget, matrix_targets

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True)
class Scales:
    """How the weights of a model are scaled."""

    block: int = 0  # a scale for each block of so many rows and columns; 0: for each row
    quantises: bool = False  # numbers of a file in 16 or 32 bits are quantised; otherwise they stay
    experts: bool = False  # those of a mixture of experts too (moe/scaled.py)


class EightBits(nn.Module):
    """Numbers in 8-bit floats: a ScaledWeight, or a layer's experts (moe/scaled.py)."""

    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """With the scales."""
        raise NotImplementedError


class ScaledWeight(EightBits):
    """[rows, columns], filled part by part by the loader; the parts lie below each other in their order."""

    q: torch.Tensor
    scale: torch.Tensor
    unit: torch.Tensor  # 1: for products whose scales are applied afterwards

    def __init__(
        self, parts: dict[str, int], columns: int, scales: Scales, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.parts, self.shape, self._scales, self._dtype = parts, (sum(parts.values()), columns), scales, dtype
        self.block = scales.block
        self.plain: torch.Tensor | None = None  # the weight in dtype, where 8 bits do not fit
        self._found: dict[str, Fp8Blocks | torch.Tensor] = {}
        rows, block = self.shape[0], self.block
        sizes = (-(-rows // block), -(-columns // block)) if block else (rows,)
        # Before loading too: kernels are compiled meanwhile, by their shapes.
        self.register_buffer("q", torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=device), persistent=False)
        self.register_buffer("scale", torch.empty(sizes, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("unit", torch.ones((), dtype=torch.float32, device=device), persistent=False)

    def put(self, part: str, found: Fp8Blocks | torch.Tensor) -> bool:
        """Whether all parts that are there are in 8 bits."""
        if isinstance(found, torch.Tensor) and self._scales.quantises:
            q, scale = fp8.quantise(found.to(self.q.device), 0)
            found = Fp8Blocks(q, scale, (1, self.shape[1]))
        self._found[part] = found
        if len(self._found) < len(self.parts):
            return True
        parts = [self._found.pop(name) for name in self.parts]
        starts = list(accumulate(self.parts.values(), initial=0))
        if all(isinstance(p, Fp8Blocks) and self._fits(p, start) for p, start in zip(parts, starts)):
            for p, start in zip(parts, starts):
                self._copy(p, start)
            return True
        numbers = [p.expanded() if isinstance(p, Fp8Blocks) else p for p in parts]
        self.plain = torch.cat([p.to(self.q.device, self._dtype) for p in numbers])
        self.q = self.scale = self.q.new_empty(0)
        return False

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


@dataclass(frozen=True)
class ScaledTarget(PackedTarget):
    """Reads 8-bit floats as they are stored."""

    def fill(self, name: str, checkpoint: Checkpoint) -> None:
        found = checkpoint.read_packed(name)
        if isinstance(found, Fp8Blocks):
            self.take(name, found if self.shard is None else found.cut(self.shard))  # type: ignore[arg-type]
        else:
            super().fill(name, checkpoint)


class ScaledLoading:
    """`targets` are for the loader; `report` comes after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain: list[str] = []

    def targets(self) -> dict[str, dict[str, LoadTarget]]:
        return {name: self._parts(name, weight) for name, weight in scaled_weights(self._model).items()}

    def _parts(self, name: str, weight: ScaledWeight) -> dict[str, LoadTarget]:
        layer = self._model.get_submodule(name.rpartition(".")[0])

        def make(part: str, shape: tuple[int, ...], shard: Shard | None) -> LoadTarget:
            return ScaledTarget(shape, shard, False, partial(self._take, weight, part))

        return matrix_targets(layer, weight.parts, weight.shape[1], make)

    def _take(self, weight: ScaledWeight, part: str, name: str, found: Any) -> None:
        if not weight.put(part, found):
            self._plain.append(name)

    def report(self) -> None:
        if self._plain:
            more = f" and {len(self._plain) - 1} more" if len(self._plain) > 1 else ""
            logger.info("%s%s: not in 8 bits, as in the file or because blocks do not meet", self._plain[0], more)
        size = sum(module.num_bytes for module in eight_bits(self._model)) / 1e6
        logger.info("matrices in memory: FP8, %.0f MB", size)


def scaled_weights(model: nn.Module) -> dict[str, ScaledWeight]:
    """By the names that they would have as parameters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ScaledWeight)}


def eight_bits(model: nn.Module) -> list[EightBits]:
    return [module for module in model.modules() if isinstance(module, EightBits)]

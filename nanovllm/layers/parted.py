"""PartedWeight: a weight in fewer bits on a GPU, filled part by part; PartedLoading: how a checkpoint fills all those
of a model.

A layer has one in place of a parameter if `Build.scaling` is set, and gives it to its operators as it would give the
parameter. The kinds: 8-bit floats (scaled.py), integers of 4 and 8 bits (integers.py). What does not fit its kind makes
the whole weight an ordinary one, exact, with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.hardware.parallel import Shard
from nanovllm.weights.loader import LoadTarget, PackedTarget, matrix_targets

TRIED_OUTPUTS = 256  # at both ends
# Matrix-vector products, tensor cores with all tiles, and what many rows take; some are no multiples of 4
TRIED_ROWS = (1, 2, 8, 24, 41, 100, 160, 256, 301)
MOST_ERROR = 0.02  # of the length of a product, which rounding to bfloat16 makes 0.003

logger = logging.getLogger("nanovllm")


class FewerBits(nn.Module):
    """Numbers in fewer bits than dtype has: a PartedWeight, or the experts of a layer (moe/scaled.py)."""

    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """With the scales."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The form in words, for reports."""
        raise NotImplementedError


class PartedWeight(FewerBits):
    """[rows, columns], filled part by part by the loader; the parts lie below each other in their order."""

    kind: ClassVar[str]  # by which operators choose their kernels
    target: ClassVar[type[PackedTarget]]  # how a part is read

    def __init__(self, parts: dict[str, int], columns: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts, self.shape, self._dtype, self._device = parts, (sum(parts.values()), columns), dtype, device
        self.dtype = dtype  # of x
        self.plain: torch.Tensor | None = None  # the weight in dtype, where its kind does not fit
        self.why = ""  # it does not
        self.as_stored = False  # see PackedTarget
        self._found: dict[str, Any] = {}

    def put(self, part: str, found: Any) -> bool:
        """Whether all parts that are there fit."""
        self._found[part] = self._prepare(found)
        if len(self._found) < len(self.parts):
            return True
        parts = [self._found.pop(name) for name in self.parts]
        self.why = self._fill(parts)
        if self.why:
            numbers = [p if isinstance(p, torch.Tensor) else p.expanded() for p in parts]
            self.plain = torch.cat([p.to(self._device, self._dtype) for p in numbers])
            self._empty()
        return not self.why

    def _prepare(self, found: Any) -> Any:
        """A part as `_fill` wants it, perhaps quantised."""
        raise NotImplementedError

    def _fill(self, parts: list[Any]) -> str:
        """Takes all parts, or says why it cannot."""
        raise NotImplementedError

    def _empty(self) -> None:
        """Frees what `plain` replaces."""
        raise NotImplementedError

    @property
    def form(self) -> tuple[Any, ...]:
        """Weights of the same shape and form have the same kernels."""
        raise NotImplementedError

    def expanded(self, places: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers that it has, in dtype; of these outputs only."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Becomes an ordinary weight."""
        if self.plain is None:
            self.plain = self.expanded()
            self._empty()

    def set_rows(self, first: int, numbers: torch.Tensor) -> None:
        """Quantises these in place of the rows from `first` on: made-up weights get other routers (runner/probe.py)."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        if self.plain is not None:
            return self.plain.nbytes
        return sum(buffer.nbytes for buffer in self.buffers())


class PartedLoading:
    """`targets` are for the loader; `report` comes after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain: dict[str, list[str]] = {}  # why -> tensors

    def targets(self) -> dict[str, dict[str, LoadTarget]]:
        return {name: self._parts(name, weight) for name, weight in parted_weights(self._model).items()}

    def _parts(self, name: str, weight: PartedWeight) -> dict[str, LoadTarget]:
        layer = self._model.get_submodule(name.rpartition(".")[0])

        def make(part: str, shape: tuple[int, ...], shard: Shard | None) -> LoadTarget:
            return weight.target(shape, shard, weight.as_stored, partial(self._take, weight, part))

        return matrix_targets(layer, weight.parts, weight.shape[1], make)

    def _take(self, weight: PartedWeight, part: str, name: str, found: Any) -> None:
        if not weight.put(part, found):
            self._plain.setdefault(weight.why, []).append(name)

    def report(self) -> None:
        for why, names in self._plain.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            logger.info("%s%s: %s", names[0], more, why)
        weights = fewer_bits(self._model)
        forms = ", ".join(sorted({weight.label for weight in weights}))
        logger.info("matrices in memory: %s, %.0f MB", forms, sum(weight.num_bytes for weight in weights) / 1e6)


def parted_weights(model: nn.Module) -> dict[str, PartedWeight]:
    """By the names that they would have as parameters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PartedWeight)}


def fewer_bits(model: nn.Module) -> list[FewerBits]:
    return [module for module in model.modules() if isinstance(module, FewerBits)]


def check_products(model: nn.Module, *products: Callable[..., torch.Tensor], columns: int | None = None) -> str:
    """Multiplies once with each kind of matrix that the model has, by each of `products` (Ops.linear and its like), and
    compares with the expanded numbers: these kernels have run on few cards, and a wrong product would be a wrong answer
    without a word. If one is wrong, or does not run, all weights are expanded. Returns why; empty: all were right.
    `columns`: of matrices with so many inputs only."""
    weights = [weight for weight in parted_weights(model).values() if weight.plain is None]
    tried = [weight for weight in reversed(weights) if columns in (None, weight.shape[1])]
    kinds = {(type(weight), weight.shape, weight.form): weight for weight in tried}
    tries = ((weight, rows, product) for weight in kinds.values() for rows in TRIED_ROWS for product in products)
    why = next(filter(None, (_wrong_product(*one) for one in tries)), "")
    for weight in weights if why else ():
        weight.give_up()
    return why


def _wrong_product(weight: PartedWeight, rows: int, product: Callable[..., torch.Tensor]) -> str:
    device = next(weight.buffers()).device
    some = torch.arange(weight.shape[0], device=device)
    if len(some) > 2 * TRIED_OUTPUTS:  # a small card has no room for a large matrix in float32
        some = torch.cat((some[:TRIED_OUTPUTS], some[-TRIED_OUTPUTS:]))
    x = tried_inputs(rows, weight.shape[1]).to(device, weight.dtype)
    right = F.linear(x, weight.expanded(some)).float()
    try:
        found = product(x, weight)
        found = (found if found.dim() == 2 else found.sum(0))[:, some].float()
        error = float((found - right).norm() / right.norm().clamp(min=1e-30))
    except torch.OutOfMemoryError:
        raise
    except Exception as failed:  # Triton's own errors have no common class with PyTorch's
        return f"a product of {rows} rows with {weight.label} does not run: {str(failed)[:200]}"
    if error <= MOST_ERROR:
        return ""
    return f"a product of {rows} rows with {weight.label} is wrong by {100 * error:.1f} %"  # or it is not a number


def tried_inputs(rows: int, columns: int) -> torch.Tensor:
    """Whole numbers from -7 to 7, float32. Products that round inputs to 8-bit floats lose nothing of these, as the
    largest of each 128, 7, becomes 448: what differs is an error."""
    x = torch.randint(-7, 8, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()
    x[:, ::128] = 7
    return x

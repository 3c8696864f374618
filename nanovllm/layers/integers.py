"""IntegerWeight: a weight of integers of 4 or 8 bits with a scale for each group of inputs, on a GPU (ops/integers.py).

Parts of one weight (q, k and v) may come in different forms: the wider bits and the smaller groups serve all. It
becomes an ordinary one where a row is no multiple of 32, where ranks cut it elsewhere, where the parts have their
inputs in different orders (act-order), or where scales are beyond float16."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nanovllm.hardware.parallel import Shard
from nanovllm.layers.parted import PartedWeight, parted_weights
from nanovllm.ops import integers
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertIntegers
from nanovllm.weights.four_bits import Grouped
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.integer_groups import KINDS, IntegerGroups, from_blocks, from_grouped, why_no_runs
from nanovllm.weights.loader import PackedTarget
from nanovllm.weights.rules import Rule, find_destination


@dataclass(frozen=True)
class IntegerForm:
    """Of the weights of a model. Those that a file has in another form take that one when they are loaded."""

    bits: int = 4
    group: int | None = 32  # inputs that share a scale; None: a whole row
    quantises: bool = False  # whatever the file has is quantised; otherwise floats stay
    experts: ExpertIntegers | None = None  # of a mixture of experts (moe/integers.py); None: they are numbers of dtype

    @property
    def name(self) -> str:
        """In memory/facts.py."""
        group = integers.stored_group(self.group or 2**30, 2**30, self.bits)
        return f"int{self.bits}-{group}"

    @classmethod
    def of_gguf(cls, types: list[str]) -> IntegerForm:
        """That of most matrices: kernels are compiled for it while the file is read."""
        name = max(types, key=types.count)
        return cls(KINDS[name][0], 16 if name == "Q6_K" else 32)

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
class RankPart:
    """What a file has of this rank's rows, and which columns of them are this rank's; None: all."""

    rows: Grouped | StoredBlocks
    columns: Shard | None

    def groups(self, device: torch.device) -> IntegerGroups | Expanded:
        if isinstance(self.rows, Grouped):
            return self._of_grouped(self.rows, device)
        # Taken apart on the device: on a host that would take longer than reading the file.
        whole, cut = from_blocks(replace(self.rows, raw=self.rows.raw.to(device))), self.columns
        if cut is None:
            return whole
        if cut.length % integers.BLOCK == 0:
            return whole.columns(cut.start, cut.length)
        return Expanded(whole.expanded()[:, cut.start : cut.start + cut.length], _why_cut(cut))

    def _of_grouped(self, rows: Grouped, device: torch.device) -> IntegerGroups | Expanded:
        cut, own = self.columns, rows
        if cut is not None:
            own = rows.narrow(slice(None), slice(cut.start, cut.start + cut.length))
        own = replace(own, q=own.q.to(device), scale=own.scale.to(device), zero=own.zero.to(device))
        found = from_grouped(own)
        if not isinstance(found, str):
            return found
        is_cut = cut is not None and not why_no_runs(rows.group)
        return Expanded(own.expanded(), _why_cut(cut, rows.is_in_order) if is_cut and cut is not None else found)


def _why_cut(cut: Shard, is_in_order: bool = True) -> str:
    """Of a matrix that one rank would have in integers."""
    what = f"expanded: {cut.num_ranks} ranks cut {cut.total} inputs"
    if not is_in_order:
        return f"{what} that are in an order of their own (act-order); one rank does not"
    good = cut.good_ranks(integers.BLOCK)
    return f"{what} within {integers.BLOCK} of them; numbers of ranks that keep it: {good}"


@dataclass(frozen=True)
class IntegerTarget(PackedTarget):
    """Reads integers as they are stored, and cuts a rank's part out of them."""

    def fill(self, name: str, checkpoint: Checkpoint) -> None:
        packed = checkpoint.read_packed(name) if self.as_stored else None
        blocks = checkpoint.read_blocks(name) if self.as_stored and packed is None else None
        rows, columns = slice(0, self.shape[0]), None
        if self.shard is not None and self.shard.dim == 0:
            rows = slice(self.shard.start, self.shard.start + self.shard.length)
        elif self.shard is not None:
            columns = self.shard
        found: Any = None
        if isinstance(packed, Grouped):
            found = RankPart(packed.narrow(rows, slice(None)), columns)
        elif blocks is not None:
            found = RankPart(replace(blocks, raw=blocks.raw[rows]), columns)
        if found is None:
            super().fill(name, checkpoint)
        else:
            self.take(name, found)


def as_groups(found: Any, quantise: tuple[int, int] | None, device: torch.device) -> IntegerGroups | Expanded:
    """Of a RankPart or a tensor of floats; on the device. `quantise`: floats to so many bits, in groups of so many
    inputs; None: they stay."""
    if isinstance(found, RankPart):
        found = found.groups(device)
    elif isinstance(found, torch.Tensor):
        columns = found.shape[1]
        if columns % integers.BLOCK:
            return Expanded(found, f"a row of {columns} is no multiple of {integers.BLOCK}")
        if quantise is None:
            return Expanded(found, f"the file has {str(found.dtype).removeprefix('torch.')}")
        bits, group = quantise
        group = group if columns % group == 0 else integers.BLOCK
        found = IntegerGroups(bits, group, *integers.quantise(found.to(device), bits, group))
    if isinstance(found, IntegerGroups) and not found.fits_half:
        return Expanded(found.expanded(), "expanded: its scales are too small or too large for float16")
    return found


class IntegerWeight(PartedWeight):
    words: torch.Tensor
    factors: torch.Tensor
    order: torch.Tensor | None  # x has its columns in this order before the product; None: as they are
    kind, target = "integers", IntegerTarget

    def __init__(
        self, parts: dict[str, int], columns: int, form: IntegerForm, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parts, columns, dtype, device)
        self._quantises, self.as_stored = form.quantises, not form.quantises
        for name in ("words", "factors", "order"):
            self.register_buffer(name, None, persistent=False)
        self._allocate(form)

    def _allocate(self, form: IntegerForm) -> None:
        """Before loading: kernels are compiled meanwhile, by their shapes."""
        (rows, columns), device, bits = self.shape, self._device, form.bits
        self.bits, self.group = bits, integers.stored_group(form.group or columns, columns, bits)
        blocks = integers.num_blocks(columns, bits)
        self.words = torch.empty((rows, blocks * integers.COLUMNS), dtype=torch.int32, device=device)
        number = blocks * integers.block_length(bits) // self.group
        self.factors = torch.empty((number, rows), dtype=torch.int32, device=device)

    def expect(self, types: list[str | None]) -> None:
        """Before loading: those of its parts in a GGUF file; None: floats."""
        forms = [IntegerForm.of_gguf([name]) for name in types if name is not None]
        if len(forms) == len(types) and self.shape[1] % integers.BLOCK == 0:  # this rank's columns
            groups = (form.group or self.shape[1] for form in forms)
            self._allocate(IntegerForm(max(form.bits for form in forms), math.gcd(*groups)))
        else:
            self.plain = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            self._empty()

    def _prepare(self, found: Any) -> IntegerGroups | Expanded:
        return as_groups(found, (self.bits, self.group) if self._quantises else None, self._device)

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
        group = math.gcd(*(integers.stored_group(part.group, self.shape[1], bits) for part in parts))
        form = IntegerForm(bits, group)
        if self.label != form.name:  # another one was expected
            self.plain = None
            self._allocate(form)
        self.order = None if orders[0] is None else orders[0].to(self._device)
        start = 0
        for part in wide:
            rows, part = slice(start, start + len(part.q)), part.in_groups(group)
            self.words[rows].copy_(integers.pack_words(part.q, bits))
            self.factors[:, rows].copy_(integers.pack_factors(part.scale, part.offset, len(self.factors)))
            start = rows.stop
        return ""

    def _empty(self) -> None:
        self.words, self.factors, self.order = self.words.new_empty(0), self.factors.new_empty(0), None

    def set_rows(self, first: int, numbers: torch.Tensor) -> None:
        groups = as_groups(numbers, (self.bits, self.group), self._device)
        assert isinstance(groups, IntegerGroups)
        groups = groups.in_groups(self.group)
        self.words[first:].copy_(integers.pack_words(groups.q, self.bits))
        self.factors[:, first:].copy_(integers.pack_factors(groups.scale, groups.offset, len(self.factors)))

    @property
    def form(self) -> tuple[Any, ...]:
        return self.bits, self.group, self.order is None

    def expanded(self, places: torch.Tensor | None = None) -> torch.Tensor:
        if places is None:
            return integers.expand(self, self._dtype)
        same = {"bits": self.bits, "group": self.group, "order": self.order, "shape": (len(places), self.shape[1])}
        return integers.expand(
            SimpleNamespace(words=self.words[places], factors=self.factors[:, places], **same), self._dtype
        )

    @property
    def label(self) -> str:
        if self.plain is not None:
            return str(self.plain.dtype).removeprefix("torch.")
        return f"int{self.bits}-{self.group}"


def expect_types(model: nn.Module, checkpoint: Checkpoint, rules: tuple[Rule, ...]) -> None:
    """Gives the weights of a model that is to be loaded from a GGUF file the forms that they will have there."""
    parted = parted_weights(model).items()
    weights = {name: weight for name, weight in parted if isinstance(weight, IntegerWeight) and weight.as_stored}
    if not weights or checkpoint.packed_forms():
        return
    types, found = checkpoint.quantised_types(), dict[str, list[str | None]]()
    for name in checkpoint.names():
        place = find_destination(rules, name)
        if place is not None and place.parameter in weights:
            found.setdefault(place.parameter, []).append(types.get(name))
    for name, parts in found.items():
        weights[name].expect(parts)

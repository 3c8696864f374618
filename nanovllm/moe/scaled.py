"""Experts in fewer bits: matrices and scales in a block of bytes (weights/expert_form.py), and the loader's targets;
here those in 8-bit floats, in integers.py those in integers. Resident experts are a stack of such blocks, and offloaded
ones pass through buffers of the same form."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.hardware.parallel import Shard
from nanovllm.layers.build import Build
from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.parted import FewerBits
from nanovllm.layers.scaled import ScaledTarget, Scales
from nanovllm.model_config import MoeConfig
from nanovllm.moe.integers import integer_part_target, integer_views
from nanovllm.ops import fp8
from nanovllm.ops.fp8 import ScaledStack
from nanovllm.weights.expert_form import DOWN, GATE, UP, ExpertForm
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.loader import Elsewhere, LoadTarget, PackedTarget

AT_ONCE = 4 << 20  # numbers that are quantised, some 12 bytes of the device's memory for each


def dense_form(moe: MoeConfig, hidden: int, build: Build) -> ExpertForm:
    """Of whole experts as this engine keeps them."""
    scales = build.scaling
    block = scales.block if isinstance(scales, Scales) and scales.experts else None
    integers = scales.experts if isinstance(scales, IntegerForm) else None
    return ExpertForm.dense(hidden, moe.intermediate_size, block, integers)


def expert_views(form: ExpertForm, block: torch.Tensor) -> tuple[Any, Any]:
    """gate_up [..., 2I, K] and down [..., rows, columns] of blocks [..., form.length or more], as `expert_pairs`
    takes them: tensors, a ScaledStack each, or an IntegerStack each (of blocks [buffers, ...])."""
    if form.integers is not None:
        return integer_views(form, block)
    lead, rows = block.shape[:-1], 2 * form.intermediate
    split = rows * form.columns
    gate_up = block[..., :split].view(*lead, rows, form.columns)
    down = block[..., split : form.numel].view(*lead, *form.parts[DOWN])
    if form.scale_block is None:
        return gate_up, down
    both, last = scale_views(form, block[..., form.scales_start : form.length])
    return ScaledStack(gate_up.view(fp8.E4M3), both, num_parts=2), ScaledStack(down.view(fp8.E4M3), last)


def scale_views(form: ExpertForm, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate_up and of down, in the bytes of blocks from form.scales_start on."""
    numbers, (rows, *columns) = tail.view(torch.float32), form.scale_shape(GATE)
    split = 2 * rows * math.prod(columns)
    both = numbers[..., :split].view(*tail.shape[:-1], 2 * rows, *columns)
    return both, numbers[..., split : form.num_scales].view(*tail.shape[:-1], *form.scale_shape(DOWN))


def by_part(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """Matrices of one expert, or their scales."""
    gate, up = gate_up.chunk(2)
    return {GATE: gate, UP: up, DOWN: down}


def part_target(
    form: ExpertForm, part: str, shard: Shard | None, block: torch.Tensor, device: torch.device
) -> PackedTarget:
    """For the loader: a part of the expert in this block. Numbers of more bits are quantised on `device`."""
    if form.integers is not None:
        return integer_part_target(form, part, shard, whole_shape(form, part, shard), block, device)
    gate_up, down = expert_views(form, block[None])
    q, scale = by_part(gate_up.q[0], down.q[0])[part], by_part(gate_up.scale[0], down.scale[0])[part]
    return ScaledTarget(whole_shape(form, part, shard), shard, False, partial(_put, q, scale, device))


def whole_shape(form: ExpertForm, part: str, shard: Shard | None) -> tuple[int, ...]:
    """Of the checkpoint's tensor."""
    whole = list(form.parts[part])
    if shard is not None:
        whole[shard.dim] = shard.total
    return tuple(whole)


def _put(q: torch.Tensor, scale: torch.Tensor, device: torch.device, name: str, found: Any) -> None:
    if isinstance(found, Fp8Blocks):
        q.copy_(found.q)
        put_scales(scale, found)
        return
    quantise(found, q, scale, device)


def quantise(found: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
    """By rows or, of made-up weights, by blocks, as `scale` is. On the device: 59 million numbers, a matrix of
    Mixtral's, take a core of a host a third of a second."""
    unit = fp8.BLOCK if scale.dim() == 2 else 1
    step = max(1, AT_ONCE // q.shape[1] // unit) * unit
    for start in range(0, len(q), step):
        some = found[start : start + step].to(device)
        numbers, factors = fp8.quantise(some, 0) if unit == 1 else fp8.quantise_blocks(some)
        q[start : start + step].copy_(numbers)
        scale[start // unit : start // unit + len(factors)].copy_(factors[:, 0] if unit == 1 else factors)


def put_scales(scale: torch.Tensor, found: Fp8Blocks) -> None:
    scale.copy_(found.scale if scale.dim() == 2 else found.row_scales())


class ScaledExperts(FewerBits):
    """The experts of a layer that this rank has, one block after the other."""

    pool: torch.Tensor

    def __init__(
        self, form: ExpertForm, shards: dict[str, Shard], here: range, num_experts: int, device: torch.device
    ) -> None:
        super().__init__()
        self.form, self._shards, self._here, self._num_experts = form, shards, here, num_experts
        self.set_pool(torch.empty(len(here), form.length, dtype=torch.uint8, device=device))

    def set_pool(self, pool: torch.Tensor) -> None:
        self.register_buffer("pool", pool, persistent=False)
        self.views, self.shape = expert_views(self.form, pool), (len(pool), self.form.numel)

    @property
    def label(self) -> str:
        return "FP8" if self.form.integers is None else self.form.integers.name

    @property
    def num_bytes(self) -> int:
        return self.pool.nbytes

    def targets(self) -> dict[str, dict[str, LoadTarget]]:
        """By the names that the stacks of experts in 16 bits have in their layer (moe/resident.py)."""
        found: dict[str, dict[str, LoadTarget]] = {"gate_up.weight": {}, "down.weight": {}}
        for expert in range(self._num_experts):
            found["gate_up.weight"] |= {f"{expert}.{part}": self._target(expert, part) for part in (GATE, UP)}
            found["down.weight"][str(expert)] = self._target(expert, DOWN)
        return found

    def _target(self, expert: int, part: str) -> LoadTarget:
        shard = self._shards.get(part)
        if expert not in self._here:
            return Elsewhere(whole_shape(self.form, part, shard))
        return part_target(self.form, part, shard, self.pool[expert - self._here.start], self.pool.device)


def scaled_expert_targets(model: nn.Module) -> dict[str, dict[str, LoadTarget]]:
    """Of all layers with resident experts in fewer bits."""
    return {
        f"{name.rpartition('.')[0]}.{parameter}": parts
        for name, module in model.named_modules()
        if isinstance(module, ScaledExperts)
        for parameter, parts in module.targets().items()
    }

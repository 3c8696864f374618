"""Experts in integers of 4 and 8 bits: words and factors in a block of bytes (weights/expert_form.py), as they are in
the device's memory, in expert buffers and in host memory; and the loader's targets.

All experts of a layer have one form, that of the kernels. What a file has in fewer bits or larger groups is widened to
it, exactly. What it has in another form at all (inputs in another order, floats beside integers) is refused by name: an
expert alone cannot be expanded where all others are bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Shard
from nanovllm.layers.integers import Expanded, IntegerTarget, as_groups
from nanovllm.ops import integers
from nanovllm.ops.integers import IntegerStack
from nanovllm.weights.expert_form import DOWN, GATE, UP, ExpertForm

REMEDY = "set quantization='none', which expands all experts to 16 bits"


def integer_views(form: ExpertForm, block: torch.Tensor) -> tuple[IntegerStack, IntegerStack]:
    """gate_up and down of blocks [buffers, form.length or more]."""
    lead, stacks, start, scales = block.shape[0], [], 0, form.scales_start
    for parts in ((GATE, UP), (DOWN,)):
        rows, columns = form.parts[parts[0]]
        rows *= len(parts)
        bits, group = form.integers.of(parts[0])  # type: ignore[union-attr]
        stop = start + sum(form.part_size(part) for part in parts)
        words = block[:, start:stop].view(torch.int32).view(lead, rows, -1)
        number = form.scale_shape(parts[0])[0]
        end = scales + 4 * number * rows
        factors = block[:, scales:end].view(torch.int32).view(lead, number, rows)
        stacks.append(IntegerStack(words, factors, bits, group, columns))
        start, scales = stop, end
    return stacks[0], stacks[1]


def integer_parts(form: ExpertForm, block: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Words [rows, ...] and factors [groups, rows] of each part of the expert in this block."""
    gate_up, down = integer_views(form, block[None])
    size = form.intermediate
    words, factors = gate_up.words[0], gate_up.factors[0]
    return {
        GATE: (words[:size], factors[:, :size]),
        UP: (words[size:], factors[:, size:]),
        DOWN: (down.words[0], down.factors[0]),
    }


def integer_part_target(
    form: ExpertForm, part: str, shard: Shard | None, shape: tuple[int, ...], block: torch.Tensor, device: torch.device
) -> IntegerTarget:
    """For the loader: a part of the expert in this block. `shape`: of the checkpoint's tensor. Floats are quantised."""
    words, factors = integer_parts(form, block)[part]
    return IntegerTarget(shape, shard, True, partial(_put, form, part, words, factors, device))


def _put(
    form: ExpertForm,
    part: str,
    words: torch.Tensor,
    factors: torch.Tensor,
    device: torch.device,
    name: str,
    found: Any,
) -> None:
    packed, both = pack_part(form, part, device, name, found)
    words.copy_(packed)
    factors.copy_(both)


def pack_part(
    form: ExpertForm, part: str, device: torch.device, name: str, found: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and factors of what the loader found, on the device."""
    assert form.integers is not None
    bits, group = form.integers.of(part)
    groups = as_groups(found, (bits, group), device)
    if isinstance(groups, Expanded):
        raise ModelError(f"{name}: not computed in integers ({groups.why.removeprefix('expanded: ')}): {REMEDY}")
    if groups.order is not None:
        raise ModelError(f"{name}: the inputs of an expert are in an order of their own (act-order): {REMEDY}")
    if groups.bits > bits or integers.stored_group(groups.group, groups.q.shape[1], bits) % group:
        what = f"int{groups.bits} in groups of {groups.group}"
        raise ModelError(f"{name}: {what} where other experts have int{bits} in groups of {group}: {REMEDY}")
    groups = (groups if groups.bits == bits else groups.in_bits(bits)).in_groups(group)
    return integers.pack_words(groups.q, bits), integers.pack_factors(
        groups.scale, groups.offset, form.scale_shape(part)[0]
    )

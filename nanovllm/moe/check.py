"""A check at the start: experts in fewer bits give what their expanded numbers give. Their kernels have run on few
kinds of cards, and a wrong product would be a wrong answer without a word (layers/parted.py checks matrices likewise).

The experts are made up, so that nothing needs to be loaded or brought, in the sizes of the model's, so that the kernels
are those that it will use. As many as a token takes are enough."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.parted import MOST_ERROR, TRIED_ROWS, tried_inputs
from nanovllm.moe.projections import SharedProjections
from nanovllm.moe.scaled import expert_views
from nanovllm.ops import integers
from nanovllm.ops.activation import silu_mul
from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.integers import IntegerStack
from nanovllm.weights.expert_form import ExpertForm

logger = logging.getLogger("nanovllm")


def check_experts(
    model: nn.Module, top_k: int, dtype: torch.dtype, device: torch.device, pairs: Callable[..., torch.Tensor]
) -> str:
    """`pairs`: Ops.expert_pairs. Returns what is wrong; empty: all is right, or no expert has fewer bits."""
    found = (module.form for module in model.modules() if isinstance(module, SharedProjections))
    for form in {form for form in found if form.is_bytes}:
        try:
            if why := _wrong_experts(form, top_k, dtype, device, pairs):
                return f"{why} with experts in {form.integers.name if form.integers is not None else 'FP8'}"
        except torch.OutOfMemoryError:
            logger.warning("no memory is left to check the kernels of experts in fewer bits; going on without")
    return ""


def _wrong_experts(
    form: ExpertForm, top_k: int, dtype: torch.dtype, device: torch.device, pairs: Callable[..., torch.Tensor]
) -> str:
    stacks = expert_views(form, torch.zeros(top_k, form.length, dtype=torch.uint8, device=device))
    for stack in stacks:
        _make_up(stack, torch.Generator(device).manual_seed(0))
    for rows in TRIED_ROWS:
        x = (tried_inputs(rows, form.hidden) / 4).to(device, dtype)
        weights = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(rows)).to(device)
        ids = (torch.arange(rows)[:, None] + torch.arange(top_k)) % top_k
        right = _expanded_pairs(x, *stacks, ids, weights)
        try:
            out = pairs(x, *stacks, ids.to(device, torch.int32), weights).float()
            error = float((out - right).norm() / right.norm().clamp(min=1e-30))
        except torch.OutOfMemoryError:
            raise
        except Exception as failed:  # Triton's own errors have no common class with PyTorch's
            return f"a product of {rows} rows does not run ({str(failed)[:200]})"
        if not error <= MOST_ERROR:  # NaN: not either
            return f"a product of {rows} rows is wrong by {100 * error:.1f} %"
    return ""


def _make_up(stack: ScaledStack | IntegerStack, generator: torch.Generator) -> None:
    """Numbers by which sums stay near 1. On the device: a host would take seconds."""
    num, rows, columns = stack.shape
    size = 1 / math.sqrt(columns)

    def random(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator, dtype=torch.uint8, device=generator.device)

    for buffer in range(num):
        if isinstance(stack, ScaledStack):
            numbers = random(127, rows, columns) | random(2, rows, columns) << 7  # all but those that are no numbers
            stack.q[buffer].view(torch.uint8).copy_(numbers)
            stack.scale[buffer].copy_((random(128, *stack.scale[buffer].shape) + 64.0) * (size / 12800))
            continue
        stack.words[buffer].copy_(integers.pack_words(random(2**stack.bits, rows, columns), stack.bits))
        shape = rows, -(-columns // stack.group)
        scale = (random(128, *shape) + 64.0) * (size / 2 ** (stack.bits + 5))
        offset = scale * (random(16, *shape) - 8.0)
        stack.factors[buffer].copy_(integers.pack_factors(scale, offset, stack.factors.shape[1]))


def _expanded_pairs(x: torch.Tensor, gate_up: Any, down: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `expert_pairs`, but weighted in float32. A piece of an expert is expanded at a time: a small card has no room
    for more."""
    out = torch.zeros(*ids.shape, down.shape[1], device=x.device)
    for buffer in range(gate_up.shape[0]):
        tokens, places = (ids == buffer).nonzero(as_tuple=True)
        both = _product(x[tokens], gate_up, buffer)
        out[tokens, places] = _product(silu_mul(both), down, buffer).float() * weights[tokens, places, None]
    return out


def _product(x: torch.Tensor, stack: ScaledStack | IntegerStack, buffer: int) -> torch.Tensor:
    return torch.cat([F.linear(x, piece) for piece in stack.pieces(buffer, x.dtype)], 1)

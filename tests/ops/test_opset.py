"""Which products a layer takes for few rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.ops.opset import PLAIN

NAMES = ("qkv", "out", "gate_up", "down")


def parts(kinds: dict[str, str]) -> tuple[Any, Any]:
    """(attention, mlp) of a layer with these weights in fewer bits."""
    weights = {name: torch.empty(0) for name in NAMES}
    found = {
        name: SimpleNamespace(weight=SimpleNamespace(plain=None, kind=kinds[name]) if name in kinds else weight)
        for name, weight in weights.items()
    }
    return SimpleNamespace(**found), SimpleNamespace(**found)


ALL_INTEGERS, ALL_FLOATS = dict.fromkeys(NAMES, "integers"), dict.fromkeys(NAMES, "fp8")


@pytest.mark.parametrize(
    ("kinds", "hidden", "most"),
    [
        ({}, 2048, 8),
        ({}, 2056, 0),
        (ALL_FLOATS, 2048, 2),
        (ALL_FLOATS, 2056, 0),
        (ALL_INTEGERS, 4096, 2),
        # A file may leave attention in 16 bits, or one matrix may have been expanded
        ({"gate_up": "integers", "down": "integers"}, 1024, 2),
        ({"out": "integers"}, 1024, 2),
        ({"qkv": "integers"}, 4096, 0),
        ({"gate_up": "integers", "down": "fp8"}, 1024, 2),
    ],
)
def test_fused_products_take_what_all_weights_of_a_layer_allow(kinds: dict[str, str], hidden: int, most: int) -> None:
    """Those with integers take two rows at most: with more rows an assertion would end the engine."""
    ops, layer = replace(PLAIN, gemv=print), parts(kinds)
    for rows in range(1, 10):
        assert ops.fuses_few(torch.empty(rows, hidden, dtype=torch.bfloat16), *layer) == (rows <= most), rows
        assert not ops.fuses_few(torch.empty(rows, hidden), *layer)
        assert not PLAIN.fuses_few(torch.empty(rows, hidden, dtype=torch.bfloat16), *layer)


def test_a_weight_that_was_expanded_is_an_ordinary_one() -> None:
    attention, mlp = parts(ALL_INTEGERS)
    for part in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
        part.weight.plain = torch.empty(0)
    assert replace(PLAIN, gemv=print).fuses_few(torch.empty(8, 1024, dtype=torch.bfloat16), attention, mlp)

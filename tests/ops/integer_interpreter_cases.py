"""Products with weights of small integers against their plain twins under Triton's interpreter, on the CPU
(`test_triton_interpreter.py`)."""

import os
from dataclasses import dataclass

import pytest
import torch

from nanovllm.ops import integers, norm
from nanovllm.ops.triton import integers as t_integers
from nanovllm.ops.triton import integers_matmul

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@dataclass
class Integers:
    """As layers/integers.py:IntegerWeight."""

    words: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    bits: int
    group: int
    shape: tuple[int, int]
    order: torch.Tensor | None = None
    plain: None = None


def integer_weight(outputs, size, group, bits=4, has_offset=True, act_order=False):
    """Its words are drawn: every bit pattern may occur, also with the highest bit set."""
    words = torch.randint(-(2**31), 2**31, (outputs, size * bits // 32)).to(torch.int32)
    groups = -(-size // group)
    scale, offset = torch.rand(outputs, groups) / 2**bits, torch.randn(outputs, groups) / 4
    order = torch.randperm(size) if act_order else None
    offset = offset.half() if has_offset else None
    return Integers(words, scale.half(), offset, bits, group, (outputs, size), order)


WEIGHTS = {
    "4 bits": (40, 256, 128, 4, True),
    "no offset": (41, 320, 64, 4, False),  # 10 runs: a step covers more
    "act-order": (24, 96, 32, 4, True, True),
    "last group": (24, 192, 128, 4, True),  # of half the inputs
    "8 bits": (24, 160, 16, 8, False),
    "8 bits offset": (24, 96, 96, 8, True),  # one scale a row
}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_rows(name, rows):
    weight = integer_weight(*WEIGHTS[name])
    outputs, size = weight.shape
    x, gain, plain = torch.randn(rows, size), torch.randn(size), integers.expand(weight, torch.float32)
    close(t_integers.integer_gemv(x, weight), x @ plain.T)
    bias, residual = torch.randn(outputs), torch.randn(rows, outputs)
    close(t_integers.integer_gemv(x, weight, bias, residual=residual), x @ plain.T + bias + residual)
    if outputs % 2 == 0:
        gate, up = (norm.rms_norm(x, gain, 1e-5) @ plain.T + bias).chunk(2, dim=1)
        got = t_integers.integer_gemv(x, weight, bias, norm=(gain, 1e-5), gated=True)
        close(got, torch.nn.functional.silu(gate) * up)


def test_few_rows_of_long_inputs():
    """Several steps, and a last one that is not full."""
    weight = integer_weight(5, 2048 + 96, 32)
    x = torch.randn(2, weight.shape[1])
    close(t_integers.integer_gemv(x, weight), x @ integers.expand(weight, torch.float32).T)
    close(t_integers.integer_gemv(x, weight, block=(2, 64)), x @ integers.expand(weight, torch.float32).T)


@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (8, 2), (9, 3), (17, 1), (64, 2), (65, 1)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_more_rows(name, rows, splits):
    weight = integer_weight(*WEIGHTS[name])
    weight.order = None
    x, bias = torch.randn(rows, weight.shape[1]), torch.randn(weight.shape[0])
    expected = x @ integers.expand(weight, torch.float32).T + bias
    found = integers_matmul.integer_matmul(x, weight, bias, splits)
    close(found, expected)
    assert torch.equal(integers_matmul.integer_matmul(x, weight, bias, splits), found)


@pytest.mark.parametrize("name", WEIGHTS)
def test_expanded_weights_are_the_same_to_the_bit(name):
    weight = integer_weight(*WEIGHTS[name])
    weight.order = None
    for dtype in (torch.float32, torch.float16):
        found, expected = integers_matmul.expand_words(weight, dtype), integers.expand(weight, dtype)
        if weight.offset is None:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 256, 257])
def test_every_number_of_rows_has_a_product(rows):
    weight = integer_weight(24, 96, 32, act_order=True)
    x, bias = torch.randn(rows, 96), torch.randn(24)
    close(t_integers.integer_linear(x, weight, bias), integers.integer_linear(x, weight, bias))

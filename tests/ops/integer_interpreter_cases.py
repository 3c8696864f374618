"""Products with weights of small integers against their plain twins under Triton's interpreter, on the CPU
(`test_triton_interpreter.py`)."""

import os
from dataclasses import dataclass

import pytest
import torch

from nanovllm.ops import integers, linear, norm
from nanovllm.ops.triton import integers as t_integers
from nanovllm.ops.triton import integers_matmul, integers_round

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@dataclass
class Integers:
    """As layers/integers.py:IntegerWeight."""

    words: torch.Tensor
    factors: torch.Tensor
    bits: int
    group: int
    shape: tuple[int, int]
    order: torch.Tensor | None = None
    plain: None = None


def integer_weight(outputs, size, group, bits=4, has_offset=True, act_order=False):
    """Its words are drawn: every bit pattern may occur, also with the highest bit set; past the end too."""
    blocks, group = integers.num_blocks(size, bits), integers.stored_group(group, size, bits)
    words = torch.randint(-(2**31), 2**31, (outputs, blocks * 16)).to(torch.int32)
    scale, offset = torch.rand(outputs, -(-size // group)) / 2**bits, torch.randn(outputs, -(-size // group)) / 4
    number = blocks * integers.block_length(bits) // group
    factors = integers.pack_factors(scale, offset if has_offset else None, number)
    order = torch.randperm(size) if act_order else None
    return Integers(words, factors, bits, group, (outputs, size), order)


WEIGHTS = {
    "4 bits": (40, 256, 128, 4, True),
    "no offset": (41, 320, 64, 4, False),  # two blocks and a half
    "act-order": (24, 96, 32, 4, True, True),
    "last group": (24, 192, 128, 4, True),  # of half the inputs
    "8 bits": (24, 160, 16, 8, False),
    "8 bits offset": (24, 96, 96, 8, True),  # one scale a row
    "8 bits by 32": (24, 128, 32, 8, True),
}


def close(found, expected, tolerance=2e-4):
    torch.testing.assert_close(found, expected, rtol=tolerance / 2, atol=tolerance)


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_rounded_block_by_block(name):
    """A row of zeros; numbers that differ by six orders of magnitude; as little error as 16 bits have."""
    weight = integer_weight(*WEIGHTS[name])
    size, length = weight.shape[1], integers.block_length(weight.bits)
    x = torch.randn(4, size)
    x[1], x[2] = 0, x[2] * torch.logspace(-3, 3, size)
    order = torch.arange(size) if weight.order is None else weight.order
    expected = torch.nn.functional.pad(integers.round_rows(x[:, order], weight.bits), (0, -size % length))
    found = integers_round.round_rows(x, weight)
    words = found.numbers.view(4, -1, 8, 2, 2 * 32 // weight.bits).int()
    whole = (words[:, :, :, 0] * 256 + words[:, :, :, 1]).flatten(2)  # [rows, blocks, bytes]
    scaled = 16 if weight.bits == 4 else 1
    i = torch.arange(length)
    places = 32 // weight.bits
    inputs = 16 * (2 * (i % (2 * places) // 4) + i % 4 % 2) + 2 * (i // (2 * places)) + i % 4 // 2
    back = torch.empty(4, expected.shape[1] // length, length)
    back[:, :, inputs] = whole * found.units[:, :, None] * scaled
    torch.testing.assert_close(back.flatten(1), expected, rtol=1e-5, atol=1e-8)
    blocks = x.abs().amax(1, keepdim=True)
    assert ((expected[:, :size] - x[:, order]).abs() <= blocks / 32512 * 0.51).all()
    sums = torch.nn.functional.pad(x[:, order], (0, -size % length)).view(4, -1, weight.group).sum(2)
    torch.testing.assert_close(found.sums, sums, rtol=1e-5, atol=1e-3)


def rounded(x, weight):
    """x as the matrix-vector product multiplies it; blocks are in the order of the words."""
    if weight.order is None:
        return integers.round_rows(x, weight.bits)
    found = torch.empty_like(x)
    found[:, weight.order] = integers.round_rows(x[:, weight.order], weight.bits)
    return found


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_rows(name, rows):
    weight = integer_weight(*WEIGHTS[name])
    outputs, size = weight.shape
    x, gain, plain = torch.randn(rows, size), torch.randn(size), integers.expand(weight, torch.float32)
    expected = rounded(x, weight) @ plain.T
    close(t_integers.integer_gemv(x, weight), expected, 1e-3)  # the sum of x is of x as it was
    bias, residual = torch.randn(outputs), torch.randn(rows, outputs)
    close(t_integers.integer_gemv(x, weight, bias, residual=residual), expected + bias + residual, 1e-3)
    if outputs % 2 == 0:
        gate, up = (rounded(norm.rms_norm(x, gain, 1e-5), weight) @ plain.T + bias).chunk(2, dim=1)
        got = t_integers.integer_gemv(x, weight, bias, norm=(gain, 1e-5), gated=True)
        close(got, torch.nn.functional.silu(gate) * up, 2e-3)


def test_few_rows_of_long_inputs():
    """Several steps, and a last one that is not full."""
    weight = integer_weight(5, 2048 + 96, 32)
    x = torch.randn(2, weight.shape[1])
    expected = rounded(x, weight) @ integers.expand(weight, torch.float32).T
    close(t_integers.integer_gemv(x, weight), expected, 1e-3)
    close(t_integers.integer_gemv(x, weight, block=(2, 64, 1)), expected, 1e-3)


@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (8, 2), (9, 3), (17, 1), (64, 2), (65, 1)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_more_rows(name, rows, splits):
    weight = integer_weight(*WEIGHTS[name])
    weight.order = None
    x, bias = torch.randn(rows, weight.shape[1]), torch.randn(weight.shape[0])
    expected = x @ integers.expand(weight, torch.float32).T + bias
    found = integers_matmul.integer_matmul(x, weight, bias, splits=splits)
    close(found, expected)
    assert torch.equal(integers_matmul.integer_matmul(x, weight, bias, splits=splits), found)
    parts = integers_matmul.integer_matmul(x, weight, bias, in_parts=True, splits=splits)
    assert torch.equal(parts if parts.dim() == 2 else sum(parts.unbind()), found)  # in their order


@pytest.mark.parametrize("name", WEIGHTS)
def test_expanded_weights(name):
    weight = integer_weight(*WEIGHTS[name])
    weight.order = None
    for dtype in (torch.float32, torch.float16):
        found, expected = integers_matmul.expand_words(weight, dtype), integers.expand(weight, dtype)
        torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6)


def test_expanded_in_pieces(monkeypatch):
    weight = integer_weight(300, 96, 32)
    x, bias = torch.randn(257, 96).half(), torch.randn(300).half()
    whole = t_integers.integer_linear(x, weight, bias)
    monkeypatch.setattr(linear, "PIECE_NUMBERS", 130 * 96)
    seen = []
    expand = t_integers.expand_words
    monkeypatch.setattr(t_integers, "expand_words", lambda *args: seen.append(args[2:]) or expand(*args))
    close(t_integers.integer_linear(x, weight, bias).float(), whole.float(), 0.02)
    assert seen == [(0, 128), (128, 256), (256, 300)]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 256, 257])
def test_every_number_of_rows_has_a_product(rows):
    weight = integer_weight(24, 96, 32, act_order=True)
    x, bias = torch.randn(rows, 96).half(), torch.randn(24).half()
    expected = integers.integer_linear(x.float(), weight, bias.float())
    close(t_integers.integer_linear(x, weight, bias).float(), expected, 0.02)
    close(t_integers.integer_linear(x.float(), weight, bias.float()), expected)  # float32: the weight is expanded

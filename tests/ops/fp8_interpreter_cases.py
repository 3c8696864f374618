"""Products with 8-bit floats against their plain twins under Triton's interpreter, on the CPU
(`test_triton_interpreter.py`)."""

import os
from dataclasses import dataclass

import pytest
import torch

from nanovllm.layers.parted import tried_inputs
from nanovllm.ops import fp8, linear, norm
from nanovllm.ops.triton import fp8 as triton_fp8
from nanovllm.ops.triton import gemv

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@dataclass
class Scaled:
    """As layers/scaled.py:ScaledWeight."""

    q: torch.Tensor
    scale: torch.Tensor
    block: int
    plain: None = None
    unit: torch.Tensor | None = None


def scaled_weight(rows, size, block):
    weight = torch.randn(rows, size)
    if block:
        pad = torch.nn.functional.pad(weight, (0, -size % block, 0, -rows % block))
        tiles = pad.unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = tiles.abs().amax((1, 3)) / 448
        wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :size]
        return Scaled((weight / wide).to(torch.float8_e4m3fn), scale, block)
    q, scale = fp8.quantise(weight, 0)
    return Scaled(q, scale[:, 0].contiguous(), 0)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "size", "block"), [(1, 256, 384, 128), (2, 40, 72, 0), (3, 128, 200, 128)])
def test_gemv_of_8_bit_floats(rows, outputs, size, block, as_bytes):
    x, gain, weight = torch.randn(rows, size), torch.randn(size), scaled_weight(outputs, size, block)
    plain = fp8.expand(weight.q, weight.scale, torch.float32)
    if as_bytes:  # cards that cannot convert them
        weight.q = weight.q.view(torch.uint8)
    torch.testing.assert_close(gemv.gemv(x, weight), x @ plain.T, rtol=1e-5, atol=1e-3)
    if outputs // 2 % (block or 1) == 0:
        gate, up = (norm.rms_norm(x, gain, 1e-5) @ plain.T).chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        got = gemv.gemv(x, weight, norm=(gain, 1e-5), gated=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


def test_bytes_become_the_floats_that_they_are():
    q = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    weight = Scaled(q.view(torch.uint8)[:, None].expand(256, 8).contiguous(), torch.ones(256), 0)
    found = gemv.gemv(torch.tensor([[1.0] + [0.0] * 7]), weight)[0]
    known = ~q.float().isnan()  # 0x7f and 0xff: never written
    assert known.sum() == 254
    assert torch.equal(found[known], q.float()[known])


@pytest.mark.parametrize("block", [0, 128])
def test_inputs_in_8_bit_floats(block):
    x = torch.randn(5, 384)
    x[1], x[2] = 0, x[2] * 1e4
    (q, scale), (expected, scales) = triton_fp8.quantise(x, block), fp8.quantise(x, block)
    assert len(q) == len(scale) == (8 if block else 5)
    q, scale = q[:5], scale[:5]
    torch.testing.assert_close(scale, scales, rtol=1e-6, atol=0)
    # The interpreter loses the carry where rounding reaches the next power of two; a card does not.
    carried = torch.frexp(expected.float().abs()).mantissa == 0.5
    assert torch.equal(q.float()[~carried], expected.float()[~carried])


@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_after_a_product(has_bias):
    x, rows, columns = torch.randn(3, 1500), torch.rand(3), torch.rand(1500)
    bias = torch.randn(1500) if has_bias else None
    expected = x * rows[:, None] * columns + (bias if has_bias else 0)
    torch.testing.assert_close(triton_fp8.rescale(x, rows, columns, bias), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "outputs", "size", "block", "splits"),
    [(3, 70, 64, 0, 1), (17, 64, 128, 0, 1), (65, 256, 256, 128, 1), (5, 70, 640, 0, 2), (33, 256, 384, 128, 4)],
)
def test_weights_alone_in_8_bits(rows, outputs, size, block, splits):
    """x stays as it is. Steps of 64 and of 128 inputs; the last of the pieces may be shorter, or left out."""
    x, bias, weight = torch.randn(rows, size).half(), torch.randn(outputs).half(), scaled_weight(outputs, size, block)
    expected = x.float() @ fp8.expand(weight.q, weight.scale, torch.float32).T
    for added in (None, bias):
        whole = expected if added is None else expected + added.float()
        found = triton_fp8.weight_only_linear(x, weight, added, splits=splits).float()
        assert ((found - whole).norm() / whole.norm()).item() < 2e-3
        parts = triton_fp8.weight_only_linear(x, weight, added, in_parts=True, splits=splits)
        assert parts.dim() == (2 if splits == 1 else 3)
        total = parts if splits == 1 else sum(parts.unbind()).half()
        assert torch.equal(total.float(), found)


# A card, the scales' blocks, sizes and rows -> how they are multiplied
WAYS = [
    ((7, 5), 0, 128, (2, 3, 4, 33), ("gemv", "pieces", "gemv", "pieces")),
    ((8, 6), 0, 128, (2, 3, 128, 129), ("gemv", "alone", "alone", "pieces")),
    ((8, 6), 128, 512, (128, 129), ("alone", "pieces")),
    ((8, 9), 0, 128, (2, 3, 4, 32, 33, 129), ("gemv", "rescaled", "rescaled", "rescaled", "rescaled", "scaled")),
    ((8, 9), 128, 512, (2, 3, 33, 128, 129), ("gemv", "alone", "alone", "alone", "pieces")),  # PyTorch has none
    ((9, 0), 128, 512, (3, 32, 33, 129), ("alone", "alone", "scaled", "scaled")),
    ((9, 0), 128, 384, (32, 33, 128, 129), ("alone", "alone", "alone", "pieces")),  # scales of 12 bytes in a row
    ((9, 0), 0, 80, (2, 4, 8, 129), ("gemv", "rescaled", "rescaled", "scaled")),  # no multiple of a step
    ((9, 0), 0, 72, (8, 129), ("pieces", "pieces")),
    ((12, 0), 128, 512, (3, 128, 129), ("alone", "alone", "pieces")),
    ((12, 0), 0, 512, (33, 129), ("rescaled", "scaled")),
]


@pytest.mark.parametrize(("card", "block", "size", "rows", "ways"), WAYS)
def test_products_by_card(card, block, size, rows, ways, monkeypatch):
    monkeypatch.setattr(triton_fp8, "INTERPRETED", False)
    monkeypatch.setattr(triton_fp8, "capability", lambda _: card)
    monkeypatch.setattr(triton_fp8, "multiplies_blocks", lambda _: card[0] == 9)
    taken = []
    names = {"gemv": "gemv", "weight_only_linear": "alone", "linear_in_pieces": "pieces", "rescale": "rescaled"}
    for name, way in names.items():
        monkeypatch.setattr(triton_fp8, name, lambda *_, way=way: taken.append(way))
    monkeypatch.setattr(triton_fp8, "quantise", lambda x, _: (x, torch.ones(len(x), 1)))
    monkeypatch.setattr(torch, "_scaled_mm", lambda q, *_, **__: q)
    weight = scaled_weight(128, size, block)
    for number, way in zip(rows, ways):
        x = torch.zeros(number, size, dtype=torch.bfloat16)
        triton_fp8.scaled_linear(x, weight)
        assert (taken or ["scaled"]) == [way], number
        assert triton_fp8.reads_weight_alone(x, weight) == (way == "alone")
        taken.clear()
        triton_fp8.scaled_linear(x.half(), weight)
        if way == "rescaled":  # float16 does not hold the sums before their scales
            assert (taken or ["scaled"]) == ["alone" if number <= 32 and size % 64 == 0 else "scaled"]
        else:
            assert (taken or ["scaled"]) == [way]
        taken.clear()
        triton_fp8.scaled_linear(x.float(), weight)
        assert taken == ["pieces"], "float32 is not rounded"
        taken.clear()


@pytest.mark.parametrize("rows", [33, 35, 36])
def test_scales_of_blocks_begin_at_16_bytes(rows, monkeypatch):
    """What PyTorch asks of a product with scales of blocks, and its numbers."""

    def scaled_mm(q, weight, scale_a, scale_b, out_dtype):
        (padded, size), outputs = q.shape, weight.shape[1]
        assert padded % 4 == 0
        assert (scale_a.shape, scale_a.stride()) == ((padded, size // 128), (1, padded))
        assert (scale_b.shape, scale_b.stride()) == ((size // 128, outputs // 128), (1, size // 128))
        x = q.float().unflatten(1, (-1, 128)) * scale_a[..., None]
        return (x.flatten(1) @ fp8.expand(weight.t(), scale_b.t(), torch.float32).T).to(out_dtype)

    monkeypatch.setattr(triton_fp8, "capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_fp8, "multiplies_blocks", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight, x = scaled_weight(256, 512, 128), tried_inputs(rows, 512).bfloat16()
    found = triton_fp8.scaled_linear(x, weight)
    expected = x.float() @ fp8.expand(weight.q, weight.scale, torch.float32).T
    assert found.shape == expected.shape
    assert ((found.float() - expected).norm() / expected.norm()).item() < 5e-3


def test_without_a_card_pytorch_has_no_product_with_scales_of_blocks():
    assert not triton_fp8.multiplies_blocks(torch.device("cpu"))


@pytest.mark.parametrize(("outputs", "size", "block"), [(300, 96, 0), (520, 200, 128)])
def test_expanded_in_pieces(outputs, size, block, monkeypatch):
    """What no kernel takes: 128 rows of the weight at a time, or all at once."""
    x, bias, weight = torch.randn(5, size), torch.randn(outputs), scaled_weight(outputs, size, block)
    whole = triton_fp8.scaled_linear(x, weight, bias)
    monkeypatch.setattr(linear, "PIECE_NUMBERS", 130 * size)
    seen = []
    expand = triton_fp8.expanded_rows
    monkeypatch.setattr(triton_fp8, "expanded_rows", lambda *args: seen.append(args[2:]) or expand(*args))
    torch.testing.assert_close(triton_fp8.scaled_linear(x, weight, bias), whole)
    assert seen == [(first, min(first + 128, outputs)) for first in range(0, outputs, 128)]
    expected = x @ fp8.expand(weight.q, weight.scale, torch.float32).T + bias
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)

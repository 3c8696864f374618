"""Quantised products: the twin against GGUF's definition, and quant.c, compiled for each kind of processor, bit for bit
against the twin."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanovllm.ops import quant
from nanovllm.ops.native import build
from nanovllm.ops.native.ops import NativeOps
from nanovllm.weights.gguf_quants import TENSOR_TYPES, TensorType, decode, split
from tests.ops.c_variants import VARIANTS, compiled

KINDS = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.unpack}
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXTREMES = (0, 255, 0x80, 0x7F, 0x0F, 0xF0)


def random_rows(kind: TensorType, outputs: int, size: int, seed: int) -> torch.Tensor:
    """Any bits, but scales that are finite; the first outputs have the extreme bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, size // kind.block_len, kind.block_bytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for output, byte in zip(range(outputs - 2), EXTREMES):
        raw[output] = byte
    for at in SCALES_AT.get(kind.name, (0,)):
        scales = (torch.randn(shape[:2], generator=generator) * 0.01).half()
        raw[..., at : at + 2] = scales.view(torch.uint8).view(*shape[:2], 2)
    return raw.flatten(1)


def pack(name: str, raw: torch.Tensor) -> quant.PackedMatrix:
    return quant.pack(name, *split(raw, KINDS[name]))


def inputs(rows: int, size: int, seed: int) -> torch.Tensor:
    """With a block of zeros, one of equal numbers, tiny ones, and an outlier."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    x[0, :32], x[0, 32:64], x[-1, :32], x[-1, 40] = 0.0, -3.0, 1e-38, 1e4
    return x


@pytest.mark.parametrize("name", KINDS)
def test_packing_loses_nothing(name: str) -> None:
    assert name in quant.FORMATS, "a type that is read but not computed with"
    raw = random_rows(KINDS[name], 19, 512, 0)
    matrix = pack(name, raw)
    expected = decode(raw.flatten(), KINDS[name]).view(19, 512)
    assert matrix.shape == (19, 512)
    assert matrix.data.numel() <= raw.numel() * 24 / 19 * 1.03  # eight outputs a panel; K types keep scales as bytes
    ids = torch.tensor([18, 0, 7, 8, 8])
    assert torch.equal(quant.dequantise_rows(matrix, ids), expected[ids])


@pytest.mark.parametrize("name", quant.MOVED)
@pytest.mark.parametrize("outputs", [8, 19])
def test_moved_blocks_are_the_packed_ones(name: str, outputs: int) -> None:
    raw = random_rows(KINDS[name], outputs, 512, 0)
    part = raw[:, : raw.shape[1] // 2]  # of several ranks: no whole rows
    for stored in (raw, part):
        moved, packed = quant.move_blocks(name, stored), pack(name, stored)
        assert torch.equal(moved.data, packed.data)
        assert (moved.form, moved.shape) == (packed.form, packed.shape)


@pytest.mark.parametrize("name", KINDS)
def test_the_twin_is_close_to_floating_point(name: str) -> None:
    raw = random_rows(KINDS[name], 40, 512, 1)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ decode(raw.flatten(), KINDS[name]).view(40, 512).double().T
    found = quant.linear(x, pack(name, raw))
    assert (found - exact).norm() < 1e-4 * exact.norm()  # 16,256 steps from 0 to the largest of 32 numbers


def test_what_is_not_finite_stays_visible() -> None:
    kind = KINDS["Q4_1"]
    matrix = pack("Q4_1", random_rows(kind, 16, 64, 3))
    x = inputs(3, 64, 4)
    x[1, 5], x[2, 40] = torch.inf, torch.nan
    found = quant.linear(x, matrix)
    assert [bool(row.isnan().all()) for row in found] == [False, True, True]


@dataclass
class Stack:
    matrices: list[quant.PackedMatrix | torch.Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(m.shape[0] for m in self.matrices), self.matrices[0].shape[1]


needs_compiler = pytest.mark.skipif(isinstance(build.load_library(), str), reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 40])
@pytest.mark.parametrize("variant", ["", "plain C"])
def test_a_stack_is_multiplied_as_its_parts_are(rows: int, variant: str) -> None:
    """Bit for bit as the twin does it; a part in float32, and some rows in plain C, as floating point does it."""
    packed = [pack(name, random_rows(KINDS[name], 19, 512, 5)) for name in ("Q4_1", "Q6_K")]
    floats = torch.randn(5, 512, generator=torch.Generator().manual_seed(6))
    weight, bias = Stack([packed[0], floats, packed[1]]), torch.arange(43.0)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(7))
    ops = NativeOps()
    ops.quant_variant = variant or ops.quant_variant
    found = ops.linear(x, weight, bias)
    starts = (0, 19, 24, 43)
    for matrix, start, stop in zip(weight.matrices, starts, starts[1:]):
        if isinstance(matrix, torch.Tensor) or (rows > 2 and variant):
            exact = matrix if isinstance(matrix, torch.Tensor) else quant.dequantise_rows(matrix, torch.arange(19))
            torch.testing.assert_close(found[:, start:stop], x @ exact.T + bias[start:stop], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[:, start:stop], quant.linear(x, matrix, bias[start:stop]))


@needs_compiler
@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_the_same_alone_and_among_others(name: str) -> None:
    matrix, x = pack(name, random_rows(KINDS[name], 24, 512, 8)), inputs(21, 512, 9)
    together, ops = NativeOps().linear(x, Stack([matrix])), NativeOps()
    for rows in (slice(0, 1), slice(7, 9), slice(5, 12), slice(20, 21)):
        assert torch.equal(ops.linear(x[rows], Stack([matrix])), together[rows])


@needs_compiler
def test_rows_of_an_embedding() -> None:
    matrix = pack("Q8_0", random_rows(KINDS["Q8_0"], 19, 64, 10))
    ids = torch.tensor([18, 0, 3])
    assert torch.equal(NativeOps().embed(ids, Stack([matrix])), quant.dequantise_rows(matrix, ids))
    for bad in (19, -1):
        with pytest.raises(IndexError, match="19 rows"):
            NativeOps().embed(torch.tensor([0, bad]), Stack([matrix]))


def test_floats_are_rounded_well() -> None:
    """Q4_1 to least squares, better than from the smallest to the largest weight; zeros, equal and tiny ones too."""
    w = torch.randn(40, 512, generator=torch.Generator().manual_seed(11))
    w[0], w[1], w[2, :32] = 0.0, 3.0, 1e-9
    ids = torch.arange(43)
    four, eight = (quant.dequantise_rows(quant.quantise_matrix(name, w, 43), ids) for name in ("Q4_1", "Q8_0"))
    assert (four[40:] == 0).all()
    blocks = w.unflatten(1, (-1, 32))
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = (high - low).clamp(min=1e-30) / 15
    plain = (((blocks - low) / step).round() * step + low).flatten(1)
    assert (four[:40] - w).square().sum() < 0.9 * (plain - w).square().sum()
    assert torch.equal(four[:2], w[:2])
    assert (eight[:40] - w).abs().max() <= w.abs().max() / 127 * 0.51


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quant")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_processor_gives_the_bits_of_the_twin(folder: Path, variant: str, name: str) -> None:
    command, kind = compiled("quant_harness.c", variant, folder), KINDS[name]
    for outputs, size, rows in ((8, 256, 1), (19, 512, 7), (16, 256, 4), (16, 256, 17)):
        matrix = pack(name, random_rows(kind, outputs, size, outputs))
        x = inputs(rows, size, rows)
        head = struct.pack("<5q", matrix.form.index, outputs, size, rows, matrix.data.numel())
        data = head + matrix.data.numpy().tobytes() + x.numpy().tobytes()
        done = subprocess.run(command, input=data, capture_output=True, check=True)
        cut, last = quant.quantise(x), quant.dequantise_rows(matrix, torch.tensor([outputs - 1]))
        expected = (last, cut.q, cut.scale, quant.linear(x, matrix))
        assert done.stdout == b"".join(part.numpy().tobytes() for part in expected), done.stderr.decode()

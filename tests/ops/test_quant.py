"""Quantised products: the twin against GGUF's definition, and quant.c, compiled for each kind of processor, bit for bit
against the twin."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm.hardware.host import cpu_fact
from nanovllm.ops import quant
from nanovllm.ops.native import build
from nanovllm.weights.gguf_quants import TENSOR_TYPES, TensorType, decode, split

KINDS = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.unpack}
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HARNESS = Path(__file__).with_name("quant_harness.c")
EXTREMES = (0, 255, 0x80, 0x7F, 0x0F, 0xF0)
X86 = {"plain C": "x86-64", "AVX2": "x86-64-v3", "AVX-512": "x86-64-v4"}
ARM = {"plain C, ARM": "armv8-a", "NEON with dot product": "armv8.2-a+dotprod"}


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


@pytest.mark.parametrize("name", KINDS)
def test_the_twin_is_close_to_floating_point(name: str) -> None:
    raw = random_rows(KINDS[name], 40, 512, 1)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ decode(raw.flatten(), KINDS[name]).view(40, 512).double().T
    found = quant.linear(x, pack(name, raw))
    assert (found - exact).norm() < 0.01 * exact.norm()  # 127 steps from 0 to the largest of 32 numbers


def test_what_is_not_finite_stays_visible() -> None:
    kind = KINDS["Q4_1"]
    matrix = pack("Q4_1", random_rows(kind, 16, 64, 3))
    x = inputs(3, 64, 4)
    x[1, 5], x[2, 40] = torch.inf, torch.nan
    found = quant.linear(x, matrix)
    assert [bool(row.isnan().all()) for row in found] == [False, True, True]


Compiled = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """variant -> the command that runs the harness; skips where the compiler or the processor is not there."""
    folder, made = tmp_path_factory.mktemp("quant"), dict[str, list[str]]()

    def get(variant: str) -> list[str]:
        arm = variant in ARM
        compiler = shutil.which("aarch64-linux-gnu-gcc" if arm else "cc")
        if compiler is None:
            pytest.skip(f"no compiler for {variant}")
        if variant not in made:
            target, machine = folder / str(len(made)), {**X86, **ARM, "this machine": "native"}[variant]
            flags = [*build.EXACT_FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-march={machine}"]
            done = subprocess.run(
                [compiler, *flags, "-static", str(HARNESS), "-o", str(target), "-lm"], capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr.decode()
            made[variant] = [str(target)]
        if arm:
            emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
            if emulator is None:
                pytest.skip("no qemu-aarch64: cross-compiled only")
            return [emulator, *made[variant]]
        needed = {"AVX2": ("avx2", "f16c", "fma"), "AVX-512": ("avx512vl", "avx512bw")}.get(variant, ())
        if not set(needed) <= set(cpu_fact("flags").split()):
            pytest.skip(f"this processor has no {variant}: compiled only")
        return made[variant]

    return get


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("variant", ["this machine", *X86, *ARM])
def test_every_processor_gives_the_bits_of_the_twin(compiled: Compiled, variant: str, name: str) -> None:
    command, kind = compiled(variant), KINDS[name]
    for outputs, size, rows in ((8, 256, 1), (19, 512, 7), (16, 256, 4)):
        matrix = pack(name, random_rows(kind, outputs, size, outputs))
        x = inputs(rows, size, rows)
        head = struct.pack("<5q", matrix.form.index, outputs, size, rows, matrix.data.numel())
        data = head + matrix.data.numpy().tobytes() + x.numpy().tobytes()
        done = subprocess.run(command, input=data, capture_output=True, check=True)
        quantised = quant.quantise(x)
        last_row = quant.dequantise_rows(matrix, torch.tensor([outputs - 1]))
        expected = (last_row, quantised.q, quantised.scale, quant.linear(x, matrix))
        assert done.stdout == b"".join(part.numpy().tobytes() for part in expected), done.stderr.decode()

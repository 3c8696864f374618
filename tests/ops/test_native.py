"""The C kernels equal their plain twins, on both sides of every limit; without a compiler everything still works."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from nanovllm.ops.attention import paged_attention_reference
from nanovllm.ops.kv_cache import expand_kv, round_kv
from nanovllm.ops.native import build
from nanovllm.ops.native.ops import CACHE_FORMS, FEW_ROWS, MAX_ROWS, SIGNATURES, NativeOps
from nanovllm.ops.native.tape import Recorder
from nanovllm.ops.opset import PLAIN, choose_ops, native_ops
from tests.ops.c_variants import VARIANTS, compiled

LIBRARY = build.load_library()
each_form = pytest.mark.parametrize("form", list(CACHE_FORMS), ids=str)
needs_compiler = pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"no native kernels: {LIBRARY}")


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 3, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_norms_and_gate(rows: int, size: int) -> None:
    ops = native_ops()
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    before = x.clone(), residual.clone()
    for got, twin in zip(ops.add_rms_norm(x, residual, weight, 1e-5), PLAIN.add_rms_norm(x, residual, weight, 1e-5)):
        close(got, twin)
    close(ops.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    gate_up = torch.cat((torch.randn(rows, size) * 40, torch.randn(rows, size)), dim=1)  # far into both tails of silu
    close(ops.silu_mul(gate_up), PLAIN.silu_mul(gate_up))


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 17, 70])
@pytest.mark.parametrize(("outputs", "size"), [(1, 1), (3, 7), (13, 64), (5, 577), (130, 200), (20, 1600)])
def test_products_of_floats(rows: int, outputs: int, size: int) -> None:
    """Also of a slice of rows, as a layer makes them, and with threads: 130 x 200 is above the limit for one."""
    ops, weight, bias = native_ops(), torch.randn(outputs, size), torch.randn(outputs)
    for x in (torch.randn(rows, size), torch.randn(rows, 2 * size)[:, :size]):
        for added in (None, bias):
            got, exact = ops.linear(x, weight, added), PLAIN.linear(x.double(), weight.double(), None)
            close(got, (exact if added is None else exact + added).float(), 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_floats_on_every_processor(variant: str, tmp_path: Path) -> None:
    done = subprocess.run(compiled("linear_harness.c", variant, tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@needs_compiler
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(("outputs", "size"), [(1, 1), (3, 7), (5, 577), (130, 256)])
def test_products_with_weights_in_16_bits(dtype: torch.dtype, unit: float, rows: int, outputs: int, size: int) -> None:
    """Sums are float32; one result is rounded once, by half a unit in its last place."""
    weight, bias = torch.randn(outputs, size).to(dtype), torch.randn(outputs).to(dtype)
    for x in (torch.randn(rows, size).to(dtype), torch.randn(rows, 2 * size).to(dtype)[:, :size]):
        exact = x.double() @ weight.double().t()
        got = native_ops().linear(x, weight)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=1.01 * unit, atol=1e-4)
        torch.testing.assert_close(native_ops().linear(x, weight, bias), PLAIN.linear(x, weight, bias))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 8])
def test_every_number_in_16_bits_is_widened_right(dtype: torch.dtype, size: int) -> None:
    """With an instruction eight at a time, and by arithmetic, which is for the rest and for other processors."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = numbers[numbers.isfinite()]
    weight = finite[: len(finite) // size * size].view(-1, size)
    assert torch.equal(native_ops().linear(torch.eye(size, dtype=dtype), weight), weight.t())
    odd = numbers[~numbers.isfinite()][:, None]
    got = native_ops().linear(torch.ones(1, 1, dtype=dtype), odd)
    torch.testing.assert_close(got, odd.t(), equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_few_rows_are_computed_by_these_kernels(dtype: torch.dtype) -> None:
    ops, calls = native_ops(), []  # type: ignore[var-annotated]
    x, gate_up, down = (torch.randn(shape).to(dtype) for shape in ((2, 64), (1, 64, 64), (1, 64, 32)))
    args = (x, gate_up, down, torch.zeros(2, 1, dtype=torch.int32), torch.rand(2, 1))
    with ops.kernels.recording(partial(Recorder, calls), torch.empty):
        got = ops.expert_pairs(*args)
    assert [name for name, _ in calls] == ["float_linear" if dtype == torch.float32 else "half_rows_linear"] * 2
    torch.testing.assert_close(got, PLAIN.expert_pairs(*args), rtol=2e-2, atol=2e-2)


@needs_compiler
def test_the_gate_of_extreme_values_is_finite_and_right() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    got = native_ops().silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    close(got, torch.nn.functional.silu(gate))


@needs_compiler
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(16, 16), (64, 64), (80, 80), (80, 32)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS + 1])
@each_form
def test_rope_and_store(head_dim: int, rot_dim: int, has_norm: bool, rows: int, form: torch.dtype) -> None:
    """Values are stored as they come, so their bits are the same; turned keys may round to the neighbouring number."""
    heads, kv_heads = 6, 2
    qkv, table = torch.randn(rows, (heads + 2 * kv_heads) * head_dim), torch.randn(90, rot_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if has_norm else None
    positions, slots = torch.randint(0, 90, (rows,)), torch.randperm(48)[:rows]
    outputs = []
    for ops in (native_ops(), PLAIN):
        caches = [round_kv(torch.zeros(6, 8, kv_heads, head_dim), form) for _ in range(2)]
        q = ops.qk_norm_rope(qkv, norms, 1e-6, *ops.rope_inputs(table, positions), *caches, slots, heads)
        outputs.append((q, *caches))
    (q, k_cache, v_cache), (twin_q, twin_k, twin_v) = outputs
    close(q, twin_q, 1e-5)
    assert torch.equal(v_cache, twin_v)
    keys, twin_keys = expand_kv(k_cache, torch.float32), expand_kv(twin_k, torch.float32)
    step = {torch.float32: 0.0, torch.float16: 2**-10, torch.int8: 1 / 127}[form]
    allowed = step * twin_keys.abs().amax(-1, keepdim=True) + 1e-5 * twin_keys.abs() + 1e-5
    assert ((keys - twin_keys).abs() <= allowed).all()


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("num_seqs", [1, 7])
@each_form
def test_decode_attention(
    heads: int, kv_heads: int, head_dim: int, window: int | None, num_seqs: int, form: torch.dtype
) -> None:
    block = 16
    lens = torch.tensor([333, 1, block - 1, block, block + 1, 20, 21], dtype=torch.int32)[:num_seqs]
    caches = [round_kv(torch.randn(200, block, kv_heads, head_dim), form) for _ in range(2)]
    tables = torch.randperm(200)[: 21 * num_seqs].view(num_seqs, 21).int()
    q = torch.randn(num_seqs, heads, head_dim) * 3
    got = NativeOps().decode_attention(q, *caches, lens, tables, head_dim**-0.5, window)
    starts = torch.arange(num_seqs + 1)
    read = [expand_kv(cache, torch.float32) for cache in caches]
    close(got, paged_attention_reference(q, *read, starts, lens, tables, head_dim**-0.5, window), 1e-5)


HEADS = {  # rows of a cache that are hard to round
    "zeros": torch.zeros(20),
    "halves between two int8": torch.arange(-127, 128, 13).float() / 2,
    "above float16": torch.tensor([1e30, -1e6, 65520.0, 65504.0, -65519.0, 1.0, float("inf"), float("-inf")]),
    "below the normal float16": torch.tensor([1e-5, -3e-6, 6.1e-5, 6.103515625e-5, 2**-25, 1.5 * 2**-24, -1e-12]),
    "all below": torch.tensor([1e-9, -2e-9, 0.0, 3e-40]),
    "scale below the normal float16": torch.tensor([1e-4, -5e-5, 2.5e-6]),
    "halves between two float16": torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 2047.5, -2048.0 - 1, 0.1, 1 / 3]),
    "NaN": torch.tensor([1.0, 2.0, float("nan")]),
}


@needs_compiler
@each_form
@pytest.mark.parametrize("row", HEADS.values(), ids=HEADS)
def test_rounding_to_the_cache_is_that_of_the_twin(row: torch.Tensor, form: torch.dtype) -> None:
    """Bit for bit (NaN: read back as NaN). A cosine of 1 and a sine of 0 leave the key as it is; keys of 0 see both
    slots alike."""
    row = row.repeat(5)  # vectors, and a rest
    dim, slots = len(row), torch.tensor([1])
    qkv, table = torch.cat((torch.zeros(dim), row, row))[None], torch.tensor([[1.0, 0.0]])
    caches = [round_kv(torch.zeros(1, 2, 1, dim), form) for _ in range(2)]
    native_ops().qk_norm_rope(qkv, None, 0.0, table, torch.tensor([0]), *caches, slots, 1)
    expected = round_kv(row, form)
    read = expand_kv(expected, torch.float32)
    for cache in caches:
        stored = cache[0, 1, 0]
        assert torch.equal(expand_kv(stored, torch.float32).isnan(), read.isnan())
        assert read.isnan().any() or torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    lens, table = torch.tensor([2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    keys = torch.zeros_like(caches[0])
    got = NativeOps().decode_attention(torch.ones(1, 1, dim), keys, caches[1], lens, table, 1.0)[0, 0]
    torch.testing.assert_close(got, read / 2, equal_nan=True, rtol=1e-6, atol=0)


@each_form
def test_rounding_loses_at_most_half_a_step(form: torch.dtype) -> None:
    x = torch.randn(50, 4, 64) * torch.logspace(-3, 3, 50)[:, None, None]
    step = {torch.float32: 0.0, torch.float16: 2**-10, torch.int8: 1 / 127}[form]
    error = (expand_kv(round_kv(x, form), torch.float32) - x).abs()
    assert (error <= 0.501 * step * x.abs().amax(-1, keepdim=True)).all()
    assert round_kv(x, form).nbytes == x.numel() * form.itemsize + (50 * 4 * 2 if form == torch.int8 else 0)


@needs_compiler
def test_other_dtypes_and_strides_go_to_the_twin() -> None:
    ops = native_ops()
    x = torch.randn(4, 32)[:, ::2]
    close(ops.rms_norm(x, torch.ones(16), 1e-6), PLAIN.rms_norm(x, torch.ones(16), 1e-6))
    half = torch.randn(2, 8).bfloat16()
    assert ops.silu_mul(half).dtype == torch.bfloat16
    assert choose_ops(False, torch.bfloat16) is PLAIN


@pytest.mark.parametrize("machine", ["x86-64-v3", "x86-64-v4", "armv8.2-a+dotprod"])
@pytest.mark.parametrize("source", build.SOURCES)
def test_every_file_compiles_for_other_processors(source: str, machine: str, tmp_path: Path) -> None:
    """What quant.c computes there: test_quant.py."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    compiler = shutil.which("cc" if machine.startswith("x86") == x86 else "aarch64-linux-gnu-gcc")
    if compiler is None or not (x86 or machine.startswith("arm")):
        pytest.skip(f"no compiler for {machine}")
    flags = [*build.SOURCES[source], "-fopenmp", "-Wall", "-Wextra", "-Werror", f"-march={machine}"]
    path = Path(build.__file__).with_name(source)
    done = subprocess.run(
        [compiler, *flags, "-c", str(path), "-o", str(tmp_path / "o")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("source", build.SOURCES)
def test_no_name_is_one_of_the_c_library(source: str, tmp_path: Path) -> None:
    """Headers have more names with newer standards, which newer compilers take by default: `fmul` was one of them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler")
    for standard in ("gnu11", "gnu2x"):
        flags = ["-D_GNU_SOURCE", *build.SOURCES[source], f"-std={standard}", "-fopenmp", "-march=native"]
        path = Path(build.__file__).with_name(source)
        done = subprocess.run(
            [compiler, *flags, "-fsyntax-only", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_arguments_are_those_of_the_c_functions() -> None:
    """A wrong one would not be noticed by ctypes, and would read or write anywhere."""
    kinds = {ctypes.c_void_p: "*", ctypes.c_int64: "int64_t", ctypes.c_float: "float"}
    text = "".join((Path(build.__file__).parent / name).read_text() for name in build.SOURCES)
    for name, (_, arguments) in SIGNATURES.items():
        found = {
            re.sub(r"\s+", " ", parameters) for parameters in re.findall(rf"\b\w+ \*?{name}\(([^()]*)\)[ ;]", text)
        }
        assert found, name
        for parameters in found:  # the definition, and the declaration in tape.c
            declared = [] if parameters == "void" else parameters.split(",")
            assert ["*" if "*" in each else each.split()[0] for each in declared] == [kinds[a] for a in arguments], name


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"NANOVLLM_NATIVE": "0"}, "turned off"),
        ({"PATH": "/nonexistent", "CC": "nothing"}, "no C compiler"),
        ({"CC": "false"}, "set CC to a compiler that works"),
        ({"NANOVLLM_CACHE": "/proc/nowhere"}, "set NANOVLLM_CACHE to a folder that can"),
    ],
)
def test_without_a_compiler_the_plain_operators_serve(environment: dict[str, str], reason: str) -> None:
    code = (
        "from nanovllm.ops.native.build import load_library; from nanovllm.ops.opset import PLAIN, choose_ops;"
        "import torch; found = load_library(); print(found); assert isinstance(found, str), found;"
        "assert choose_ops(False, torch.float32) is PLAIN"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if isinstance(LIBRARY, str) and "turned off" not in reason:
        return
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


def refuse(*args: object, **kwargs: object) -> None:
    raise OSError(30, "Read-only file system")


@needs_compiler
def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    build.load_library.cache_clear()
    try:
        assert not isinstance(build.load_library(), str)
        [first] = (tmp_path / "native").iterdir()
        stamp = first.stat().st_mtime_ns
        build.load_library.cache_clear()
        assert not isinstance(build.load_library(), str)
        assert [p.stat().st_mtime_ns for p in (tmp_path / "native").iterdir()] == [stamp]
        with monkeypatch.context() as patch:  # a container whose files are read-only
            patch.setattr(build.tempfile, "TemporaryFile", refuse)
            build.load_library.cache_clear()
            assert not isinstance(build.load_library(), str)
        first.unlink()  # what is loaded stays as it is
        first.write_bytes(b"damaged")
        build.load_library.cache_clear()
        assert not isinstance(build.load_library(), str)
        assert [p.name for p in (tmp_path / "native").iterdir()] == [first.name]
    finally:
        build.load_library.cache_clear()


@needs_compiler
def test_a_full_disk_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("cc: error: writing to /x.o: No space left on device")

    monkeypatch.setattr(build, "_load", full)
    build.load_library.cache_clear()
    found = build.load_library()
    build.load_library.cache_clear()
    assert isinstance(found, str)
    assert "or set NANOVLLM_CACHE to a folder elsewhere" in found
    assert "CC" not in found.replace("NANOVLLM_CACHE", "")

"""The C kernels equal their plain twins, on both sides of every limit; without a compiler everything still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.ops.attention import paged_attention_reference
from nanovllm.ops.native import build
from nanovllm.ops.native.ops import MAX_ROWS, NativeOps
from nanovllm.ops.opset import PLAIN, choose_ops, native_ops

LIBRARY = build.load_library()
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
def test_the_gate_of_extreme_values_is_finite_and_right() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    got = native_ops().silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    close(got, torch.nn.functional.silu(gate))


@needs_compiler
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(16, 16), (64, 64), (80, 80), (80, 32)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS + 1])
def test_rope_and_store(head_dim: int, rot_dim: int, has_norm: bool, rows: int) -> None:
    heads, kv_heads = 6, 2
    qkv, table = torch.randn(rows, (heads + 2 * kv_heads) * head_dim), torch.randn(90, rot_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if has_norm else None
    positions, slots = torch.randint(0, 90, (rows,)), torch.randperm(48)[:rows]
    outputs = []
    for ops in (native_ops(), PLAIN):
        caches = torch.zeros(6, 8, kv_heads, head_dim), torch.zeros(6, 8, kv_heads, head_dim)
        q = ops.qk_norm_rope(qkv, norms, 1e-6, *ops.rope_inputs(table, positions), *caches, slots, heads)
        outputs.append((q, *caches))
    for got, twin in zip(*outputs):
        close(got, twin, 1e-5)


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("num_seqs", [1, 7])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None, num_seqs: int) -> None:
    block = 16
    lens = torch.tensor([333, 1, block - 1, block, block + 1, 20, 21], dtype=torch.int32)[:num_seqs]
    caches = torch.randn(200, block, kv_heads, head_dim), torch.randn(200, block, kv_heads, head_dim)
    tables = torch.randperm(200)[: 21 * num_seqs].view(num_seqs, 21).int()
    q = torch.randn(num_seqs, heads, head_dim) * 3
    got = NativeOps().decode_attention(q, *caches, lens, tables, head_dim**-0.5, int(lens.max()), window)
    starts = torch.arange(num_seqs + 1)
    close(got, paged_attention_reference(q, *caches, starts, lens, tables, head_dim**-0.5, window), 1e-5)


@needs_compiler
def test_other_dtypes_and_strides_go_to_the_twin() -> None:
    ops = native_ops()
    x = torch.randn(4, 32)[:, ::2]
    close(ops.rms_norm(x, torch.ones(16), 1e-6), PLAIN.rms_norm(x, torch.ones(16), 1e-6))
    half = torch.randn(2, 8).bfloat16()
    assert ops.silu_mul(half).dtype == torch.bfloat16
    assert choose_ops(False, torch.bfloat16) is PLAIN


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"NANOVLLM_NATIVE": "0"}, "turned off"),
        ({"PATH": "/nonexistent", "CC": "nothing"}, "no C compiler"),
        ({"CC": "false"}, "compiling failed"),
        ({"NANOVLLM_CACHE": "/proc/nowhere"}, "compiling failed"),
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
    finally:
        build.load_library.cache_clear()

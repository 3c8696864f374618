"""Every Triton kernel compiles for every family of architectures, and fits its shared memory, on a machine without a
GPU. (For sm_86, sm_89, sm_100 and sm_120 only the attention and expert kernels, whose tiles depend on shared memory:
sm_80 and sm_90 compile the rest.)

This checks in CI that kernels can run on, for example, an RTX 2080 Ti (sm_75). It does not check that they are fast:
since Triton 3.3 a dot product on Turing runs on the ordinary cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("cross_compile_cases.py")
ROOT = Path(__file__).resolve().parents[2]
KB = 1024
# Most dynamic shared memory of one block.
SHARED_LIMITS = {75: 64 * KB, 80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB, 120: 99 * KB}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[int, list[dict]]:
    """A fresh cache folder: a kernel found in a cache would not be compiled."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[int, list[dict]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            results.setdefault(result["arch"], []).append(result)
    return results


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_every_kernel_compiles_and_fits(compiled, arch):
    results = compiled[arch]
    errors = [f"{r['name']}: {r['error']}" for r in results if "error" in r]
    assert not errors, "\n".join(errors)
    too_large = [f"{r['name']}: {r['shared']} bytes" for r in results if r["shared"] > SHARED_LIMITS[arch]]
    assert not too_large, "\n".join(too_large)
    assert all(r["cubin_bytes"] > 0 for r in results)
    kinds = {r["name"].split()[0] for r in results}
    expected = {"prefill", "decode", "moe_gate_up", "moe_down"}
    expected |= (
        {"mla_decode", "mla_rope", "mla_piece", "mla_absorb", "mla_project"} if arch >= 80 and arch != 89 else set()
    )
    expected |= {"integer_matmul", "moe_integers"} if arch >= 80 else set()
    if arch in (75, 80, 90):
        expected |= {"merge", "norm", "silu", "sample", "advance", "begin", "keep", "rope", "gemv", "moe_route"}
        expected |= {"integer_gemv", "integer_round", "integer_expand", "integer_splits", "moe_integer_gemv"}
        expected |= {"moe_sum", "moe_count", "moe_place", "moe_gemv", "moe_gather", "moe_scatter"}
        expected |= {"propose", "feed", "accept"}
    expected |= {"few_rows"} if arch in (80, 90) else set()
    expected |= {"fp8_weights"} if arch in (80, 90) else set()
    assert kinds == (expected | {"fp8_quantise", "fp8_rescale", "matmul"} if arch == 90 else expected)


def test_products_with_operands_in_registers_are_waited_for(compiled):
    """Hopper's product reads its left operand from registers while the program goes on. Where the compiler lets some of
    them run on into the next step, that step overwrites what they read (ops/triton/integers_matmul.py:hold)."""
    waits = {r["name"].replace(" bf16", ""): r["waits"] for r in compiled[90]}
    for name in (
        "integer_matmul 8",
        "integer_matmul 64",
        "integer_matmul 256",
        "moe_integers 8",
        "moe_integers 512",
        "fp8_weights by 1",
        "fp8_weights by 128",
    ):
        assert waits[name] == ["0"], name

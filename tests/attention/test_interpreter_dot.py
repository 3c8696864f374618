"""The interpreter multiplies the bit patterns of bf16 as integers, without an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreter_dot.py")
ROOT = SCRIPT.parents[2]


def test_bf16_products_are_right_under_the_interpreter() -> None:
    """Without the cast in `dot` the error is some 1e10 (triton 3.7.1); all bf16 kernel tests need it."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    error, largest = map(float, done.stdout.split())
    assert largest > 1
    assert error < 1e-5  # products of bf16 are exact in fp32; only their sum of 16 is rounded

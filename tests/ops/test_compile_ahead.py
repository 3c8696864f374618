"""Kernels are compiled in threads from launches that do not happen, and Triton is left as it was found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_variant_is_compiled_and_none_is_launched(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    case = Path(__file__).with_name("compile_ahead_case.py")
    done = subprocess.run(
        [sys.executable, str(case)], env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["compiled", "2"]

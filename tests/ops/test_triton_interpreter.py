"""Runs the `*interpreter_cases.py` in a process whose Triton interprets kernels instead of compiling them.

The mode is fixed when a kernel is decorated, so it cannot share a process with tests that compile or that use a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = ("interpreter_cases.py", "moe_interpreter_cases.py", "sampling_interpreter_cases.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cases", CASES)
def test_kernels_equal_their_twins_under_the_interpreter(cases):
    env = os.environ | {"TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(Path(__file__).with_name(cases))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""Runs the `*interpreter_cases.py` in a process whose Triton interprets kernels instead of compiling them.

The mode is fixed when a kernel is decorated, so it cannot share a process with tests that compile or that use a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 3600  # seconds: for what hangs, not for what is slow beside other work
PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.ops.quick_interpreter")


def run_interpreted(*cases: Path) -> str:
    """What pytest printed; all cases passed."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-x", *PLUGINS, *map(str, cases)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_equal_their_twins_under_the_interpreter():
    """One process: each would spend five seconds on importing."""
    cases = sorted(Path(__file__).parent.glob("*interpreter_cases.py"))
    printed = run_interpreted(*cases)
    assert len(cases) == 9
    assert " passed" in printed

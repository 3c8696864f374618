"""Facts of the machine, and what is set before OpenMP is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (None, "1000")),
        ({"OMP_WAIT_POLICY": "active"}, ("active", None)),
        ({"GOMP_SPINCOUNT": "7"}, (None, "7")),
    ],
)
def test_threads_wait_briefly_unless_the_user_says_otherwise(
    given: dict[str, str], found: tuple[str | None, str | None]
) -> None:
    code = f"import nanovllm, os, sys; print([os.environ.get(n) for n in {SETTINGS}], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run([sys.executable, "-c", code], env=env | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{list(found)} False"  # before OpenMP is loaded, which torch does

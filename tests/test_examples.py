"""The examples run as a reader runs them, and the steps they print are all there."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/flash_attention.py"


def test_flash_attention_runs_and_every_step_equals_torch() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^(\d) .*largest difference to torch (\S+)$", done.stdout, re.M)
    assert [int(number) for number, _ in steps] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert all(float(difference) < 1e-12 for _, difference in steps)


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150


def test_a_wrong_step_is_found() -> None:
    """Forget to rescale the old sums, and the example must fail at its first step with tiles."""
    names = runpy.run_path(str(EXAMPLE))
    main, right = names["main"], names["add_tile"]

    def wrong(state, scores, v):
        acc, _, total = state
        return right((acc, right(state, scores, v)[1], total), scores, v)

    main.__globals__["add_tile"] = wrong
    with pytest.raises(AssertionError, match="3 online"):
        main()

"""Guesses as a GPU makes and verifies them, without one: see draft_path_cases.py."""

from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.ops.test_triton_interpreter import run_interpreted


def test_guesses_in_the_captured_loop_change_nothing() -> None:
    run_interpreted(Path(__file__).with_name("draft_path_cases.py"))

"""What a GPU runs, without one: see device_path_cases.py."""

from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.ops.test_triton_interpreter import run_interpreted


def test_the_device_path_gives_the_tokens_of_the_plain_one() -> None:
    here = Path(__file__)
    run_interpreted(here.with_name("device_path_cases.py"), here.with_name("integer_path_cases.py"))


def test_experts_in_fewer_bits_on_the_kernels() -> None:
    here = Path(__file__)
    run_interpreted(here.with_name("experts8_cases.py"), here.with_name("experts4_cases.py"))


def test_weights_in_8_bit_floats_on_the_kernels() -> None:
    run_interpreted(Path(__file__).with_name("fp8_path_cases.py"))

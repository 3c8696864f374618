"""A step that runs out of memory. The same check runs on a GPU, with memory really gone: tests/gpu/check_oom.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM
from tests.gpu.check_oom import check, raised, requests


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"decode_steps": 4}], ids=str)
def test_running_out_of_memory_ends_the_largest_request_only(
    make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    """Three others share its step and start over, five wait behind it: all get the tokens they would have had."""
    found = check(make_llm(max_num_seqs=4, **options).engine, requests(100), raised)
    assert found["said"] == "OutOfMemoryError: out of memory, raised by the test"

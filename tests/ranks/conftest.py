"""The model of most tests of this folder, and groups of ranks that they share, started when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.group import RankGroup
from tests.tiny_models import TinyModel


@pytest.fixture(scope="session")
def qwen(tiny: Callable[[str], TinyModel]) -> Path:
    """Two ranks can share it."""
    return tiny("qwen3-bias-tied").path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    groups: dict[int, RankGroup] = {}

    def get(size: int) -> RankGroup:
        if size not in groups:
            groups[size] = RankGroup(size)
        return groups[size]

    yield get
    for group in groups.values():
        group.close()

"""Groups of ranks that all tests of this folder share: one of two, one of four, started when they are first wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.group import RankGroup


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

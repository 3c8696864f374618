"""The lookup against a search that compares every place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.ops.ngram import find


def search(tokens: list[int], shortest: int, longest: int, wanted: int) -> int:
    best = (0, False, 0, len(tokens))
    for last in range(len(tokens) - 1):
        count = 0
        while count < longest and count <= last and tokens[last - count] == tokens[-1 - count]:
            count += 1
        if count >= shortest:
            enough = last + wanted < len(tokens)
            best = max(best, (count, enough, last if enough else -last, last + 1))
    return best[3] if best[0] else len(tokens)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 4), st.integers(1, 9))
def test_the_longest_match_is_found(tokens: list[int], shortest: int, more: int, wanted: int) -> None:
    found = find(np.array(tokens, np.int32), shortest, shortest + more, wanted)
    assert found == search(tokens, shortest, shortest + more, wanted)


@pytest.mark.parametrize(
    ("tokens", "wanted", "found"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3], 3, 3),  # 1 2 3 is longer than 2 3
        ([2, 3, 4, 2, 3, 5, 7, 8, 2, 3], 2, 5),  # the later of two
        ([2, 3, 4, 2, 3, 5, 7, 8, 2, 3], 6, 2),  # which has enough after it
        ([7, 8, 7, 8, 7, 8], 4, 4),  # 8 7 8 is longer, though less comes after it
        ([1, 2, 3, 4, 5], 3, 5),
        ([4], 3, 1),
        ([4, 4], 3, 2),
        ([4, 4, 4], 3, 2),
    ],
)
def test_what_is_found(tokens: list[int], wanted: int, found: int) -> None:
    assert find(np.array(tokens, np.int32), 2, 3, wanted) == found

from __future__ import annotations

import random

import pytest

from nanovllm.bench.report import percentile, summary
from nanovllm.bench.workload import Lengths, make_workload
from nanovllm.errors import ConfigError


def test_small_vocabulary() -> None:
    workload = make_workload(random.Random(0), 50, Lengths(1, 40), Lengths(1, 2), vocab_size=17)
    assert max(map(max, workload.prompts)) == 16
    assert {len(prompt) for prompt in workload.prompts} >= {1, 40}
    assert set(workload.output_lens) == {1, 2}


@pytest.mark.parametrize(
    ("text", "exact", "up_to"),
    [
        ("64", (64, 64), (64, 64)),
        ("100", (100, 100), (100, 100)),
        ("101", (101, 101), (100, 101)),
        ("32..256", (32, 256), (32, 256)),
        ("1..1", (1, 1), (1, 1)),
    ],
)
def test_lengths(text: str, exact: tuple[int, int], up_to: tuple[int, int]) -> None:
    assert Lengths.parse(text) == Lengths(*exact)
    assert Lengths.parse(text, lowest_of_max=100) == Lengths(*up_to)


@pytest.mark.parametrize("text", ["", "0", "-3", "5..4", "0..4", "a", "1.5", "1...3"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="length"):
        Lengths.parse(text)


def test_no_sequences() -> None:
    with pytest.raises(ConfigError, match="num_seqs=0"):
        make_workload(random.Random(0), 0, Lengths(1, 1), Lengths(1, 1))


def test_percentiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [percentile(values, p) for p in (0, 50, 100)] == [1.0, 3.0, 5.0]
    assert percentile(values, 90) == pytest.approx(4.6)
    assert summary([7.0]) == {"mean": 7.0, "p50": 7.0, "p99": 7.0, "max": 7.0}

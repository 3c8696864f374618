"""The tables of docs/benchmarks.md come from result files and nothing else; the committed ones are up to date."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nanovllm.bench.tables import PAGES, fill, read_results
from nanovllm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", list(PAGES))
def test_the_committed_tables_are_what_the_results_say(page: str, tmp_path: Path) -> None:
    copy = tmp_path / Path(page).name
    shutil.copy(ROOT / page, copy)
    assert fill(copy, read_results(ROOT / "benchmarks/results"), PAGES[page]) == ["cpu", "gpu"]
    assert copy.read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8"), "run: nanovllm bench tables"


def test_a_page_without_a_place_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ConfigError, match="bench:cpu"):
        fill(page, read_results(ROOT / "benchmarks/results"), PAGES["docs/benchmarks.md"])
    assert page.read_text() == "nothing here"


def test_every_result_says_where_and_when() -> None:
    for result in read_results(ROOT / "benchmarks/results"):
        assert result.get("hardware") or result.get("gpu") or result.get("device"), sorted(result)

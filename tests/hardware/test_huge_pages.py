"""Weights in large pages have the same numbers, each in its own place."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch

from nanovllm.hardware import huge_pages
from nanovllm.hardware.huge_pages import ALIGN, CHUNK, PAGE, HugePages, has_huge_pages

pytestmark = pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages")


def test_tensors_are_side_by_side() -> None:
    memory = HugePages()
    given = [
        torch.randn(3, 5),
        torch.randint(0, 255, (7, 9), dtype=torch.uint8),
        torch.randn(0, 4),
        torch.randn(100, 64),
    ]
    given += [torch.randn(4, 4).half(), torch.randn(CHUNK // 4 + 5)]  # the last in a mapping of its own
    kept = [memory.keep(tensor) for tensor in given]
    kept.append(memory.empty((2, 3), torch.int64).zero_())
    for before, after in zip([*given, torch.zeros(2, 3, dtype=torch.int64)], kept):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert after.data_ptr() % ALIGN == 0
    assert kept[0].data_ptr() % PAGE == kept[-2].data_ptr() % PAGE == 0
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_small_tensors_between_large_ones_share_a_page() -> None:
    memory = HugePages()
    small = []
    for _ in range(3):
        small.append(memory.empty((100,), torch.float32).data_ptr())
        memory.empty((CHUNK // 4 + 5,), torch.float32)
    assert max(small) - min(small) < PAGE


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = []

    def watched(*args: object, **kwargs: object) -> object:
        made = real(*args, **kwargs)
        mappings.append(weakref.ref(made))
        return made

    real = huge_pages.mmap.mmap
    monkeypatch.setattr(huge_pages.mmap, "mmap", watched)
    kept = HugePages().keep(torch.ones(10))
    view = kept[3:]
    del kept
    gc.collect()
    assert view.sum() == 7
    del view
    gc.collect()
    assert [mapping() for mapping in mappings] == [None]


def test_a_system_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "SETTING", setting)
    assert not has_huge_pages()
    setting.write_text("always madvise [never]\n")
    assert not has_huge_pages()
    setting.write_text("always [madvise] never\n")
    assert has_huge_pages()


def test_a_system_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    assert HugePages().keep(torch.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="allocate memory"):
        HugePages().empty((2**45,), torch.float64)

"""Tensors in a file: the same numbers, nothing left behind, a clear error where there is no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware import disk_memory
from nanovllm.hardware.disk_memory import DiskMemory
from nanovllm.hardware.host import is_in_memory


def test_numbers_come_back_and_no_file_is_left(tmp_path: Path) -> None:
    disk = DiskMemory(tmp_path / "new")
    given = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 5), (0, 4), (7, 4096))]
    given.append(torch.randn(4, 6).t())
    kept = [disk.keep(tensor) for tensor in given]
    del disk
    assert all(torch.equal(*pair) for pair in zip(kept, given))
    assert not list((tmp_path / "new").iterdir())


def test_a_folder_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_memory, "is_in_memory", lambda folder: folder == tmp_path / "shm")
    DiskMemory(tmp_path / "disk")
    assert not caplog.text
    DiskMemory(tmp_path / "shm")
    assert "shm is in memory" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="Linux says where files are")
def test_memory_is_recognised_by_its_mount() -> None:
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for words in lines:
        kind, place = words[words.index("-") + 1], Path(words[4])
        if kind in ("tmpfs", "ext4", "overlay", "xfs", "btrfs") and place.is_dir() and place.resolve() == place:
            assert is_in_memory(place / "new folder") == (kind == "tmpfs") or any(
                Path(other[4]) == place for other in lines if other is not words
            )


def test_no_room_and_no_folder_are_errors_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: no file for quantised experts .*set NANOVLLM_CACHE"):
        DiskMemory(tmp_path / "file")
    disk = DiskMemory(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"No space left on device, after 0 MiB"):
        disk.keep(torch.zeros(8))

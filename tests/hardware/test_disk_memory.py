"""Tensors in a file: the same numbers, nothing left behind, a clear error where there is no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware.disk_memory import DiskMemory


def test_numbers_come_back_and_no_file_is_left(tmp_path: Path) -> None:
    disk = DiskMemory(tmp_path / "new")
    given = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 5), (0, 4), (7, 4096))]
    given.append(torch.randn(4, 6).t())
    kept = [disk.keep(tensor) for tensor in given]
    del disk
    assert all(torch.equal(*pair) for pair in zip(kept, given))
    assert not list((tmp_path / "new").iterdir())


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

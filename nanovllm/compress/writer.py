"""Folders that appear whole or not at all: written beside, put in place by a rename.

Until the last moment the previous folder stays as it was. A run that was killed leaves `<folder>.partial`, from which
the next one goes on; one that was killed between the two renames leaves `<folder>.previous`, which is put back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nanovllm.errors import ModelError


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def previous_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def recover(folder: Path) -> None:
    previous = previous_of(folder)
    if previous.exists() and not folder.exists():
        previous.rename(folder)


def replace_folder(partial: Path, folder: Path) -> None:
    previous = previous_of(folder)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """A full disk or a missing right is told with what became of the work."""
    recover(folder)
    try:
        yield
    except (OSError, SafetensorError) as error:
        state = "the previous folder is untouched" if folder.exists() else "nothing was put in its place"
        raise ModelError(
            f"{folder}: writing failed ({error}); {state}, and finished layers are kept in {partial_of(folder).name}: "
            "make room and run the same command again"
        ) from error


def check_room(folder: Path, num_bytes: int) -> None:
    """Before hours of work, not after."""
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ModelError(
            f"{folder}: needs {num_bytes / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free; "
            "make room or give another --output-dir"
        )

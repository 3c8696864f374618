"""Folders that appear whole or not at all, and never in place of other files.

A folder is written beside its place and put there by a rename; until then the previous one stays as it was. A run that
was killed leaves `<folder>.partial`, from which the next one goes on; one killed between the two renames leaves
`<folder>.previous`, which is put back. While a run writes, `<folder>.lock` is locked: a second one is refused.

All three names are replaced and removed only if they are absent, empty, or of the `Kind` that is being written.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file as save_private

from nanovllm.errors import ConfigError, ModelError

logger = logging.getLogger("nanovllm")
STATE = "state.json"


@dataclass(frozen=True)
class Kind:
    """The content of a folder of one command."""

    format: str  # one JSON file of the names `marks` must have it under "format"
    marks: tuple[str, ...]
    names: tuple[str, ...]  # patterns of all other files and folders in it

    def strangers(self, folder: Path) -> list[str]:
        """What must not be deleted with it: everything, unless the folder is of this kind."""
        found = sorted(path.name for path in folder.iterdir())
        if not any(self._proves(folder / mark) for mark in self.marks):
            return found
        return [name for name in found if not any(fnmatch(name, known) for known in (*self.marks, *self.names))]

    def _proves(self, mark: Path) -> bool:
        try:
            facts = json.loads(mark.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(facts, dict) and facts.get("format") == self.format


def output_folder(option: str, given: Path) -> Path:
    """Links are followed: the renames are done beside the folder itself."""
    folder = Path(os.path.realpath(given))
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{option} {given}: cannot be the current folder or one above it; name a new one")
    return folder


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def previous_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def check_replaceable(path: Path, kind: Kind) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise ConfigError(f"{path}: is no folder, and would be deleted; move it away or name another folder")
    if strangers := kind.strangers(path):
        shown = ", ".join(strangers[:3]) + ", ..." * (len(strangers) > 3)
        raise ConfigError(
            f"{path}: holds what this command did not write ({shown}) and would delete; move it away or name another "
            "folder"
        )


def remove_folder(folder: Path, kind: Kind) -> None:
    """The marks go last: what a kill leaves of the folder is still of this kind."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in kind.marks:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def replace_folder(partial: Path, folder: Path, kind: Kind) -> None:
    previous = previous_of(folder)
    remove_folder(previous, kind)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    remove_folder(previous, kind)


@contextmanager
def writing_to(folder: Path, kind: Kind) -> Iterator[None]:
    """No other run writes there meanwhile, and no other files are in the way. A full disk or a missing right is an
    error that states what became of the work."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            for path in (folder, partial_of(folder), previous_of(folder)):
                check_replaceable(path, kind)
            if previous_of(folder).exists() and not folder.exists():
                previous_of(folder).rename(folder)
            yield
    except (OSError, SafetensorError) as error:
        state = "the previous folder is untouched" if folder.exists() else "nothing was put in its place"
        if partial_of(folder).exists():
            state += f", and finished layers are kept in {partial_of(folder).name}"
        raise ModelError(
            f"{folder}: writing failed ({error}); {state}: make room and run the same command again, or name another "
            "folder"
        ) from error
    finally:
        for parent in missing:
            with suppress(OSError):  # it holds something now
                parent.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """By `flock`, which ends with the process: a lock file that a kill left locks nothing."""
    path = folder.with_name(folder.name + ".lock")
    while not _is_at(path, file := path.open("a", encoding="utf-8")):
        file.close()  # its owner has just ended and removed it
    with file:
        if os.fstat(file.fileno()).st_size:
            raise ConfigError(f"{path}: is not empty, so it is no lock of this command; move it away")
        try:
            yield
        finally:
            os.unlink(path)


def _is_at(path: Path, file: IO[str]) -> bool:
    """Locks the file; True if it is still the one of this name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path.with_suffix('')}: another run is writing it ({path.name} is locked); wait for its end, or name "
            "another folder"
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s: cannot be locked (%s); start no second run for the same folder", path, error)
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """There is no file of this name until it is whole. It has the rights of any new file, by umask: safetensors 0.8
    writes a temporary file that only its owner may read."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.touch()
    mode = unfinished.stat().st_mode
    save_private(tensors, str(unfinished))
    unfinished.chmod(mode)
    os.replace(unfinished, path)


def is_same_job(partial: Path, state: dict[str, Any]) -> bool:
    """Whether `partial` was left by a killed run of the same job: all that its files depend on is in `state`."""
    try:
        return json.loads((partial / STATE).read_text(encoding="utf-8")) == json.loads(json.dumps(state))
    except (OSError, ValueError):
        return False


def start_over(partial: Path, kind: Kind, state: dict[str, Any]) -> None:
    remove_folder(partial, kind)
    partial.mkdir()
    (partial / STATE).write_text(json.dumps(state), encoding="utf-8")


def check_room(folder: Path, num_bytes: int) -> None:
    """Before hours of work, not after."""
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ModelError(
            f"{folder}: needs {num_bytes / 1e9:.2f} GB, but {parent} has {free / 1e9:.2f} GB free; "
            "make room or give another --output-dir"
        )

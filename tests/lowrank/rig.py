"""What the tests of compression share: the trained fixture, a small calibration of it, one open model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress.calibrate import Calibration, collect
from nanovllm.lowrank.compress.model import WindowModel, open_windows
from nanovllm.lowrank.compress.text import Source

TRAINED = Path(__file__).parent.parent / "fixtures" / "tiny-mixtral"
CPU = Device.choose("cpu")
CALIB_CHARACTERS = 30_000  # of calib.txt: 8,000 tokens or so; the documented figures take all of it


@contextmanager
def opened(path: Path = TRAINED) -> Iterator[WindowModel]:
    with open_windows(path, CPU) as model:
        yield model


def small_text(folder: Path, num_characters: int = CALIB_CHARACTERS) -> Path:
    path = folder / f"text-{num_characters}.txt"
    path.write_text((TRAINED / "calib.txt").read_text(encoding="utf-8")[:num_characters], encoding="utf-8")
    return path


def small_calibration(folder: Path) -> Calibration:
    return collect(TRAINED, folder / "calib", Source(small_text(folder), window=256), cap=64, device="cpu")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

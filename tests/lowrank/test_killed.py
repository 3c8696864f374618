"""A process that gets SIGKILL in the middle: what was there stays, what was finished is kept, and going on gives the
folder of an undisturbed run, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.errors import ModelError
from nanovllm.lowrank.compress import calibrate, distill
from nanovllm.lowrank.compress.calibrate import collect
from nanovllm.lowrank.compress.distill import compress
from nanovllm.lowrank.compress.factors import Factors
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.text import Source
from nanovllm.lowrank.compress.writer import partial_of, previous_of
from tests.lowrank.rig import TRAINED, content, small_text

ROOT = Path(__file__).parents[2]
OPTIONS = Options(rank=8, dtype="float32", w2_mode="output")
REFINED = dataclasses.replace(OPTIONS, refine_steps=3)

# Kills its own process at call number `left` of a function. Nothing is flushed, no handler runs.
CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from nanovllm.lowrank.compress import calibrate, distill, factors, text
from nanovllm.lowrank.compress.options import Options

owner, name, left = {owner}, {name!r}, {calls}
real = getattr(owner, name)

def killing(*args, **kwargs):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

setattr(owner, name, killing)
{job}
"""


def run_child(code: str) -> subprocess.CompletedProcess[str]:
    """With as many threads as here: sums of as many parts, equal to the last bit."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def run_killed(owner: str, name: str, calls: int, job: str) -> None:
    ended = run_child(CHILD.format(owner=owner, name=name, calls=calls, job=job))
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small calibration, and what undisturbed runs make of it."""
    folder = tmp_path_factory.mktemp("killed")
    collect(TRAINED, folder / "calib", Source(small_text(folder, 3000), window=64), 8, "cpu")
    for name, options in (("closed", OPTIONS), ("refined", REFINED)):
        compress(TRAINED, folder / "calib", folder / name, options, "cpu")
    return folder


class Stopped(BaseException):
    pass


def solved_layers(monkeypatch: pytest.MonkeyPatch, stop_before: int | None = None) -> list[int]:
    """Filled with the layers that are solved from now on."""
    solved: list[int] = []
    real = distill.solve_layer

    def solve(job: distill.DistillRun, layer: int, rows: Any) -> Factors:
        if layer == stop_before:
            raise Stopped
        solved.append(layer)
        return real(job, layer, rows)

    monkeypatch.setattr(distill, "solve_layer", solve)
    return solved


@pytest.mark.parametrize(
    ("owner", "name", "calls", "options", "solved"),
    [
        ("factors", "save_file", 20, OPTIONS, [2, 3]),  # at expert 4 of layer 2
        ("torch.optim.Adam", "step", 1, REFINED, []),
        ("factors", "save_file", 32 + 12, REFINED, []),  # at expert 4 of layer 1 of the refined ones
        ("Path", "unlink", 4 + 2, OPTIONS, [0, 1]),  # four when layers began, two of what a whole folder has no use for
        ("Path", "rename", 1, OPTIONS, [0, 1, 2, 3]),  # the old folder is away, the new one not there yet
    ],
)
def test_a_killed_distillation_goes_on(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    calls: int,
    options: Options,
    solved: list[int],
) -> None:
    folder = tmp_path / "svd"
    compress(TRAINED, None, folder, dataclasses.replace(OPTIONS, method="pca", rank=4), "cpu")
    before = content(folder)
    words = (TRAINED, place / "calib", folder)
    arguments = ", ".join(f"Path({str(path)!r})" for path in words)
    run_killed(owner, name, calls, f"distill.compress({arguments}, {options!r}, 'cpu')")
    assert content(previous_of(folder) if name == "rename" else folder) == before
    assert partial_of(folder).is_dir()
    computed = solved_layers(monkeypatch)
    compress(*words, options, "cpu")
    assert computed == solved
    assert content(folder) == content(place / ("refined" if options.refine_steps else "closed"))
    assert [path.name for path in tmp_path.iterdir()] == ["svd"]


def test_later_layers_see_what_the_disk_holds(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed continues with finished layers from the disk. One that was never killed computes with the
    same tensors: form and alignment too, which decide how a product rounds."""
    solve, used = distill.solve_layer, []

    def solve_by_column(*args: Any) -> Factors:
        found = solve(*args)
        return dataclasses.replace(found, u={w: t.T.contiguous().T for w, t in found.u.items()})

    def add(stream: Any, rows: Any, ours: Factors) -> None:
        used.append(ours)
        raise Stopped

    monkeypatch.setattr(distill, "solve_layer", solve_by_column)
    monkeypatch.setattr(distill.Stream, "add", add)
    for _ in range(2):
        with pytest.raises(Stopped):
            compress(TRAINED, place / "calib", tmp_path / "svd", OPTIONS, "cpu")
    undisturbed, resumed = (found.tensors() for found in used)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(undisturbed, resumed, strict=True))


@pytest.mark.parametrize("change", [{"rank": 17}, {"ridge": 1e-3}, {"dtype": "bfloat16"}, {"w2_mode": "input"}])
def test_a_killed_distillation_of_another_job_starts_over(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    for options in (OPTIONS, dataclasses.replace(OPTIONS, **change)):
        solved = solved_layers(monkeypatch, stop_before=1)
        with pytest.raises(Stopped):
            compress(TRAINED, place / "calib", tmp_path / "svd", options, "cpu")
        assert solved == [0]
        monkeypatch.undo()


def test_what_the_kill_left_unreadable_is_computed_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a loss of power: the file is there, its end is not."""
    folder = tmp_path / "svd"
    words = (TRAINED, place / "calib", folder)
    arguments = ", ".join(f"Path({str(path)!r})" for path in words)
    run_killed("factors", "save_file", 28, f"distill.compress({arguments}, {OPTIONS!r}, 'cpu')")
    for path in (distill.u_layer_file(partial_of(folder), 0), distill.done_file(partial_of(folder), 2)):
        path.write_bytes(path.read_bytes()[:7])
    computed = solved_layers(monkeypatch)
    compress(*words, OPTIONS, "cpu")
    assert computed == [0, 2, 3]
    assert content(folder) == content(place / "closed")


def test_a_file_that_the_system_refuses_to_write(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real failure of a real write, by the limit on a file's size: the command says one line and what became of the
    work, and the same command goes on when there is room. Files of experts have 25 kB, that of all U has 49."""
    folder = tmp_path / "svd"
    compress(TRAINED, None, folder, dataclasses.replace(OPTIONS, method="pca", rank=4), "cpu")
    before = content(folder)
    words = ["compress", "distill", "--model-path", str(TRAINED), "--calib-path", str(place / "calib"), "--rank", "8",
             "--dtype", "float32", "--w2-mode", "output", "--device", "cpu", "--output-dir", str(folder)]  # fmt: skip
    code = f"""
import resource, sys
sys.dont_write_bytecode = True
from nanovllm.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
sys.argv[1:] = {words!r}
main()
"""
    ended = run_child(code)
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert [line for line in lines if not line.startswith("calibration: ")] == [lines[-1]], ended.stderr  # warnings
    assert "File too large" in ended.stderr
    assert "the previous folder is untouched, and finished layers are kept in svd.partial" in ended.stderr
    assert content(folder) == before
    computed = solved_layers(monkeypatch)
    compress(TRAINED, place / "calib", folder, OPTIONS, "cpu")
    assert computed == []
    assert content(folder) == content(place / "closed")


def without_text(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No window can be made from now on; the list counts layers whose statistics are computed."""
    seen: list[int] = []
    real: Callable[..., Any] = calibrate.layer_statistics

    def statistics(*args: Any) -> Any:
        seen.append(1)
        return real(*args)

    def refuse(*args: Any) -> Any:
        raise AssertionError("the text was made again")

    monkeypatch.setattr(calibrate, "layer_statistics", statistics)
    monkeypatch.setattr(Source, "windows", refuse)
    return seen


def test_a_killed_calibration_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = small_text(place, 3000), tmp_path / "calib"
    job = (
        f"calibrate.collect(Path({str(TRAINED)!r}), Path({str(out)!r}), "
        f"text.Source(Path({str(text)!r}), window=64), 8, 'cpu')"
    )
    run_killed("calibrate", "save_file", 3, job)  # the windows, layer 0, layer 1
    assert not out.exists()
    with monkeypatch.context() as patch:
        seen = without_text(patch)
        collect(TRAINED, out, Source(text, window=64), 8, "cpu")
    assert len(seen) == 2
    assert content(out) == content(place / "calib")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("change", [{"cap": 9}, {"window": 63}, {"characters": 2999}])
def test_a_full_disk_leaves_the_previous_calibration_and_another_job_starts_over(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    text, out = small_text(place, 3000), tmp_path / "calib"
    collect(TRAINED, out, Source(text, window=64), 7, "cpu")
    before = content(out)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "layer_statistics", fill_the_disk)
        with pytest.raises(ModelError, match=r"No space left.*the previous folder is untouched.*calib\.partial"):
            collect(TRAINED, out, Source(text, window=64), 8, "cpu")
    assert content(out) == before
    without_text(monkeypatch)
    source = Source(small_text(place, change.get("characters", 3000)), window=change.get("window", 64))
    with pytest.raises(AssertionError, match="made again"):
        collect(TRAINED, out, source, change.get("cap", 8), "cpu")


def fill_the_disk(*args: Any) -> Any:
    raise OSError(28, "No space left on device")

"""`--out` and `--output-dir`: only what these commands made is ever replaced or removed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError, ModelError
from nanovllm.lowrank.compress import calibrate, distill, writer
from nanovllm.lowrank.compress.calibrate import collect
from nanovllm.lowrank.compress.distill import compress
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.compress.text import Source
from tests.cli.runner import make_runner
from tests.lowrank.rig import TRAINED, content, small_text

Make = Callable[[Path], None]


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Make]:
    text = small_text(tmp_path_factory.mktemp("text"), 2000)

    def make_calibration(folder: Path) -> None:
        collect(TRAINED, folder, Source(text, window=64), 8, "cpu")

    def make_experts(folder: Path) -> None:
        compress(TRAINED, None, folder, Options("pca", rank=4), "cpu")

    return {"calibrate": make_calibration, "pca": make_experts}


@pytest.fixture(scope="module")
def made(makers: dict[str, Make], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each command."""
    place = tmp_path_factory.mktemp("made")
    for name, make in makers.items():
        make(place / name)
    return {name: place / name for name in makers}


@pytest.fixture(params=["calibrate", "pca"])
def command(request: pytest.FixtureRequest) -> str:
    return request.param


def other_folder(path: Path, *_: Any) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "thesis.txt").write_text("years of work")


def with_notes(path: Path, made: dict[str, Path], command: str) -> None:
    shutil.copytree(made[command], path)
    (path / "notes.md").write_text("which text this was")


def same_names(path: Path, *_: Any) -> None:
    path.mkdir()
    for name in ("metadata.json", "calibration.json", "state.json"):
        (path / name).write_text('{"format": "of somebody else"}')


def a_link(path: Path, *_: Any) -> None:
    other_folder(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


STRANGE: dict[str, Callable[[Path, dict[str, Path], str], Any]] = {
    "other folder": other_folder,
    "plain file": lambda path, *_: path.write_text("years of work"),
    "a model": lambda path, *_: shutil.copytree(TRAINED, path),
    "the other command": lambda path, made, command: shutil.copytree(
        made["pca" if command == "calibrate" else "calibrate"], path
    ),
    "with notes": with_notes,
    "same names": same_names,
    "a link": a_link,
}


@pytest.mark.parametrize("name", ["out", "out.partial", "out.previous"])
@pytest.mark.parametrize("strange", STRANGE)
def test_what_others_made_is_refused_and_untouched(
    makers: dict[str, Make],
    made: dict[str, Path],
    tmp_path: Path,
    command: str,
    strange: str,
    name: str,
) -> None:
    STRANGE[strange](tmp_path / name, made, command)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=r"would (be deleted|delete).*another folder") as caught:
        makers[command](tmp_path / "out")
    assert str(tmp_path / ("elsewhere" if strange == "a link" and name == "out" else name)) in str(caught.value)
    assert content(tmp_path) == before
    assert not (tmp_path / "out.lock").exists()


def test_what_this_command_made_is_replaced(
    makers: dict[str, Make], made: dict[str, Path], tmp_path: Path, command: str
) -> None:
    """Also what a kill left of it, and a folder by way of a link."""
    out, whole = tmp_path / "out", content(made[command])
    out.mkdir()
    makers[command](out)  # empty
    assert content(out) == whole
    for name in ("out.partial", "out.previous"):
        shutil.copytree(made[command], tmp_path / name)
    (tmp_path / "link").symlink_to("out")
    makers[command](tmp_path / "link")
    assert content(out) == whole
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", [0, 1, 2, 30])
def test_a_kill_while_the_old_folder_is_removed(
    makers: dict[str, Make], made: dict[str, Path], tmp_path: Path, command: str, at: int
) -> None:
    out, kind = tmp_path / "out", (calibrate if command == "calibrate" else distill).KIND
    shutil.copytree(made[command], out)
    shutil.copytree(made[command], writer.previous_of(out))
    real, calls = os.unlink, []

    def unlink(path: str | Path, **more: int) -> None:
        calls.append(path)
        if len(calls) > at:
            raise Killed
        real(path, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        patch.setattr(Path, "unlink", unlink)
        try:
            writer.remove_folder(writer.previous_of(out), kind)
        except Killed:
            assert writer.previous_of(out).exists()
    makers[command](out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("given", [".", "..", "/", "", "x/..", "./", "{cwd}"])
def test_the_current_folder_is_refused_in_one_line(
    given: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    option = "--out" if command == "calibrate" else "--output-dir"
    words = ("--model-path", TRAINED, "--device", "cpu", option, given.format(cwd=tmp_path / "here"))
    result = make_runner(monkeypatch, capsys)("compress", command, *words)
    assert (result.code, len(result.err.strip().splitlines())) == (2, 1), result.err
    assert option in result.err
    assert "name a new one" in result.err
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]
    assert not list((tmp_path / "here").iterdir())


def test_two_runs_into_one_folder(makers: dict[str, Make], made: dict[str, Path], tmp_path: Path, command: str) -> None:
    """The lock is of the process: a file that a killed one left does not lock."""
    out, lock = tmp_path / "out", tmp_path / "out.lock"
    code = f"""
import sys
from pathlib import Path
from typing import Any
from nanovllm.lowrank.compress.writer import locked
with locked(Path({str(out)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=r"out: another run is writing it \(out\.lock is locked\)"):
            makers[command](out)
        assert lock.exists()
        other.kill()
    assert lock.exists()
    makers[command](out)
    assert content(out) == content(made[command])
    assert list(tmp_path.iterdir()) == [out]
    lock.write_text("of somebody else")
    with pytest.raises(ConfigError, match=r"out\.lock: is not empty"):
        makers[command](out)
    assert lock.read_text() == "of somebody else"


def test_a_lock_whose_owner_has_just_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before its owner removed it: it locks a file that has no name any more, so it is taken again."""
    out, lock, real, opened = tmp_path / "out", tmp_path / "out.lock", writer.fcntl.flock, []

    def flock(file: object, how: int) -> None:
        opened.append(file)
        if len(opened) < 3:
            lock.unlink()
        real(file, how)

    monkeypatch.setattr(writer.fcntl, "flock", flock)
    with writer.locked(out):
        assert len(opened) == 3
        assert lock.exists()
    assert not lock.exists()


def test_where_nothing_can_be_locked_the_work_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(writer.fcntl, "flock", flock)
    with writer.locked(tmp_path / "out"):
        assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_are_readable_like_their_neighbours(
    makers: dict[str, Make], tmp_path: Path, command: str, mask: int
) -> None:
    before = os.umask(mask)
    try:
        makers[command](tmp_path / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_new_folders_above_stay_only_if_something_is_in_them(
    makers: dict[str, Make], tmp_path: Path, command: str
) -> None:
    makers[command](tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out").is_dir()
    with pytest.raises(ConfigError):
        compress(TRAINED, None, tmp_path / "c" / "d" / "out", Options("pca", rank=4000), "cpu")
    assert not (tmp_path / "c").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/out: writing failed .*nothing was put in its place"):
        makers[command](tmp_path / "file" / "out")

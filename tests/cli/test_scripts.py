"""scripts/*.sh with a stand-in for Python: what is installed when, and what is said when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Makes "environments" that hold a copy of itself, "installs" by writing a line into a log, and is Python otherwise.
FAKE = f"""#!/bin/bash
if [ "$1 $2" = "-m venv" ]; then
    echo venv >>"$LOG"
    target="${{@: -1}}"; mkdir -p "$target/bin"; cp "$0" "$target/bin/python"; exit
fi
if [ "$1 $2 $3" = "-m pip install" ]; then echo "install ${{@: -1}}" >>"$LOG"; exit "${{PIP_CODE:-0}}"; fi
if [ "$1 $2" = "-m pip" ]; then if [ -n "${{LOG_PIP:-}}" ]; then echo "pip $3" >>"$LOG"; fi; exit 0; fi
if [ "$1" = "-m" ]; then
    shift; echo "ran $*" >>"$LOG"
    case " $FAILING " in *" $1 "*) exit 1 ;; esac
    exit 0
fi
if [ "$1" = "-c" ] && [[ "$2" == *ensurepip* ]] && [ -n "${{NO_VENV:-}}" ]; then exit 1; fi
if [ "$1" = "-c" ] && [[ "$2" == *version_info* ]] && [ -n "${{TOO_OLD:-}}" ]; then exit 1; fi
exec "{sys.executable}" "$@"
"""


class Clone:
    """A copy of the scripts in a folder with a space, and a PATH on which only the stand-in is a Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.log = folder / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        (self.root / "pyproject.toml").write_text("[project]\n")
        tools = folder / "bin"
        tools.mkdir()
        for tool in ("bash", "cat", "cp", "dirname", "env", "mkdir", "mv", "rm"):
            (tools / tool).symlink_to(shutil.which(tool) or tool)
        (tools / "python3").write_text(FAKE)
        (tools / "python3").chmod(0o755)
        self.env = {"PATH": str(tools), "LOG": str(self.log), "HOME": os.environ.get("HOME", "/")}

    def run(self, script: str, *args: str, **env: str) -> tuple[int, list[str], str]:
        """(exit code, what was done, what was said)"""
        self.log.write_text("")
        done = subprocess.run(
            ["bash", str(self.root / script), *args],
            env={**self.env, **env},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, self.log.read_text().splitlines(), done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_demo_installs_once(clone: Clone) -> None:
    answer = "ran nanovllm generate Why is the sky blue? --max-tokens 8"
    args = ("scripts/demo.sh", "Why is the sky blue?", "--max-tokens", "8")
    assert clone.run(*args)[:2] == (0, ["venv", f"install {clone.root}", answer])
    assert clone.run(*args, LOG_PIP="1")[:2] == (0, [answer])  # and pip, half a second to import, is not started
    (clone.root / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert clone.run(*args)[:2] == (0, [f"install {clone.root}", answer])


def test_demo_without_a_question_asks_one(clone: Clone) -> None:
    assert clone.run("scripts/demo.sh")[1][-1] == "ran nanovllm generate What is the capital of France?"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_the_demo_installs_nothing(clone: Clone, option: str) -> None:
    code, done, said = clone.run("scripts/demo.sh", option)
    assert (code, done) == (0, [])
    assert "scripts/demo.sh --serve" in said
    assert "set -e" not in said


def test_failed_install_is_redone(clone: Clone) -> None:
    code, done, said = clone.run("scripts/demo.sh", "x", PIP_CODE="1")
    assert code == 1
    assert done == ["venv", f"install {clone.root}"]
    assert "pip could not install" in said
    assert clone.run("scripts/demo.sh", "x")[:2] == (0, [f"install {clone.root}", "ran nanovllm generate x"])


def test_incomplete_environment_is_made_anew(clone: Clone) -> None:
    (clone.root / ".venv/bin").mkdir(parents=True)
    code, done, said = clone.run("scripts/demo.sh", "x")
    assert (code, done[0]) == (0, "venv")
    assert "making it anew" in said


def test_tests_use_their_extra_and_serve_the_demo(clone: Clone) -> None:
    code, done, said = clone.run(".ci/run", "-k", "one thing")
    assert code == 0
    assert done[:2] == ["venv", f"install {clone.root}[test]"]
    assert done[2:5] == ["ran ruff format --check --quiet .", "ran ruff check .", "ran mypy"]
    assert done[5].startswith("ran pytest")
    assert done[5].endswith("-k one thing")
    assert said.count(" passed in ") == 4
    assert clone.run("scripts/demo.sh", "x")[1] == ["ran nanovllm generate x"]


def test_demo_environment_is_not_enough_for_tests(clone: Clone) -> None:
    clone.run("scripts/demo.sh", "x")
    assert clone.run("scripts/test.sh")[1][0] == f"install {clone.root}[test]"


@pytest.mark.parametrize(("failing", "count"), [("ruff", 2), ("mypy", 1), ("pytest", 1)])
def test_any_failed_check_fails_the_run_but_all_run(clone: Clone, failing: str, count: int) -> None:
    code, done, said = clone.run("scripts/test.sh", FAILING=failing)
    assert code == 1
    assert sum(line.startswith("ran ") for line in done) == 4
    assert (said.count(" passed in "), said.count(" FAILED in ")) == (4 - count, count)


def test_python_too_old(clone: Clone) -> None:
    code, done, said = clone.run("scripts/demo.sh", "x", TOO_OLD="1")
    assert (code, done) == (1, [])
    assert "needs Python 3.10" in said
    assert "python3 (" in said  # what was found


def test_no_python_at_all(clone: Clone) -> None:
    (Path(clone.env["PATH"]) / "python3").unlink()
    code, _, said = clone.run("scripts/demo.sh", "x")
    assert code == 1
    assert "found: none" in said


def test_venv_missing(clone: Clone) -> None:
    code, done, said = clone.run("scripts/demo.sh", "x", NO_VENV="1")
    assert (code, done) == (1, [])
    version = "{}.{}".format(*sys.version_info[:2])
    assert f"apt install python{version}-venv" in said

"""The wheel outside of the checkout: built from a copy of the tracked files, installed into a fresh environment, used
from another folder. Its dependencies come from the running environment by path, so nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import nanovllm
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 180  # for one command on a busy machine; all of them together take some 30 s on an idle one


def sources() -> set[str]:
    """The files of the package: those that git does not ignore, or all where there is no git or no repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "nanovllm"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT) for path in (ROOT / "nanovllm").rglob("*"))
        listed = [path.as_posix() for path in found if "__pycache__" not in path.parts]
    return {name for name in listed if (ROOT / name).is_file()}


def has_setuptools() -> bool:
    """What pyproject.toml wants to build with; without it pip fetches one (an older one comes with Python)."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        return False


def outside(**more: str) -> dict[str, str]:
    """The environment's variables without PYTHONPATH, which would show the checkout to the fresh environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NANOVLLM"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """Its standard output."""
    options = {"cwd": cwd, "env": outside(**more), "timeout": TIMEOUT}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(python: str | Path, *args: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", *args, "--quiet", "--disable-pip-version-check", "--no-deps", cwd=cwd)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that building leaves nothing in the checkout and takes nothing from its old build/ folder."""
    copy = tmp_path_factory.mktemp("tree")
    for name in {*sources(), "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    (copy / "tests").mkdir()
    (copy / "tests/test_nothing.py").touch()
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if has_setuptools() else []
    pip(sys.executable, "wheel", *isolation, "--wheel-dir", folder, tree, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = f"nano_vllm-{nanovllm.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == sources()
    assert f"{info}licenses/LICENSE" in names
    assert {"nanovllm/py.typed", "nanovllm/ops/native/quant.c", "nanovllm/server/page/index.html"} <= names


@pytest.mark.skipif(not has_setuptools(), reason="setuptools 77 is not installed")
def test_the_source_archive_holds_what_the_wheel_is_made_of(tree: Path, tmp_path: Path) -> None:
    code = f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=tree)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {file.name.partition("/")[2] for file in opened.getmembers() if file.isfile()}
    assert {*sources(), "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_the_version_is_in_one_place() -> None:
    """pyproject.toml reads it from nanovllm/__init__.py, where it is a literal: setuptools parses, imports nothing."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert 'version = {attr = "nanovllm.__version__"}' in project
    assert nanovllm.__version__ not in re.sub(r'"[\w\[\]-]+[<>=].*?"', "", project)
    code = "import nanovllm, sys; print(nanovllm.__version__, 'torch' in sys.modules)"
    assert run(sys.executable, "-S", "-c", code, cwd=ROOT).split() == [nanovllm.__version__, "False"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?(Unreleased|{re.escape(nanovllm.__version__)})\b", changes, re.M)


@dataclass(frozen=True)
class Installed:
    bin: Path
    packages: Path  # its own site-packages
    away: Path  # a folder outside of the checkout

    def nanovllm(self, *args: str | Path) -> str:
        return run(self.bin / "nanovllm", *args, cwd=self.away, NANOVLLM_CACHE=str(self.away / "cache"))

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.away)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    [packages] = folder.glob("env/lib/python*/site-packages")
    # Paths in a .pth file come after the environment's own packages, and .pth files there, such as that of an editable
    # install of this project, are not read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    away = folder / "away"
    away.mkdir()
    pip(folder / "env/bin/python", "install", "--no-index", "--ignore-installed", wheel, cwd=away)
    return Installed(folder / "env/bin", packages, away)


def test_a_fresh_environment_imports_the_wheel(installed: Installed) -> None:
    code = (
        "import nanovllm, nanovllm.ops.triton.moe_tiles as tiles, importlib.metadata as metadata\n"
        "print(nanovllm.__file__, metadata.version('nano-vllm'), len(tiles.read_table(tiles.TABLE)), sep='\\n')"
    )
    file, found, entries = installed.python(code).splitlines()
    assert Path(file) == installed.packages / "nanovllm/__init__.py"
    assert found == nanovllm.__version__
    assert int(entries) > 0
    assert installed.nanovllm("--version").startswith(f"nanovllm {nanovllm.__version__}, ")
    assert json.loads(installed.nanovllm("info", "--json"))


def test_it_generates_with_kernels_compiled_from_the_wheel(installed: Installed, llama: TinyModel) -> None:
    options = ("--model", llama.path, "--device", "cpu", "--max-tokens", "4", "--temperature", "0", "--ignore-eos")
    answer = json.loads(installed.nanovllm("generate", "a b c", *options, "--json"))
    assert len(answer["outputs"][0]["token_ids"]) == 4
    if shutil.which("cc"):
        assert list(installed.away.glob("cache/native/kernels-*.so"))


@pytest.fixture
def address(installed: Installed, llama: TinyModel) -> Iterator[str]:
    command = [installed.bin / "nanovllm", "serve", llama.path, "--device", "cpu", "--port", "0"]
    env = outside(NANOVLLM_CACHE=str(installed.away / "cache"))
    server = subprocess.Popen(command, cwd=installed.away, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.match(r"page: (http\S+)/", line):
                yield found[1]
                break
        else:
            pytest.fail("".join(said))
    finally:
        server.kill()
        server.communicate()


def test_it_serves_its_page(installed: Installed, address: str) -> None:
    page = installed.packages / "nanovllm/server/page"
    for path, file in (("", "index.html"), ("static/app.js", "app.js"), ("static/vendor/markdown-it.min.js", "")):
        with urllib.request.urlopen(f"{address}/{path}", timeout=60) as answer:
            assert answer.read() == (page / (file or path.removeprefix("static/"))).read_bytes()

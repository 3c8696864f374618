"""The Docker image and the GitHub workflow, as far as they can be tested without Docker and GitHub: what they copy and
call exists, and the image's entry point starts a server that is not open to everyone. With a Docker daemon and
NANOVLLM_DOCKER_BUILD=1 the image is built and asked for its health."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.test_scripts import Clone

ROOT = Path(__file__).resolve().parent.parent


def instructions(name: str = "Dockerfile") -> list[tuple[str, str]]:
    """(COPY, its arguments) and so on, one a line, without comments."""
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def extras() -> set[str]:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.M))


def test_what_the_image_copies_exists_and_is_sent_to_docker() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert ignored[0] == "*"
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copies = [shlex.split(rest) for word, rest in instructions() if word == "COPY"]
    found = [source for words in copies for source in words[:-1] if not source.startswith("--")]
    assert "nanovllm" in found
    for source in found:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, f"{entry}*") for entry in kept), f".dockerignore leaves out {source}"
    assert all((ROOT / entry).exists() for entry in kept)


def test_the_image_is_installed_by_our_script() -> None:
    functions = re.findall(r"^(\w+)\(\)", (ROOT / "scripts/setup.sh").read_text(encoding="utf-8"), re.M)
    calls = re.findall(r"source scripts/setup\.sh && (\w+) ([\w,]+)", "\n".join(rest for _, rest in instructions()))
    assert len(calls) == 2
    assert {name for name, _ in calls} <= set(functions)
    for _, wanted in calls:
        assert set(wanted.split(",")) <= extras()
    assert [rest.split(" AS ")[1] for word, rest in instructions() if word == "FROM"] == ["base", "cuda", "cpu"]


def test_the_server_of_the_image_runs_as_a_user_and_is_watched() -> None:
    found = dict(instructions())
    assert found["USER"] == "nanovllm"
    assert found["VOLUME"] == "/cache"
    # What is not JSON would silently be taken for a line of shell.
    [script] = json.loads(found["ENTRYPOINT"])
    assert os.access(ROOT / Path(script).relative_to(found["WORKDIR"]), os.X_OK)
    assert json.loads(found["CMD"])[0] == "serve"
    python, option, code = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, option) == (f"{found['WORKDIR']}/.venv/bin/python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert "http://127.0.0.1:8000/health" in code


@pytest.mark.parametrize(
    ("args", "env", "done"),
    [
        (["serve", "smollm2", "--events"], {}, "serve --host 0.0.0.0 smollm2 --events"),
        (["serve"], {"NANOVLLM_API_KEY": "mine"}, "serve --host 0.0.0.0"),
        (["serve", "--api-key", "mine"], {}, "serve --host 0.0.0.0 --api-key mine"),
        (["serve", "--api-key=mine"], {}, "serve --host 0.0.0.0 --api-key=mine"),
        (["generate", "a b"], {}, "generate a b"),
    ],
)
def test_the_entry_point_never_serves_without_a_key(
    tmp_path: Path, args: list[str], env: dict[str, str], done: str
) -> None:
    clone = Clone(tmp_path)
    clone.run("scripts/demo.sh", "x")  # an environment
    python = clone.root / ".venv/bin/python"
    python.write_text(python.read_text().replace('echo "ran $*"', 'echo "ran $* key=${NANOVLLM_API_KEY:-}"'))
    code, [ran], said = clone.run("scripts/container.sh", *args, **env)
    command, _, key = ran.partition(" key=")
    assert (code, command) == (0, f"ran nanovllm {done}")
    if args[0] == "serve" and not env and "api-key" not in done:
        assert len(key) == 32
        assert key in said
    else:
        assert (key, said) == (env.get("NANOVLLM_API_KEY", ""), "")


def test_the_workflow_runs_what_we_run() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    checks = workflow["jobs"]["checks"]
    assert checks["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert checks["timeout-minutes"] == 90
    for job in workflow["jobs"].values():
        [setup] = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
        assert (setup["cache"], setup["cache-dependency-path"]) == ("pip", "pyproject.toml")
        [(program, *arguments)] = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
        assert program == ".ci/run"
        assert os.access(ROOT / program, os.X_OK)
        assert all((ROOT / argument).exists() for argument in arguments)


def docker(*args: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False, timeout=3600)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def has_docker() -> bool:
    return shutil.which("docker") is not None and bool(docker("info", "--format", "{{.ServerVersion}}", check=False))


@pytest.mark.skipif(
    os.environ.get("NANOVLLM_DOCKER_BUILD") != "1" or not has_docker(),
    reason="NANOVLLM_DOCKER_BUILD=1 builds the image (some minutes, 2 GB), where a Docker daemon runs",
)
def test_the_image_answers() -> None:
    docker("build", "--target", "cpu", "--tag", "nano-vllm:test", str(ROOT))
    container = docker("run", "--detach", "--health-interval", "2s", "nano-vllm:test")
    try:
        deadline = time.monotonic() + 600
        while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, docker("logs", container)
            time.sleep(2)
        assert docker("exec", container, "id", "--user", "--name") == "nanovllm"
    finally:
        docker("rm", "--force", container)

"""`nanovllm serve` as a command: options, what it says when something is missing, and the demo script."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nanovllm.cli.bench_options import LOAD
from nanovllm.cli.serve import API_KEY, SERVER
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions
from tests.cli.runner import Run, make_runner
from tests.cli.test_scripts import Clone
from tests.server.rig import until
from tests.tiny_models import TinyModel


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv(API_KEY, raising=False)
    return make_runner(monkeypatch, capsys)


def test_every_option_is_explained() -> None:
    for group in (SERVER, LOAD):
        assert set(group.help) == {f.name for f in dataclasses.fields(group.of)}
        assert group.build({p.name: p.default for p in group.parameters()}) == group.of()


def test_loopback_is_the_default() -> None:
    assert ServerOptions().host == "127.0.0.1"
    assert not ServerOptions().is_open
    assert ServerOptions(host="0.0.0.0").is_open
    assert not ServerOptions(host="0.0.0.0", api_key="k").is_open
    assert (ServerOptions().events, ServerOptions().trace, ServerOptions().max_watchers) == (False, None, 8)


@pytest.mark.parametrize(
    "option", [{"port": -1}, {"port": 65536}, {"port": True}, {"max_n": 0}, {"request_timeout": 0.0}, {"host": ""},
               {"request_timeout": float("nan")}, {"max_body_mb": float("inf")}, {"api_key": " "}, {"api_key": "\n"},
               {"max_waiting": -1}, {"max_header_kb": 0}, {"max_headers": 0}, {"max_connections": 0},
               {"idle_timeout": 0.0}, {"max_connections": True}, {"max_prompts": 0}, {"events": 1}, {"trace": " "},
               {"max_watchers": 0}, {"reasoning_parser": "other"}, {"tool_call_parser": "other"}],
)  # fmt: skip
def test_bad_options(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        ServerOptions(**option)  # type: ignore[arg-type]


def test_without_the_extra_the_command_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nanovllm.cli.serve"], "find_spec", lambda name: None)
    result = run("serve")
    assert result.code == 2
    assert "fastapi, uvicorn, prometheus_client" in result.err
    assert "pip install 'nano-vllm[server]'" in result.err


def test_the_core_imports_without_the_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'pydantic', 'httpx', 'llguidance'):\n"
        "    sys.modules[name] = None\n"
        "import nanovllm.cli, nanovllm.llm, nanovllm.engine.async_engine, nanovllm.server.options\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--port", taken.getsockname()[1], "--model", "/no/such/model")
    assert result.code == 2
    assert "cannot listen" in result.err


def test_the_key_may_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("nanovllm.server.run.serve", lambda config, options, say: seen.append(options.api_key))
    monkeypatch.setenv(API_KEY, "from-env")
    assert run("serve").code == 0
    assert run("serve", "--api-key", "given").code == 0
    assert seen == ["from-env", "given"]


def test_the_model_may_come_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `vllm serve MODEL`."""
    seen = []
    monkeypatch.setattr("nanovllm.server.run.serve", lambda config, options, say: seen.append(config.model))
    assert run("serve").code == 0
    assert run("serve", "some/model", "--port", "0").code == 0
    assert run("serve", "--port", "0", "some/model").code == 0
    assert run("serve", "--model", "other").code == 0
    assert run("serve", "same", "--model", "same").code == 0
    assert seen == ["smollm2", "some/model", "some/model", "other", "same"]
    for wrong in (["some/model", "--model", "other"], ["some/model", "--model", "smollm2"]):
        result = run("serve", *wrong)
        assert result.code == 2
        assert "two models, 'some/model' and --model" in result.err
    assert run("serve", "a", "b").code == 2
    assert run("serve", "").code == 2
    assert len(seen) == 5


def test_demo_serve(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    code, done, _ = clone.run("scripts/demo.sh", "--serve", "--port", "9000")
    assert (code, done[-2:]) == (0, [f"install {clone.root}[server]", "ran nanovllm serve --events --port 9000"])
    assert clone.run("scripts/demo.sh", "--serve")[1] == ["ran nanovllm serve --events"]


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def test_the_last_line_says_how_it_ended(llama: TinyModel) -> None:
    words = [sys.executable, "-m", "nanovllm", "serve", "--model", str(llama.path), "--device", "cpu", "--port", "0"]
    with subprocess.Popen([*words, "--num-kvcache-blocks", "64"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while " at http://" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            until(lambda: answers(line.split(" at ")[1].split("/v1")[0]))  # its handler of signals is there now
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert said.splitlines()[-1] == "all requests are answered, the engine is closed"
    assert process.returncode == 0

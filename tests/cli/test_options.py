"""Help, names and defaults of the command line; none of this may import torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from nanovllm.cli.options import ENGINE, SAMPLING
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from tests.cli.runner import Run

BENCHES = ("throughput", "workloads", "crossover", "latency", "schedulers")
ENGINE_COMMANDS = [["generate"], ["chat"], ["info"], *(["bench", name] for name in BENCHES)]


def flags(group: type, skipped: frozenset[str] = frozenset()) -> list[str]:
    return [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(group) if f.name not in skipped]


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
def test_help_names_every_engine_option(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.code == 0
    words = result.out.split()
    assert [flag for flag in flags(EngineConfig) if flag not in words] == []


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_sampling_option(run: Run, command: str) -> None:
    words = run(command, "--help").out.split()
    assert [flag for flag in flags(SamplingParams, SAMPLING.skipped) if flag not in words] == []


def test_every_option_is_explained() -> None:
    for group in (ENGINE, SAMPLING):
        names = {f.name for f in dataclasses.fields(group.of)} - group.skipped
        assert set(group.help) == names, "an option without help, or help without an option"


def test_defaults_are_those_of_the_config() -> None:
    values = {parameter.name: parameter.default for parameter in ENGINE.parameters()}
    assert ENGINE.build(values) == EngineConfig()


def test_sampling_defaults_and_lists() -> None:
    values = {parameter.name: parameter.default for parameter in SAMPLING.parameters()}
    assert SAMPLING.build(dict(values)) == SamplingParams(temperature=0.0, max_tokens=256)
    values |= {"stop": ["a", "b"], "logit_bias": ["7=-2.5", "8=1"], "allowed_token_ids": [7, 8]}
    params = SAMPLING.build(values)
    assert params.stop == ("a", "b")
    assert params.logit_bias == {7: -2.5, 8: 1.0}
    assert params.allowed_token_ids == (7, 8)


def test_help_and_simulator_do_not_import_torch() -> None:
    code = "import sys, nanovllm.cli, nanovllm.bench.schedulers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "nanovllm", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert "schedulers" not in done.stdout  # a subcommand of bench

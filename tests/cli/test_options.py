"""Help, names and defaults of the command line; none of this may import torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from nanovllm import __version__
from nanovllm.cli import app
from nanovllm.cli.bench_options import LOAD, MOE, bench
from nanovllm.cli.options import ENGINE, SAMPLING
from nanovllm.cli.plan import PLAN
from nanovllm.cli.serve import SERVER
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from tests.cli.runner import Run

BENCHES = ("throughput", "workloads", "crossover", "moe", "latency", "schedulers")
ENGINE_COMMANDS = [["generate"], ["chat"], ["serve"], ["info"], *(["bench", name] for name in BENCHES)]


def every_command() -> list[list[str]]:
    groups = [group.typer_instance for group in app.registered_groups]
    paths = [([], app), *(([group.info.name], group) for group in groups)]
    return [[*path, each.name or each.callback.__name__] for path, group in paths for each in group.registered_commands]


def flags(group: type, skipped: frozenset[str] = frozenset()) -> list[str]:
    return [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(group) if f.name not in skipped]


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=" ".join)
def test_help_names_every_engine_option(run: Run, command: list[str]) -> None:
    result = run(*command, "--help-all")
    assert result.code == 0
    words = result.out.split()
    assert [flag for flag in flags(EngineConfig) if flag not in words] == []


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_sampling_option(run: Run, command: str) -> None:
    words = run(command, "--help-all").out.split()
    assert [flag for flag in flags(SamplingParams, SAMPLING.skipped) if flag not in words] == []


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_help_fits_a_screen(run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And no name is cut, however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    result = run(*command, "--help")
    lines = result.out.splitlines()
    assert result.code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "…" not in result.out
    assert "\x1b" not in result.out


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_no_option_is_cut(run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*command, "--help-all" if "--help-all" in run(*command, "--help").out else "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    names = {name for param in group.params for name in param.opts if name.startswith("--")}
    assert names <= set(re.findall(r"--[\w-]+", result.out))


@pytest.mark.parametrize("group", [[], ["bench"], ["compress"], ["trace"]], ids=" ".join)
def test_lists_of_commands_are_not_cut(run: Run, group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run(*group, "--help").out.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_shows_sampling_first_and_the_way_to_the_rest(run: Run, command: str) -> None:
    result = run(command, "--help")
    shown = [line.split()[0] for line in result.out.splitlines() if line.startswith("  --")]
    assert shown[0] == "--n"
    for flag in ("--temperature", "--max-tokens", "--model", "--device", "--help-all"):
        assert flag in shown
    assert shown.index("--max-tokens") < shown.index("--model")
    assert "--expert-policy" not in shown


def test_help_all_comes_before_mistakes(run: Run) -> None:
    assert run("generate", "--no-such-option", "--help-all").code == 2
    assert run("generate", "--help-all", "--temperature", "nan").code == 0


def test_hidden_options_still_work(run: Run) -> None:
    assert "expert_policy='x'" in run("generate", "the town", "--expert-policy", "x").err


@pytest.mark.parametrize("command", ["kernels", "tables"])
def test_help_all_is_only_where_there_is_more(run: Run, command: str) -> None:
    assert "--help-all" not in run("bench", command, "--help").out


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.code == 0
    assert re.fullmatch(rf"nanovllm {re.escape(__version__)}, .*\btorch \d.*\n", result.out)
    assert result.err == ""


def test_every_option_is_explained() -> None:
    for group in (ENGINE, SAMPLING, SERVER, PLAN, MOE, LOAD):
        names = {f.name for f in dataclasses.fields(group.of)} - group.skipped
        assert (group.common or names) <= names
        assert set(group.help) == names | set(group.others), "an option without help, or help without an option"
        assert all(group.help.values())


def test_every_benchmark_can_be_saved(run: Run) -> None:
    """All are declared by bench_command; `tables` measures nothing."""
    names = [each.callback.__name__ for each in bench.registered_commands if each.callback is not None]
    assert len(names) == 13
    assert [name for name in names if "--save" not in run("bench", name, "--help").out] == ["tables"]


def test_defaults_are_those_of_the_config() -> None:
    values = {parameter.name: parameter.default for parameter in ENGINE.parameters()}
    assert ENGINE.build(values) == EngineConfig()


def test_speculation_as_vllm_writes_it(run: Run) -> None:
    values = {parameter.name: parameter.default for parameter in ENGINE.parameters()}
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    wanted = EngineConfig(
        speculative_method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2
    )
    assert ENGINE.build({**values, "speculative_config": text}) == wanted
    assert ENGINE.build({**values, "speculative_method": "none"}) == EngineConfig()
    for wrong, words in (("ngram", "no JSON"), ("[]", "must be a dictionary"), ('{"method": "eagle"}', "'eagle'")):
        result = run("generate", "Hi", "--speculative-config", wrong)
        assert result.code != 0
        assert words in result.err
    differ = ["--speculative-method", "mtp", "--speculative-config", text]
    assert "differ: give one" in run("generate", "Hi", *differ).err


def test_sampling_defaults_and_lists() -> None:
    values = {parameter.name: parameter.default for parameter in SAMPLING.parameters()}
    assert (values["temperature"], values["max_tokens"], values["top_p"]) == (0.0, 256, 1.0)
    assert SAMPLING.build({}) == {}
    params = SamplingParams(
        **SAMPLING.build({"stop": ["a", "b"], "logit_bias": ["7=-2.5", "8=1"], "allowed_token_ids": [7, 8]})
    )
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

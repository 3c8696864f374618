"""Sampling options that are not given: the model's generation_config.json first, then the terminal's own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.cli.options import SAMPLING
from nanovllm.engine.llm_engine import LLMEngine
from tests.cli.runner import SMALL, Run

FILE = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 3}
VALUES = {"temperature": 0.6, "top_k": 20, "max_tokens": 3}
TERMINAL = SamplingParams(temperature=0, max_tokens=256)
FRONTS = pytest.mark.parametrize("front", ["generate", "chat"])


@pytest.fixture
def tuned(llama_copy: Path) -> Path:
    (llama_copy / "generation_config.json").write_text(json.dumps(FILE), encoding="utf-8")
    return llama_copy


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """What each request was sampled by."""
    found: list[SamplingParams] = []
    add = LLMEngine.add_request

    def note(engine: LLMEngine, request_id: str, prompt: Any, params: SamplingParams, **more: Any) -> None:
        found.append(params)
        add(engine, request_id, prompt, params.clone(max_tokens=1, min_tokens=0), **more)

    monkeypatch.setattr(LLMEngine, "add_request", note)
    return found


def call(run: Run, front: str, model: Path, *options: Any) -> str:
    words = ["rain"] if front == "generate" else []
    result = run(front, *words, "--model", model, *SMALL, *options, stdin="rain\n")
    assert result.code == 0, result.err
    return result.err


@FRONTS
def test_the_models_file_comes_before_the_terminals_defaults(
    run: Run, tuned: Path, seen: list[SamplingParams], front: str
) -> None:
    err = call(run, front, tuned)
    assert seen == [SamplingParams(**VALUES)]
    line = f"sampling defaults: temperature=0.6, top_k=20, max_tokens=3, from {tuned / 'generation_config.json'}"
    assert line in err.splitlines()


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--temperature", 0], {"temperature": 0}),
        (["--top-k", 0], {"top_k": 0}),  # given, though it is what SamplingParams have anyway
        (["--max-tokens", "none"], {"max_tokens": None}),
        (["--max-tokens", 256, "--stop", "x"], {"max_tokens": 256, "stop": ["x"]}),
        (["--max-tokens", 40, "--min-tokens", 30], {"max_tokens": 40, "min_tokens": 30}),
        (["--logit-bias", "7=-2.5"], {"logit_bias": {7: -2.5}}),
    ],
    ids=str,
)
def test_given_options_win_one_by_one(
    run: Run, tuned: Path, seen: list[SamplingParams], options: list[Any], given: dict[str, Any]
) -> None:
    call(run, "generate", tuned, *options)
    assert seen == [SamplingParams(**{**VALUES, **given})]


@FRONTS
def test_without_the_file_the_terminals_defaults_stay(
    run: Run, tuned: Path, llama: Any, seen: list[SamplingParams], front: str
) -> None:
    assert "sampling defaults" not in call(run, front, llama.path)
    assert "sampling defaults" not in call(run, front, tuned, "--generation-config", "vllm")
    assert seen == [TERMINAL, TERMINAL]


def test_only_given_options_are_said_to_have_no_effect(run: Run, tuned: Path, seen: list[SamplingParams]) -> None:
    assert "no effect" not in call(run, "generate", tuned, "--temperature", 0)
    assert "no effect" not in call(run, "generate", tuned, "--temperature", 0, "--top-k", 0)
    assert "top_k=20 has no effect" in call(run, "generate", tuned, "--temperature", 0, "--top-k", 20)


@pytest.mark.parametrize("options", [["--top-p", 0], ["--min-tokens", 5, "--max-tokens", 4]], ids=str)
def test_mistakes_are_known_before_the_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[Any]
) -> None:
    monkeypatch.setattr(LLMEngine, "__init__", lambda *_: pytest.fail("loaded"))
    result = run("generate", "rain", *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {options[0].removeprefix('--').replace('-', '_')}=")


def test_a_limit_of_the_file_is_known_afterwards(run: Run, tuned: Path) -> None:
    result = run("generate", "rain", "--model", tuned, *SMALL, "--min-tokens", 4)
    assert result.code == 2
    assert "error: min_tokens=4: must be in [0, 3]" in result.err
    assert f"max_tokens=3 comes from {tuned / 'generation_config.json'}" in result.err
    result = run("generate", "rain", "--model", tuned, *SMALL, "--min-tokens", 4, "--max-tokens", 2)
    assert "comes from" not in result.err


def test_a_missing_folder(run: Run, tuned: Path) -> None:
    result = run("generate", "rain", "--model", tuned, *SMALL, "--generation-config", tuned / "nowhere")
    assert (result.code, result.out) == (2, "")
    assert f"error: generation_config='{tuned / 'nowhere'}': " in result.err


@FRONTS
def test_help_says_whose_defaults_are_shown(run: Run, front: str) -> None:
    [title] = [line for line in run(front, "--help").out.splitlines() if line.startswith("Sampling")]
    assert "generation_config.json" in title
    assert SAMPLING.defaults == {"temperature": 0.0, "max_tokens": 256}

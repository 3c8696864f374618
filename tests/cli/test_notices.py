"""What a user should not have to find out: low-rank experts in use, and options that change nothing here."""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.runner.no_effect import OF_GPUS, OF_OFFLOADED_EXPERTS, options_without_effect
from tests.cli.runner import SMALL, Run
from tests.lowrank.svd_folders import Choice, copy_model, write_svd
from tests.server.rig import command
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
IN_USE = "low-rank experts in use: 50% of the experts' bytes"
OTHERS: dict[str, Any] = {  # of each option that may do nothing, a value that is not its default
    "gpu_memory_utilization": 0.5,
    "gpu_memory_gb": 1.0,
    "enforce_eager": True,
    "cpu_kvcache_gb": 1.0,
    "expert_placement": "resident",
    "expert_cache_gb": 0.5,
    "expert_host_gb": 1.0,
    "expert_policy": "lru",
    "expert_prefetch": False,
    "expert_cpu_misses": True,
}


@pytest.fixture(autouse=True)
def to_stderr() -> Iterator[None]:
    """As in a program that sets up no logging; in a test, pytest has set it up. Those with processes show the rest."""
    logger, handler = logging.getLogger("nanovllm"), logging.lastResort
    assert handler is not None
    logger.setLevel(logging.NOTSET)  # forgets what it decided while another test had patched its level
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def low_rank(tiny: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = copy_model(tiny("mixtral").path, tmp_path_factory.mktemp("low-rank") / "model")
    write_svd(path, [Choice(24, 24, 24)])
    return path


def lines_with(text: str, words: str) -> list[str]:
    return [line for line in text.splitlines() if words in line]


def test_generate_says_once_that_experts_are_low_rank(
    run: Run, low_rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("generate", "the rain", "--model", low_rank, *SMALL, "--max-tokens", 3)
    result = run(*args)
    [line] = lines_with(result.err, "xperts")
    assert IN_USE in line
    assert str(low_rank / "svd_experts") in line
    assert "low-rank" not in result.out
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
    assert not lines_with(run(*args).err, "xperts")


def test_two_ranks_say_it_once(low_rank: Path) -> None:
    command = [sys.executable, "-m", "nanovllm", "generate", "the rain", "--model", str(low_rank), *SMALL]
    done = subprocess.run(
        [*command, "--max-tokens", "3", "--tensor-parallel-size", "2", "--enforce-eager"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(lines_with(done.stderr, IN_USE)) == 1
    assert len(lines_with(done.stderr, "enforce_eager=True has no effect")) == 1


def test_info_says_so_and_counts_them(run: Run, low_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("info", "--model", low_rank, "--device", "cpu")
    shown = run(*args)
    assert len(lines_with(shown.out, IN_USE)) == 1
    found = run(*args, "--json").last_json["model"]
    assert found["experts"].startswith(IN_USE)
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
    own = run(*args, "--json").last_json["model"]
    assert "experts" not in own
    # A layer: 8 experts of three matrices 48 x 80; or of [24 x 80] x 3, and three shared 48 x 24.
    assert own["num_parameters"] - found["num_parameters"] == 2 * (8 * 3 * (48 - 24) * 80 - 3 * 48 * 24)


def test_serve_says_so(low_rank: Path) -> None:
    with command(low_rank, *SMALL[2:], "--gpu-memory-gb", "1") as (process, _):
        log = Path(f"/proc/{process.pid}/fd/2").read_text()
    [line] = lines_with(log, "SVD")
    assert IN_USE in line
    assert len(lines_with(log, "gpu_memory_gb=1.0 has no effect")) == 1


def test_the_example_says_so(low_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["--model", str(low_rank), "--gpu-memory-gb", "4", "--max-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["example_mixtral.py", *args])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        runpy.run_path(str(ROOT / "example_mixtral.py"), run_name="__main__")
    assert len(lines_with(out.getvalue() + err.getvalue(), IN_USE)) == 1
    assert out.getvalue().count("Completion: ") == 2


# ---- options that change nothing -------------------------------------------------------------------------------------


def found_by(is_gpu: bool, placement: str | None, **more: Any) -> set[str]:
    """Of all options that may do nothing, each given alone."""
    configs = {name: replace(EngineConfig(**more), **{name: value}) for name, value in OTHERS.items()}
    return {name for name, config in configs.items() if name in options_without_effect(config, is_gpu, placement)}


def test_which_options_do_nothing_where() -> None:
    dense = {"expert_placement", *OF_OFFLOADED_EXPERTS}
    assert found_by(False, None) == {*OF_GPUS, *dense}
    assert found_by(True, None) == {"cpu_kvcache_gb", *dense}
    assert found_by(False, "resident") == {*OF_GPUS, *OF_OFFLOADED_EXPERTS}
    assert found_by(True, "resident") == {"cpu_kvcache_gb", *OF_OFFLOADED_EXPERTS}
    assert found_by(True, "offload") == {"cpu_kvcache_gb"}
    assert found_by(False, "offload") == set(OF_GPUS) - {"gpu_memory_gb"}
    assert found_by(False, "offload", num_kvcache_blocks=9) == {*OF_GPUS, "cpu_kvcache_gb"} - {"gpu_memory_gb"}


def test_defaults_are_never_mentioned() -> None:
    for is_gpu in (False, True):
        for placement in (None, "resident", "offload"):
            assert options_without_effect(EngineConfig(), is_gpu, placement) == {}


def test_every_expert_option_is_thought_of() -> None:
    experts = {field.name for field in fields(EngineConfig) if field.name.startswith("expert_")}
    assert experts == {"expert_placement", "expert_parallel_size", *OF_OFFLOADED_EXPERTS}


def test_a_gpu_option_on_a_cpu_says_so(run: Run, llama: TinyModel) -> None:
    """Also one that is more than the machine has: nothing is limited by it."""
    args = ("--model", llama.path, *SMALL, "--gpu-memory-gb", 100000)
    result = run("generate", "the rain", *args, "--max-tokens", 3)
    assert result.code == 0
    assert "gpu_memory_gb=100000.0 has no effect: the model runs on a CPU" in result.err.splitlines()
    facts = run("info", *args, "--json").last_json
    assert facts["options"] == {"gpu_memory_gb": "has no effect: the model runs on a CPU"}


def test_expert_options_with_resident_experts_say_so(run: Run, tiny: Callable[[str], TinyModel]) -> None:
    args = ("--model", tiny("mixtral").path, *SMALL, "--expert-policy", "lru", "--no-expert-prefetch")
    result = run("generate", "the rain", *args, "--max-tokens", 3)
    said = lines_with(result.err, "has no effect: all experts stay on the device")
    assert [line.split()[0] for line in said] == ["expert_policy='lru'", "expert_prefetch=False"]
    assert set(run("info", *args, "--json").last_json["options"]) == {"expert_policy", "expert_prefetch"}
    offloaded = run("generate", "the rain", *args, "--max-tokens", 3, "--expert-placement", "offload")
    assert offloaded.code == 0
    assert not lines_with(offloaded.err, "has no effect")


@pytest.mark.parametrize("front", ["generate", "chat"])
def test_sampling_options_that_do_nothing_say_so(run: Run, llama: TinyModel, front: str) -> None:
    args = (front, *(["rain"] if front == "generate" else []), "--model", llama.path, *SMALL, "--max-tokens", 2)
    assert not lines_with(run(*args).err, "has no effect")
    err = run(*args, "--top-p", 0.5, "--top-k", 3, "--logprobs", 1).err
    assert [line.split()[0] for line in lines_with(err, "has no effect")] == ["top_p=0.5", "top_k=3", "logprobs=1"]
    assert not lines_with(run(*args, "--top-p", 0.5, "--temperature", 1).err, "has no effect")


def test_logprobs_have_an_effect_in_json(run: Run, llama: TinyModel) -> None:
    result = run("generate", "rain", "--model", llama.path, *SMALL, "--max-tokens", 2, "--logprobs", 1, "--json")
    assert not lines_with(result.err, "has no effect")


def test_options_of_guesses() -> None:
    given = EngineConfig(num_speculative_tokens=3, prompt_lookup_max=3)
    found = options_without_effect(given, False, None)
    assert set(found) == {"num_speculative_tokens", "prompt_lookup_max"}
    assert set(options_without_effect(replace(given, speculative_method="mtp"), False, None)) == {"prompt_lookup_max"}
    assert options_without_effect(replace(given, speculative_method="ngram"), False, None) == {}


def test_options_of_other_policies_and_of_ranks() -> None:
    def named(**options: object) -> set[str]:
        return set(options_without_effect(EngineConfig(**options), False, None))  # type: ignore[arg-type]

    assert named(max_wait_steps=3, worker_timeout=7.0) == {"max_wait_steps", "worker_timeout"}
    assert named(max_wait_steps=3, scheduling_policy="sjf", worker_timeout=7.0, tensor_parallel_size=2) == set()

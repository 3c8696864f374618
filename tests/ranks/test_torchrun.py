"""Ranks that torchrun started: all run the same script, and have the tokens of one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.ranks.torchrun import Place
from tests.ranks.processes import children

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("spmd.py")
LOOPBACK = "0100007F"


def found_in(text: str) -> list[dict]:
    """Ranks share a pipe: the end of a line may come after the beginning of another rank's."""
    return [json.JSONDecoder().raw_decode(part)[0] for part in text.split("FOUND ")[1:]]


ANY_PORT = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")


def start_script(
    model: Path, what: str, options: Sequence[str] = ANY_PORT, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """torchrun with spmd.py on two ranks; `prefix`: a command that runs torchrun."""
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(model), "2", what]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def run_script(model: Path, what: str) -> list[dict]:
    with start_script(model, what) as agent:
        try:
            output = agent.communicate(timeout=150)[0]
        finally:
            agent.kill()
    found = sorted(found_in(output), key=lambda one: one["rank"])
    assert len(found) == 2, output
    return found


def expected_tokens(model: Path) -> list[list[list[int]]]:
    found = []
    prompts = [{"prompt_token_ids": [5, 6, 7 + number] * (1 + number * 3)} for number in range(8)]
    for seed in (1, 2):
        with LLM(str(model), device="cpu", max_num_seqs=4, num_kvcache_blocks=64, seed=seed) as llm:
            for temperature in (0, 0.9):
                params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
    return found


def test_every_rank_has_the_tokens_of_one(qwen: Path) -> None:
    """Two engines, one after the other, in one script; unseeded sampling included."""
    found, expected = run_script(qwen, "same"), expected_tokens(qwen)
    for one in found:
        assert one["executor"] == "TorchrunExecutor", "chosen because torchrun has set the environment"
        assert one["errors"] == []
        assert one["tokens"] == expected
        assert set(one["listening"]) == {LOOPBACK}, "all ranks are on one machine"


def test_ranks_with_other_requests_are_refused(qwen: Path) -> None:
    """Without the check, they would give wrong tokens or wait for each other."""
    for one in run_script(qwen, "differ"):
        assert "ranks [1] were given other requests than rank 0" in one["died"]


def test_a_rank_that_hangs_is_named_by_the_others(qwen: Path) -> None:
    """Rank 1 stops torchrun and itself, so that reports can be neither written nor read."""
    agent = start_script(qwen, "lost")
    try:
        assert agent.stdout is not None
        seen = []
        for line in agent.stdout:
            seen.append(line)
            if "FOUND " in line:
                break
        (found,) = found_in("".join(seen))
        assert found["rank"] == 0
        assert "rank 1: no answer within 3 s" in found["died"]
        assert found["errors"] == [], "no output is a text that was cut"
    finally:
        for child in children(agent.pid):
            os.kill(child, signal.SIGCONT)
            os.kill(child, signal.SIGKILL)
        agent.kill()
        agent.communicate()


def test_the_environment_of_torchrun() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place = Place.of(environ)
    assert place == Place(3, 4, 1, 2, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=127.0.0.1 is a loopback address"):
        place.address()  # the ranks are on two machines
    assert Place(1, 2, 1, 2, "anything").address() == "127.0.0.1"
    assert Place.of({}) is None
    assert Place.of({**environ, "RANK": ""}) is None


def test_another_number_of_ranks_is_refused(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: this process was started by torchrun with 4 ranks"):
        make_llm(distributed_executor_backend="torchrun", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="speculative_method='ngram': under torchrun every rank makes its own plans"):
        make_llm(distributed_executor_backend="torchrun", tensor_parallel_size=4, speculative_method="ngram")

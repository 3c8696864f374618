"""DeepSeek's experts offloaded, low-rank, and both: as for Mixtral, beside the experts that every token takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.memory.budget import GIB
from nanovllm.memory.facts import ModelFacts
from nanovllm.moe.offload import store
from tests.cli.runner import Run
from tests.lowrank.svd_folders import Choice, copy_model, write_svd
from tests.tiny_models import TinyModel, random_prompts

Tiny = Callable[[str], TinyModel]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.logger, "level", logging.ERROR)  # the disk tier warns each time


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(random_prompts((1, 15, 33, 17)), PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def offloads(llm: LLM) -> list[dict[str, Any]]:
    """Buffers for top_k and for some more; host memory for all experts, for half of them, for none."""
    low_rank = llm.engine.executor.low_rank
    facts = ModelFacts(llm.engine.model_config, 4, forms=None if low_rank is None else low_rank.forms)
    size, everything = facts.expert_bytes, facts.all_experts_bytes
    return [
        {
            "expert_placement": "offload",
            "expert_cache_gb": count * size / GIB,
            "expert_host_gb": share * everything / GIB,
        }
        for count, share in ((3, 1.5), (10, 0.5), (7, 0.0))
    ]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_offloaded_says_what_resident_says_to_the_last_bit(make_llm: Callable[..., LLM], tiny: Tiny, name: str) -> None:
    resident = make_llm(tiny(name).path)
    wanted = answers(resident)
    for options in offloads(resident):
        llm = make_llm(tiny(name).path, **options)
        assert answers(llm) == wanted, options
        assert llm.engine.executor.expert_stats().misses > 0


def test_low_rank_experts_resident_and_offloaded(make_llm: Callable[..., LLM], tiny: Tiny, tmp_path: Path) -> None:
    path, dense = copy_model(tiny("deepseek-v3").path, tmp_path / "model"), tmp_path / "dense"
    write_svd(path, [Choice(16, 24, 16, "output"), Choice(24, 16, 24, "input")], dense=dense)
    low_rank = make_llm(path)
    assert "experts" in low_rank.engine.describe()["runs_on"]
    wanted, products = answers(low_rank), answers(make_llm(dense))
    for (tokens, logprobs, _), (same, others, _) in zip(wanted, products):
        assert tokens == same
        for found, other in zip(logprobs, others):
            assert [e.logprob for e in found.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-4)
    for options in offloads(low_rank):
        assert answers(make_llm(path, **options)) == wanted, options


def test_compress_makes_a_folder_that_runs(make_llm: Callable[..., LLM], tiny: Tiny, tmp_path: Path, run: Run) -> None:
    """Full rank: the model's own answers again."""
    path = copy_model(tiny("deepseek-v3").path, tmp_path / "model")
    wanted = answers(make_llm(path))
    text = tmp_path / "text.txt"
    text.write_text("the men of the town sing in the rain all day long on the river " * 60)
    where = ("--model-path", path, "--device", "cpu")
    result = run("compress", "calibrate", *where, "--out", tmp_path / "calib", "--text", text)
    assert result.code == 0, result.err
    result = run("compress", "distill", *where, "--calib-path", tmp_path / "calib", "--rank", 48, "--dtype", "float32")
    assert result.code == 0, result.err
    found = answers(make_llm(path))
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in wanted]

"""A model with a folder of low-rank experts gives the output of a dense model with the products of the factors,
wherever V lives; a folder that is not the model's is refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.cli.plan import PlanOptions, make_estimate
from nanovllm.errors import ModelError
from nanovllm.lowrank.folder import low_rank_forms
from nanovllm.lowrank.format import METADATA, U_FILE, v_file
from nanovllm.memory.budget import GIB
from nanovllm.memory.facts import ModelFacts
from nanovllm.moe.offload import store as store_module
from tests.engine.test_offload_engine import make
from tests.lowrank.svd_folders import Choice, copy_model, full_rank, write_svd
from tests.runner.test_relay import InSegments
from tests.tiny_models import TinyModel, random_prompts

TRAINED = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"
QWEN = "qwen3-moe-dense-layers"  # 3 layers, the second one dense; hidden 48, experts of 40
PROMPTS = random_prompts((1, 15, 33, 4))
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
# Ranks differ by layer and by matrix, and so do the sides; none is a multiple of eight.
MIXED = [Choice(37, 100, 50, "input"), Choice(60, 41, 33, "output"), Choice(9, 20, 20, "input"), Choice(50, 9, 50)]
SMALL = [Choice(17, 30, 20, "input"), Choice(25, 11, 13, "output")]
Tiny = Callable[[str], TinyModel]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.logger, "level", logging.ERROR)  # the disk tier warns each time


@pytest.fixture(scope="module")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> a model with a folder; "dense " + name -> the same without, its experts replaced by the products."""
    folder, found = tmp_path_factory.mktemp("low-rank"), {}
    for name, source, choices in (("trained", TRAINED, MIXED), ("qwen", tiny(QWEN).path, SMALL)):
        found[name] = copy_model(source, folder / name)
        found[f"dense {name}"] = folder / f"dense-{name}"
        write_svd(found[name], choices, dense=found[f"dense {name}"])
    return found


def answers(llm: LLM) -> list[Any]:
    return [
        (o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs)
        for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def numbers(found: Any) -> Iterator[float]:
    """All logprobs, in the order of tokens."""
    for tokens, *logprobs in found:
        yield from tokens
        for place in [place for some in logprobs for place in some if place]:
            yield from (place[token].logprob for token in sorted(place))


def close(found: list[Any], wanted: list[Any]) -> bool:
    pairs = list(zip(numbers(found), numbers(wanted), strict=True))
    return len(pairs) > 200 and max(abs(a - b) for a, b in pairs) < 1e-4


@pytest.fixture(scope="module")
def resident(models: dict[str, Path]) -> Callable[[str], list[Any]]:
    known: dict[str, list[Any]] = {}

    def get(name: str) -> list[Any]:
        if name not in known:
            with make(models[name]) as llm:
                known[name] = answers(llm)
        return known[name]

    return get


# ---- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trained", "qwen"])
def test_it_is_the_dense_model_with_the_products_of_the_factors(name: str, resident: Any, models: Any) -> None:
    assert close(resident(name), resident(f"dense {name}"))


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("name", ["trained", "qwen"])
def test_full_rank_is_the_teacher(
    name: str, side: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_model(TRAINED if name == "trained" else tiny(QWEN).path, tmp_path / "model")
    write_svd(path, [full_rank(path, side)])
    with make(path) as low_rank, make(path.rename(tmp_path / "moved")) as again:
        found = answers(low_rank)
        assert answers(again) == found
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
    with make(tmp_path / "moved") as teacher:
        assert "experts" not in teacher.engine.describe()["runs_on"]
        assert close(found, answers(teacher))
        assert answers(teacher) != found  # it did compute something else


def options_of(path: Path) -> list[dict[str, Any]]:
    """Buffers for top_k, some and all; host memory for all, some and none."""
    llm = make(path)
    try:
        facts = ModelFacts(llm.engine.model_config, 4, forms=low_rank_forms(path, llm.engine.model_config))
    finally:
        llm.close()
    buffer, everything = facts.expert_bytes, facts.all_experts_bytes
    return [
        {"expert_cache_gb": num_buffers * buffer / GIB, "expert_host_gb": (everything * share + buffer) / GIB, **more}
        for num_buffers, share, more in (
            (2, 1.0, {}),
            (7, 0.5, {"expert_policy": "lru"}),
            (9, 0.0, {"expert_prefetch": False}),
            (30, 0.3, {}),
            (7, -1.0, {}),
        )
    ]


@pytest.mark.parametrize("name", ["trained", "qwen"])
def test_offloaded_says_what_resident_says_to_the_last_bit(name: str, resident: Any, models: Any) -> None:
    wanted, in_files = resident(name), set()
    for options in options_of(models[name]):
        options["expert_host_gb"] = max(options["expert_host_gb"], 0.0)
        with make(models[name], expert_placement="offload", **options) as llm:
            experts = llm.engine.describe()["runs_on"]["experts"]
            assert answers(llm) == wanted, options
            assert (experts["placement"], experts["format"]) == ("offload", "low-rank")
            in_files.add(experts["on_disk"])
            assert llm.engine.executor.expert_stats().misses > 0
    assert 0 in in_files
    assert experts["in_host_memory"] == 0  # the last one reads all of them from files
    assert len(in_files) >= 4


@pytest.mark.parametrize("name", ["trained", "qwen"])
def test_decode_in_pieces(name: str, models: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 9, 2, 7, 1, 3]}, {"prompt_token_ids": [8, 4]}]
    with make(models[name]) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    for more in ({}, {"expert_prefetch": False}, {"expert_host_gb": 0.0}):
        with make(models[name], expert_placement="offload", expert_cache_gb=0.0015, **more) as llm:
            runner = llm.engine.executor.runner
            runner.model = runner._forward.model = InSegments(runner.model)
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == wanted
            assert runner.model.num_steps >= 6


def test_bf16_and_a_cpu_that_helps(models: Any, resident: Any) -> None:
    with make(models["qwen"], dtype="bfloat16") as llm:
        wanted = answers(llm)
    for host_gb in (0.0, 1.0):
        with make(
            models["qwen"],
            dtype="bfloat16",
            expert_placement="offload",
            expert_cache_gb=0.00004,
            expert_host_gb=host_gb,
        ) as llm:
            assert answers(llm) == wanted
    with make(models["qwen"], expert_placement="offload", expert_cache_gb=0.00004, expert_cpu_misses=True) as llm:
        assert close(answers(llm), resident("qwen"))
        assert llm.engine.executor.expert_stats().computed_on_cpu > 0


# ---- the log, sizes --------------------------------------------------------------------------------------------------


def test_two_engines_one_with_and_one_without(
    models: Any, resident: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = models["qwen"] / "svd_experts"
    with caplog.at_level(logging.INFO, "nanovllm"), make(models["qwen"]) as low_rank:
        assert f"[ModelRunner] Using SVD Expert Manager from {folder}" in caplog.text
        caplog.clear()
        monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
        with make(models["qwen"]) as own:
            assert "SVD" not in caplog.text
            assert answers(low_rank) == resident("qwen") == answers(low_rank)
            assert not close(answers(own), resident("qwen"))
        experts = low_rank.engine.describe()["runs_on"]["experts"]
    assert (experts["placement"], experts["format"], experts["folder"]) == ("resident", "low-rank", str(folder))
    assert experts["ranks"] == {0: {"w1": 17, "w2": 30, "w3": 20}, 2: {"w1": 25, "w2": 11, "w3": 13}}
    assert experts["w2_modes"] == {0: "input", 2: "output"}


@pytest.mark.parametrize("name", ["trained", "qwen"])
def test_sizes_are_those_of_the_model_as_built(name: str, models: Any) -> None:
    with make(models[name]) as llm:
        executor = llm.engine.executor
        facts = ModelFacts(llm.engine.model_config, 4, forms=executor.low_rank.forms)
        assert facts.dense_bytes + facts.all_experts_bytes == 4 * executor.num_parameters
    plan = make_estimate(PlanOptions(model=str(models[name]), gpu_memory_gb=4, host_memory_gb=8, dtype="float32"))
    assert plan.tiers is not None
    assert plan.tiers.resident_bytes == plan.model.all_experts_bytes == facts.all_experts_bytes
    assert plan.model.dense_bytes == facts.dense_bytes
    with make(models[name], expert_placement="offload", expert_cache_gb=20 * facts.expert_bytes / GIB) as llm:
        stats_before = llm.engine.executor.expert_stats()
        answers(llm)
        stats = llm.engine.executor.expert_stats() - stats_before
        copied = sum(a * b for a, b in zip(stats.layer_misses, facts.layer_bytes))
        assert len(set(facts.layer_bytes)) > 1
        assert stats.bytes_copied == copied + stats.prefetched_bytes_wasted


def test_experts_of_the_checkpoint_may_be_absent(
    models: Any, resident: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not read; but then there is nothing to compare the folder with."""
    path = Path(shutil.copytree(models["qwen"], tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING, "nanovllm"), make(path) as llm:
        assert "is not compared with them" in caplog.text
        assert answers(llm) == resident("qwen")


def test_dummy_weights_take_the_sizes_alone(models: Any, tmp_path: Path) -> None:
    """For speed tests: config.json and metadata.json, no tensors at all."""
    (tmp_path / "svd_experts").mkdir()
    for name in ("config.json", f"svd_experts/{METADATA}"):
        shutil.copy(models["trained"] / name, tmp_path / name)
    with make(tmp_path, load_format="dummy") as llm:
        wanted = answers(llm)
    with make(tmp_path, load_format="dummy", expert_placement="offload", expert_cache_gb=0.003) as llm:
        assert answers(llm) == wanted


# ---- refused ---------------------------------------------------------------------------------------------------------


def change(folder: Path, **facts: Any) -> None:
    path = folder / METADATA
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def retrain(folder: Path) -> None:
    path = folder.parent / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.0." in name)
    save_file({**tensors, name: tensors[name] + 0.01}, path, {"format": "pt"})


def widen(folder: Path) -> None:
    path = v_file(folder, 2, 1)
    save_file({**load_file(path), "w1_V": torch.zeros(26, 40)}, path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (retrain, "other weights"),
        (lambda folder: change(folder, teacher_hash="00"), "other weights"),
        (lambda folder: change(folder, version=2), "version 2"),
        (lambda folder: change(folder, hidden_size=64), "hidden_size=64"),
        (lambda folder: change(folder, num_experts=5), "num_experts=5"),
        (lambda folder: cut(v_file(folder, 2, 5)), r"layer_2_expert_5.*not whole"),
        (lambda folder: cut(folder / U_FILE), f"{U_FILE}.*not whole"),
        (lambda folder: v_file(folder, 0, 3).unlink(), r"layer_0_expert_3.*missing"),
        (widen, r"w1_V is \(26, 40\).*\(25, 40\)"),
        (lambda folder: (folder / METADATA).unlink(), "cannot be read"),
        (lambda folder: (folder / METADATA).write_text("[]"), "JSON object"),
    ],
    ids=["retrained", "hash", "version", "hidden", "experts", "cut V", "cut U", "no V", "rank", "no json", "bad json"],
)
def test_a_folder_that_does_not_belong_is_refused_with_the_way_out(
    models: Any, tmp_path: Path, damage: Callable[[Path], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(models["qwen"], tmp_path / "model"))
    damage(path / "svd_experts")
    for options in ({}, {"expert_placement": "offload"}):
        with pytest.raises(ModelError, match=rf"(?s){complaint}.*nanovllm compress.*NANOVLLM_DISABLE_SVD=1"):
            make(path, **options)
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
    make(path).close()


def test_a_file_that_changes_while_it_is_served(models: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(models["qwen"], tmp_path / "model"))
    with make(path, expert_placement="offload", expert_cache_gb=0.00004, expert_host_gb=0.0) as llm:
        wanted = answers(llm)
        files = sorted((path / "svd_experts/V_experts").iterdir())
        for file in files:
            file.rename(file.with_suffix(".old"))
            shutil.copy(file.with_suffix(".old"), file)  # the same bytes, but another file
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all("replaced while it is served" in output.error for output in found)
        for file in files:
            file.with_suffix(".old").rename(file)
        assert answers(llm) == wanted

"""Engines whose experts are in 8-bit floats: resident ones hold the numbers of the file, offloaded ones give the same
bits. The decision is that of a GPU and the plain twins compute (tests/runner/experts8_cases.py: the kernels)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cli.plan import read_facts
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import GIB
from nanovllm.moe import scaled
from nanovllm.moe.offload import store
from nanovllm.moe.scaled import ScaledExperts
from nanovllm.ops.fp8 import quantise
from nanovllm.runner import build
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.expert_form import ExpertForm
from tests.moe.experts8 import BLOCK_FILE, MODELS, ROW_FILE, as_on_a_gpu, twin_ops
from tests.runner.test_relay import FIXTURE as TRAINED
from tests.runner.test_relay import InSegments
from tests.weights.quantised_samples import floats, write_folders

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 24,
    "kvcache_block_size": 16,
}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7], list(range(20, 53)), [45])]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
Folders = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(model: str, form: str) -> tuple[Path, Path]:
        """(in 8-bit floats, the same numbers in float32)"""
        if (model, form) not in made:
            family, sizes = MODELS[model]
            sample = {"blocks": BLOCK_FILE, "rows": ROW_FILE}[form]
            made[model, form] = write_folders(tmp_path_factory.mktemp("m"), family, sizes, sample)
        return made[model, form]

    return get


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(build, "choose_ops", lambda *_: twin_ops())


def open_engine(path: Path, **options: Any) -> LLM:
    """The native attention backend would need the native operators."""
    is_latent = path.is_dir() and "kv_lora_rank" in (path / "config.json").read_text()
    backend = "auto" if is_latent else "sdpa"
    return LLM(str(path), **{**OPTIONS, "attn_backend": backend, **options})


def run(path: Path, **options: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """(tokens and every digit of the logprobs, what the engine says of its experts, statistics)"""
    with open_engine(path, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not [output.error for output in outputs if output.error]
        found = [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
        experts = llm.engine.describe()["runs_on"].get("experts", {})
        return found, experts, llm.engine.executor.expert_stats()


def scores(answers: list[Any]) -> list[float]:
    positions = [p for _, logprobs, prompts in answers for p in (*logprobs, *(prompts or ()))]
    return [entry.logprob for position in positions for entry in (position or {}).values()]


@pytest.mark.parametrize("form", ["blocks", "rows"])
@pytest.mark.parametrize("model", MODELS)
def test_a_file_gives_what_its_expanded_numbers_give(
    model: str, form: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = folders(model, form)
    expected, _, _ = run(plain)
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(build, "choose_ops", lambda *_: twin_ops())
    resident, _, _ = run(small)
    assert [answer[0] for answer in resident] == [answer[0] for answer in expected]
    assert scores(resident) == pytest.approx(scores(expected), abs=5e-4)
    num_experts = 12 if model == "mixtral" else 16
    for host in (num_experts, 5, 0):  # all in host memory, some, none
        with monkeypatch.context() as patch:
            patch.setattr(store, "CHUNK_BYTES", 5000)  # chunks reach over the borders of matrices and scales
            patch.setattr(store.logger, "level", logging.ERROR)
            size = expert_bytes(small)
            room = {"expert_cache_gb": 6.5 * size / GIB, "expert_host_gb": (host + 0.5) * size / GIB}
            offloaded, experts, stats = run(small, expert_placement="offload", **room)
        assert (experts["in_host_memory"], experts["expert_bytes"]) == (host, size)
        assert (experts["expert_dtype"], experts["cached_slots"] + experts["streaming_slots"]) == ("float8_e4m3fn", 6)
        assert offloaded == resident, host
        assert stats.misses > 20
        assert (stats.bytes_from_disk > 0) == (host < num_experts)


def expert_bytes(path: Path) -> int:
    with open_engine(path) as llm:
        layers = (layer.mlp for layer in llm.engine.executor.runner.model.layers)
        pools = [mlp.experts.scaled.pool for mlp in layers if hasattr(mlp, "experts")]
    assert {pool.dtype for pool in pools} == {torch.uint8}
    return pools[0].shape[1]


@pytest.mark.parametrize("model", ["mixtral", "deepseek-v3"])
def test_quantised_while_it_is_loaded(
    model: str, folders: Folders, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quantization="fp8" rounds each row of the experts as `ops/fp8.py` does, and offloaded ones are the same bits."""
    _, plain = folders(model, "rows")
    resident, _, _ = run(plain, quantization="fp8")
    offloaded, experts, _ = run(plain, quantization="fp8", expert_placement="offload")
    assert experts["expert_dtype"] == "float8_e4m3fn"
    assert offloaded == resident
    with monkeypatch.context() as patch:
        patch.setattr(store.logger, "level", logging.ERROR)
        patch.setattr(scaled, "AT_ONCE", 1000)
        room = {"expert_cache_gb": 6.5 * experts["expert_bytes"] / GIB, "expert_host_gb": 0}
        from_disk, _, stats = run(plain, quantization="fp8", expert_placement="offload", **room)
    assert from_disk == resident
    assert stats.bytes_from_disk > 0
    with open_engine(plain, quantization="fp8") as llm:
        layer = next(m for m in llm.engine.executor.runner.model.modules() if isinstance(m, ScaledExperts))
        checkpoint = open_checkpoint(plain)
        name = next(name for name in checkpoint.names() if name.endswith(("experts.1.w2.weight", "1.down_proj.weight")))
        q, scale = quantise(checkpoint.read(name), 0)
        _, down = layer.views
        assert torch.equal(down.q[1].float(), q.float())
        assert torch.equal(down.scale[1], scale[:, 0])


def test_dummy_weights(folders: Folders, on_gpu: None) -> None:
    _, plain = folders("mixtral", "rows")
    options = {"load_format": "dummy", "quantization": "fp8"}
    resident, _, _ = run(plain, **options)
    assert run(plain, **options, expert_placement="offload")[0] == resident
    with open_engine(plain, **options, expert_placement="offload") as llm:  # as `nanovllm bench moe` draws routers
        llm.engine.executor.probe().spread_routing(0)
        qkv = llm.engine.executor.runner.model.layers[0].attention.qkv.weight
        assert qkv.scale[:-32].max() < 1e-3 / 400 < qkv.scale[-32:].min()
        assert not llm.generate(PROMPTS, PARAMS, use_tqdm=False)[0].error


@pytest.mark.parametrize("form", ["blocks", "rows"])
def test_dummy_weights_take_the_form_that_config_json_names(form: str, folders: Folders, on_gpu: None) -> None:
    """So that the speed of a published file can be measured without it, and `nanovllm plan` tells its bytes."""
    small, _ = folders("mixtral", form)
    resident, _, _ = run(small, load_format="dummy")
    offloaded, experts, _ = run(small, load_format="dummy", expert_placement="offload")
    assert offloaded == resident
    planned = read_facts(EngineConfig(model=str(small))).expert_bytes
    assert (experts["expert_dtype"], experts["expert_bytes"]) == ("float8_e4m3fn", planned)
    with open_engine(small, load_format="dummy") as made_up, open_engine(small) as stored:
        forms = [llm.engine.describe()["runs_on"]["quantization"] for llm in (made_up, stored)]
    assert forms == [{"rows": "FP8", "blocks": "FP8, float32"}[form]] * 2
    with open_engine(small, load_format="dummy", quantization="none") as llm:
        assert llm.engine.describe()["runs_on"]["quantization"] == "none"


def test_blocks_that_no_product_takes_are_rounded_again_by_rows(
    tmp_path: Path, on_gpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a model in 16 bits are. With `auto` they are expanded."""
    sample = floats("block", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_scale_inv", (64, 64))
    sizes = {**MODELS["mixtral"][1], "num_attention_heads": 8}  # all rows are longer than a block
    small, plain = write_folders(tmp_path, "Mixtral", sizes, sample)
    expected, _, _ = run(plain, quantization="fp8")
    assert "rounds weights again" not in caplog.text
    assert run(small, quantization="fp8")[0] == expected
    assert "quantization='fp8' rounds weights again that the file has in FP8; 'auto' rounds nothing" in caplog.text
    assert run(small, quantization="fp8", expert_placement="offload")[0] == expected
    with open_engine(small, quantization="fp8") as llm:
        assert llm.engine.describe()["runs_on"]["quantization"] == "FP8"
    assert scores(run(small)[0]) == pytest.approx(scores(run(plain)[0]), abs=5e-4)
    monkeypatch.setattr(store.logger, "level", logging.ERROR)
    with pytest.raises(ConfigError, match=r"would be expanded.* from disk as they are needed; raise expert_host_gb"):
        run(small, quantization="fp8", expert_placement="offload", expert_host_gb=0)
    with pytest.raises(ConfigError, match=r"would be expanded.* from disk as they are needed; raise expert_host_gb"):
        run(small, expert_placement="offload", expert_host_gb=0)


@pytest.mark.parametrize("num_buffers", [4, 12, 40])
def test_decodes_in_segments(num_buffers: int, on_gpu: None) -> None:
    """As a GPU decodes few sequences with offloaded experts: what is here is computed before the host knows the others.
    The trained Mixtral, quantised while it is loaded."""
    resident, _, _ = run(TRAINED, quantization="fp8")
    room = (num_buffers + 0.5) * ExpertForm.dense(128, 256, 0).length / GIB
    with open_engine(TRAINED, quantization="fp8", expert_placement="offload", expert_cache_gb=room) as llm:
        runner = llm.engine.executor.runner
        runner.model = runner._forward.model = InSegments(runner.model)
        found = llm.generate(PROMPTS[:2], replace(PARAMS, prompt_logprobs=None), use_tqdm=False)
        assert runner.model.num_steps == 5
    assert [output.outputs[0].token_ids for output in found] == [answer[0] for answer in resident[:2]]


def test_what_cannot_be_is_refused(folders: Folders, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    small, plain = folders("mixtral", "rows")
    with pytest.raises(ConfigError, match=r"expert_cpu_misses=True.*leave it out, or set quantization='none'"):
        run(small, expert_placement="offload", expert_cpu_misses=True)
    monkeypatch.setattr(store.logger, "level", logging.ERROR)
    with pytest.raises(ConfigError, match=r"would be expanded.* from disk as they are needed; raise expert_host_gb"):
        run(small, quantization="none", expert_placement="offload", expert_host_gb=0)
    monkeypatch.setattr(build, "choose_scales", lambda *args: as_on_a_gpu(*args[:4], True))
    with pytest.raises(ConfigError, match=r"low-rank experts are kept in 16 bits.*leave quantization out"):
        run(plain, quantization="fp8")


def test_on_a_cpu_and_with_none_they_are_expanded(folders: Folders) -> None:
    small, plain = folders("mixtral", "rows")
    for options in ({}, {"quantization": "none"}):
        found, _, _ = run(small, **options)
        assert scores(found) == pytest.approx(scores(run(plain)[0]), abs=5e-4)


def test_experts_that_the_file_has_in_16_bits_stay(
    tmp_path: Path, on_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    family, sizes = MODELS["mixtral"]
    kept = ("embed_tokens", "lm_head", "norm", "gate.", "experts.3.w2")
    small, plain = write_folders(tmp_path, family, sizes, ROW_FILE, kept)
    with caplog.at_level(logging.INFO, logger="nanovllm"), open_engine(small) as llm:
        assert not [m for m in llm.engine.executor.runner.model.modules() if isinstance(m, ScaledExperts)]
    assert "experts are expanded: the file does not have all of them" in caplog.text
    assert scores(run(small)[0]) == pytest.approx(scores(run(plain)[0]), abs=5e-4)

"""`nanovllm info`: facts from config.json, no weights needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.ops.native.build import load_library
from tests.cli.runner import SMALL, Run
from tests.mtp_models import add_mtp_layer
from tests.tiny_models import TinyModel


@pytest.mark.parametrize("kind", ["auto", "float16", "int8"])
def test_facts_equal_the_real_engine(run: Run, llama: TinyModel, kind: str) -> None:
    if isinstance(load_library(), str) and kind != "auto":
        pytest.skip("no C compiler")
    facts = run("info", "--model", llama.path, *SMALL, "--kv-cache-dtype", kind, "--json").last_json
    options = {"device": "cpu", "max_num_seqs": 8, "num_kvcache_blocks": 64, "max_num_batched_tokens": 64}
    with LLM(str(llama.path), kv_cache_dtype=kind, **options) as llm:
        runs_on = llm.engine.describe()["runs_on"]
        assert facts["model"]["max_model_len"] == llm.engine.max_model_len
    assert facts["attention_backends"] == runs_on["attn_reasons"]
    assert facts["memory_plan"]["kv_bytes"] == runs_on["kv_bytes"]
    assert facts["memory_plan"]["kv_blocks"] == runs_on["kv_blocks"] == 64
    assert facts["model"]["num_parameters"] == sum(p.numel() for p in llama.load_hf().parameters())


def test_what_guesses_is_counted(run: Run, llama: TinyModel, tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    add_mtp_layer(tiny("deepseek-v3").path, tmp_path)
    for path, how in (
        (llama.path, {"speculative_method": "draft_model", "speculative_model": str(tiny("qwen3").path)}),
        (tmp_path, {"speculative_method": "mtp"}),
    ):
        given = [word for name, value in how.items() for word in ("--" + name.replace("_", "-"), value)]
        facts = run("info", "--model", path, *SMALL, *given, "--json").last_json
        options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, **how}
        with LLM(str(path), num_kvcache_blocks=64, skip_tokenizer_init=True, **options) as llm:
            runs_on = llm.engine.describe()["runs_on"]
        assert facts["memory_plan"]["kv_bytes"] == runs_on["kv_bytes"]
    assert facts["model"]["weight_bytes"] == runs_on["weight_bytes"]
    refused = run("info", "--model", llama.path, *SMALL, "--speculative-method", "mtp")
    assert refused.code == 2
    assert "has no layer for multi-token prediction" in refused.err


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_weights_take_what_the_engine_says(run: Run, llama: TinyModel, make_llm: Callable[..., LLM], kind: str) -> None:
    if isinstance(load_library(), str) and kind != "none":
        pytest.skip("no C compiler")
    facts = run("info", "--model", llama.path, *SMALL, "--quantization", kind, "--json").last_json
    assert facts["model"]["quantization"] == kind
    assert facts["model"]["weight_bytes"] == make_llm(quantization=kind).engine.describe()["runs_on"]["weight_bytes"]


def test_whether_quantised_products_can_be_computed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("info", "--model", "missing", "--device", "cpu", "--json").last_json["hardware"]["quantised_products"]
    assert said in ("plain C", "AVX2", "AVX-VNNI", "AVX-512 VNNI", "NEON with dot product") or said.startswith("no: ")
    monkeypatch.setenv("NANOVLLM_NATIVE", "0")
    load_library.cache_clear()
    try:
        said = run("info", "--model", "missing", "--device", "cpu", "--json").last_json["hardware"][
            "quantised_products"
        ]
        assert said.startswith("no: products with quantised weights need compiled C code")
        assert "leave that out" in said
    finally:
        load_library.cache_clear()


def test_cache_on_a_cpu_is_planned_as_the_engine_does(run: Run, llama: TinyModel) -> None:
    """160 tokens in blocks of 16 for 3 sequences: more than 30 blocks could never be used."""
    args = ["--model", llama.path, "--device", "cpu", "--max-num-seqs", 3]
    assert run("info", *args, "--json").last_json["memory_plan"]["kv_blocks"] == 30
    refused = run("info", *args, "--json", "--cpu-kvcache-gb", "0.0000001").last_json["memory_plan"]
    assert "cpu_kvcache_gb" in refused["does_not_fit"]


def test_needs_config_only(run: Run, llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").unlink()
    result = run("info", "--model", llama_copy, "--device", "cpu")
    assert result.code == 0
    for word in ("LlamaForCausalLM", "num parameters", "kv bytes per token", "transformers", "sdpa"):
        assert word in result.out


def test_downloads_nothing(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    result = run("info", "--model", "nobody/nothing-here", "--json")
    assert "nobody/nothing-here" in result.last_json["model"]["not_on_disk"]
    assert result.last_json["hardware"]["device"]
    assert result.code == 2
    [line] = result.err.splitlines()
    assert line.startswith("error: model='nobody/nothing-here'")


@pytest.mark.parametrize("name", ["missing", "./missing", "missing.gguf", "/no/such/folder"])
def test_a_missing_model_is_code_2_after_what_is_known(run: Run, name: str) -> None:
    result = run("info", "--model", name)
    assert result.code == 2
    assert "attention backends" in result.out
    assert "missing" in result.err or "/no/such/folder" in result.err


def test_the_default_model_may_still_come(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stranger's first command, before anything was fetched."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    result = run("info", "--json")
    assert "not_on_disk" in result.last_json["model"]
    assert result.code == 0


def test_the_models_own_defaults(run: Run, llama: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}', encoding="utf-8")
    found = run("info", "--model", llama.path, "--generation-config", tmp_path, "--json").last_json
    assert "top_k=7" in found["model"]["sampling_defaults"]
    missing = run("info", "--model", llama.path, "--generation-config", tmp_path / "nope")
    assert missing.code == 2
    assert "nope" in missing.err

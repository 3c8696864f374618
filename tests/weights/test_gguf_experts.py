"""Mixture-of-experts models in GGUF files, written as llama.cpp's converter writes them: the text of the same model in
safetensors, and, quantised, that of the expanded weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.hardware.disk_memory import DiskMemory
from nanovllm.layers.packed import packed_weights
from nanovllm.memory.budget import DoesNotFit
from nanovllm.ops.native.build import load_library
from nanovllm.ops.quant import PackedMatrix
from nanovllm.runner import expert_memory
from nanovllm.weights.gguf_checkpoint import hf_name
from tests.parity.test_parity import check, engine, greedy
from tests.tiny_models import DEEPSEEK, TinyModel, Variant, hf_model
from tests.weights.gguf_samples import add_tensors, stack_experts, write_tokenizer
from tests.weights.test_gguf_deepseek import write_deepseek

ARCHITECTURES = {"mixtral": ("llama", gguf.MODEL_ARCH.LLAMA), "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE)}
needs_compiler = pytest.mark.skipif(isinstance(load_library(), str), reason="no C compiler")
GAP = 0.035
SEEDS = {"Mixtral": 1, "Qwen3Moe": 0, "DeepseekV3": 0}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16, "num_experts_per_tok": 2}
SMALL = {
    "Mixtral": {**SIZES, "num_local_experts": 4},
    "Qwen3Moe": {**SIZES, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "DeepseekV3": {
        **{**DEEPSEEK, **SIZES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32},
    },
}
SMALL["DeepseekV3"]["head_dim"] = 8


def write_experts(path: Path, model: Path, matrices: list[str] | None = None) -> Path:
    """A folder of Mixtral or Qwen3-MoE as a file; `matrices`: their types (gguf_samples.py)."""
    config, state = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    arch, number = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])  # by transformers' release
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    write_tokenizer(writer)
    for name, tensor in state.items():
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.view(-1, 2, head_dim // 2, tensor.shape[1])
            state[name] = halves.transpose(1, 2).reshape(tensor.shape)
    add_tensors(writer, gguf.get_tensor_name_map(number, config["num_hidden_layers"]), stack_experts(state), matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-renormalised"])
def test_a_gguf_file_writes_the_same_text(tiny: Callable[[str], TinyModel], tmp_path: Path, name: str) -> None:
    model = tiny(name)
    with engine(write_experts(tmp_path / "m.gguf", model.path)) as llm:
        check(llm.generate(model.prompts, greedy(), use_tqdm=False), model.answers)


def test_older_files_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    expert = "model.layers.2.block_sparse_moe.experts.11."
    found = [hf_name(f"blk.2.ffn_{part}.11.weight", tmp_path) for part in ("gate", "up", "down")]
    assert found == [expert + f"{part}.weight" for part in ("w1", "w3", "w2")]


Answer = tuple[list[int], list[dict[int, float]]]


def answer(llm: LLM) -> Answer:
    """Inputs of quantised products are rounded to 15 bits, which decides
    none of these tokens: their next best are `GAP` away."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    (output,) = llm.generate([[7]], params, use_tqdm=False)
    found = [{token: entry.logprob for token, entry in entries.items()} for entries in output.outputs[0].logprobs]
    assert min(abs(a - b) for a, b in (entries.values() for entries in found)) > GAP
    return output.outputs[0].token_ids, found


def assert_close(found: Answer, expected: Answer) -> None:
    assert found[0] == expected[0]
    assert all(here == pytest.approx(there, abs=GAP / 2) for here, there in zip(found[1], expected[1]))


def write_small(folder: Path, family: str) -> Path:
    """A random model whose rows are whole blocks of 32, two per rank of two."""
    hf_model(Variant(family, SMALL[family]), SEEDS[family]).save_pretrained(folder)
    types = ["Q8_0", "Q4_0", "Q5_1", "Q4_1", "Q5_0"]
    if family == "DeepseekV3":
        return write_deepseek(folder / "m.gguf", folder, True, matrices=types)
    return write_experts(folder / "m.gguf", folder, types)


@needs_compiler
@pytest.mark.parametrize("family", SMALL)
def test_quantised_experts_write_the_text_of_expanded_ones(
    make_llm: Callable[..., LLM], tmp_path: Path, family: str
) -> None:
    path = write_small(tmp_path, family)
    expected = answer(make_llm(path, skip_tokenizer_init=True, quantization="none"))
    llm = make_llm(path, skip_tokenizer_init=True)
    weights = packed_weights(llm.engine.executor.runner.model)
    experts = [weights[f"layers.1.mlp.experts.{which}.weight"] for which in ("gate_up", "down")]
    assert all(isinstance(matrix, PackedMatrix) for weight in experts for matrix in weight.matrices)
    assert_close(answer(llm), expected)


@needs_compiler
def test_memory_is_planned_for_the_matrices_of_the_file(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded they would need four to six times as much: a model that fits must not be refused for that."""
    path, free = write_small(tmp_path, "Mixtral"), 0
    monkeypatch.setattr(expert_memory, "available_host_bytes", lambda: free)
    with pytest.raises(DoesNotFit) as refused:
        make_llm(path, skip_tokenizer_init=True, quantization="none")
    assert "GPU" not in str(refused.value)
    assert "expert_placement='offload'" in str(refused.value)
    free = int(refused.value.missing_bytes / expert_memory.CPU_SHARE) - 500_000
    with pytest.raises(DoesNotFit):
        make_llm(path, skip_tokenizer_init=True, quantization="none")
    make_llm(path, skip_tokenizer_init=True)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
def test_offloaded_quantised_experts_are_in_a_file(
    make_llm: Callable[..., LLM],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    path, folder = write_small(tmp_path, "Mixtral"), tmp_path / "cache"
    expected = answer(make_llm(path, skip_tokenizer_init=True, **options))
    monkeypatch.setenv("NANOVLLM_CACHE", str(folder))
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = make_llm(path, skip_tokenizer_init=True, expert_placement="offload", expert_policy="lru", **options)
    assert "of these are in a file in" in caplog.text
    assert "expert_policy='lru' has no effect: quantised experts are in a file" in caplog.text
    assert answer(llm) == expected, "the same bits"
    assert not [file for file in folder.iterdir() if file.is_file()], "it has no name"
    if not options:
        weights = packed_weights(llm.engine.executor.runner.model)
        assert all(isinstance(w.memory, DiskMemory) == (".experts." in name) for name, w in weights.items())


@needs_compiler
@pytest.mark.parametrize(("family", "groups"), [("Mixtral", 1), ("Mixtral", 2), ("Qwen3Moe", 2), ("DeepseekV3", 1)])
def test_two_ranks_write_the_text_of_one(
    make_llm: Callable[..., LLM], tmp_path: Path, family: str, groups: int
) -> None:
    """Each has half of every expert, or with two groups half of the experts; all stay quantised."""
    path = write_small(tmp_path, family)
    alone = make_llm(path, skip_tokenizer_init=True)
    expected = answer(alone)
    several = make_llm(path, skip_tokenizer_init=True, tensor_parallel_size=2, expert_parallel_size=groups)
    runs_on = several.engine.describe()["runs_on"]
    assert runs_on["quantization"] == alone.engine.describe()["runs_on"]["quantization"]
    assert_close(answer(several), expected)


@needs_compiler
def test_experts_that_move_between_ranks_are_expanded(
    make_llm: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_small(tmp_path, "Mixtral")
    expected, _ = answer(make_llm(path, skip_tokenizer_init=True, quantization="none"))
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "enable_eplb": True}
    llm = make_llm(path, skip_tokenizer_init=True, **ranks)
    assert "its weights are expanded, which is slower: on a CPU experts move between ranks as numbers" in caplog.text
    assert answer(llm)[0] == expected

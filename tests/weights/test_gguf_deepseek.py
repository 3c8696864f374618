"""DeepSeek in GGUF files, written as llama.cpp's converter writes them (names by the gguf package): the same text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import open_checkpoint
from tests.parity.test_parity import check, engine, greedy
from tests.tiny_models import TinyModel
from tests.weights.gguf_samples import add_tensors, stack_experts, write_tokenizer

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, 8)


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], absorbed: bool) -> None:
    """`absorbed`: as newer converters do."""
    nope, rope, v, rank = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if absorbed else config["num_attention_heads"])
    writer.add_key_length(rank + rope if absorbed else nope + rope)
    writer.add_value_length(rank if absorbed else v)
    if absorbed:
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(v)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["n_group"] is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["rope_parameters"]["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])
        writer.add_rope_scaling_orig_ctx_len(config["rope_parameters"]["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])
    write_tokenizer(writer)


def write_deepseek(
    path: Path, model: Path, absorbed: bool, leave_out: str = "", matrices: list[str] | None = None
) -> Path:
    """`leave_out`: a tensor; `matrices`: their types (gguf_samples.py)."""
    config, state = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    write_metadata(writer, config, absorbed)
    tensors = {}
    for name, tensor in stack_experts(state).items():
        if absorbed and name.endswith("kv_b_proj.weight"):
            both = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
            to_k, to_v = both.split((config["qk_nope_head_dim"], config["v_head_dim"]), dim=1)
            tensors[name.replace("kv_b_proj", "k_b_proj")] = to_k.transpose(1, 2)
            tensors[name.replace("kv_b_proj", "v_b_proj")] = to_v
        else:
            tensors[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    add_tensors(writer, NAMES, {name: tensor for name, tensor in tensors.items() if name != leave_out}, matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("absorbed", [False, True], ids=["older", "newer"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2-groups", "deepseek-v3"])
def test_a_gguf_file_writes_the_same_text(
    tiny: Callable[[str], TinyModel], tmp_path: Path, name: str, absorbed: bool
) -> None:
    model = tiny(name)
    path = write_deepseek(tmp_path / "m.gguf", model.path, absorbed)
    with engine(path) as llm:
        check(llm.generate(model.prompts, greedy(), use_tqdm=False), model.answers)


def test_every_tensor_comes_back(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny("deepseek-v3").path
    checkpoint, state = (
        open_checkpoint(write_deepseek(tmp_path / "m.gguf", model, True)),
        load_file(model / "model.safetensors"),
    )
    assert sorted(checkpoint.names()) == sorted(state)
    for name, tensor in state.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name
    checkpoint.close()


def test_half_of_a_pair_is_refused(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    gone = "model.layers.1.self_attn.v_b_proj.weight"
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k_b\.weight and blk\.1\.attn_v_b\.weight have shapes .*\(\)"):
        open_checkpoint(write_deepseek(tmp_path / "m.gguf", tiny("deepseek-v3").path, True, gone))

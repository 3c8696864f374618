"""Rotary tables against transformers, kind by kind, at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.config import EngineConfig
from nanovllm.engine.defaults import resolve_max_model_len
from nanovllm.errors import ConfigError
from nanovllm.layers.rotary import cos_sin_table, frequencies
from nanovllm.model_config import ModelConfig

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
LLAMA3 = {
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: list[tuple[str, dict[str, Any], int, int, int]] = [  # kind, params, head_dim, max_position, max_model_len
    ("default", {"rope_theta": 1e5}, 64, 2048, 2048),
    ("default", {"rope_theta": 1e6}, 80, 4096, 300),
    ("linear", {"rope_theta": 1e4, "factor": 4.0}, 128, 2048, 8192),
    ("linear", {"rope_theta": 1e4, "factor": 2.5}, 96, 2048, 100),
    ("dynamic", {"rope_theta": 1e4, "factor": 2.0}, 64, 2048, 2048),
    ("dynamic", {"rope_theta": 1e4, "factor": 2.0}, 64, 2048, 2049),
    ("dynamic", {"rope_theta": 1e4, "factor": 4.0}, 128, 2048, 8192),
    ("llama3", LLAMA3, 128, 131072, 9000),
    ("llama3", {**LLAMA3, "factor": 32.0, "low_freq_factor": 0.5}, 64, 131072, 9000),
    ("yarn", YARN, 128, 131072, 9000),
    ("yarn", {**YARN, "attention_factor": 0.8}, 64, 131072, 2000),
    ("yarn", {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}, 64, 163840, 2000),
    ("yarn", {**YARN, "beta_fast": 12.0, "beta_slow": 3.0, "truncate": False}, 96, 131072, 2000),
    ("yarn", {"rope_theta": 1e4, "factor": 0.5, "original_max_position_embeddings": 2048}, 64, 2048, 2000),
]


def make(kind: str, params: dict[str, Any], head_dim: int, max_position: int) -> tuple[Any, ModelConfig]:
    hf = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": kind, **params},
    )
    return hf, ModelConfig.from_hf({**hf.to_dict(), "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(("kind", "params", "head_dim", "max_position", "max_model_len"), CASES)
def test_same_frequencies_as_transformers(
    kind: str, params: dict[str, Any], head_dim: int, max_position: int, max_model_len: int
) -> None:
    hf, ours = make(kind, params, head_dim, max_position)
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding(hf).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](hf, "cpu", seq_len=max_model_len)
    got, got_factor = frequencies(ours.rope, max_position, max_model_len)
    torch.testing.assert_close(got, expected.float(), rtol=2e-6, atol=0)
    assert got_factor == pytest.approx(factor)
    table = cos_sin_table(ours.rope, max_position, max_model_len)
    assert table.shape == (max_model_len, head_dim)
    assert table.dtype == torch.float32
    angles = torch.outer(torch.arange(max_model_len).float(), expected.float())
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], -1) * factor, rtol=0, atol=3e-3)
    torch.testing.assert_close(table[:64], torch.cat([angles.cos(), angles.sin()], -1)[:64] * factor)


@pytest.mark.parametrize(
    ("kind", "params", "word"),
    [
        ("yarn", {"factor": 4.0, "mscale": "1", "mscale_all_dim": 1.0}, "mscale='1'"),
        ("yarn", {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": [1]}, "mscale_all_dim"),
        ("yarn", {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast"),
        ("llama3", {"factor": 8.0}, "low_freq_factor"),
        ("llama3", {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
    ],
)
def test_parameters_that_make_no_table_are_refused_by_name(kind: str, params: dict[str, Any], word: str) -> None:
    config = {**SMALL, "rope_scaling": {"rope_type": kind, **params}}
    with pytest.raises(ConfigError, match=word):
        frequencies(ModelConfig.from_hf(config).rope, 2048, 2048)


# Both sides of every limit, values that overflow a float32 or an int64, and no numbers at all. What passes makes tables
# of some megabytes.
NUMBERS = st.sampled_from([
    None, True, "8", [], {}, 0, -1, 1, 2, 3, 4096, 2**31 - 1, 2**31, 2**63, 2**70, 10**400, 0.0, 1e-320, 1e-30, 1e-6,
    0.5, 1.0, 1.0 + 2**-52, 1.5, 3.5, 32.0, 1e4, 2.0**20, 1e15, 1e25, 1e30, 1e39, 1e308, float("inf"), float("nan"),
])  # fmt: skip
ROPE_NAMES = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "rope_type",
)
NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta", "partial_rotary_factor", "tie_word_embeddings",
    "dtype", "torch_dtype", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "eos_token_id",
    "hidden_act", "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "mlp_only_layers", "decoder_sparse_step", "shared_expert_intermediate_size", "quantization_config", "architectures",
    "rope_scaling", "rope_parameters", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "topk_method",
    "n_group", "topk_group", "scoring_func", "routed_scaling_factor", "rope_interleave", "num_nextn_predict_layers",
)  # fmt: skip
FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Other")
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4}
LATENT |= {"n_group": 2, "topk_group": 1, "num_local_experts": None}


def check_numbers(family: str, rope: dict[str, Any], changes: dict[str, Any]) -> bool:
    """A table, or a ConfigError; whether it was a table."""
    config = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config |= {"architectures": [f"{family}ForCausalLM"], "rope_scaling": rope, "max_position_embeddings": 64}
    config |= LATENT if family.startswith("Deepseek") else {}
    try:
        model = ModelConfig.from_hf({**config, **changes}, {"eos_token_id": changes.get("eos_token_id")})
        max_model_len = resolve_max_model_len(EngineConfig(model="x"), model)
        table = cos_sin_table(model.rope, model.max_position_embeddings, max_model_len)
    except ConfigError:
        return False
    assert table.shape == (max_model_len, model.rope.rotary_dim)
    assert table.isfinite().all()
    return True


def sane_rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_one_absurd_number_ends_in_a_config_error_or_a_table(kind: str) -> None:
    assert check_numbers("Llama", sane_rope(kind), {})
    for value in NUMBERS.elements:
        for name in ROPE_NAMES:
            check_numbers("Llama", {**sane_rope(kind), name: value}, {})
        for name in NAMES:
            for family in FAMILIES if kind == "default" else FAMILIES[:1]:
                check_numbers(family, sane_rope(kind), {name: value})


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.sampled_from(ROPE_NAMES), NUMBERS, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=3),
)
def test_absurd_numbers_end_in_a_config_error_or_a_table(
    family: str, kind: str, rope: dict[str, Any], changes: dict[str, Any]
) -> None:
    check_numbers(family, {**sane_rope(kind), **rope}, changes)

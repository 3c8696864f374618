"""Rotary tables against transformers, kind by kind (Lesson 16), at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.errors import ModelError
from nanovllm.layers.rotary import cos_sin_table, frequencies
from nanovllm.model_config import ModelConfig

LLAMA3 = {"rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
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
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=max_position,
        rope_parameters={"rope_type": kind, **params},
    )  # fmt: skip
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


@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "mrope", "nonsense"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_other_kinds_are_refused_by_name(kind: str, key: str) -> None:
    config = make("default", {"rope_theta": 1e4}, 64, 2048)[0].to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "rope_parameters": None, key: {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(ModelError, match=f"{kind}.*llama3"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("factor", [None, 0, -1.0, "2", float("nan"), True])
def test_a_scaling_without_a_usable_factor_is_refused(factor: Any) -> None:
    config = make("default", {"rope_theta": 1e4}, 64, 2048)[0].to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "linear", "factor": factor}}
    with pytest.raises(ModelError, match="factor"):
        ModelConfig.from_hf(config)

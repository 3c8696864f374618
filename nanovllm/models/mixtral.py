"""Mixtral: Mistral with eight MLPs in every layer, of which each token takes two (8x7B, 8x22B)."""

from __future__ import annotations

from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import Parts, Style, Transformer
from nanovllm.weights.rules import Rule

ARCHITECTURES = ("MixtralForCausalLM",)
_EXPERT = "model.layers.{i}.block_sparse_moe.experts.{e}"
RULES = (
    Rule("model.layers.{i}.block_sparse_moe.gate.weight", "layers.{i}.mlp.gate.weight"),
    Rule(_EXPERT + ".w1.weight", "layers.{i}.mlp.experts.gate_up.weight", "{e}.gate"),
    Rule(_EXPERT + ".w3.weight", "layers.{i}.mlp.experts.gate_up.weight", "{e}.up"),
    Rule(_EXPERT + ".w2.weight", "layers.{i}.mlp.experts.down.weight", "{e}"),
)


def build(config: ModelConfig, parts: Parts) -> Transformer:
    return Transformer(config, Style(more_rules=RULES), parts)

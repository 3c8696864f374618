"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with experts in place of MLPs, in all layers or in those the config names."""

from __future__ import annotations

from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import Parts, Style, Transformer
from nanovllm.weights.rules import Rule

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
_EXPERT = "model.layers.{i}.mlp.experts.{e}"
RULES = (
    Rule("model.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.gate.weight"),
    Rule(_EXPERT + ".{p:gate|up}_proj.weight", "layers.{i}.mlp.experts.gate_up.weight", "{e}.{p}"),
    Rule(_EXPERT + ".down_proj.weight", "layers.{i}.mlp.experts.down.weight", "{e}"),
)


def build(config: ModelConfig, parts: Parts) -> Transformer:
    bias = bool(config.hf.get("attention_bias", False))
    return Transformer(config, Style(qkv_bias=bias, out_bias=bias, head_norm=True, more_rules=RULES), parts)

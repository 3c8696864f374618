"""Qwen3: Llama with an RMSNorm on every head of q and k, before RoPE."""

from __future__ import annotations

from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import Parts, Style, Transformer

ARCHITECTURES = ("Qwen3ForCausalLM",)


def build(config: ModelConfig, parts: Parts) -> Transformer:
    bias = bool(config.hf.get("attention_bias", False))
    return Transformer(config, Style(qkv_bias=bias, out_bias=bias, head_norm=True), parts)

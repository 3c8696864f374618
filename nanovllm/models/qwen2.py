"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, whatever attention_bias is in the config."""

from __future__ import annotations

from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import Parts, Style, Transformer

ARCHITECTURES = ("Qwen2ForCausalLM",)


def build(config: ModelConfig, parts: Parts) -> Transformer:
    return Transformer(config, Style(qkv_bias=True), parts)

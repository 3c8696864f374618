"""Llama 2 and 3, SmolLM2, and Mistral (whose sliding window is part of ModelConfig; every backend applies it)."""

from __future__ import annotations

from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import Parts, Style, Transformer

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def build(config: ModelConfig, parts: Parts) -> Transformer:
    attention_bias = bool(config.hf.get("attention_bias", False))
    style = Style(qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=bool(config.hf.get("mlp_bias", False)))
    return Transformer(config, style, parts)

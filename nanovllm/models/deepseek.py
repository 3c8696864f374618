"""DeepSeek-V2, V2-Lite, V3 and R1: latent attention, dense layers first, then experts beside an MLP that every token
takes. V3 differs in its router and in a layer for guessing more tokens (mtp.py), which is loaded only to be used."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.attention.base import LatentSpec, attention_specs
from nanovllm.layers.mla import LatentAttention
from nanovllm.model_config import DEEPSEEK, ModelConfig
from nanovllm.models.mtp import MtpLayer, mtp_rules
from nanovllm.models.qwen3_moe import RULES as EXPERT_RULES
from nanovllm.models.transformer import RULES as COMMON_RULES
from nanovllm.models.transformer import Parts, Style, Transformer
from nanovllm.weights.rules import Rule

ARCHITECTURES = DEEPSEEK
_ATTENTION, _OURS = "model.layers.{i}.self_attn.", "layers.{i}.attention."
RULES = (
    Rule(_ATTENTION + "{part:q}_proj.weight", _OURS + "down.weight"),
    Rule(_ATTENTION + "{part:q}_a_proj.weight", _OURS + "down.weight"),
    Rule(_ATTENTION + "{part:kv}_a_proj_with_mqa.weight", _OURS + "down.weight"),
    Rule(_ATTENTION + "{n:q|kv}_a_layernorm.weight", _OURS + "{n}_norm.weight"),
    Rule(_ATTENTION + "{n:q|kv}_b_proj.weight", _OURS + "{n}_up.weight"),
    Rule("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.gate_bias"),
    Rule("model.layers.{i}.mlp.shared_experts.{part:gate|up}_proj.weight", "layers.{i}.mlp.shared.gate_up.weight"),
    Rule("model.layers.{i}.mlp.shared_experts.down_proj.weight", "layers.{i}.mlp.shared.down.weight"),
    *EXPERT_RULES,
)


def build(config: ModelConfig, parts: Parts) -> Transformer:
    first = config.num_layers
    unused = tuple(Rule(f"model.layers.{first + i}.{{name:*}}", None) for i in range(config.num_mtp_layers))
    if not parts.uses_mtp:
        return Transformer(config, Style(attention=latent_attention, more_rules=unused + RULES), parts)
    rules = mtp_rules(first, RULES + COMMON_RULES) + unused[1:] + RULES
    style, build = Style(attention=latent_attention, more_rules=rules), parts.build
    model, extended = Transformer(config, style, parts), config.with_mtp_layer()
    spec = attention_specs(extended, build.dtype, build.parallel, build.kv_dtype)[first]
    model.mtp = MtpLayer(first, extended, style, replace(parts, experts=None), spec)
    return model


def latent_attention(config: ModelConfig, spec: LatentSpec, parts: Parts) -> LatentAttention:
    assert config.mla is not None
    return LatentAttention(config.hidden_size, config.mla, spec, parts.backend, parts.build)

"""The decoder that every family here shares: embed, N x (attention, MLP or experts), norm, head.

A family (llama.py, qwen3.py, mixtral.py, ...) is a `Style`: how it differs. Its checkpoint names are data, the RULES
below. The residual stream is a second value beside the branch (`x`, `residual`), so that each addition is fused with
the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.attention.base import attention_specs
from nanovllm.layers.attention import KVCache, Rope, Step
from nanovllm.layers.build import Build, Layer
from nanovllm.layers.embedding import LMHead, VocabEmbedding
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import cos_sin_table
from nanovllm.layers.scaled_attention import attention_of
from nanovllm.model_config import ModelConfig
from nanovllm.moe.layer import MakeExperts, MoeLayer
from nanovllm.moe.resident import ResidentExperts
from nanovllm.weights.rules import Rule


@dataclass(frozen=True)
class Style:
    """How a family differs from Llama without biases."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMSNorm on every head of q and k
    attention: Callable[..., Layer] | None = None  # (config, spec, parts) -> another kind of attention
    more_rules: tuple[Rule, ...] = ()  # checkpoint names that are not in RULES


@dataclass(frozen=True)
class Parts:
    """What a model is built from besides its config: everything that depends on the machine and not on the family."""

    build: Build
    backend: Any  # an AttentionBackend, or for latent attention a LatentBackend
    max_model_len: int
    experts: MakeExperts | None = None  # None: all experts are in the device's memory
    uses_mtp: bool = False  # the checkpoint's layer that guesses is part of the model (mtp.py)


RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Rule("model.layers.{i}.self_attn.{part:q|k|v}_proj.{w:weight|bias}", "layers.{i}.attention.qkv.{w}"),
    Rule("model.layers.{i}.self_attn.o_proj.{w:weight|bias}", "layers.{i}.attention.out.{w}"),
    Rule("model.layers.{i}.self_attn.{n:q_norm|k_norm}.weight", "layers.{i}.attention.{n}.weight"),
    Rule("model.layers.{i}.mlp.{part:gate|up}_proj.{w:weight|bias}", "layers.{i}.mlp.gate_up.{w}"),
    Rule("model.layers.{i}.mlp.down_proj.{w:weight|bias}", "layers.{i}.mlp.down.{w}"),
    Rule("model.layers.{i}.self_attn.rotary_emb.inv_freq", None),  # old checkpoints carry this table; ours is computed
)


class DecoderLayer(Layer):
    def __init__(self, index: int, config: ModelConfig, style: Style, parts: Parts, spec: Any) -> None:
        super().__init__()
        build, eps = parts.build, config.rms_norm_eps
        self.ops = build.ops
        self.fuses = config.moe is None and style.attention is None and build.parallel.size == 1  # no sums between
        self.attention_norm = RMSNorm(config.hidden_size, eps, build)
        sizes, biases = (config.hidden_size, spec, config.num_kv_heads), (style.qkv_bias, style.out_bias)
        self.attention: Any  # an Attention or a LatentAttention
        if style.attention is not None:
            self.attention = style.attention(config, spec, parts)
        else:
            self.attention = attention_of(spec)(*sizes, parts.backend, build, *biases, eps if style.head_norm else None)
        self.mlp_norm = RMSNorm(config.hidden_size, eps, build)
        self.mlp: Any  # a MoeLayer or a GatedMLP
        if config.moe is not None and config.moe.layers[index]:
            make = parts.experts or (lambda _, *sizes: ResidentExperts(*sizes))
            experts = make(index, config.moe, config.hidden_size, build)
            self.mlp = MoeLayer(config.moe, config.hidden_size, experts, build)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, style.mlp_bias, build, in_parts=True)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, step: Step, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None and self.fuses and self.ops.fuses_few(x, self.attention, self.mlp):
            return self.forward_few(x, rope, step, cache), None
        x, residual = self.attend(x, residual, rope, step, cache)
        return self.mlp(x), residual

    def attend(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, step: Step, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All but the MLP: its input, and the residual stream."""
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, rope, step, cache)
        return self.mlp_norm(x, residual)

    def forward_few(self, x: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> torch.Tensor:
        """The same for one or two tokens, where a launch costs as much as its work: norms, the gate and the sums are
        computed inside the matrix products beside them. x is the residual stream itself."""
        gemv, attention, mlp = self.ops.gemv, self.attention, self.mlp
        norm = (self.attention_norm.weight, self.attention_norm.eps)
        mixed = attention.mix(gemv(x, attention.qkv.weight, attention.qkv.bias, norm=norm), rope, step, cache)
        x = gemv(mixed, attention.out.weight, attention.out.bias, residual=x)
        norm = (self.mlp_norm.weight, self.mlp_norm.eps)
        gated = gemv(x, mlp.gate_up.weight, mlp.gate_up.bias, norm=norm, gated=True)
        return gemv(gated, mlp.down.weight, mlp.down.bias, residual=x)


class Transformer(Layer):
    cos_sin: torch.Tensor

    def __init__(self, config: ModelConfig, style: Style, parts: Parts) -> None:
        super().__init__()
        build, self.ops = parts.build, parts.build.ops
        self.rules = style.more_rules + RULES  # the first that matches
        self.specs = attention_specs(config, build.dtype, build.parallel, build.kv_dtype)  # one per layer
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        self.layers: Any = nn.ModuleList(DecoderLayer(i, config, style, parts, s) for i, s in enumerate(self.specs))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        tied = self.embed if config.tie_word_embeddings else None
        self.head = LMHead(config.vocab_size, config.hidden_size, build, tied)
        table = cos_sin_table(config.rope, config.max_position_embeddings, parts.max_model_len)
        self.register_buffer("cos_sin", table.to(build.device), persistent=False)
        self.mtp: Any = None  # an MtpLayer (mtp.py), which a family sets and the runner calls

    def forward(self, step: Step, caches: list[KVCache]) -> torch.Tensor:
        """Final hidden states of the rows step.logit_rows, [len(step.logit_rows), hidden]."""
        x = self.embed(step.token_ids)  # [tokens, hidden]
        x, residual = self.through(range(len(caches)), x, None, step, caches)
        return self.last_norm(x, residual, step)

    def rope(self, step: Step) -> Rope:
        return Rope(*self.ops.rope_inputs(self.cos_sin, step.positions))

    def through(
        self, layers: range, x: torch.Tensor, residual: torch.Tensor | None, step: Step, caches: list[KVCache]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rope = self.rope(step)
        for i in layers:
            x, residual = self.layers[i](x, residual, rope, step, caches[i])
        return x, residual

    def last_norm(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> torch.Tensor:
        """Only of step.logit_rows: the head, the model's largest matrix, need not compute the others."""
        if step.logit_rows is not None:
            x, residual = x[..., step.logit_rows, :], None if residual is None else residual[step.logit_rows]
        x, _ = self.norm(x, residual)
        return x

    @property
    def graph_safe(self) -> bool:
        """Whether a step can be captured: experts that are copied in when they are chosen cannot."""
        return all(layer.mlp.experts.graph_safe for layer in self.layers if isinstance(layer.mlp, MoeLayer))

    def router_weights(self) -> list[torch.Tensor]:
        """Of the sparse layers in order."""
        return [layer.mlp.gate.weight for layer in self.layers if isinstance(layer.mlp, MoeLayer)]

    @property
    def num_layer_kinds(self) -> int:
        sizes = [tuple((name, p.shape) for name, p in layer.mlp.named_parameters()) for layer in self.layers]
        return len({(spec, type(layer.mlp), size) for spec, layer, size in zip(self.specs, self.layers, sizes)})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)  # [rows, vocab]

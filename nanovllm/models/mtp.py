"""MtpLayer: the layer for multi-token prediction (MTP) that DeepSeek-V3 brings along. It was trained to guess the token
after the next one from a hidden state of the model, so it needs no second model.

A row for token t at position j takes h, the hidden state after the model's last norm at position j - 1:

    x = eh_proj [enorm(embed(t)) | hnorm(h)]        embed and, below, head: the model's own
    h' = decoder layer(x)                           latent attention with a cache of its own, experts
    guess at the token of position j + 1 = head(norm(h'))

So the layer knows h, in which the model has decided what t is, and t itself, which was drawn from it. For one more
guess it is applied again, to the guess and its own h'.

A later row reads of this one only its key and value, which are made of x alone: `store` computes no more than these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nanovllm.layers.attention import KVCache, Rope, Step
from nanovllm.layers.build import Layer
from nanovllm.layers.linear import Linear
from nanovllm.layers.norm import RMSNorm
from nanovllm.model_config import ModelConfig
from nanovllm.models.transformer import DecoderLayer, Parts, Style
from nanovllm.weights.rules import Rule


class MtpLayer(Layer):
    def __init__(self, index: int, config: ModelConfig, style: Style, parts: Parts, spec: Any) -> None:
        """`config`: that of a model which has this layer at `index` (ModelConfig.with_mtp_layer)."""
        super().__init__()
        hidden, eps, build = config.hidden_size, config.rms_norm_eps, parts.build
        self.spec, self.hidden_size = spec, hidden
        self.enorm, self.hnorm = RMSNorm(hidden, eps, build), RMSNorm(hidden, eps, build)
        self.eh_proj = Linear(2 * hidden, {"": hidden}, False, build)  # whole on every rank: its input is
        self.layer = DecoderLayer(index, config, style, parts, spec)
        self.norm = RMSNorm(hidden, eps, build)

    def forward(
        self, embedded: torch.Tensor, before: torch.Tensor, rope: Rope, step: Step, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`before`: hidden states of the positions before. Returns (what the head reads, h'), [tokens, hidden] each."""
        x, residual = self.layer(self._join(embedded, before), None, rope, step, cache)
        return self.norm(x, residual)

    def store(self, embedded: torch.Tensor, before: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> None:
        """Only the keys and values of these rows."""
        x, _ = self.layer.attention_norm(self._join(embedded, before), None)
        self.layer.attention.store(x, rope, step, cache)

    def _join(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded, None)[0], self.hnorm(before, None)[0]), dim=1))


def mtp_rules(index: int, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """`rules`: of the ordinary layers, whose names this layer has too, at `index`. Its embedding and head are copies of
    the model's."""
    at = f"model.layers.{index}."
    inner = (
        replace(
            rule,
            source=rule.source.replace("model.layers.{i}.", at),
            target=rule.target and rule.target.replace("layers.{i}.", "mtp.layer."),
        )
        for rule in rules
        if rule.source.startswith("model.layers.{i}.")
    )
    return (
        Rule(at + "{n:enorm|hnorm|eh_proj}.weight", "mtp.{n}.weight"),
        Rule(at + "shared_head.norm.weight", "mtp.norm.weight"),
        Rule(at + "{n:embed_tokens|shared_head.head}.weight", None),
        *inner,
    )

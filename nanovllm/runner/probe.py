"""Probe: what a benchmark reads and changes of a running model, so that bench/ needs nothing of the runner's inside.

probe = engine.executor.probe()
with probe.routes() as routes: ...                  # what the sparse layers choose meanwhile
probe.spread_routing(seed)                          # dummy weights that route as trained ones do
probe.restart_experts(16, "lru", prefetch=False)    # an empty expert cache with other settings
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.layers.mla import LatentAttention
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.moe.offload.offload import Offload
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.model_runner import ModelRunner

COMMON = 0.05  # of the variance of a token's embedding: what all tokens have in common
UPDATE = 0.5  # of the context that each layer adds
LOGIT_STD = 1.5


@dataclass(frozen=True)
class Route:
    """One call of a router."""

    num_tokens: int
    num_distinct: int  # experts


@dataclass(frozen=True)
class Probe:
    device: Device
    layout: CacheLayout
    _runner: ModelRunner | None = None  # None: the model is in other processes (ray)
    _offload: Offload | None = None  # None: experts stay on the device

    @contextlib.contextmanager
    def routes(self) -> Iterator[list[Route]]:
        """Every choice of the sparse layers meanwhile. Decodes run kernel by kernel: a captured step runs no Python."""
        found: list[Route] = []
        if self._runner is None:
            yield found
            return
        layers = [module for module in self._runner.model.modules() if isinstance(module, MoeLayer)]

        def watched(route: Any) -> Any:
            def call(*args: Any) -> Any:
                ids, weights = route(*args)
                found.append(Route(len(ids), len(ids.unique())))
                return ids, weights

            return call

        kept = [layer.ops for layer in layers]
        try:
            for layer, ops in zip(layers, kept):
                layer.ops = replace(ops, route=watched(ops.route))
            with self._runner.uncaptured():
                yield found
        finally:
            for layer, ops in zip(layers, kept):
                layer.ops = ops

    @torch.no_grad()
    def spread_routing(self, seed: int) -> None:
        """Weights that route as trained ones do, by three properties that decide what a cache and a guess are worth:

        - which experts a token takes depends on the token: embeddings are drawn at unit scale, so that a norm (of
          weight 1) gives x of unit scale, not one that its epsilon has flattened;
        - some experts are popular, others in every layer: tokens have a part in common, and a gate's product with that
          part is a constant for each expert;
        - the next layer's router, applied one layer early, is mostly right: attention, which weighs all tokens alike
          because dummy queries and keys are small, adds to x a part of the context, so that x turns a little from layer
          to layer.

        In 16 layers of 8 experts with hidden size 512, 86 % of the guesses were right, and LRU hit 38, 70 and 89 % with
        2, 4 and 6 cached. The choices that `tests/moe/routing.py` makes up give 37, 63 and 86 %.
        Experts themselves stay tiny and change nothing. Captured steps compute with the new values: addresses stay.
        """
        assert self._runner is not None
        model = self._runner.model
        embed = model.embed.weight
        if not isinstance(embed, torch.Tensor):
            raise ConfigError("quantization: made-up weights are drawn in dtype; leave it out")
        draw = torch.Generator(embed.device).manual_seed(seed)
        hidden = embed.shape[1]
        embed.normal_(std=(1 - COMMON) ** 0.5, generator=draw)
        embed.add_(torch.empty_like(embed[0]).normal_(std=COMMON**0.5, generator=draw))
        layer: Any  # a nn.ModuleList has no types
        for layer in model.layers:
            layer.attention_norm.weight.fill_(1)
            layer.mlp_norm.weight.fill_(1)
            if isinstance(layer.attention, LatentAttention):
                layer.attention.kv_norm.weight.fill_(1)
                v = layer.attention.value_weight
                v.normal_(std=v.shape[-1] ** -0.5, generator=draw)
            else:
                qkv = layer.attention.qkv.weight
                first = qkv.shape[0] - list(layer.attention.qkv.parts.values())[-1]
                _draw_rows(qkv, first, qkv.shape[1] ** -0.5, draw)
            out = layer.attention.out.weight
            _draw_rows(out, 0, UPDATE * out.shape[1] ** -0.5, draw)
            if isinstance(layer.mlp, MoeLayer):
                layer.mlp.gate.weight.normal_(std=LOGIT_STD * hidden**-0.5, generator=draw)
        self._experts.watch_gates(model.router_weights())

    @torch.no_grad()
    def tie_routing(self) -> None:
        """Routers of zeros: all experts are equally good for every token, and all tokens take the first ones. What an
        engine does with made-up weights whose router differs by less than the precision of its scores."""
        if self._runner is None or not self._runner.model.router_weights():
            raise ConfigError("--tie-experts: there is no router here to change; leave it out")
        for weight in self._runner.model.router_weights():
            weight.zero_()

    # ---- offloaded experts -------------------------------------------------------------------------------------

    @property
    def _experts(self) -> Offload:
        assert self._offload is not None, "no experts are offloaded here"
        return self._offload

    @property
    def expert_bytes(self) -> int:
        return self._experts.shape.num_bytes

    def expert_stats(self) -> ExpertStats:
        return self._experts.stats()

    def restart_experts(self, num_cached: int, policy: str, prefetch: bool) -> None:
        self._experts.restart(num_cached, policy, prefetch)

    @contextlib.contextmanager
    def chosen_experts(self) -> Iterator[dict[int, set[int]]]:
        """Layer -> the distinct experts it chose meanwhile; also in captured steps, in which the host takes part."""
        seen: dict[int, set[int]] = {}
        cache = self._experts.cache
        select = cache.select

        def watched(layer: int, token_counts: Any, *more: Any) -> Any:
            seen.setdefault(layer, set()).update(token_counts)
            return select(layer, token_counts, *more)

        cache.select = watched  # type: ignore[method-assign,assignment]
        try:
            yield seen
        finally:
            del cache.select  # the class's own is behind it


def _draw_rows(weight: Any, first: int, std: float, draw: torch.Generator) -> None:
    """Rows from `first` on, of a tensor or of a PartedWeight."""
    if not isinstance(weight, torch.Tensor) and weight.plain is not None:
        weight = weight.plain
    if isinstance(weight, torch.Tensor):
        weight[first:].normal_(std=std, generator=draw)
        return
    numbers = torch.empty((weight.shape[0] - first, weight.shape[1]), device=draw.device)
    weight.set_rows(first, numbers.normal_(std=std, generator=draw))

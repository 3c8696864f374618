"""Attention with a KV cache in 8-bit floats: keys and values are divided by a scale before they are rounded.

A layer has two scales, one for all keys and one for all values. They stand at one address for as long as the model
lives, because captured graphs read them there, and are set once, before anything is cached: from the checkpoint, or by
the first step that is not a trial (AttentionBatch.measures). After that a block means the same to every step, which
prefix caching and preemption rely on. Each rank has scales of its own: what it caches, no other rank reads.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.attention.base import AttentionSpec
from nanovllm.layers.attention import Attention, KVCache, Rope, Step
from nanovllm.layers.build import Build
from nanovllm.ops import qk_norm_rope
from nanovllm.ops.kv_cache import E4M3, measure_scales
from nanovllm.ops.rotary import Angles, gather_angles

PIECE = 512  # tokens measured at a time


def attention_of(spec: AttentionSpec) -> type[Attention]:
    return ScaledAttention if spec.kv_dtype == E4M3 else Attention


class ScaledAttention(Attention):
    backend: Any  # its `attend` takes scales

    def __init__(
        self, hidden: int, spec: AttentionSpec, num_kv_heads: int, backend: Any, build: Build, *others: Any
    ) -> None:
        super().__init__(hidden, spec, num_kv_heads, backend, build, *others)
        self.scales = torch.ones(2, dtype=torch.float32, device=build.device)
        self.from_checkpoint = False

    def mix(self, qkv: torch.Tensor, rope: Rope, step: Step, cache: KVCache) -> torch.Tensor:
        if step.attention.measures:
            self._measure(qkv, rope)
        args = (*self._norms(), rope.angles, rope.positions, *cache, step.attention.slots, self.spec.num_heads)
        q = self.ops.qk_norm_rope(qkv, *args, scales=self.scales)
        return self.backend.attend(q, *cache, step.attention, self.spec, scales=self.scales).flatten(1)

    def _norms(self) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, float]:
        if self.head_norm_eps is None:
            return None, 0.0
        return (self.q_norm.weight, self.k_norm.weight), self.head_norm_eps

    def _measure(self, qkv: torch.Tensor, rope: Rope) -> None:
        """Sets the scales by the keys and values of a step, before they are written. Plain operators will do, once, but
        a few tokens at a time: what they take was not tried when the cache was sized."""
        spec = self.spec
        parts = qkv[:, spec.num_heads * spec.head_dim :].split(PIECE)
        angles = rope.angles if rope.positions is None else gather_angles(rope.angles, rope.positions)
        found = []
        for i, part in enumerate(parts):
            k, v = part.new_empty((2, 1, len(part), spec.num_kv_heads, spec.head_dim))
            here = Angles(*(table[i * PIECE : i * PIECE + len(part)] for table in angles))
            slots = torch.arange(len(part), device=part.device)
            qk_norm_rope.qk_norm_rope(part, *self._norms(), here, None, k, v, slots, 0)
            found.append(measure_scales(k, v))
        self.scales.copy_(torch.stack(found).amax(0))


def scaled_layers(layers: Any) -> list[ScaledAttention]:
    """The attention of a model's layers, if its KV cache is in 8-bit floats; else empty."""
    return [layer.attention for layer in layers if isinstance(layer.attention, ScaledAttention)]

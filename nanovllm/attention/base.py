"""The contract of an attention backend, and the records that all of them read: the specs of a model's layers, which
say what is cached, and the metadata of a step.

A backend has two methods: `rejects` returns None if it can serve a model on a device, else the reason why not; `attend`
computes attention over the paged cache. Keys and values of the step are already in the cache when `attend` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.model_config import ModelConfig
from nanovllm.ops.kv_cache import E4M3, SCALE_BYTES


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # a token sees itself and the window - 1 before it; None = everything before it
    kv_dtype: torch.dtype | None = None  # of the cache, where it is not dtype

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a token takes in each tensor of the layer's cache: K and V."""
        row = self.head_dim + (SCALE_BYTES if self.kv_dtype == torch.int8 else 0)
        return ((self.num_kv_heads, row),) * 2

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the tensors: 8-bit floats are bytes (ops/kv_cache.py)."""
        return torch.uint8 if self.kv_dtype == E4M3 else self.kv_dtype or self.dtype


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (layers/mla.py) of one layer: one vector a token is cached for all heads, [latent | k_pe]."""

    num_heads: int  # of this rank; the cache is whole on every rank
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dtype: torch.dtype
    scale: float

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.kv_rank + self.rope_dim,),)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def expanded_bytes(self) -> int:
        """Keys and values of a token, computed for all heads of this rank."""
        return self.num_heads * (self.nope_dim + self.rope_dim + self.v_dim) * self.dtype.itemsize


CacheSpec = AttentionSpec | LatentSpec


def expanded_bytes(specs: Sequence[CacheSpec]) -> int:
    """What a token would take in layers that cache latents if they cached keys and values of all heads."""
    return sum(spec.expanded_bytes for spec in specs if isinstance(spec, LatentSpec))


def attention_specs(
    config: ModelConfig, dtype: torch.dtype, parallel: Parallel, kv_dtype: torch.dtype | None = None
) -> list[CacheSpec]:
    """What each layer of a model computes and caches, on one of several ranks."""
    heads = parallel.share(config.num_heads, "num_attention_heads")
    if (mla := config.mla) is not None:
        scale = mla.head_dim**-0.5 * config.rope.score_factor
        spec = LatentSpec(heads, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim, dtype, scale)
        return [spec] * config.num_layers
    kv_heads, _ = parallel.share_kv_heads(config.num_kv_heads)
    return [
        AttentionSpec(heads, kv_heads, config.head_dim, dtype, config.sliding_window if windowed else None, kv_dtype)
        for windowed in config.windowed_layers
    ]


@dataclass(frozen=True)
class HostLens:
    """What a backend that is not graph_safe reads of a step on the host, so that it need not wait for the device."""

    query_lens: list[int]
    context_lens: list[int]
    spans: list[slice | torch.Tensor]  # per sequence: one slice of slots where its blocks adjoin, else its block ids

    def after(self, count: int) -> HostLens:
        return HostLens(self.query_lens[count:], self.context_lens[count:], self.spans[count:])


@dataclass(frozen=True)
class AttentionBatch:
    """The queries of one step and their keys. Sequence i owns rows query_starts[i] to query_starts[i + 1] of q; its
    keys are the first context_lens[i] slots of block_tables[i], the new ones included. Made by runner/step.py.
    """

    query_starts: torch.Tensor  # int32 [sequences + 1]
    context_lens: torch.Tensor  # int32 [sequences]
    block_tables: torch.Tensor  # int32 [sequences, most blocks of any]
    slots: torch.Tensor  # int64 [tokens]: where this step's K and V are stored; -1 = padding, not stored
    num_decodes: int  # so many leading sequences have one query each
    max_context_len: int  # an upper bound, known on the host; fixed when a graph is captured
    # None for a graph_safe backend: a captured step is replayed with other contents, and lists would stay as they were.
    host: HostLens | None
    measures: bool = False  # the first prompts: layers set the scales of their KV cache by them
    # What a backend makes once a step for all layers. Not for graphs: there one batch is replayed with other contents.
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def without_decodes(self) -> AttentionBatch:
        n = self.num_decodes
        return replace(
            self,
            query_starts=self.query_starts[n:] - n,
            context_lens=self.context_lens[n:],
            block_tables=self.block_tables[n:],
            slots=self.slots[n:],
            num_decodes=0,
            host=self.on_host.after(n),
        )

    @property
    def on_host(self) -> HostLens:
        assert self.host is not None
        return self.host


class Backend(Protocol):
    name: str
    graph_safe: bool  # attend may be captured in a graph: fixed launches, no host sync
    kv_dtypes: tuple[torch.dtype, ...]  # of KV caches that it reads, beside the model's

    def rejects(self, spec: Any, device: Device, block_size: int) -> str | None: ...


class AttentionBackend(Backend, Protocol):
    """For layers with an AttentionSpec. Those with a LatentSpec have backends of their own (latent.py)."""

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [tokens, heads, head_dim], caches [blocks, block_size, kv_heads, head_dim] (int8: ops/kv_cache.py) -> like
        q. A backend that has float8_e4m3fn among its kv_dtypes also takes `scales` (ops/kv_cache.py)."""
        ...

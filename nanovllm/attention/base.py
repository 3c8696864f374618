"""The contract of an attention backend, and the one metadata record that all of them read.

A backend has two methods: `rejects` returns None if it can serve a model on a device, else the reason why not; `attend`
computes attention over the paged cache. Keys and values of the step are already in the cache when `attend` is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from nanovllm.hardware.device import Device


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # a token sees itself and the window - 1 before it; None = everything before it

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


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


class AttentionBackend(Protocol):
    name: str
    graph_safe: bool  # attend may be captured in a graph: fixed launches, no host sync

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None: ...

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [tokens, heads, head_dim], caches [blocks, block_size, kv_heads, head_dim] -> like q."""
        ...

"""The contract of an attention backend, and the one metadata record that all of them read.

A backend answers two questions: can you serve this model on this device (`rejects`: None or the reason why not), and
what does attention over the paged cache give (`attend`). Keys and values of the step are already in the cache when
`attend` is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from nanovllm.hardware.device import Device


@dataclass(frozen=True)
class AttentionSpec:
    """What a model asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # a token sees itself and the window - 1 before it; None = everything before it

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class AttentionBatch:
    """Where the queries of one step sit. Sequence i owns rows query_starts[i] to query_starts[i + 1] of q; its keys
    are the first context_lens[i] slots of block_tables[i], the new ones included.

    The same facts on the host (lists, no sync needed) and on the device.
    """

    query_lens: list[int]
    context_lens: list[int]
    spans: list[slice | torch.Tensor]  # per sequence: one slice of slots where its blocks adjoin, else its block ids
    device_query_starts: torch.Tensor  # int32 [sequences + 1]
    device_context_lens: torch.Tensor  # int32 [sequences]
    device_block_tables: torch.Tensor  # int32 [sequences, most blocks of any]
    slots: torch.Tensor  # int64 [tokens]: where this step's K and V are stored; -1 = padding, not stored
    num_decodes: int = 0  # so many leading sequences have one query each
    max_context_len: int = 0  # an upper bound, known on the host; fixed when a graph is captured
    # What a backend makes once a step for all layers. Not for graphs: there one batch is replayed with other contents.
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def without_decodes(self) -> AttentionBatch:
        n = self.num_decodes
        return replace(
            self,
            query_lens=self.query_lens[n:],
            context_lens=self.context_lens[n:],
            spans=self.spans[n:],
            device_query_starts=self.device_query_starts[n:] - n,
            device_context_lens=self.device_context_lens[n:],
            device_block_tables=self.device_block_tables[n:],
            slots=self.slots[n:],
            num_decodes=0,
        )


class AttentionBackend(Protocol):
    name: str
    graph_safe: bool  # attend may be captured in a graph: fixed launches, no host sync

    def rejects(self, spec: AttentionSpec, device: Device, block_size: int) -> str | None: ...

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [tokens, heads, head_dim], caches [blocks, block_size, kv_heads, head_dim] -> like q."""
        ...

"""Steps that hold a prompt, as captured graphs for common sizes.

A prompt of 1,024 tokens is 4 ms of work for a large GPU and 27 ms of launching for a slow host, so small mixed steps
are replayed too: the step is padded to the next bucket of tokens (their slots are -1, no sequence owns them) and to a
fixed number of entries (of no tokens). Large steps gain nothing: there the launches hide behind the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.attention.base import AttentionBatch
from nanovllm.hardware.device import Device
from nanovllm.hardware.graphs import capture_graph
from nanovllm.hardware.staging import StaticUpload
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.ops.sampler_state import SamplerState

if TYPE_CHECKING:
    from nanovllm.ops.triton.sampling import Drawn

TOKEN_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
MAX_ENTRIES = 16


@dataclass(frozen=True)
class MixedInputs:
    """One step on the host, unpadded; the order of the fields is the order in the upload."""

    tokens: np.ndarray  # int64 [tokens], -1 = take row_tokens[token_rows]
    token_rows: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    slots: np.ndarray  # int64 [tokens]
    query_starts: np.ndarray  # int32 [entries + 1]
    context_lens: np.ndarray  # int32 [entries]
    block_tables: np.ndarray  # int32 [entries, blocks]
    logit_rows: np.ndarray  # int64 [sampling entries, then positions to score]
    rows: np.ndarray  # int32 [sampling entries]: whose token is sampled

    def padded(self, num_tokens: int, num_blocks: int, spare_row: int) -> list[np.ndarray]:
        def grow(array: np.ndarray, size: int, fill: int) -> np.ndarray:
            return np.concatenate([array, np.full(size - len(array), fill, dtype=array.dtype)])

        tables = np.zeros((MAX_ENTRIES, num_blocks), dtype=np.int32)
        tables[: len(self.block_tables), : self.block_tables.shape[1]] = self.block_tables
        return [
            grow(self.tokens, num_tokens, 0),
            grow(self.token_rows, num_tokens, 0),
            grow(self.positions, num_tokens, 0),
            grow(self.slots, num_tokens, -1),
            grow(self.query_starts, MAX_ENTRIES + 1, int(self.query_starts[-1])),
            grow(self.context_lens, MAX_ENTRIES, 0),
            tables,
            grow(self.logit_rows, MAX_ENTRIES, 0),
            grow(self.rows, MAX_ENTRIES, spare_row),
        ]


@dataclass(frozen=True)
class MixedOutput:
    rows: torch.Tensor  # int32 [sampling entries]
    logits: torch.Tensor
    drawn: Drawn
    scored: torch.Tensor  # hidden states of the positions to score


def compute_mixed(
    model: Transformer, caches: list[KVCache], inputs: list[torch.Tensor], row_tokens: torch.Tensor,
    state: SamplerState, num_decodes: int, max_context_len: int,
) -> MixedOutput:  # fmt: skip
    """Forward, sample, remember the tokens by row. `inputs`: the fields of MixedInputs."""
    from nanovllm.ops.triton.sampling import draw

    tokens, token_rows, positions, slots, starts, lens, tables, logit_rows, rows = inputs
    tokens = torch.where(tokens < 0, row_tokens[token_rows], tokens)
    batch = AttentionBatch(
        query_lens=[],
        context_lens=[],
        spans=[],
        device_query_starts=starts,
        device_context_lens=lens,
        device_block_tables=tables,
        slots=slots,
        num_decodes=num_decodes,
        max_context_len=max_context_len,
    )
    hidden = model(Step(tokens, positions, logit_rows, batch), caches)
    logits = model.logits(hidden[: len(rows)])
    drawn = draw(logits, rows, (positions[logit_rows[: len(rows)]] + 1).int(), state)  # as in decode graphs
    row_tokens.index_copy_(0, rows.long(), drawn.tokens)
    return MixedOutput(rows, logits, drawn, hidden[len(rows) :])


class MixedGraphs:
    def __init__(
        self, model: Transformer, caches: list[KVCache], device: Device, row_tokens: torch.Tensor, state: SamplerState,
        num_blocks: int, max_num_tokens: int, max_model_len: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._state = state
        self._caches = caches
        self._device = device
        self._row_tokens = row_tokens  # one row more than sequences: padding writes there
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self.sizes = [size for size in TOKEN_BUCKETS if size <= max_num_tokens]
        self._graphs: dict[int, tuple[StaticUpload, Callable[[], None], list[MixedOutput]]] = {}

    def capture(self) -> None:
        pool = None
        for size in reversed(self.sizes):
            upload = self._empty_upload(size)
            out: list[MixedOutput] = []

            def compute(upload: StaticUpload = upload, out: list[MixedOutput] = out) -> None:
                out[:] = [self._compute(upload)]

            replay, pool = capture_graph(compute, pool)
            self._graphs[size] = (upload, replay, out)

    def compute_smallest(self) -> None:
        self._compute(self._empty_upload(TOKEN_BUCKETS[0]))

    def _empty_upload(self, size: int) -> StaticUpload:
        empty = MixedInputs(
            *(np.zeros(0, dtype=np.int64) for _ in range(4)), np.zeros(1, dtype=np.int32),
            np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32),
            np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32),
        )  # fmt: skip
        return StaticUpload(self._device, empty.padded(size, self._num_blocks, len(self._row_tokens) - 1))

    def _compute(self, upload: StaticUpload) -> MixedOutput:
        tensors, rows = upload.tensors, self._row_tokens
        return compute_mixed(self._model, self._caches, tensors, rows, self._state, 0, self._max_model_len)

    def size_for(self, num_tokens: int, num_entries: int) -> int | None:
        if num_entries > MAX_ENTRIES:
            return None
        return next((size for size in self.sizes if size >= num_tokens and size in self._graphs), None)

    def run(self, size: int, inputs: MixedInputs) -> MixedOutput:
        """Its tensors have lines for padding too, and the next run overwrites them."""
        upload, replay, out = self._graphs[size]
        upload.send(inputs.padded(size, self._num_blocks, len(self._row_tokens) - 1))
        replay()
        return out[0]

"""One step: its record on the host, its tensors, and the one way to compute it.

    InputBatch.inputs(entries)   StepInputs     integers of one step, from a plan and what the runner remembers
    step_of(...)                 Step           the same as tensors, in the form the model reads
    Forward                      hidden states  the forward pass
    draw_from(...)               StepOutput     logits of the rows that end a sequence's part, drawn tokens

A step that is computed once, one that is captured and replayed, and one whose results feed the next (decode_loop.py)
all pass through these three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from nanovllm.attention.base import AttentionBatch, HostLens
from nanovllm.hardware.staging import Transfers
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.moe.load import choices_of

# (logits [rows, vocab], rows int32, positions of the tokens to be drawn) -> a record with `tokens` int64 [rows]
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
# (step, row of each token's sequence [tokens], final hidden states [tokens, hidden])
Read = Callable[[Step, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class StepInputs:
    """One step on the host; entries stand one after another, decodes first. The fields are uploaded in this order."""

    tokens: np.ndarray  # int64 [tokens]; -1 = the newest token of its row, which a step in flight has yet to sample
    token_rows: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    slots: np.ndarray  # int64 [tokens]
    query_starts: np.ndarray  # int32 [entries + 1]
    context_lens: np.ndarray  # int32 [entries]
    block_tables: np.ndarray  # int32 [entries, most blocks of any]; beyond an entry's own: leftovers
    logit_rows: np.ndarray  # int64 [sampling entries, then positions to score]
    rows: np.ndarray  # int32 [sampling entries]: whose token is sampled

    @property
    def num_decodes(self) -> int:
        return int((np.diff(self.query_starts) == 1).cumprod().sum())  # leading ones

    def arrays(self) -> list[np.ndarray]:
        return [getattr(self, field.name) for field in fields(self)]

    def padded(self, num_tokens: int, num_entries: int, num_blocks: int, spare_row: int) -> list[np.ndarray]:
        """The arrays of a captured size: padded tokens are stored nowhere, padded entries own no tokens, and what is
        sampled for them goes to the spare row."""

        def grow(array: np.ndarray, size: int, fill: int) -> np.ndarray:
            return np.concatenate([array, np.full(size - len(array), fill, dtype=array.dtype)])

        tables = np.zeros((num_entries, num_blocks), dtype=np.int32)
        tables[: len(self.block_tables), : self.block_tables.shape[1]] = self.block_tables
        return [
            grow(self.tokens, num_tokens, 0),
            grow(self.token_rows, num_tokens, 0),
            grow(self.positions, num_tokens, 0),
            grow(self.slots, num_tokens, -1),
            grow(self.query_starts, num_entries + 1, int(self.query_starts[-1])),
            grow(self.context_lens, num_entries, 0),
            tables,
            grow(self.logit_rows, num_entries, 0),
            grow(self.rows, num_entries, spare_row),
        ]

    @classmethod
    def empty(cls) -> StepInputs:
        none = np.zeros(0, dtype=np.int64)
        return cls(
            none,
            none,
            none,
            none,
            np.zeros(1, dtype=np.int32),
            none.astype(np.int32),
            np.zeros((0, 1), dtype=np.int32),
            none,
            none.astype(np.int32),
        )

    def host_lens(self, block_size: int, block_tables: torch.Tensor) -> HostLens:
        """`block_tables`: on the device, so that no block id is copied there a second time."""
        spans: list[slice | torch.Tensor] = []
        context_lens = self.context_lens.tolist()
        for i, (blocks, context_len) in enumerate(zip(self.block_tables, context_lens)):
            count, first = -(-context_len // block_size), int(blocks[0])
            if blocks[count - 1] == first + count - 1 and (np.diff(blocks[:count]) == 1).all():
                spans.append(slice(first * block_size, first * block_size + context_len))
            else:
                spans.append(block_tables[i, :count].long())
        return HostLens(np.diff(self.query_starts).tolist(), context_lens, spans)


TABLES = [field.name for field in fields(StepInputs)].index("block_tables")


@dataclass(frozen=True)
class Bounds:
    """What is known of a step on the host beside its tensors."""

    num_decodes: int
    max_context_len: int
    host: HostLens | None = None
    measures: bool = False


def step_of(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    logit_rows: torch.Tensor | None,
    bounds: Bounds,
) -> Step:
    known = (bounds.num_decodes, bounds.max_context_len, bounds.host, bounds.measures)
    batch = AttentionBatch(query_starts, context_lens, block_tables, slots, *known)
    return Step(tokens, positions, logit_rows, batch)


def send_step(
    inputs: StepInputs,
    transfers: Transfers,
    bounds: Bounds,
    reads_host: int | None = None,
) -> tuple[list[torch.Tensor], Bounds]:
    """The arrays of `inputs` on the device, and what is known of them on the host. `reads_host`: the block size, where
    attention is not graph_safe."""
    sent = transfers.send(inputs.arrays())
    if reads_host is None:
        return sent, bounds
    host = inputs.host_lens(reads_host, sent[TABLES])
    return sent, replace(bounds, max_context_len=int(inputs.context_lens.max()), host=host)


def unstored_step(lens: list[int], block_size: int, num_blocks: int, device: torch.device, num_logits: int = 0) -> Step:
    """Whole prompts that are computed and not kept: slots are -1, and every block table points to block 0, which a
    model without a cache does not read. Logits of all tokens, or of the first one `num_logits` times."""
    starts, positions = np.cumsum([0, *lens]), np.concatenate([np.arange(n) for n in lens])
    spans = [torch.zeros(-(-n // block_size), dtype=torch.int64, device=device) for n in lens]
    lists = torch.tensor(lens, dtype=torch.int32, device=device)
    at = torch.from_numpy(positions).to(device)
    return step_of(
        torch.zeros_like(at),
        at,
        torch.full_like(at, -1),
        torch.tensor(starts, dtype=torch.int32, device=device),
        lists,
        torch.zeros(len(lens), num_blocks, dtype=torch.int32, device=device),
        torch.zeros(num_logits, dtype=torch.int64, device=device) if num_logits else None,
        Bounds(0, max(lens), HostLens(lens, lens, list(spans))),
    )


@dataclass(frozen=True)
class StepOutput:
    """Of a captured step: with lines for padding, and overwritten by the next replay."""

    rows: torch.Tensor  # int32 [sampling entries]
    logits: torch.Tensor
    drawn: Any  # what `Draw` returned; None if no row is sampled
    scored: torch.Tensor  # hidden states of the positions to score
    choices: list[torch.Tensor]  # of experts, by sparse layer (moe/load.py)


class Forward:
    """The forward pass of a model over its caches."""

    def __init__(self, model: Transformer, caches: list[KVCache], read: Read | None = None) -> None:
        """`read` gets every step, and the hidden states of all its tokens (mtp.py)."""
        self.model, self.caches, self._read = model, caches, read

    def __call__(self, step: Step, token_rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states of step.logit_rows. `token_rows`: the row of each token's sequence; of padding (slot -1)
        any number."""
        if self._read is None:
            return self.model(step, self.caches)
        hidden = self.model(replace(step, logit_rows=None), self.caches)
        self._read(step, token_rows, hidden)
        return hidden if step.logit_rows is None else hidden[step.logit_rows]


def draw_from(
    model: Transformer, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, draw: Draw
) -> StepOutput:
    """`positions`: where the drawn tokens will stand, one after the tokens just fed."""
    choices = choices_of(model.layers)
    if len(rows) == 0:  # only the first part of prompts
        return StepOutput(rows, hidden[:0], None, hidden, choices)
    logits = model.logits(hidden[: len(rows)])
    return StepOutput(rows, logits, draw(logits, rows, positions), hidden[len(rows) :], choices)

"""DraftModel: a smaller model of the same vocabulary guesses what the large one will write.

It is more layers of the same cache (model_drafter.py). What a block holds of the draft model may be
missing: a prompt whose request ended at its first token was never read by it, and plans without guesses write tokens
that it has not seen. So `_Coverage` counts, for each sequence, the leading tokens whose K and V are there, and says of
each block whether it is full; what is missing is computed before the next guess.

Its guesses are drawn as model_drafter.py says. For the first one it is fed two tokens:

    newest token n      the model is fed tokens n - 1 and n, and draws guess 1      (n - 1: if all guesses of the step
                                                                                     before were right, the last of them
                                                                                     was drawn but never fed)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import Transfers
from nanovllm.layers.attention import Step
from nanovllm.models.transformer import Transformer
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.model_drafter import ModelDrafter
from nanovllm.runner.recorded_decodes import RecordedDecodes, can_record
from nanovllm.runner.step import Draw, StepOutput
from nanovllm.scheduling.plan import PlanEntry, StepPlan

PIECE = 2048  # tokens of one step in which it reads what it has missed


class DraftModel(ModelDrafter):
    first_rows = 2

    def __init__(
        self,
        model: Transformer,
        layout: CacheLayout,
        device: Device,
        limits: StepLimits,
        max_num_seqs: int,
        most: int,
        reads_host: bool,
    ) -> None:
        super().__init__(model, model.specs, layout, device, limits.max_model_len, most, reads_host)
        self._piece = min(PIECE, limits.max_num_batched_tokens)
        self._coverage = _Coverage(max_num_seqs, layout)
        self._fed: dict[int, tuple[int, np.ndarray]] = {}  # row -> (place of the newest token, guesses fed after it)

    def join(self, batch: InputBatch, transfers: Transfers, draw: Draw) -> None:
        super().join(batch, transfers, draw)
        self._recorded: RecordedDecodes | None = None
        if can_record(self.model):
            self._recorded = RecordedDecodes(self.model, self.caches, transfers, self._max_model_len, draw)

    def apply(self, plan: StepPlan) -> None:
        for row in self._coverage.apply(plan, self._batch):
            self._fed.pop(row, None)

    def forward(self, step: Step, token_rows: torch.Tensor) -> torch.Tensor:
        return self.model(step, self.caches)

    def step(self, entries: Sequence[PlanEntry]) -> StepOutput:
        out = None if self._recorded is None else self._recorded.run(self._batch.inputs(entries))
        return super().step(entries) if out is None else out

    def was_fed(self, seq_id: int, place: int, guesses: np.ndarray) -> None:
        self._fed[self._batch.row(seq_id)] = place, guesses
        self._coverage.reach(self._batch, seq_id, place + 1)

    # ---- what it has not read ----------------------------------------------------------------------------------

    def catch_up(self, entries: Sequence[PlanEntry]) -> None:
        """K and V of all tokens but the newest two: those are fed with the next guess."""
        batch, budget, chunks = self._batch, self._piece, []
        for entry in entries:
            tokens, row = batch.tokens(entry.seq_id), batch.row(entry.seq_id)
            if row in self._fed:  # guesses that were right are read
                place, guesses = self._fed.pop(row)
                after = tokens[place + 1 : place + 1 + len(guesses)]
                right = int((guesses[: len(after)] == after).cumprod().sum())
                self._coverage.reach(batch, entry.seq_id, place + 1 + right)
            start, stop = self._coverage.of(row), len(tokens) - 2
            while start < stop:
                count = min(stop - start, budget)
                chunks.append(PlanEntry(entry.seq_id, start, count, 0, (), False))
                start, budget = start + count, budget - count
                if budget == 0:
                    self.step(chunks)
                    budget, chunks = self._piece, []
        if chunks:
            self.step(chunks)
        for entry in entries:
            self._coverage.reach(batch, entry.seq_id, len(batch.tokens(entry.seq_id)) - 2)

    def reached(self, seq_id: int) -> None:
        """A visit of the device has ended, in which every step guessed: all but the newest two tokens were fed."""
        self._coverage.reach(self._batch, seq_id, len(self._batch.tokens(seq_id)) - 2)


class _Coverage:
    """Of each row the leading tokens whose K and V of the draft model are in the cache; of each block whether it is
    full of them."""

    def __init__(self, num_rows: int, layout: CacheLayout) -> None:
        self._size = layout.block_size
        self._counts = np.zeros(num_rows, dtype=np.int64)
        self._is_full = np.zeros(layout.num_blocks, dtype=bool)

    def apply(self, plan: StepPlan, batch: InputBatch) -> list[int]:
        """The rows of sequences that arrive: their cached prefix is what its blocks are full of. Blocks that a sequence
        gets and does not find there have other contents from now on."""
        arrived = {arrival.seq_id for arrival in plan.arrivals}
        for entry in plan.entries:
            found = entry.start // self._size if entry.seq_id in arrived else 0
            blocks = np.array(entry.block_ids, dtype=np.int64)
            self._is_full[blocks[found:]] = False
            if entry.seq_id in arrived:
                full = int(self._is_full[blocks[:found]].cumprod().sum())
                self._counts[batch.row(entry.seq_id)] = full * self._size
        return [batch.row(seq_id) for seq_id in arrived]

    def of(self, row: int) -> int:
        return int(self._counts[row])

    def reach(self, batch: InputBatch, seq_id: int, count: int) -> None:
        row = batch.row(seq_id)
        before, self._counts[row] = self._counts[row], max(count, self._counts[row])
        first, last = before // self._size, self._counts[row] // self._size
        if last > first:
            self._is_full[batch.block_table_rows([row], last)[0, first:]] = True

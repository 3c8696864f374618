"""DraftModel: a smaller model of the same vocabulary guesses what the large one will write.

It is more layers of the same cache. Its K and V lie in tensors of their own, at the slots of the same blocks, so block
tables, prefix caching and preemption serve it without knowing of it. What a block holds of the draft model may be
missing: a prompt whose request ended at its first token was never read by it, and plans without guesses write tokens
that it has not seen. So `_Coverage` counts, for each sequence, the leading tokens whose K and V are there, and says of
each block whether it is full; what is missing is computed before the next guess.

A guess is drawn as the token itself will be: with the same parameters, and the noise of its position. Where the two
models agree about a position, they also draw the same token, at any temperature.

    newest token n      the model is fed tokens n - 1 and n, and draws guess 1      (n - 1: if all guesses of the step
    guess j             it is fed guess j, and draws guess j + 1                     before were right, the last of them
                                                                                     was drawn but never fed)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanovllm.hardware.device import Device
from nanovllm.models.transformer import Transformer
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.recorded_decodes import RecordedDecodes, can_record
from nanovllm.runner.step import Bounds, Draw, StepOutput, compute, send_step, step_of
from nanovllm.scheduling.drafts import draft_lengths
from nanovllm.scheduling.plan import PlanEntry, StepPlan

PIECE = 2048  # tokens of one step in which it reads what it has missed


class DraftModel:
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
        """`layout`: that of the large model. `reads_host`: attention needs lengths on the host."""
        self.model, self.lengths = model, draft_lengths(most)
        self._layout, self._max_model_len = layout, limits.max_model_len
        self._reads_host = layout.block_size if reads_host else None
        self._piece = min(PIECE, limits.max_num_batched_tokens)
        self.caches = allocate(layout, model.specs, device)
        self._coverage = _Coverage(max_num_seqs, layout)
        self._fed: dict[int, tuple[int, np.ndarray]] = {}  # row -> (place of the newest token, guesses fed after it)

    def join(self, batch: InputBatch, transfers: Any, draw: Draw) -> None:
        """The runner's: its batch, its way to the device, its sampler."""
        self._batch, self._transfers, self._draw = batch, transfers, draw
        self._recorded: RecordedDecodes | None = None
        if can_record(self.model):
            self._recorded = RecordedDecodes(self.model, self.caches, transfers, self._max_model_len, draw)

    def apply(self, plan: StepPlan) -> None:
        for row in self._coverage.apply(plan, self._batch):
            self._fed.pop(row, None)

    # ---- on a host that has every token ------------------------------------------------------------------------

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        self.catch_up(entries)
        seq_ids = [entry.seq_id for entry in entries]
        newest = [len(batch.tokens(seq_id)) - 1 for seq_id in seq_ids]
        drafts: list[list[int]] = [[] for _ in entries]
        for count in range(most):
            rows = []
            for seq_id, place in zip(seq_ids, newest):
                first = place - 1 if count == 0 and place > 0 else place + count
                rows += [PlanEntry(seq_id, at, 1, 0, (), True) for at in range(first, place + count + 1)]
            drawn = self._step(rows).drawn.tokens.tolist()
            ends = [i for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1].seq_id != row.seq_id]
            for draft, seq_id, end in zip(drafts, seq_ids, ends):
                draft.append(drawn[end])
                batch.add_draft(seq_id, np.array(draft, np.int32))
        for seq_id, place, draft in zip(seq_ids, newest, drafts):
            self._fed[batch.row(seq_id)] = place, np.array(draft[: most - 1], np.int32)
            self._coverage.reach(batch, seq_id, place + 1)
        return [np.array(draft, np.int32) for draft in drafts]

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
                    self._step(chunks)
                    budget, chunks = self._piece, []
        if chunks:
            self._step(chunks)
        for entry in entries:
            self._coverage.reach(batch, entry.seq_id, len(batch.tokens(entry.seq_id)) - 2)

    def reached(self, seq_id: int) -> None:
        """A visit of the device has ended, in which every step guessed: all but the newest two tokens were fed."""
        self._coverage.reach(self._batch, seq_id, len(self._batch.tokens(seq_id)) - 2)

    def _step(self, entries: Sequence[PlanEntry]) -> StepOutput:
        inputs = self._batch.inputs(entries)
        if self._recorded is not None and (out := self._recorded.run(inputs)) is not None:
            return out
        bounds = Bounds(inputs.num_decodes, self._max_model_len)
        sent, bounds = send_step(inputs, self._transfers, bounds, self._reads_host)
        tokens, _, positions, slots, starts, lens, tables, logit_rows, rows = sent
        step = step_of(tokens, positions, slots, starts, lens, tables, logit_rows, bounds)
        drawn_at = (positions[logit_rows[: len(rows)]] + 1).int()
        return compute(self.model, self.caches, step, rows, drawn_at, self._draw)

    # ---- in a captured step (draft_loop.py) --------------------------------------------------------------------

    def guess(self, state: Any, history: torch.Tensor, tables: torch.Tensor, flags: torch.Tensor, num: int) -> None:
        """Writes the rows that verify `num` guesses of each sequence (DraftState), after drawing them."""
        from nanovllm.ops.triton.drafts import feed

        size, lanes = len(state.lanes), (state.lanes, state.ends)
        block_tables = state.block_tables.view(size, 1 + num, -1)
        rest = (lanes, history, tables, flags)
        drawn = None
        for count in range(num):
            per_lane = 2 if count == 0 else 1
            # In the rows of the step to come, which are written last. Not in new memory: while kernels are compiled
            # (compile_ahead) nothing writes it, and what is read from it would be no token.
            rows = tuple(part[: size * per_lane] for part in state.fed)
            feed(*rest, drawn, range(count + 1 - per_lane, count + 1), self._layout.block_size, rows)
            number, tokens, positions, lens, slots = rows
            starts = torch.arange(size * per_lane + 1, dtype=torch.int32, device=lens.device)
            last = torch.arange(per_lane - 1, size * per_lane, per_lane, device=lens.device)
            bounds = Bounds(size * per_lane, self._max_model_len)
            of_rows = block_tables[:, :per_lane].reshape(size * per_lane, -1)
            hidden = self.model(step_of(tokens, positions, slots, starts, lens, of_rows, last, bounds), self.caches)
            drawn = self._draw(self.model.logits(hidden), number[last], lens[last]).tokens
        feed(*rest, drawn, range(num + 1), self._layout.block_size, state.fed, verifies=True)


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

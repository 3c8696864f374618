"""DraftLoop: decode steps that guess tokens and verify them, captured like those of the DecodeLoop, without the host.

One graph is: guess (Drafter.guess), forward pass of 1 + n rows for each sequence,
draw a token of each, keep those that are right (accept). It is replayed num_steps times a visit; a sequence then stands
where its own right guesses have brought it, which the host learns at the end of the visit. verify.py says why the
output is that without guesses.

Graphs are captured for a few batch sizes and numbers of guesses: with many sequences the card is busy, and a row that
may be dropped costs what it takes. A plan that no graph fits is replayed without guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.hardware.staging import Transfers
from nanovllm.runner.drafter import Drafter
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.row_tables import RowTables
from nanovllm.runner.samplers import DeviceSampler
from nanovllm.runner.step import Bounds, Forward, StepOutput, draw_from, step_of
from nanovllm.scheduling.drafts import MAX_SEQS, MAX_STEPS
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

SIZES = (1, 2, 4, 8, MAX_SEQS)  # sequences
MAX_ROWS = 64  # of a graph: beyond, products take longer with every row


@dataclass(frozen=True)
class DraftState:
    """What a graph reads and writes; one row for each token that is fed, 1 + n of them a sequence."""

    lanes: torch.Tensor  # int32 [sequences]: the sequence's row, -1 = padding
    ends: torch.Tensor  # int64 [sequences]: the place of its newest token
    steps: torch.Tensor  # int32 [sequences]: replays since the visit began
    kept: torch.Tensor  # int32 [sequences, MAX_STEPS]
    guessed: torch.Tensor  # int32 [sequences, MAX_STEPS]
    rows: torch.Tensor  # int32 [rows]
    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    context_lens: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int64 [rows]
    samples: torch.Tensor  # int64 [rows, MAX_STEPS]
    block_tables: torch.Tensor  # int32 [rows, blocks]

    @classmethod
    def allocate(cls, num_blocks: int, device: torch.device) -> DraftState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        small, most = torch.int32, SIZES[-1]
        return cls(
            zeros(most, dtype=small) - 1,
            zeros(most),
            zeros(most, dtype=small),
            zeros(most, MAX_STEPS, dtype=small),
            zeros(most, MAX_STEPS, dtype=small),
            zeros(MAX_ROWS, dtype=small) - 1,
            zeros(MAX_ROWS),
            zeros(MAX_ROWS),
            zeros(MAX_ROWS, dtype=small),
            zeros(MAX_ROWS) - 1,
            zeros(MAX_ROWS, MAX_STEPS),
            zeros(MAX_ROWS, num_blocks, dtype=small),
        )

    @property
    def fed(self) -> tuple[torch.Tensor, ...]:
        """What the step is fed, as `Drafter.guess` writes it."""
        return self.rows, self.tokens, self.positions, self.context_lens, self.slots

    def first(self, size: int, num_drafts: int) -> DraftState:
        counts = [size] * 5 + [size * (1 + num_drafts)] * 7
        return DraftState(*(getattr(self, field.name)[:count] for field, count in zip(fields(self), counts)))


class DraftLoop:
    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        tables: RowTables,
        transfers: Transfers,
        sampler: DeviceSampler,
        drafter: Drafter,
        max_model_len: int,
    ) -> None:
        self._forward, self._batch, self._tables = forward, batch, tables
        self._transfers, self._sampler, self._drafter = transfers, sampler, drafter
        self._max_model_len, device = max_model_len, transfers.device
        num_rows, num_blocks = tables.tables.shape
        self._history = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        self._num_known = np.zeros(num_rows, dtype=np.int64)  # tokens of a row that are in it
        self._state = DraftState.allocate(num_blocks, device)
        self._arange = torch.arange(MAX_ROWS + 1, dtype=torch.int32, device=device)
        self._newest: dict[tuple[int, int], StepOutput] = {}
        sizes = [size for size in SIZES if size < num_rows] + [min(num_rows, SIZES[-1])]
        pairs = [(size, num) for size in sizes for num in drafter.lengths if num and size * (1 + num) <= MAX_ROWS]
        # (sequences, guesses) -> what computes them, the largest first: its memory then serves all others
        pairs.sort(key=lambda pair: -pair[0] * (1 + pair[1]))
        self._replays: dict[tuple[int, int], Callable[[], None]] = {
            pair: partial(self._compute, *pair) for pair in pairs
        }

    def capture(self, capture: Capture) -> None:
        for graph, compute in self._replays.items():
            self._replays[graph] = capture(compute)

    def compute_each(self) -> None:
        for graph in self._replays:
            self._compute(*graph)

    def find(self, plan: StepPlan) -> tuple[int, int] | None:
        """The graph for this plan: (sequences, guesses); None if there is none."""
        count = len(plan.entries)
        fitting = [(s, n) for s, n in self._replays if s >= count and n <= plan.num_drafts]
        return min(fitting, key=lambda pair: (-pair[1], pair[0]), default=None)

    def apply(self, plan: StepPlan) -> None:
        for arrival in plan.arrivals:
            self._num_known[self._batch.row(arrival.seq_id)] = 0

    def launch(self, plan: StepPlan, graph: tuple[int, int]) -> Callable[[], StepResult]:
        """Returns a function that waits for the result."""
        size, num = graph
        self._drafter.catch_up(plan.entries)
        state = self._begin(plan, size, num)
        reports = self._sampler.reports([entry for entry in plan.entries for _ in range(1 + num)])
        for _ in range(plan.num_steps):
            self._replays[graph]()
            if reports.after_step is not None:
                reports.after_step(self._newest[graph])
        count, steps = len(plan.entries), plan.num_steps
        arriving = [
            self._transfers.start(part[:length, :steps].contiguous())
            for part, length in ((state.samples, count * (1 + num)), (state.kept, count), (state.guessed, count))
        ]
        reports.start()

        def result() -> StepResult:
            samples, kept, guessed = (part.wait() for part in arriving)
            samples = samples.reshape(count, 1 + num, steps)
            samples[np.arange(1 + num)[None, :, None] >= kept[:, None, :]] = 0  # dropped, or never drawn
            scores = reports.read(samples.reshape(-1, steps))
            tokens, logprobs = [], []
            for i, entry in enumerate(plan.entries):
                places = [(at, step) for step in range(steps) for at in range(kept[i, step])]
                tokens.append([int(samples[i, at, step]) for at, step in places])
                if scores is not None:
                    logprobs.append([scores[i * (1 + num) + at][step] for at, step in places])
                self._batch.extend(entry.seq_id, tokens[-1])
                self._num_known[self._batch.row(entry.seq_id)] += len(tokens[-1])
                self._drafter.reached(entry.seq_id)
            return StepResult(tokens, logprobs or None, num_drafted=guessed.sum(1).tolist())

        return result

    def _begin(self, plan: StepPlan, size: int, num: int) -> DraftState:
        """Point a graph at the sequences of a plan. What the history does not have yet is sent: a prompt, or tokens
        that were drawn by other steps."""
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(plan.entries)] = found = self._batch.rows(plan.entries)
        ends = np.zeros(size, dtype=np.int64)
        ends[: len(plan.entries)] = [entry.start for entry in plan.entries]
        places, tokens = self._missing(plan.entries, found)
        changed = self._tables.take_changed(int(ends.max()) + plan.num_steps * (1 + num))
        sent = self._transfers.send([rows, ends, places, tokens, *changed])
        d_rows, d_ends, d_places, d_tokens, *d_changed = sent
        num_blocks = self._tables.store(*d_changed)
        if len(places):
            self._history.view(-1).index_copy_(0, d_places, d_tokens)
        state = self._state.first(size, num)
        state.lanes.copy_(d_rows)
        state.ends.copy_(d_ends)
        state.steps.zero_()
        of_rows = d_rows.clamp(min=0).long().repeat_interleave(1 + num)
        state.block_tables[:, :num_blocks].copy_(self._tables.tables[:, :num_blocks].index_select(0, of_rows))
        return state

    def _missing(self, entries: Sequence[PlanEntry], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        width, places, tokens = self._history.shape[1], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for entry, row in zip(entries, rows.tolist()):
            known, first = self._batch.tokens(entry.seq_id), int(self._num_known[row])
            places.append(row * width + np.arange(first, len(known)))
            tokens.append(known[first:])
            self._num_known[row] = len(known)
        return np.concatenate(places), np.concatenate(tokens)

    def _compute(self, size: int, num: int) -> None:
        from nanovllm.ops.triton.drafts import accept

        s = self._state.first(size, num)
        self._drafter.guess(s, self._history, self._tables.tables, self._sampler.state.ints, num)
        count = size * (1 + num)
        bounds = Bounds(count, self._max_model_len)
        starts = self._arange[: count + 1]
        step = step_of(s.tokens, s.positions, s.slots, starts, s.context_lens, s.block_tables, None, bounds)
        hidden, draw = self._forward(step, s.rows), self._sampler.draw
        out = self._newest[size, num] = draw_from(self._forward.model, hidden, s.rows, s.context_lens, draw)
        outputs = (s.samples, s.kept, s.guessed)
        accept((s.lanes, s.ends, s.steps), self._history, s.fed, out.drawn.tokens, outputs, num)

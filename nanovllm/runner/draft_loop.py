"""DraftLoop: decode steps that guess tokens and verify them, captured like those of the DecodeLoop, without the host.

One graph is: guess (Drafter.guess), forward pass of 1 + n rows for each sequence,
draw a token of each, keep those that are right (accept). It is replayed num_steps times a visit; a sequence then stands
where its own right guesses have brought it, which the host learns at the end of the visit. verify.py says why the
output is that without guesses.

Graphs are captured for a few batch sizes and numbers of guesses: with many sequences the card is busy, and a row that
may be dropped costs what it takes. A plan that no graph fits is replayed without guesses. A plan with a grammar is
replayed in three parts for each step, because the host computes which tokens the grammar allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.hardware.staging import Arriving, Transfers
from nanovllm.runner.drafter import Drafter
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.row_tables import RowTables
from nanovllm.runner.samplers import DeviceSampler
from nanovllm.runner.step import Bounds, Draw, Forward, StepOutput, draw_from, step_of
from nanovllm.scheduling.drafts import MAX_ROWS, MAX_SEQS, MAX_STEPS
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

SIZES = (1, 2, 4, 8, MAX_SEQS)  # sequences


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
    masks: torch.Tensor  # int32 [rows]: lines of the sampler's masks, where a plan has a grammar

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
            zeros(MAX_ROWS, dtype=small),
        )

    @property
    def fed(self) -> tuple[torch.Tensor, ...]:
        """What the step is fed, as `Drafter.guess` writes it."""
        return self.rows, self.tokens, self.positions, self.context_lens, self.slots

    def first(self, size: int, num_drafts: int) -> DraftState:
        counts = [size] * 5 + [size * (1 + num_drafts)] * 8
        return DraftState(*(getattr(self, field.name)[:count] for field, count in zip(fields(self), counts)))


@dataclass(frozen=True)
class _Parts:
    """A step cut in three. Behind the first the host sees the guesses; before the last it uploads which tokens a
    grammar allows after each of them."""

    guess: Callable[[], None]
    feed: Callable[[], None]
    verify: Callable[[], None]
    newest: list[StepOutput]  # of one element, once `verify` was called


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
        self._forward, self._batch, self._tables, self._drafter = forward, batch, tables, drafter
        self.transfers, self.sampler = transfers, sampler
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

        self._parts: dict[tuple[int, int], _Parts] = {}
        self._capture: Capture | None = None

    def capture(self, capture: Capture) -> None:
        self._capture = capture
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

    def launch(self, plan: StepPlan, graph: tuple[int, int], count: Callable[..., None]) -> Callable[[], StepResult]:
        """Returns a function that waits for the result. `count`: ModelRunner.count."""
        self._drafter.catch_up(plan.entries)
        visit = _DraftVisit(self, plan, graph, count)
        if self.sampler.needs_tokens(plan.entries):
            visit.replay_in_parts(self._parts.get(graph) or self._parts.setdefault(graph, self._make_parts(*graph)))
        else:
            visit.replay()
        return visit.result

    def replay(self, graph: tuple[int, int]) -> StepOutput:
        """One step. What it returns is overwritten by the next."""
        self._replays[graph]()
        return self._newest[graph]

    def keep(self, entry: PlanEntry, tokens: list[int]) -> None:
        """The host has them now."""
        self._batch.extend(entry.seq_id, tokens)
        self._num_known[self._batch.row(entry.seq_id)] += len(tokens)
        self._drafter.reached(entry.seq_id)

    def begin(self, plan: StepPlan, graph: tuple[int, int]) -> DraftState:
        """Point a graph at the sequences of a plan. What the history does not have yet is sent: a prompt, or tokens
        that were drawn by other steps."""
        size, num = graph
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(plan.entries)] = found = self._batch.rows(plan.entries)
        ends = np.zeros(size, dtype=np.int64)
        ends[: len(plan.entries)] = [entry.start for entry in plan.entries]
        places, tokens = self._missing(plan.entries, found)
        changed = self._tables.take_changed(int(np.max(ends)) + plan.num_steps * (1 + num))
        sent = self.transfers.send([rows, ends, places, tokens, *changed])
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

    # ---- one step ----------------------------------------------------------------------------------------------

    def _compute(self, size: int, num: int) -> None:
        self._guess(size, num)
        self._newest[size, num] = self._verify(size, num, self._feed(size, num), self.sampler.draw_uncounted)

    def _make_parts(self, size: int, num: int) -> _Parts:
        hidden: list[torch.Tensor] = []
        newest: list[StepOutput] = []
        draw = partial(self.sampler.draw_uncounted, masks=self._state.first(size, num).masks)

        def feed() -> None:
            hidden[:] = [self._feed(size, num)]

        def verify() -> None:
            newest[:] = [self._verify(size, num, hidden[0], draw)]

        def captured(function: Callable[[], None]) -> Callable[[], None]:
            """Now, when they are first needed: few plans have a grammar."""
            return function if self._capture is None else self._capture(function, trial=False)

        return _Parts(captured(partial(self._guess, size, num)), captured(feed), captured(verify), newest)

    def _guess(self, size: int, num: int) -> None:
        state, recent = self._state.first(size, num), self.sampler.state.recent
        self._drafter.guess(state, self._history, self._tables.tables, recent, num)

    def _feed(self, size: int, num: int) -> torch.Tensor:
        s, count = self._state.first(size, num), size * (1 + num)
        bounds, starts = Bounds(count, self._max_model_len), self._arange[: count + 1]
        step = step_of(s.tokens, s.positions, s.slots, starts, s.context_lens, s.block_tables, None, bounds)
        return self._forward(step, s.rows)

    def _verify(self, size: int, num: int, hidden: torch.Tensor, draw: Draw) -> StepOutput:
        from nanovllm.ops.triton.drafts import accept

        s = self._state.first(size, num)
        out = draw_from(self._forward.model, hidden, s.rows, s.context_lens, draw)
        outputs = (s.samples, s.kept, s.guessed)
        accept((s.lanes, s.ends, s.steps), self._history, s.fed, out.drawn.tokens, outputs, self.sampler.state, num)
        return out


class _DraftVisit:
    """One plan with guesses on its way through the device."""

    def __init__(self, loop: DraftLoop, plan: StepPlan, graph: tuple[int, int], count: Callable[..., None]) -> None:
        self._loop, self._plan, self._graph, self._count = loop, plan, graph, count
        self._state, self._per_entry = loop.begin(plan, graph), 1 + graph[1]
        self._sampler, self._transfers = loop.sampler, loop.transfers
        self._reports = self._sampler.reports([entry for entry in plan.entries for _ in range(self._per_entry)])
        self._arriving: list[list[Arriving]] = []
        self._samples: list[np.ndarray] = []  # [entries * rows of each, steps]
        self._tokens: list[list[int]] = [[] for _ in plan.entries]  # that are kept
        self._places: list[list[tuple[int, int]]] = [[] for _ in plan.entries]  # (row of the entry, step) of each
        self._num_guessed, self._num_drafts = np.zeros((2, len(plan.entries)), np.int64)  # tokens; steps with any

    def replay(self) -> None:
        for _ in range(self._plan.num_steps):
            self._report(self._loop.replay(self._graph))
        self._take(0, self._plan.num_steps)
        self._reports.start()

    def replay_in_parts(self, parts: _Parts) -> None:
        """With a grammar: what it allows after each guess is found while the forward pass runs, and is on the device
        when tokens are drawn. The next step waits for these."""
        entries, state = self._plan.entries, self._state
        num_rows = len(entries) * self._per_entry
        [masks] = self._transfers.send([self._sampler.begin_guesses(entries, self._per_entry)])
        state.masks[:num_rows].copy_(masks)
        for step in range(self._plan.num_steps):
            parts.guess()
            arriving = [self._transfers.start(part[:num_rows]) for part in (state.tokens, state.rows)]
            parts.feed()
            tokens, rows = (part.wait().reshape(len(entries), -1) for part in arriving)
            left = self._sampler.mask_guesses(entries, tokens, rows >= 0)
            [rows_left] = self._transfers.send([np.where(left, rows, -1).reshape(-1).astype(np.int32)])
            state.rows[:num_rows].copy_(rows_left)
            parts.verify()
            self._report(parts.newest[0])
            self._take(step, step + 1)
            self._settle()
        self._reports.start()

    def result(self) -> StepResult:
        self._settle()
        scores = self._reports.read(np.concatenate(self._samples, axis=1))
        logprobs = None
        if scores is not None:
            first = range(0, len(scores), self._per_entry)
            logprobs = [[scores[i + at][step] for at, step in places] for i, places in zip(first, self._places)]
        return StepResult(
            self._tokens, logprobs, num_drafted=self._num_guessed.tolist(), num_drafts=self._num_drafts.tolist()
        )

    def _report(self, out: StepOutput) -> None:
        rows = self._state.rows
        self._count(out, len(rows), lambda: rows >= 0)
        if self._reports.after_step is not None:
            self._reports.after_step(out)

    def _take(self, first: int, last: int) -> None:
        """What these steps have left: on its way to the host."""
        s, count = self._state, len(self._plan.entries)
        lengths = ((s.samples, count * self._per_entry), (s.kept, count), (s.guessed, count))
        self._arriving.append(
            [self._transfers.start(part[:length, first:last].contiguous()) for part, length in lengths]
        )

    def _settle(self) -> None:
        """Wait for what is on its way."""
        for arriving in self._arriving:
            samples, kept, guessed = (part.wait() for part in arriving)
            first = sum(part.shape[1] for part in self._samples)
            by_entry = samples.reshape(len(kept), self._per_entry, -1)
            by_entry[np.arange(self._per_entry)[None, :, None] >= kept[:, None, :]] = 0  # dropped, or never drawn
            self._samples.append(samples)
            self._num_guessed += guessed.sum(1)
            self._num_drafts += (guessed > 0).sum(1)
            for i, entry in enumerate(self._plan.entries):
                places = [(at, step) for step in range(kept.shape[1]) for at in range(kept[i, step])]
                tokens = [int(by_entry[i, at, step]) for at, step in places]
                self._tokens[i] += tokens
                self._places[i] += [(at, first + step) for at, step in places]
                self._loop.keep(entry, tokens)
        self._arriving = []

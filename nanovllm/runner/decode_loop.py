"""DecodeLoop: a decode step whose results are the inputs of the next, captured once per batch size, replayed k times.

Launching a decode step's 300 kernels from Python takes longer than running them, so the launches are recorded once and
replayed by the driver. What a graph reads must stay at fixed addresses: the `Lanes` below, which `begin` fills on
every visit of the host, and which the graph itself advances from token to token. Buckets are fine (1, 2, 4, then every
8), because as sequences end, padding would otherwise dominate; all graphs share one memory pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.hardware.staging import Transfers
from nanovllm.layers.attention import Step
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.relay import Relay, relays
from nanovllm.runner.row_tables import RowTables
from nanovllm.runner.samplers import DeviceSampler
from nanovllm.runner.step import Bounds, Forward, StepOutput, draw_from, step_of
from nanovllm.scheduling.drafts import MAX_STEPS
from nanovllm.scheduling.plan import PlanEntry

AfterStep = Callable[[StepOutput], None]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8; the last covers max_num_seqs whatever it is."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    sizes += list(range(8, max_num_seqs, 8))
    return [*sizes, max_num_seqs]


@dataclass(frozen=True)
class Lanes:
    rows: torch.Tensor  # int32 [lanes]: the sequence's row, -1 = padding
    tokens: torch.Tensor  # int64 [lanes]
    positions: torch.Tensor  # int64
    context_lens: torch.Tensor  # int32, 0 = padding
    slots: torch.Tensor  # int64, -1 = padding
    block_tables: torch.Tensor  # int32 [lanes, most blocks]
    out: torch.Tensor  # int64 [lanes, MAX_STEPS]: what each replay sampled
    step: torch.Tensor  # int32 [1]: replays since the visit began

    @classmethod
    def allocate(cls, num_lanes: int, num_blocks: int, device: torch.device) -> Lanes:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(num_lanes, dtype=torch.int32) - 1,
            zeros(num_lanes),
            zeros(num_lanes),
            zeros(num_lanes, dtype=torch.int32),
            zeros(num_lanes) - 1,
            zeros(num_lanes, num_blocks, dtype=torch.int32),
            zeros(num_lanes, MAX_STEPS),
            zeros(1, dtype=torch.int32),
        )

    def first(self, count: int) -> Lanes:
        parts = {field.name: getattr(self, field.name)[:count] for field in fields(self)}
        return Lanes(**{**parts, "step": self.step})


@dataclass(frozen=True)
class Halves:
    """A step cut in two: between them the host uploads which tokens a grammar allows."""

    forward: Callable[[], None]
    sample: Callable[[], None]
    newest: dict[int, StepOutput]


class DecodeLoop:
    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        tables: RowTables,
        row_tokens: torch.Tensor,
        max_model_len: int,
        transfers: Transfers,
        sampler: DeviceSampler,
    ) -> None:
        """`row_tokens`: the newest token of every row, and one of padding."""
        self._forward, self._model = forward, forward.model
        self._draw, self._ints = sampler.draw, sampler.state.ints
        self._batch = batch
        self._transfers = transfers
        self._max_model_len = max_model_len
        max_num_seqs, num_blocks = tables.tables.shape
        device = transfers.device
        self._row_tokens, self._tables = row_tokens, tables
        self.sizes = bucket_sizes(max_num_seqs)
        self._lanes = Lanes.allocate(max_num_seqs, num_blocks, device)
        self._arange = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._newest: dict[int, StepOutput] = {}  # what the newest replay of a size left
        self._replays: dict[int, Callable[[], None]] = {size: partial(self._compute, size) for size in self.sizes}
        self._halves: dict[int, Halves] = {}
        self._capture: Capture | None = None

    def capture(self, capture: Capture) -> None:
        """Largest first: its memory then serves all others. A size that cannot be captured is launched from Python."""
        self._capture = capture if self._model.graph_safe else None
        model = self._model, self._forward.caches
        for size in reversed(self.sizes):
            if self._model.graph_safe:
                self._replays[size] = capture(partial(self._compute, size))
            elif relays(self._model, size):
                sample = partial(self._sample_as, self._newest, size)
                self._replays[size] = Relay(*model, self._step(size), sample, capture, pin=True).run

    def compute_each(self) -> None:
        for size in self.sizes:
            self._compute(size)

    @contextlib.contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Launches kernel by kernel, as before the capture: a profiler sees the parts of a step."""
        captured, self._replays = self._replays, {size: partial(self._compute, size) for size in self.sizes}
        newest = dict(self._newest)  # where the captured ones leave their results
        try:
            yield
        finally:
            self._replays = captured
            self._newest.update(newest)

    def begin(self, entries: Sequence[PlanEntry], num_steps: int, in_halves: bool = False) -> Lanes:
        """Point the lanes of a graph at the sequences of a plan; one upload."""
        from nanovllm.ops.triton.lanes import begin

        count = len(entries)
        # Halves are captured when they are first needed, which takes a moment: fewer sizes.
        sizes = [size for size in self.sizes if size & (size - 1) == 0 or size == self.sizes[-1]]
        size = next(size for size in (sizes if in_halves else self.sizes) if size >= count)
        rows = np.full(size, -1, dtype=np.int32)
        rows[:count] = self._batch.rows(entries)
        positions = np.zeros(size, dtype=np.int32)
        positions[:count] = [entry.start for entry in entries]
        tokens = np.full(size, -1, dtype=np.int32)
        tokens[:count] = self._batch.known_tokens(rows[:count], positions[:count])
        changed = self._tables.take_changed(int(np.max(positions)) + num_steps)
        d_rows, d_tokens, d_positions, *d_changed = self._transfers.send([rows, tokens, positions, *changed])
        lanes = self._lanes.first(size)
        lanes.rows.copy_(d_rows)
        lanes.step.zero_()
        num_blocks = self._tables.store(*d_changed)
        begin(
            lanes.rows,
            d_tokens,
            d_positions,
            (self._row_tokens, self._tables.tables, self._ints),
            (lanes.tokens, lanes.positions, lanes.context_lens, lanes.slots, lanes.block_tables),
            self._batch.block_size,
            num_blocks,
        )
        return lanes

    def run(self, lanes: Lanes, num_steps: int, after_step: AfterStep) -> None:
        size = len(lanes.rows)
        for _ in range(num_steps):
            self._replays[size]()
            after_step(self._newest[size])

    def run_in_halves(self, lanes: Lanes, between: Callable[[], None], after_step: AfterStep) -> None:
        """One step. `between` is called while the forward pass runs, and what it uploads is there when tokens are
        drawn."""
        size = len(lanes.rows)
        halves = self._halves.get(size) or self._halves.setdefault(size, self._make_halves(size))
        halves.forward()
        between()
        halves.sample()
        after_step(halves.newest[size])

    def _make_halves(self, size: int) -> Halves:
        newest: dict[int, StepOutput] = {}
        hidden: dict[int, torch.Tensor] = {}

        def forward() -> None:
            hidden[size] = self._forward(self._step(size), self._lanes.rows[:size])

        def sample() -> None:
            self._sample_as(newest, size, hidden[size])

        if self._capture is None:
            if isinstance(getattr(self._replays[size], "__self__", None), Relay):  # its last segment draws
                return Halves(lambda: None, self._replays[size], self._newest)
            return Halves(forward, sample, newest)
        return Halves(self._capture(forward, trial=False), self._capture(sample, trial=False), newest)

    def end(self, lanes: Lanes) -> None:
        """Keep the newest tokens by row: the next visit may begin before they are on the host."""
        from nanovllm.ops.triton.lanes import keep_tokens

        keep_tokens(lanes.rows, lanes.tokens, self._row_tokens)

    def _compute(self, size: int) -> None:
        hidden = self._forward(self._step(size), self._lanes.rows[:size])
        self._sample_as(self._newest, size, hidden)

    def _step(self, size: int) -> Step:
        lanes = self._lanes.first(size)
        return step_of(
            lanes.tokens,
            lanes.positions,
            lanes.slots,
            self._arange[: size + 1],
            lanes.context_lens,
            lanes.block_tables,
            None,
            Bounds(size, self._max_model_len),
        )

    def _sample_as(self, newest: dict[int, StepOutput], size: int, hidden: torch.Tensor) -> None:
        """What was drawn is found in `newest`; a captured one stays at that address."""
        from nanovllm.ops.triton.decode_state import advance

        lanes = self._lanes.first(size)
        # The token being drawn stands one position after the one just fed.
        out = newest[size] = draw_from(self._model, hidden, lanes.rows, lanes.context_lens, self._draw)
        advance(
            out.drawn.tokens,
            lanes.tokens,
            lanes.positions,
            lanes.context_lens,
            lanes.slots,
            lanes.block_tables,
            lanes.out,
            lanes.step,
            lanes.rows,
            self._ints,
            self._batch.block_size,
        )

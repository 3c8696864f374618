"""InputBatch: what the runner remembers of the running sequences, and the arrays of a step made from it.

One row per running sequence holds its tokens and its block table, so a plan need only say what is new. numpy, not
torch: a handful of small integers per sequence, and numpy's calls cost a tenth of torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanovllm.sampling.rows import SamplingRow
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan


@dataclass(frozen=True)
class StepArrays:
    """The inputs of one forward pass; entries stand one after another."""

    token_ids: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    slots: np.ndarray  # int64 [tokens]
    query_starts: np.ndarray  # int32 [entries + 1]
    context_lens: np.ndarray  # int32 [entries]
    block_tables: np.ndarray  # int32 [entries, most blocks of any]; beyond an entry's own: leftovers


class InputBatch:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._lens = [0] * max_num_seqs  # known tokens per row
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, whatever an interrupted `apply` has left behind."""
        self._arrivals: list[Arrival | None] = [None] * len(self._tokens)
        self._rows: dict[int, int] = {}  # seq_id -> row
        self._free_rows = list(range(len(self._tokens)))[::-1]

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed. Departures first: their rows are needed by the arrivals."""
        for seq_id in plan.departures:
            if (row := self._rows.pop(seq_id, None)) is not None:
                self._arrivals[row] = None
                self._free_rows.append(row)
        for arrival in plan.arrivals:
            row = self._rows[arrival.seq_id] = self._free_rows.pop()
            self._arrivals[row] = arrival
            self._lens[row] = len(arrival.token_ids)
            self._tokens[row, : len(arrival.token_ids)] = arrival.token_ids
        for entry in plan.entries:
            if entry.block_ids:
                row, first = self._rows[entry.seq_id], entry.first_block
                self._block_tables[row, first : first + len(entry.block_ids)] = entry.block_ids

    def arrays(self, entries: tuple[PlanEntry, ...], offset: int = 0) -> StepArrays:
        """offset: how many tokens each entry has advanced since the plan was made (decode steps after the first)."""
        size = self.block_size
        rows = np.array([self._rows[entry.seq_id] for entry in entries])
        starts = np.array([entry.start + offset for entry in entries])
        counts = np.array([entry.num_new for entry in entries])
        query_starts = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.repeat(starts - query_starts[:-1], counts) + np.arange(query_starts[-1])
        context_lens = (starts + counts).astype(np.int32)
        slots = self._block_tables[token_rows, positions // size].astype(np.int64) * size + positions % size
        return StepArrays(
            token_ids=self._tokens[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._block_tables[rows, : -(-int(context_lens.max()) // size)],
        )

    def arrival(self, seq_id: int) -> Arrival:
        arrival = self._arrivals[self._rows[seq_id]]
        assert arrival is not None
        return arrival

    def tokens(self, seq_id: int) -> np.ndarray:
        row = self._rows[seq_id]
        return self._tokens[row, : self._lens[row]]

    def sampling_row(self, seq_id: int) -> SamplingRow:
        arrival = self.arrival(seq_id)
        return SamplingRow(
            arrival.params, arrival.seed, self.tokens(seq_id), arrival.num_prompt, arrival.stop_ids,
            arrival.bad_words_ids,
        )  # fmt: skip

    def row(self, seq_id: int) -> int:
        return self._rows[seq_id]

    def known_tokens(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: tokens at these places, -1 where a step in flight has yet to sample it."""
        lens = np.array([self._lens[row] for row in rows])
        return np.where(positions < lens, self._tokens[rows, np.minimum(positions, self._tokens.shape[1] - 1)], -1)

    def block_table_rows(self, rows: list[int], num_blocks: int) -> np.ndarray:
        return self._block_tables[rows, :num_blocks]

    def append(self, seq_id: int, token_id: int) -> None:
        if (row := self._rows.get(seq_id, -1)) < 0:
            return  # it left while the step that sampled this token was in flight
        if self._lens[row] < self._tokens.shape[1]:  # the very last token of max_model_len is never fed back
            self._tokens[row, self._lens[row]] = token_id
        self._lens[row] += 1

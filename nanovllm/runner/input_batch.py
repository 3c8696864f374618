"""InputBatch: the runner's copy of the running sequences, and the integers of a step made from it.

The truth about a request is its Sequence (scheduling/sequence.py). One row here per running sequence holds a copy of
its tokens and its block table, so a plan need only hold what is new. numpy, not torch: a few small integers per
sequence, and numpy's calls cost a tenth of torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nanovllm.runner.step import StepInputs
from nanovllm.sampling.rows import SamplingRow
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan


class InputBatch:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # One row and one column more, for tokens that nobody will read (see `append`).
        self._tokens = np.zeros((max_num_seqs + 1, max_model_len + 1), dtype=np.int32)
        self._lens = np.zeros(max_num_seqs + 1, dtype=np.int64)  # known tokens per row
        self._num_drafted = np.zeros(
            max_num_seqs + 1, dtype=np.int64
        )  # guesses behind them, while a step verifies them
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, whatever an interrupted `apply` has left behind."""
        num_rows = len(self._block_tables)
        self._arrivals: list[Arrival | None] = [None] * num_rows
        self._rows: dict[int, int] = {}  # seq_id -> row
        self._free_rows = list(range(num_rows))[::-1]
        self._num_drafted[:] = 0

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed. Departures first: their rows are needed by the arrivals."""
        for seq_id in plan.departures:
            if (row := self._rows.pop(seq_id, None)) is not None:
                self._arrivals[row] = None
                self._free_rows.append(row)
        for arrival in plan.arrivals:
            row = self._rows[arrival.seq_id] = self._free_rows.pop()
            self._arrivals[row] = arrival
            self._lens[row], self._num_drafted[row] = len(arrival.token_ids), 0
            self._tokens[row, : len(arrival.token_ids)] = arrival.token_ids
        for entry in plan.entries:
            if entry.block_ids:
                row, first = self._rows[entry.seq_id], entry.first_block
                self._block_tables[row, first : first + len(entry.block_ids)] = entry.block_ids

    def inputs(self, entries: Sequence[PlanEntry], offset: int = 0, scored: Iterable[range] = ()) -> StepInputs:
        """`offset`: how many tokens each entry has advanced since the plan was made (decode steps after the first).
        `scored`: rows of the step that are followed by a prompt token whose logprob is wanted."""
        size = self.block_size
        rows = self.rows(entries)
        starts = np.array([entry.start + offset for entry in entries])
        counts = np.array([entry.num_new for entry in entries])
        query_starts = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        token_rows, positions = rows, starts
        if query_starts[-1] > len(entries):  # not only decodes
            token_rows = np.repeat(rows, counts)
            positions = np.repeat(starts - query_starts[:-1], counts) + np.arange(query_starts[-1])
        context_lens = (starts + counts).astype(np.int32)
        samples = np.array([entry.samples for entry in entries])
        last = query_starts[1:][samples].astype(np.int64) - 1
        return StepInputs(
            tokens=self.known_tokens(token_rows, positions).astype(np.int64),
            token_rows=token_rows,
            positions=positions,
            slots=self._block_tables[token_rows, positions // size].astype(np.int64) * size + positions % size,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._block_tables[rows, : -(-int(context_lens.max()) // size)],
            logit_rows=np.concatenate([last, *(np.array(found, dtype=np.int64) for found in scored)]),
            rows=rows[samples].astype(np.int32),
        )

    def scored_rows(self, entries: Sequence[PlanEntry]) -> dict[int, range]:
        """seq_id -> rows of the step that are followed by another prompt token, where prompt logprobs are wanted."""
        found, first = {}, 0
        for entry in entries:
            arrival = self.arrival(entry.seq_id)
            count = min(entry.num_new, arrival.num_prompt - 1 - entry.start)
            if arrival.params.prompt_logprobs is not None and count > 0:
                found[entry.seq_id] = range(first, first + count)
            first += entry.num_new
        return found

    def arrival(self, seq_id: int) -> Arrival:
        return self._of_row(self._rows[seq_id])

    def _of_row(self, row: int) -> Arrival:
        arrival = self._arrivals[row]
        assert arrival is not None
        return arrival

    def tokens(self, seq_id: int) -> np.ndarray:
        return self._known(self._rows[seq_id])

    def _known(self, row: int) -> np.ndarray:
        return self._tokens[row, : self._lens[row]]

    def sampling_row(self, row: int, length: int | None = None) -> SamplingRow:
        """`length`: of the tokens before the one to be drawn, where some of them are guesses; None: all are known."""
        arrival, known = self._of_row(row), self._known(row)
        return SamplingRow(
            arrival.params,
            arrival.seed,
            known if length is None else self._tokens[row, :length],
            arrival.num_prompt,
            arrival.stop_ids,
            arrival.bad_words_ids,
            0 if length is None else length - len(known),
            arrival.max_len,
        )

    def row(self, seq_id: int) -> int:
        return self._rows[seq_id]

    def rows(self, entries: Sequence[PlanEntry]) -> np.ndarray:
        return np.array([self._rows[entry.seq_id] for entry in entries], dtype=np.int64)

    def known_tokens(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: tokens at these places, -1 where a step in flight has yet to sample it."""
        places = np.minimum(positions, self._tokens.shape[1] - 1)
        return np.where(positions < self._lens[rows] + self._num_drafted[rows], self._tokens[rows, places], -1)

    def block_table_rows(self, rows: list[int], num_blocks: int) -> np.ndarray:
        return self._block_tables[rows, :num_blocks]

    def add_draft(self, seq_id: int, draft: np.ndarray) -> list[PlanEntry]:
        """Guesses after the newest token, until `keep`. Returns what to feed: that token and each guess."""
        row = self._rows[seq_id]
        first, self._num_drafted[row] = int(self._lens[row]), len(draft)
        self._tokens[row, first : first + len(draft)] = draft
        return [PlanEntry(seq_id, first - 1 + i, 1, 0, (), True) for i in range(1 + len(draft))]

    def keep(self, seq_id: int, draft: np.ndarray, drawn: list[int]) -> int:
        """Of the tokens that were drawn, the first and those after right guesses become known. Returns how many."""
        count = 1
        while count < len(drawn) and draft[count - 1] == drawn[count - 1]:
            count += 1
        self._num_drafted[self._rows[seq_id]] = 0
        self.extend(seq_id, drawn[:count])
        return count

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        row = self._rows[seq_id]
        first = int(self._lens[row])
        self._tokens[row, first : first + len(tokens)] = tokens
        self._lens[row] += len(tokens)

    def append(self, seq_ids: Sequence[int], tokens: np.ndarray) -> None:
        """tokens [sequences, steps]. Those of a sequence that left while they were sampled go to the spare row, and the
        very last of max_model_len to the spare column: it is counted but never fed."""
        rows = np.array([self._rows.get(seq_id, -1) for seq_id in seq_ids], dtype=np.int64)
        places = self._lens[rows][:, None] + np.arange(tokens.shape[1])
        self._tokens[rows[:, None], np.minimum(places, self._tokens.shape[1] - 1)] = tokens
        self._lens[rows] += tokens.shape[1]

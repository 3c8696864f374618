"""What the runner remembers between plans: rows, tokens, block tables; and the sizes that graphs are captured for."""

from __future__ import annotations

import numpy as np
import pytest

from nanovllm.runner.captured_steps import MAX_ENTRIES
from nanovllm.runner.decode_loop import bucket_sizes
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.step import StepInputs
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan


def arrival(seq_id: int, *tokens: int) -> Arrival:
    return Arrival(seq_id, tokens, len(tokens), SamplingParams(), seed=seq_id, stop_ids=())


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100, 255, 256, 257])
def test_every_batch_size_has_a_graph(max_num_seqs: int) -> None:
    """Also a max_num_seqs that is no multiple of 16, and fewer than 8 sequences."""
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    for n in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= n)
        assert size - n < 8, "padding stays below one step of buckets"


def test_arrays_of_a_mixed_step() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=32, block_size=4)
    entries = (
        PlanEntry(7, 0, 5, 0, (3, 1), True),  # a prompt of 5 in blocks 3 and 1
        PlanEntry(9, 0, 2, 0, (2,), False),  # the first two tokens of a prompt of 6
    )
    batch.apply(StepPlan(1, entries, (arrival(7, *range(10, 15)), arrival(9, *range(20, 26)))))
    arrays = batch.inputs(entries)
    assert arrays.tokens.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert arrays.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert arrays.slots.tolist() == [12, 13, 14, 15, 4, 8, 9]
    assert arrays.query_starts.tolist() == [0, 5, 7]
    assert arrays.context_lens.tolist() == [5, 2]
    assert arrays.block_tables[0, :2].tolist() == [3, 1]
    batch.append([7], np.array([[99]]))
    later = (PlanEntry(7, 5, 1, 2, (), True),)
    batch.apply(StepPlan(2, later))
    assert batch.inputs(later).tokens.tolist() == [99]
    assert batch.inputs(later).slots.tolist() == [5]


def test_tokens_still_in_flight_are_unknown() -> None:
    batch = InputBatch(2, 16, 4)
    batch.apply(StepPlan(1, (PlanEntry(1, 0, 3, 0, (0,), True),), (arrival(1, 5, 6, 7),)))
    rows = np.array([batch.row(1)] * 2)
    assert batch.known_tokens(rows, np.array([2, 3])).tolist() == [7, -1]
    batch.append([1], np.array([[8]]))
    assert batch.known_tokens(rows, np.array([2, 3])).tolist() == [7, 8]


def test_rows_are_reused_and_late_tokens_of_who_left_are_dropped() -> None:
    batch = InputBatch(1, 8, 4)
    batch.apply(StepPlan(1, (PlanEntry(1, 0, 2, 0, (0,), True),), (arrival(1, 5, 6),)))
    batch.apply(StepPlan(2, (PlanEntry(2, 0, 1, 0, (1,), True),), (arrival(2, 9),), departures=(1,)))
    batch.append([1], np.array([[77]]))  # sampled for sequence 1 by a step that was in flight when it left
    assert batch.tokens(2).tolist() == [9]
    batch.apply(StepPlan(3, (), (), departures=(1, 2, 12345)))  # unknown ids are fine: a failed plan repeats them
    batch.apply(StepPlan(4, (PlanEntry(3, 0, 1, 0, (0,), True),), (arrival(3, 4),)))
    assert batch.tokens(3).tolist() == [4]


def test_tokens_beyond_a_full_sequence_overwrite_none() -> None:
    batch = InputBatch(2, 4, 4)
    entries = (PlanEntry(1, 0, 4, 0, (0,), True), PlanEntry(2, 0, 1, 0, (1,), True))
    batch.apply(StepPlan(1, entries, (arrival(1, 1, 2, 3, 4), arrival(2, 7))))
    batch.append([1, 2], np.array([[5, 6], [8, 9]]))
    assert batch.tokens(1).tolist()[:4] == [1, 2, 3, 4]
    assert batch.tokens(2).tolist() == [7, 8, 9]


def test_padding_of_a_mixed_step_touches_nothing() -> None:
    """Padded tokens store nowhere, padded entries own no tokens, padded samples go to the spare row."""
    int64, int32 = np.int64, np.int32
    inputs = StepInputs(
        np.array([4, -1, 6], int64),
        np.array([0, 1, 0], int64),
        np.array([0, 8, 1], int64),
        np.array([3, 9, 4], int64),
        np.array([0, 1, 3], int32),
        np.array([9, 2], int32),
        np.array([[5, 6], [7, 0]], int32),
        np.array([0, 2], int64),
        np.array([1, 0], int32),
    )
    padded = inputs.padded(num_tokens=8, num_entries=MAX_ENTRIES, num_blocks=3, spare_row=4)
    tokens, _, _, slots, starts, lens, tables, logit_rows, rows = padded
    assert tokens.tolist() == [4, -1, 6, 0, 0, 0, 0, 0]
    assert slots.tolist() == [3, 9, 4, -1, -1, -1, -1, -1]
    assert starts.tolist() == [0, 1] + [3] * (MAX_ENTRIES - 1)
    assert lens.tolist() == [9, 2] + [0] * (MAX_ENTRIES - 2)
    assert tables.shape == (MAX_ENTRIES, 3)
    assert tables[:2].tolist() == [[5, 6, 0], [7, 0, 0]]
    assert len(logit_rows) == len(rows) == MAX_ENTRIES
    assert rows.tolist() == [1, 0] + [4] * (MAX_ENTRIES - 2)

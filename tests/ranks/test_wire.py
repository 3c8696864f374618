"""Plans survive the way through bytes; damaged ones are refused."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.errors import EngineDeadError
from nanovllm.ranks.wire import decode_plan, encode_plan, receive, send
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
ids = st.integers(0, 2**40)
few = st.lists(ids, max_size=5).map(tuple)
params = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=0, stop=["a", "\u00e9"], logit_bias={5: -1.5}, seed=2**63),
        SamplingParams(top_p=0.3, n=2, logprobs=3, bad_words=["x"], stop_token_ids=[1, 2]),
    ]
)
fed = st.one_of(st.just((1, True)), st.tuples(st.integers(1, 9000), st.booleans()))  # decodes, and anything
entries = st.builds(
    lambda seq_id, start, fed, first, blocks: PlanEntry(seq_id, start, fed[0], first if blocks else 0, blocks, fed[1]),
    ids,
    ids,
    fed,
    ids,
    few,
)
decodes = st.builds(PlanEntry, ids, ids, st.just(1), st.just(0), st.just(()), st.just(True))
arrivals = st.builds(
    Arrival, ids, few, st.integers(0, 99), params, st.integers(0, 2**64 - 1), few, st.lists(few, max_size=3).map(tuple)
)
plans = st.builds(
    StepPlan,
    ids,
    st.lists(st.one_of(entries, decodes), max_size=6).map(tuple),
    st.lists(arrivals, max_size=3).map(tuple),
    few,
    st.integers(1, 64),
    st.integers(0, 16),
)


@settings(max_examples=300, deadline=None)
@given(plans)
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    found = decode_plan(encode_plan(plan))
    assert found == plan
    for entry, sent in zip(found.entries, plan.entries):
        assert [getattr(entry, name) for name in PlanEntry._fields] == list(sent)
        assert type(entry.samples) is bool, "the runner selects by a list of them: 0 and 1 would be places"


@settings(max_examples=100, deadline=None)
@given(plans)
def test_plans_do_not_depend_on_each_other(plan: StepPlan) -> None:
    """A plan that never arrived, or came twice, changes nothing about the next: there is no state to lose."""
    other = StepPlan(7, (PlanEntry(3, 9, 1, 0, (), True),), departures=(1,))
    first = encode_plan(plan)
    decode_plan(encode_plan(other))
    with contextlib.suppress(Exception):
        decode_plan(first[:-1])
    assert decode_plan(first) == plan == decode_plan(encode_plan(plan))


@pytest.mark.parametrize("num", [1, 2, 255, 256, 257])
def test_a_decode_step_is_small(num: int) -> None:
    """Two numbers an entry; the first_block of an entry without blocks is not sent."""
    plan = StepPlan(5, tuple(PlanEntry(i, 100 + i, 1, 6, (), True) for i in range(num)), num_steps=8)
    data = encode_plan(plan)
    assert len(data) == 72 + 16 * num
    assert decode_plan(data) == StepPlan(5, tuple(e._replace(first_block=0) for e in plan.entries), num_steps=8)


@settings(max_examples=300, deadline=None)
@given(plans, st.data())
def test_a_damaged_plan_is_refused_or_read_but_never_executed(plan: StepPlan, data: st.DataObject) -> None:
    whole = encode_plan(plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((EngineDeadError, ValueError, TypeError)):
        decode_plan(whole[:cut])
    with pytest.raises((EngineDeadError, ValueError, TypeError)):
        decode_plan(whole + b"\0" * 8)
    place = data.draw(st.integers(0, len(whole) - 1))
    bent = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    with contextlib.suppress(EngineDeadError, ValueError, TypeError, MemoryError, OverflowError):
        decode_plan(bent)


def test_messages_of_any_length_and_the_end_of_a_connection() -> None:
    here, there = socket.socketpair()
    with there:
        send(here, b"P", b"x" * 100_000)
        assert receive(there) == (b"P", b"x" * 100_000)
        here.sendall(struct.pack("<Ic", 2**31, b"P"))
        with pytest.raises(EngineDeadError, match="at most"):
            receive(there)
        here.close()
        assert receive(there) is None


def test_the_measured_cost_of_a_message_is_below_100_us() -> None:
    """tests/ranks/measure_message.py wrote it: 256 sequences; write, send, receive and read together."""
    rows = json.loads((RESULTS / "2026-11-15-cpu-plan-message.json").read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if row["num_seqs"] == 256]
    for name in ("quietest_us", "median_us"):
        parts = dict(row[name])
        assert parts.pop("total") == pytest.approx(sum(parts.values()), abs=0.2)
        assert sum(parts.values()) < 100
    plan = StepPlan(5, tuple(PlanEntry(i, i, 1, 0, (i,) if i % 64 == 0 else (), True) for i in range(256)))
    more = 8  # num_drafts, one integer of 537, came after the measurement
    assert len(encode_plan(plan)) == row["num_bytes"] + more, "what was measured is what is sent"

"""Plans survive the way through bytes; damaged ones are refused."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.errors import EngineDeadError
from nanovllm.executor.wire import decode_plan, encode_plan, receive, send
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan

ids = st.integers(0, 2**40)
few = st.lists(ids, max_size=5).map(tuple)
params = st.sampled_from([
    SamplingParams(), SamplingParams(temperature=0, stop=["a", "\u00e9"], logit_bias={5: -1.5}, seed=2**63),
    SamplingParams(top_p=0.3, n=2, logprobs=3, bad_words=["x"], stop_token_ids=[1, 2]),
])  # fmt: skip
entries = st.builds(PlanEntry, ids, ids, st.integers(1, 9000), ids, few, st.booleans())
arrivals = st.builds(
    Arrival, ids, few, st.integers(0, 99), params, st.integers(0, 2**64 - 1), few, st.lists(few, max_size=3).map(tuple)
)
plans = st.builds(
    StepPlan, ids, st.lists(entries, max_size=6).map(tuple), st.lists(arrivals, max_size=3).map(tuple), few,
    st.integers(1, 64),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(plans)
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize("cut", [3, 5, 12, 40])
def test_a_damaged_plan_is_refused(cut: int) -> None:
    plan = StepPlan(1, (PlanEntry(0, 0, 1, 0, (1, 2), True),))
    data = encode_plan(plan)
    with pytest.raises((EngineDeadError, struct.error, ValueError)):
        decode_plan(data[:-cut] if cut > 3 else data[:cut])


def test_messages_and_the_end_of_a_connection() -> None:
    here, there = socket.socketpair()
    send(here, b"P", b"x" * 100_000)
    assert receive(there) == (b"P", b"x" * 100_000)
    here.close()
    assert receive(there) is None
    there.close()


def test_an_absurd_length_is_refused() -> None:
    here, there = socket.socketpair()
    here.sendall(struct.pack("<Ic", 2**31, b"P"))
    with pytest.raises(EngineDeadError, match="at most"):
        receive(there)
    here.close()
    there.close()

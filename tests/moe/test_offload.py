"""Offloaded experts: the bits of resident ones, whatever is where; one download a call; order; errors; numbers."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.hardware.copies import CopyStream
from nanovllm.moe.offload.idle import IdleTime
from nanovllm.moe.offload.offload import Offload, OffloadOptions
from nanovllm.moe.offload.report import GUESS_TOKENS, ExpertCall
from nanovllm.ops.native.build import load_library
from nanovllm.ops.opset import PLAIN
from tests.moe.offload_rig import HIDDEN, SIZE, make_rig, random_call

EXPERT_BYTES = 3 * HIDDEN * SIZE * 4


@st.composite
def cases(draw):
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    top_k = draw(st.integers(1, min(3, num_experts)))
    options = OffloadOptions(
        num_cached=draw(st.integers(0, num_layers * num_experts)),
        num_streaming=draw(st.integers(top_k, 2 * top_k + 2)),
        policy=draw(st.sampled_from(["lfu", "lru", "none"])),
        prefetch=draw(st.booleans()),
        piece_bytes=draw(st.sampled_from([512, 1000, EXPERT_BYTES])),
        host_bytes=draw(st.none() | st.integers(0, num_layers * num_experts).map(EXPERT_BYTES.__mul__)),
    )
    step = st.tuples(st.sampled_from([1, 1, 1, 2, 5, GUESS_TOKENS + 1]), st.integers(1, 8))
    steps = draw(st.lists(step, max_size=12))
    return num_layers, num_experts, top_k, options, steps


def in_two_halves(offload, layer, x, ids, weights):
    pairs = torch.full((*ids.shape, HIDDEN), float("nan"), dtype=x.dtype)
    call = ExpertCall(layer, x, ids, weights, pairs)
    offload.compute_present(call)
    report = offload.stream.download(offload.report.pack(call, x))
    if offload.has_all(call, report):
        offload.note_hits(call, report)
    else:
        offload.compute_missing(call, report)
    return PLAIN.sum_pairs(pairs)


@settings(max_examples=200, deadline=None)
@given(
    cases(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 20),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_output_has_the_bits_of_resident_experts(case, dtype, lazy, num_pieces, seed, halves) -> None:
    """Computed at once, or in the two halves of a captured decode step, or now this way, now that."""
    draw = random.Random(seed)
    num_layers, num_experts, top_k, options, steps = case
    rig = make_rig(num_layers, num_experts, top_k, options, dtype, lazy, num_pieces)
    generator = torch.Generator().manual_seed(seed)
    num_calls = 0
    for num_tokens, spread in [(7, None), *steps]:
        for layer in range(num_layers):
            x, ids, weights = random_call(rig, num_tokens, generator, min(spread or num_experts, num_experts))
            compute = in_two_halves if draw.random() < halves else Offload.compute
            out = compute(rig.offload, layer, x, ids, weights)
            assert torch.equal(out, rig.resident(layer, x, ids, weights))
            num_calls += 1
    assert rig.stream.num_downloads == num_calls
    stats = rig.offload.stats()
    assert stats.bytes_copied + stats.bytes_saved == rig.stream.bytes_copied
    assert stats.bytes_from_disk <= stats.bytes_copied
    assert stats.tokens == 7 + sum(n for n, _ in steps)
    rig.offload.close()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("num_pieces", [0, 1, 5, 12, 24])
def test_a_guess_saves_its_bytes_if_right_and_costs_no_more_if_wrong(right: bool, num_pieces: int) -> None:
    """12 pieces an expert; nothing is cached, so both experts of a call are missing."""
    rig = make_rig(2, 8, 2, OffloadOptions(0, 4, piece_bytes=EXPERT_BYTES // 12), num_pieces=num_pieces)
    x, ids, weights = random_call(rig, 1, torch.Generator().manual_seed(3))
    rig.layer(0)(x, ids, weights)
    guessed = PLAIN.route(x @ rig.gates[1].T, 2, False)[0]
    rest = [expert for expert in range(8) if expert not in guessed[0].tolist()]
    others, fresh = (torch.tensor([rest[i : i + 2]], dtype=torch.int32) for i in (0, 2))
    chosen = guessed if right else others
    before = rig.stream.bytes_copied
    assert before == 2 * EXPERT_BYTES + num_pieces * EXPERT_BYTES // 12
    out = rig.layer(1)(x, chosen, weights)
    assert torch.equal(out, rig.resident(1, x, chosen, weights))
    bytes_guessed = num_pieces * EXPERT_BYTES // 12
    assert rig.stream.bytes_copied - before == 2 * EXPERT_BYTES - (bytes_guessed if right else 0)
    rig.offload.idle.num_pieces = 0
    rig.layer(1)(x, fresh, weights)
    stats = rig.offload.stats()
    assert stats.prefetched_bytes_useful == (bytes_guessed if right else 0)
    assert stats.prefetched_bytes_wasted == (0 if right else bytes_guessed)
    assert stats.prefetch_precision == (float(right) if num_pieces else 0.0)
    assert stats.misses == 6  # a right guess is a miss whose copy came early
    assert stats.hits == 0


def test_idle_time_goes_to_the_next_layer_first_and_then_to_the_one_after() -> None:
    """Two tokens, three layers; whole experts as pieces."""
    for num_pieces in range(6):
        rig = make_rig(3, 8, 1, OffloadOptions(0, 8, piece_bytes=EXPERT_BYTES), num_pieces=num_pieces)
        x, ids, weights = random_call(rig, 2, torch.Generator().manual_seed(7))
        guesses = [
            (layer, int(expert))
            for layer in (1, 2)
            for expert in PLAIN.route(x @ rig.gates[layer].T, 1, False)[0].flatten()
        ]
        assert len(set(guesses)) == 4
        rig.layer(0)(x, ids, weights)
        assert {key for key in rig.offload.cache._buffer_of if key[0] > 0} == set(guesses[:num_pieces])


def test_a_guess_gives_way_to_a_miss() -> None:
    rig = make_rig(2, 8, 2, OffloadOptions(2, 2, piece_bytes=EXPERT_BYTES), num_pieces=2)
    x, _, weights = random_call(rig, 1, torch.Generator().manual_seed(5))
    guessed = PLAIN.route(x @ rig.gates[1].T, 2, False)[0]
    rest = [expert for expert in range(8) if expert not in guessed[0].tolist()]
    pairs = [torch.tensor([rest[i : i + 2]], dtype=torch.int32) for i in (0, 2)]
    # Each layer owns one buffer. Layer 0's first call fills it and one of the ring, which leaves room for one guess.
    rig.layer(0)(x, pairs[0], weights)
    assert rig.stream.num_copies == 3
    rig.layer(0)(x, pairs[0], weights)  # nothing is missing, but one buffer is in use: the guess is there already
    assert rig.stream.num_copies == 3
    assert torch.equal(rig.layer(0)(x, pairs[1], weights), rig.resident(0, x, pairs[1], weights))  # needs two buffers
    assert rig.offload.stats().prefetched_bytes_wasted == EXPERT_BYTES
    assert torch.equal(rig.layer(1)(x, guessed, weights), rig.resident(1, x, guessed, weights))


class RecordOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_call_makes_few_calls_of_torch_and_never_waits_for_the_device(monkeypatch) -> None:
    """Of misses and of hits. What remains is what offload itself calls: operators are replaced or subtracted."""
    rig = make_rig(2, 8, 2, OffloadOptions(8, 4), lazy=False)
    zeros = torch.zeros(1, HIDDEN)
    ops = replace(PLAIN, expert_pairs=lambda *tensors: tensors[-1], sum_pairs=lambda pairs: zeros)
    monkeypatch.setattr(rig.offload, "_ops", ops)
    x, ids, weights = random_call(rig, 1, torch.Generator().manual_seed(0))
    with RecordOps() as guess:
        PLAIN.route(PLAIN.linear(x, rig.gates[1]), 2, False)
    for limit in (30, 12):  # both experts are missing, then both are hits
        with RecordOps() as record:
            rig.layer(0)(x, ids, weights)
        own = Counter(record.names) - Counter(guess.names)
        assert not {"_local_scalar_dense", "item", "_to_copy", "nonzero", "is_nonzero"} & own.keys()
        assert own.total() <= limit
    assert (rig.stream.num_downloads, rig.stream.num_copies) == (2, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_leaves_the_truth_behind(error: type[BaseException]) -> None:
    """Copies that were not queued are not taken for granted by the next step, wherever the step was cut."""
    for cut in range(1, 12):
        rig = make_rig(2, 6, 2, OffloadOptions(4, 3, piece_bytes=EXPERT_BYTES // 3), num_pieces=2)
        generator = torch.Generator().manual_seed(cut)
        count, send = 0, rig.offload.store.send

        def broken(layer, expert, start, stop, memory, cut=cut, send=send):
            nonlocal count
            count += 1
            if count == cut:
                half = (start + stop) // 2
                send(layer, expert, start, half, memory)
                raise error
            send(layer, expert, start, stop, memory)

        rig.offload.store.send = broken
        raised = 0
        for step in range(6):
            for layer in range(2):
                x, ids, weights = random_call(rig, 9 if step == 0 else 1, generator)
                try:
                    out = rig.layer(layer)(x, ids, weights)
                except error:
                    raised += 1
                    break
                assert torch.equal(out, rig.resident(layer, x, ids, weights))
        assert raised == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_an_expert_goes_back_to_the_host(after: bool) -> None:
    """Wherever it comes, the next steps are right, and soon nothing is read from disk again."""
    num_raised = 0
    for cut in range(1, 10):
        rig = make_rig(2, 6, 2, OffloadOptions(8, 3, host_bytes=4 * EXPERT_BYTES, piece_bytes=EXPERT_BYTES))
        generator, store = torch.Generator().manual_seed(cut), rig.offload.store
        count, copy = 0, rig.stream.copy
        blocks = {block.tensor.data_ptr() for held in store.held for block in held.values()}

        def broken(target, source, cut=cut, copy=copy, blocks=blocks):
            nonlocal count
            count += target.data_ptr() in blocks
            if count < cut or target.data_ptr() not in blocks or count > cut:
                return copy(target, source)
            if after:
                copy(target, source)
            raise KeyboardInterrupt

        rig.stream.copy = broken
        for step in range(60):
            if step == 40:  # the prompt of this step reads again what was lost
                rig.stream.copy = copy
            if step == 50:
                num_reads = rig.files.num_reads
            for layer in range(2):
                x, ids, weights = random_call(rig, 9 if step % 10 == 0 else 1, generator)
                try:
                    out = rig.layer(layer)(x, ids, weights)
                except KeyboardInterrupt:
                    num_raised += 1
                    break
                assert torch.equal(out, rig.resident(layer, x, ids, weights))
        assert rig.files.num_reads == num_reads
        assert [len(held) for held in store.held] == [2, 2]
    assert num_raised >= 4


def test_the_cpu_computes_what_has_just_come_back() -> None:
    """With cpu_misses a block is read by the CPU, which must wait for a copy that is still to fill it."""
    rig = make_rig(1, 6, 2, OffloadOptions(3, 2, host_bytes=3 * EXPERT_BYTES, cpu_misses=True))
    generator = torch.Generator().manual_seed(3)
    for step in range(240):
        x, ids, weights = random_call(rig, 1, generator, spread=3)
        ids = (ids + step // 40) % 6  # now these three, now others
        out = rig.layer(0)(x, ids, weights)
        torch.testing.assert_close(out, rig.resident(0, x, ids, weights), rtol=1e-4, atol=1e-4)
    stats = rig.offload.stats()
    assert min(stats.bytes_saved, stats.computed_on_cpu) > 0


def test_an_error_in_a_kernel_still_marks_the_use(monkeypatch) -> None:
    rig = make_rig(1, 4, 1, OffloadOptions(0, 1))
    x, ids, weights = random_call(rig, 1, torch.Generator().manual_seed(0))
    good = rig.offload._ops

    def fail(*tensors):
        good.expert_pairs(*tensors)
        raise RuntimeError("kernel")

    monkeypatch.setattr(rig.offload, "_ops", replace(good, expert_pairs=fail))
    with pytest.raises(RuntimeError, match="kernel"):
        rig.layer(0)(x, ids, weights)
    monkeypatch.setattr(rig.offload, "_ops", good)
    other = (ids + 1) % 4
    assert torch.equal(rig.layer(0)(x, other, weights), rig.resident(0, x, other, weights))


def test_rare_misses_on_the_cpu() -> None:
    """An expert that is not worth a buffer is computed where it lies; one that is, is copied. Close, not bit-equal."""
    rig = make_rig(1, 8, 2, OffloadOptions(2, 2, cpu_misses=True), torch.bfloat16, lazy=False)
    generator = torch.Generator().manual_seed(0)
    x, _, weights = random_call(rig, 1, generator)
    hot, rare = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0, 5]], dtype=torch.int32)
    for _ in range(5):
        rig.layer(0)(x, hot, weights)
    copies = rig.stream.num_copies
    out = rig.layer(0)(x, rare, weights)
    assert rig.stream.num_copies == copies == 2
    assert rig.offload.stats().computed_on_cpu == 1
    assert rig.offload._on_cpu.name == ("torch" if isinstance(load_library(), str) else "native")
    torch.testing.assert_close(out, rig.resident(0, x, rare, weights), rtol=2e-2, atol=2e-2)
    x, ids, weights = random_call(rig, 12, generator)
    many = ids.clone().fill_(5)
    many[:, 1] = 6  # twelve tokens want both: copied
    torch.testing.assert_close(rig.layer(0)(x, many, weights), rig.resident(0, x, many, weights), rtol=2e-2, atol=2e-2)
    assert rig.offload.stats().computed_on_cpu == 1
    assert rig.stream.num_downloads == 7
    rig = make_rig(1, 8, 2, OffloadOptions(0, 2, cpu_misses=True), lazy=False)  # all of a call: no pass at all
    x, ids, weights = random_call(rig, 1, generator)
    torch.testing.assert_close(rig.layer(0)(x, ids, weights), rig.resident(0, x, ids, weights))
    assert rig.stream.num_copies == 0


def test_statistics_are_cumulative_and_subtract() -> None:
    rig = make_rig(2, 4, 2, OffloadOptions(4, 2))
    generator = torch.Generator().manual_seed(0)
    call = random_call(rig, 1, generator)
    for layer in (0, 1):
        rig.layer(layer)(*call)
    first = rig.offload.stats()
    assert (first.hits, first.misses, first.tokens) == (0, 4, 1)
    assert first.bytes_per_token == 4 * EXPERT_BYTES
    rig.layer(0)(*call)
    later = rig.offload.stats() - first
    assert (later.hits, later.misses, later.bytes_copied, later.tokens) == (2, 0, 0, 1)
    assert later.layer_hits == (2, 0)
    assert later.hit_rate == 1.0
    rig.offload.forget()
    assert rig.offload.stats().tokens == rig.offload.stats().hits == 0
    rig.layer(0)(*call)
    assert rig.offload.stats().hits == 2  # what the buffers hold stays


def test_close_waits_for_copies_and_frees_once() -> None:
    rig = make_rig(2, 4, 2, OffloadOptions(2, 4), num_pieces=1)
    call = random_call(rig, 1, torch.Generator().manual_seed(0))
    rig.layer(0)(*call)
    assert rig.stream._queue  # a guess that no kernel waits for
    rig.offload.close()
    assert not rig.stream._queue
    rig.offload.close()
    with pytest.raises(AssertionError):
        rig.layer(0)(*call)
    gc.collect()


class ClockedStream(CopyStream):
    """Marks are numbers that the test sets."""

    now = 0.0

    def _record_copies(self, timed: bool) -> float:
        return self.now

    _record_compute = _record_copies


def test_idle_time_is_what_is_measured_between_copies_and_the_next_question() -> None:
    stream = ClockedStream()
    idle = IdleTime(stream, bandwidth=100.0, piece_bytes=10)

    def layer(number: int, has_misses: bool, gap: float) -> int:
        stream.now += gap
        idle.after_download(idle.before_download(number))
        return idle.pieces(number, has_misses, 1)

    assert layer(0, True, 9.0) == 0  # nothing measured yet
    assert layer(1, True, 0.55) == 5  # 0.55 s at 100 bytes/s are 5 pieces of 10
    assert layer(2, False, 0.55) == 0  # without misses: another kind, not measured yet
    assert layer(3, False, 2.05) == 20
    assert layer(0, True, 50.0) == 5  # the time between two steps is not a layer's
    assert IdleTime(stream, None, 10).pieces(0, True, 1) == 0


def test_the_second_half_does_nothing_when_all_chosen_experts_are_on_the_device() -> None:
    """Once announced, an expert is computed by the first half alone: no copy, no pass, no table changes."""
    rig = make_rig(1, 8, 2, OffloadOptions(num_cached=4, num_streaming=2))
    x, ids, weights = random_call(rig, 1, torch.Generator().manual_seed(5))
    first = in_two_halves(rig.offload, 0, x, ids, weights)
    copies = rig.stream.num_copies
    call = ExpertCall(0, x, ids, weights, torch.full((1, 2, HIDDEN), float("nan")))
    rig.offload.compute_present(call)
    assert torch.equal(PLAIN.sum_pairs(call.pairs), first)
    report = rig.stream.download(rig.offload.report.pack(call, x))
    call.pairs.fill_(7.0)
    rig.offload.compute_missing(call, report)
    assert (call.pairs == 7.0).all()
    assert rig.offload.has_all(call, report)
    rig.offload.note_hits(call, report)
    assert rig.stream.num_copies == copies
    assert (rig.offload.stats().hits, rig.offload.stats().misses) == (4, 2)


def test_an_evicted_expert_is_not_looked_for_in_its_old_buffer() -> None:
    """Three experts take turns in two buffers: each time the first half must see who is really there."""
    rig = make_rig(1, 3, 1, OffloadOptions(num_cached=1, num_streaming=1, policy="lru"))
    x, _, weights = random_call(rig, 1, torch.Generator().manual_seed(5))
    for expert in (0, 1, 2, 0, 1, 1, 2, 0, 0, 2):
        ids = torch.tensor([[expert]], dtype=torch.int32)
        assert torch.equal(in_two_halves(rig.offload, 0, x, ids, weights), rig.resident(0, x, ids, weights))

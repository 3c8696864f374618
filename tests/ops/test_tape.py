"""Recorded C calls give the bits of the calls themselves, with other numbers at the same addresses; what cannot be
recorded is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nanovllm.ops.native import build
from nanovllm.ops.native.ops import SIGNATURES, NativeOps
from nanovllm.ops.native.tape import FUNCTIONS, NUM_ARGUMENTS, Pool, Tape
from nanovllm.ops.quant import quantise_matrix, stack

LIBRARY = build.load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"no native kernels: {LIBRARY}")


class Packed:
    def __init__(self, *formats: str, size: int = 64) -> None:
        parts = (quantise_matrix(name, torch.randn(size // len(formats), size)) for name in formats)
        self.matrices, self.shape = stack(parts), (size, size)


def all_functions(ops: NativeOps, rows: int) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """(what changes between two runs, a function that calls each of FUNCTIONS)."""
    ids, positions, lens = torch.randint(0, 64, (rows,)), torch.randint(0, 30, (rows,)), torch.randint(1, 40, (rows,))
    lens, tables, slots = lens.int(), torch.randint(0, 6, (rows, 6)).int(), torch.randperm(48)[:rows]
    square, narrow, weight = torch.randn(64, 64), torch.randn(64, 32), torch.randn(64)
    table, packed = Packed("Q8_0"), Packed("Q8_0", "Q4_1")
    norm, angles, caches = torch.randn(16), torch.randn(30, 16), (torch.randn(6, 8, 1, 16), torch.randn(6, 8, 1, 16))

    def run() -> torch.Tensor:
        x, residual = ops.add_rms_norm(ops.embed(ids, square), ops.embed(ids, table), weight, 1e-5)
        qkv = ops.linear(x, square, weight)
        q = ops.qk_norm_rope(qkv, (norm, norm), 1e-6, angles, positions, *caches, slots, 2)
        mixed = ops.decode_attention(q, *caches, lens, tables, 0.25, 9).flatten(1)
        x, _ = ops.add_rms_norm(ops.linear(mixed, narrow), residual, weight, 1e-5)
        return ops.linear(ops.silu_mul(ops.linear(x, packed, weight)), narrow)

    return [ids, positions, lens, *caches], run


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_replays_are_the_calls(rows: int) -> None:
    torch.manual_seed(rows)
    ops = NativeOps()
    inputs, run = all_functions(ops, rows)
    replay, first = Tape(ops).record(run)
    assert replay is not run
    for _ in range(3):
        others = [torch.randint(1, 30, t.shape) if t.dtype != torch.float32 else torch.randn_like(t) for t in inputs]
        results = []
        for function in (run, replay):
            for tensor, other in zip(inputs, others):
                tensor.copy_(other)
            results.append((function().clone(), *(tensor.clone() for tensor in inputs)))
        for expected, got in zip(*results):  # keys and values are stored too
            assert torch.equal(got, expected)
        assert replay().data_ptr() == first.data_ptr()


def test_threads_share_the_work_of_a_replay() -> None:
    ops, x, packed, weight = NativeOps(), torch.randn(8, 512), Packed("Q4_1", size=512), torch.randn(128, 512)
    ids, lens = torch.arange(8), torch.full((8,), 90).int()
    caches, tables = (torch.randn(6, 16, 4, 16), torch.randn(6, 16, 4, 16)), torch.randint(0, 6, (8, 6)).int()

    def run() -> torch.Tensor:
        q = ops.linear(ops.linear(ops.embed(ids, x), packed), weight).view(8, 8, 16)
        return ops.decode_attention(q, *caches, lens, tables, 0.25, 0)

    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        replay, first = Tape(ops).record(run)
        assert replay is not run
        found += [first.clone(), *(replay().clone() for _ in range(20))]
    torch.set_num_threads(before)
    assert all(torch.equal(result, found[0]) for result in found)


def test_recordings_use_the_same_memory() -> None:
    ops = NativeOps()
    tape, weight = Tape(ops), torch.randn(512, 512)
    replays = []
    for rows in (8, 8, 7, 5):  # one class of sizes
        x = torch.randn(rows, 512)
        replays.append((x, tape.record(lambda x=x: ops.linear(ops.linear(ops.linear(x, weight), weight), weight))[0]))
    assert len(tape.pool.pieces) == 2
    for x, replay in replays:
        expected = ops.linear(ops.linear(ops.linear(x, weight), weight), weight)
        assert torch.equal(replay(), expected)


def test_memory_stays_as_long_as_a_view_of_it() -> None:
    pool = Pool()
    first = pool.empty(4, 300)
    view = first.flatten()[100:]
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    second = pool.empty(4, 300)
    assert second.data_ptr() != address
    del view
    assert pool.empty(1100).data_ptr() == address


@pytest.mark.parametrize("name", ["add", "copy", "empty", "item"])
def test_a_function_that_does_more_is_called(name: str) -> None:
    ops, x, weight = NativeOps(), torch.randn(2, 64), torch.randn(64)
    more: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "add": lambda y: y + 1,
        "copy": lambda y: y[:, :32].contiguous(),
        "empty": lambda y: torch.empty(2, 64).copy_(y),
        "item": lambda y: y if float(y[0, 0]) > -1e9 else -y,
    }

    def run() -> torch.Tensor:
        return ops.rms_norm(more[name](ops.rms_norm(x, weight, 1e-5)), weight[:32] if name == "copy" else weight, 1e-5)

    replay, _ = Tape(ops).record(run)
    assert replay is run


def test_a_call_that_fails_raises_its_own_error() -> None:
    ops, ids = NativeOps(), torch.tensor([3])
    table = torch.randn(8, 64)
    replay, _ = Tape(ops).record(lambda: ops.rms_norm(ops.embed(ids, table), torch.ones(64), 1e-5))
    ids[0] = 8
    with pytest.raises(IndexError, match="8 rows"):
        replay()
    ids[0] = 7
    assert torch.equal(replay(), ops.rms_norm(table[7:], torch.ones(64), 1e-5))


def test_the_library_is_itself_again_after_an_error() -> None:
    ops = NativeOps()

    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Tape(ops).record(fail)
    assert ops.silu_mul(torch.ones(1, 2)).untyped_storage().nbytes() == 4  # not a piece of the pool


def test_calls_fit_the_table() -> None:
    assert max(len(SIGNATURES[name][1]) for name in FUNCTIONS) <= NUM_ARGUMENTS

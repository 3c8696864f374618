"""Loops that several threads share out: every part once, one loop after another, and a thread that is away holds up
nothing but the part that it has begun."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from nanovllm.ops.native import build

LIBRARY = build.load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"no native kernels: {LIBRARY}")
PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
SHARE = ctypes.CFUNCTYPE(None, ctypes.c_int64, PART, ctypes.c_void_p)
WITH_TEAM = SHARE  # the same arguments


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def share(parts: int, run: Callable[[int], None]) -> None:
    SHARE(("share", LIBRARY))(parts, PART(lambda _, part: run(part)), None)


def with_team(most_shares: int, walk: Callable[[], None]) -> None:
    WITH_TEAM(("with_team", LIBRARY))(most_shares, PART(lambda *_: walk()), None)


@pytest.mark.parametrize("most", [0, 3, 1000])
def test_every_part_runs_once(threads: int, most: int) -> None:
    """Whether there are records for all loops or not."""
    sizes = [0, 1, 2, 7, 40, 3] * 20
    seen: list[tuple[int, int]] = []

    def walk() -> None:
        for loop, parts in enumerate(sizes):
            share(parts, lambda part, loop=loop: seen.append((loop, part)))

    for team in (lambda: with_team(most, walk), walk):
        seen.clear()
        team()
        assert [loop for loop, _ in seen] == sorted(loop for loop, _ in seen)  # none begins before the last has ended
        assert sorted(seen) == [(loop, part) for loop, parts in enumerate(sizes) for part in range(parts)]


def test_a_thread_that_is_away_gets_no_parts() -> None:
    """Whoever takes the first part ends it after all the others."""
    before, others, waited = torch.get_num_threads(), threading.Semaphore(0), []

    def run(part: int) -> None:
        if part:
            others.release()
        else:
            waited.append(all(others.acquire(timeout=30) for _ in range(7)))

    torch.set_num_threads(2)
    with_team(9, lambda: [share(8, run) for _ in range(5)] and None)
    torch.set_num_threads(before)
    assert waited == [True] * 5


def test_it_works_beside_other_teams(threads: int) -> None:
    """Two engines in two threads of one process."""
    counts = [0, 0]

    def work(which: int) -> None:
        def walk() -> None:
            for _ in range(50):
                mine: list[int] = []
                share(6, mine.append)
                counts[which] += sorted(mine) == list(range(6))

        with_team(60, walk)

    workers = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert counts == [50, 50]

"""The soak and the figures, for some seconds on a tiny model: that they run, and that they would notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server import figures, soak
from tests.server.rig import Running, running, until


@pytest.fixture(scope="module")
def server(talker: Callable[[bool], Path]) -> Iterator[Running]:
    with running(talker(False), {"num_kvcache_blocks": 600, "max_num_seqs": 16}) as made:
        yield made


def test_every_action_finds_nothing_wrong(server: Running) -> None:
    work = soak.Soak(server.url, 0)

    async def each() -> None:
        async with httpx.AsyncClient(timeout=30, verify=False) as client:
            for _, action in work.actions.values():
                for _ in range(3):
                    await action(client)

    asyncio.run(each())
    for _ in range(40):  # as often as a busy machine needs
        asyncio.run(work.run(1.5, 6, lambda: None))
        if work.errors or (sum(work.done.values()) > 10 and len(work.health) >= 2):
            break
    assert not work.errors
    assert sum(work.done.values()) > 10
    assert len(work.health) >= 2
    until(server.is_empty)
    assert not any(soak.still_held(server.url).values())


def test_what_is_wrong_is_counted(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    work = soak.Soak(server.url, 0)
    monkeypatch.setattr(server.engine, "grammars", None)
    asyncio.run(work.run(1, 2, lambda: None))
    assert any("answered 500" in error for error in work.errors)
    with pytest.raises(soak.Wrong):
        soak.check_trip('{"town": "Oslo", "days": 4}')
    gone = soak.Soak("http://127.0.0.1:9", 0)
    asyncio.run(gone.run(0.5, 2, lambda: None))
    assert gone.errors
    assert not gone.done


def test_the_commands(
    server: Running, talker: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soak with a server process of its own, the figures with the server of this process."""
    model, out = str(talker(False)), tmp_path / "found.json"
    monkeypatch.setattr(figures, "command", lambda *_: contextlib.nullcontext((None, server.url)))
    assert soak.main(["--model", model, "--minutes", "0.05", "--clients", "4", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert (found["num_errors"], found["leaked"], found["exit_code"]) == (0, False, 0)
    assert found["num_requests"] > 0
    few = ["--rounds", "2", "--clients", "4", "--input-len", "8", "--output-len", "20"]
    assert figures.main(["--model", model, *few, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert len(found["rounds"]) == 2
    assert 0 < found["share"] < 10
    assert 0 < found["health_first_byte_seconds"]["p50"] <= found["health_first_byte_seconds"]["p99"]

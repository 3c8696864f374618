from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm.engine.llm_engine import LLMEngine


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """press(k): Ctrl-C arrives in the middle of the k-th step from now on."""
    # A shell that starts something in the background has it ignore SIGINT; so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def at(count: int) -> None:
        step, left = LLMEngine.step, [count]

        def interrupted(engine: LLMEngine) -> Any:
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return step(engine)

        monkeypatch.setattr(LLMEngine, "step", interrupted)

    yield at
    signal.signal(signal.SIGINT, before)

"""How many tokens are guessed follows from measured times. Tests say it instead."""

from __future__ import annotations

from typing import Any


def always(llm: Any, *lengths: int) -> None:
    """Plans of an LLM (or a server) guess as many tokens as these say, over and over, if there is room for them."""
    turn, drafts = 0, llm.engine.scheduler.drafts

    def advance(_: int, most: int, *__: Any) -> int:
        nonlocal turn
        turn += 1
        return min(lengths[(turn - 1) % len(lengths)], most)

    for length in (drafts.length, drafts.length_with_grammar):
        length.choose = length.skip = advance
        length.next = lambda _, most, *__: (min(lengths[turn % len(lengths)], most), False)
        length.record = lambda *_: None

"""Drafters: guesses at the tokens that come next, which a step then verifies (verify.py).

A drafter may guess anything: what is accepted is decided by the tokens that the model draws, so a bad guess costs time
and changes nothing else. All ranks of an engine must guess alike, so a guess may depend on the tokens only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nanovllm.config import EngineConfig
from nanovllm.ops.ngram import find
from nanovllm.scheduling.drafts import draft_lengths


class Drafter(Protocol):
    lengths: tuple[int, ...]  # numbers of guesses that plans will have: those for which graphs are captured

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Tokens that may follow prompt and output so far: `most` or fewer, also none."""
        ...


class NgramDrafter:
    """What followed the last time that the text ended as it does now. Good where an answer repeats its prompt or
    itself: edits of a given text, code, lists; elsewhere it finds little, and proposes nothing."""

    def __init__(self, lookup: tuple[int, int], most: int) -> None:
        """`lookup`: (fewest, most) tokens that are compared."""
        self.lookup, self.lengths = lookup, draft_lengths(most)

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        first = find(token_ids, *self.lookup, most)
        return token_ids[first : first + most]


def make_drafter(config: EngineConfig) -> Drafter | None:
    if config.speculative_method is None:
        return None
    return NgramDrafter(config.prompt_lookup, config.num_speculative_tokens)

"""Drafters: guesses at the tokens that come next, which a step then verifies (verify.py).

A drafter may guess anything: what is accepted is decided by the tokens that the model draws, so a bad guess costs time
and changes nothing else. All ranks of an engine must guess alike: by the tokens, or by sums that all ranks have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nanovllm.ops.ngram import find
from nanovllm.runner.input_batch import InputBatch
from nanovllm.scheduling.drafts import draft_lengths
from nanovllm.scheduling.plan import PlanEntry, StepPlan


class Drafter(Protocol):
    lengths: tuple[int, ...]  # numbers of guesses that plans will have: those for which graphs are captured

    def apply(self, plan: StepPlan) -> None:
        """Before every plan, also those without guesses, after the batch has taken it in."""
        ...

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        """Of each sequence tokens that may follow prompt and output so far: `most` or fewer, also none."""
        ...


class TokenDrafter:
    """Guesses of a sequence by its tokens alone."""

    lengths: tuple[int, ...]

    def apply(self, plan: StepPlan) -> None: ...

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        return [self.propose(batch.tokens(entry.seq_id), most) for entry in entries]

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        raise NotImplementedError


class NgramDrafter(TokenDrafter):
    """What followed the last time that the text ended as it does now. Good where an answer repeats its prompt or
    itself: edits of a given text, code, lists; elsewhere it finds little, and proposes nothing."""

    def __init__(self, lookup: tuple[int, int], most: int) -> None:
        """`lookup`: (fewest, most) tokens that are compared."""
        self.lookup, self.lengths = lookup, draft_lengths(most)

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        first = find(token_ids, *self.lookup, most)
        return token_ids[first : first + most]

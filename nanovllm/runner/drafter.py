"""Drafters: guesses at the tokens that come next, which a step then verifies (verify.py).

A drafter may guess anything: what is accepted is decided by the tokens that the model draws, so a bad guess costs time
and changes nothing else. All ranks of an engine must guess alike: by the tokens, or by sums that all ranks have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanovllm.hardware.staging import Transfers
from nanovllm.layers.attention import Step
from nanovllm.ops.ngram import find
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.step import Draw
from nanovllm.scheduling.drafts import draft_lengths
from nanovllm.scheduling.plan import PlanEntry, StepPlan


class Drafter:
    lengths: tuple[int, ...]  # numbers of guesses that plans will have: those for which graphs are captured
    can_be_captured = False  # it has `guess`
    reads_steps = False  # it has `read`

    def join(self, batch: InputBatch, transfers: Transfers, draw: Draw) -> None:
        """Of the runner: its batch, its way to the device, and how its sampler draws a token that may be dropped."""
        self._batch, self._transfers, self._draw = batch, transfers, draw

    def apply(self, plan: StepPlan) -> None:
        """Before every plan, also those without guesses, after the batch has taken it in."""

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        """Of each sequence tokens that may follow prompt and output so far: `most` or fewer, also none."""
        raise NotImplementedError

    def read(self, step: Step, token_rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """Every step of the large model, behind its forward pass, also in captured ones (step.py:Forward)."""
        raise NotImplementedError

    # ---- in a captured step (draft_loop.py)

    def catch_up(self, entries: Sequence[PlanEntry]) -> None:
        """Before the captured steps of a plan."""

    def guess(self, state: Any, history: torch.Tensor, tables: torch.Tensor, recent: torch.Tensor, num: int) -> None:
        """Writes the rows that verify `num` guesses of each sequence (`state`: a DraftState), and the guesses into the
        `recent` of the sampler's state."""
        raise NotImplementedError

    def reached(self, seq_id: int) -> None:
        """The captured steps of a plan have ended, and the batch has the tokens of this sequence."""


class TokenDrafter(Drafter):
    """Guesses of a sequence by its tokens alone."""

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        return [self.propose(batch.tokens(entry.seq_id), most) for entry in entries]

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        raise NotImplementedError


class NgramDrafter(TokenDrafter):
    """What followed the last time that the text ended as it does now. Good where an answer repeats its prompt or
    itself: edits of a given text, code, lists; elsewhere it finds little, and proposes nothing."""

    can_be_captured = True

    def __init__(self, lookup: tuple[int, int], most: int) -> None:
        """`lookup`: (fewest, most) tokens that are compared."""
        self.lookup, self.lengths = lookup, draft_lengths(most)

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        first = find(token_ids, *self.lookup, most)
        return token_ids[first : first + most]

    def guess(self, state: Any, history: torch.Tensor, tables: torch.Tensor, recent: torch.Tensor, num: int) -> None:
        from nanovllm.ops.triton.drafts import propose

        lanes, text = (state.lanes, state.ends), (history, tables, recent)
        propose(lanes, *text, state.fed, self.lookup, num, self._batch.block_size)

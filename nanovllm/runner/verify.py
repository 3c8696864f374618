"""Decodes with drafted tokens, on a host that has every token.

A step feeds the newest token of a sequence and, after it, the tokens that a drafter guesses (drafter.py). Each is a row
of the batch like the decode of one more sequence: every layer writes the K and V of all rows before it attends, so a
row sees the rows before it, by its position. Of each row a token is drawn, with the noise of its position. The first
is right in any case. It is also what follows in truth, so if it equals the first guess, the second row was fed the
right token, and what was drawn there is right too, and so on:

    newest   guesses             drawn               kept
    the      cat  sat  on        cat  lay  on  a     cat lay        "sat" was wrong, so what follows it is dropped

So the output is that without drafts, whatever was guessed: greedy or with a seed, with penalties and grammars (a row's
parameters see the guesses before it as output). K and V of dropped rows stay in the cache behind the sequence's end,
where the next step writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanovllm.runner.drafter import Drafter
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.step import StepOutput
from nanovllm.sampling.structured import Grammar
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

Call = Callable[[Sequence[PlanEntry]], StepOutput]


def verify(plan: StepPlan, batch: InputBatch, drafter: Drafter, call: Call) -> StepResult:
    """`call` computes one token of each entry, and draws the token after it."""
    tokens: list[list[int]] = [[] for _ in plan.entries]
    logprobs: list[list[Any]] = [[] for _ in plan.entries]
    num_drafted, num_drafts = [0] * len(plan.entries), [0] * len(plan.entries)
    for _ in range(plan.num_steps):
        guesses = drafter.propose_all(batch, plan.entries, plan.num_drafts)
        drafts = [_allowed(entry, batch, draft) for entry, draft in zip(plan.entries, guesses)]
        rows = [row for entry, draft in zip(plan.entries, drafts) for row in batch.add_draft(entry.seq_id, draft)]
        drawn, first = call(rows).drawn, 0
        found = drawn.tokens.tolist()
        for i, (entry, draft) in enumerate(zip(plan.entries, drafts)):
            own = found[first : first + 1 + len(draft)]
            count = batch.keep(entry.seq_id, draft, own)
            tokens[i] += own[:count]
            logprobs[i] += drawn.logprobs[first : first + count]
            num_drafted[i] += len(draft)
            num_drafts[i] += len(draft) > 0
            first += len(own)
    return StepResult(tokens, logprobs, num_drafted=num_drafted, num_drafts=num_drafts)


def _allowed(entry: PlanEntry, batch: InputBatch, draft: np.ndarray) -> np.ndarray:
    """Without what a grammar forbids, and what follows it: it would be dropped."""
    grammar, row = batch.arrival(entry.seq_id).params.structured_outputs, batch.row(entry.seq_id)
    if isinstance(grammar, Grammar) and len(draft):
        draft = draft[: grammar.num_allowed(batch.sampling_row(row).output_ids, draft)]
    return draft.copy()  # it may be a view of the tokens that are about to change

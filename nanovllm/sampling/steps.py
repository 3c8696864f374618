"""Edits of logits: small functions `logits, rows -> logits`, each run only when some row of the batch uses its field.

They come before temperature and filters (`ops/sampling.py`) and apply to greedy rows too. The order is vLLM's.
Logits are contiguous fp32 [rows, vocab], edited in place; a banned token has -inf. Token ids outside the vocabulary are
dropped here: indexing with them would abort the whole device, not one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling.structured import structured_tokens

NEG_INF = float("-inf")


def _cells(logits: torch.Tensor, ids_of_rows: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> torch.Tensor:
    """Positions in logits.view(-1) of (row, token ids) pairs."""
    vocab = logits.shape[-1]
    parts = [np.zeros(0, np.int64)]
    for row, ids in ids_of_rows:
        ids = np.asarray(ids, np.int64)
        parts.append(row * vocab + ids[ids < vocab])
    return torch.from_numpy(np.concatenate(parts)).to(logits.device)


def allowed_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    limited = [(i, list(ids)) for i, row in enumerate(rows) if (ids := row.params.allowed_token_ids)]
    cells = _cells(logits, limited)
    kept = logits.view(-1)[cells]
    logits[[i for i, _ in limited]] = NEG_INF
    logits.view(-1)[cells] = kept
    return logits


def bad_words(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Ban the last token of a bad word when the output (not the prompt, as in vLLM) ends with its other tokens."""
    banned = []
    for i, row in enumerate(rows):
        longest = max(map(len, row.bad_words_ids), default=0)
        tail = tuple(row.output_ids[-longest:].tolist()) if longest else ()
        for word in row.bad_words_ids:
            start = len(tail) - (len(word) - 1)
            if word and start >= 0 and tail[start:] == word[:-1]:
                banned.append((i, word[-1:]))
    logits.view(-1)[_cells(logits, banned)] = NEG_INF
    return logits


def min_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    early = ((i, row.stop_ids) for i, row in enumerate(rows) if row.num_output < row.params.min_tokens)
    logits.view(-1)[_cells(logits, early)] = NEG_INF
    return logits


def logit_bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    vocab = logits.shape[-1]
    pairs = [(i, t, b) for i, row in enumerate(rows) for t, b in (row.params.logit_bias or {}).items() if t < vocab]
    cells = _cells(logits, ((i, [token]) for i, token, _ in pairs))
    logits.view(-1)[cells] += torch.tensor([bias for _, _, bias in pairs], device=logits.device)
    return logits


def penalties(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Repetition over prompt and output: towards less likely by a factor; frequency and presence over output only.

    Sparse: only the tokens a row has seen are gathered, changed and put back.
    """
    seen, factors, losses = [], [], []
    for i, row in enumerate(rows):
        params = row.params
        if not row.has_penalty:
            continue
        ids = np.unique(row.token_ids if params.repetition_penalty != 1.0 else row.output_ids)
        ids = ids[ids < logits.shape[-1]]
        counts = np.zeros(len(ids) + 1, np.float32)  # one more for output ids outside the vocabulary
        output_ids, output_counts = np.unique(row.output_ids, return_counts=True)
        counts[np.searchsorted(ids, output_ids)] = output_counts
        counts = counts[:-1]
        seen.append((i, ids))
        factors.append(np.full(len(ids), params.repetition_penalty, np.float32))
        losses.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    cells = _cells(logits, seen)
    factor = torch.from_numpy(np.concatenate(factors)).to(logits.device)
    loss = torch.from_numpy(np.concatenate(losses).astype(np.float32)).to(logits.device)
    old = logits.view(-1)[cells]
    logits.view(-1)[cells] = torch.where(old > 0, old / factor, old * factor) - loss
    return logits


class LogitsEdit(NamedTuple):
    used_by: Callable[[SamplingRow], bool]
    apply: Callable[[torch.Tensor, Sequence[SamplingRow]], torch.Tensor]


EDITS = (
    LogitsEdit(lambda row: row.params.allowed_token_ids is not None, allowed_tokens),
    LogitsEdit(lambda row: bool(row.bad_words_ids), bad_words),
    LogitsEdit(lambda row: row.num_output < row.params.min_tokens, min_tokens),
    LogitsEdit(lambda row: bool(row.params.logit_bias), logit_bias),
    LogitsEdit(lambda row: row.has_penalty, penalties),
    LogitsEdit(lambda row: row.params.structured_outputs is not None, structured_tokens),
)


def in_use(steps: Sequence[LogitsEdit], rows: Sequence[SamplingRow]) -> list[LogitsEdit]:
    return [step for step in steps if any(map(step.used_by, rows))]

"""Logits steps: small functions `logits, rows -> logits`, each run only when some row of the batch uses its field.

EDITS come first and change what a greedy row sees. FILTERS then get only the rows that are really drawn, each shifted
so that its most likely token has logit 0; no filter removes that token. The order is vLLM's. Logits are contiguous fp32
[rows, vocab], edited in place; a banned token has -inf. Token ids outside the vocabulary are dropped here: indexing
with them would abort the whole device, not one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling.structured import structured_tokens

NEG_INF = float("-inf")
# Weights below are integers held in floats: 2**35 for the most likely token, so that even 2**18 equal tokens sum to
# 2**53, the last integer up to which float64 is exact.
PEAK_WEIGHT = 2.0**35
# top_p looks at this many candidates first, then at 8 times as many. topk of 512, 4096 and all of 49152 tokens takes 4,
# 10 and 60 ms for 16 rows on one core, and the first nearly always suffices.
FIRST_WIDTH = 512


def integer_weights(logits: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities as whole numbers: floor(2**35 * exp(logit)), fp32; the peak of the logits is 0.

    Sums of such numbers in float64 have no rounding, so a cumulative sum is the same however a device splits the scan,
    and a row's token cannot depend on how many rows it was scanned with. Tokens under 2**-35 of the peak get 0, so
    -30 is as good as -inf here; the CPU's exp is 15 times slower where its result is 0 or denormal.
    """
    return logits.clamp(min=-30.0).exp_().mul_(PEAK_WEIGHT).floor_()


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, that sort like the fp32 values with ties broken by the lower token id.

    torch.topk and sort leave the order of equal values open, and bf16 logits are full of them. The bits of a float
    sort like an integer once those of negative numbers are flipped; the low half of the key holds the id, reversed.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0, equal to 0.0 but with other bits, into 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return bits.long().mul_(2**32).add_(reversed_ids)


def ids_of_keys(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    return vocab - 1 - (keys & 0xFFFFFFFF)


def _column(logits: torch.Tensor, values: Iterable[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=logits.device).unsqueeze(1)  # [rows, 1]


def _cells(logits: torch.Tensor, ids_of_rows: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> torch.Tensor:
    """Positions in logits.view(-1) of (row, token ids) pairs."""
    vocab = logits.shape[-1]
    parts = [np.zeros(0, np.int64)]
    for row, ids in ids_of_rows:
        ids = np.asarray(ids, np.int64)
        parts.append(row * vocab + ids[ids < vocab])
    return torch.from_numpy(np.concatenate(parts)).to(logits.device)


def allowed_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    limited = [(i, row.params.allowed_token_ids) for i, row in enumerate(rows) if row.params.allowed_token_ids]
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
    pairs = [(i, t, b) for i, row in enumerate(rows) for t, b in row.params.logit_bias.items() if t < vocab]
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
        if not _has_penalty(row):
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


def temperature(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """No logit is above 0, so no temperature, however small, can overflow."""
    return logits.div_(_column(logits, (row.params.temperature for row in rows)))


def min_p(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Drop tokens less likely than min_p times the most likely one, whose logit is 0."""
    lowest = _column(logits, (row.params.min_p for row in rows)).log()
    return torch.where(logits < lowest, NEG_INF, logits)


def top_k_top_p(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Keep the top_k most likely tokens, then of those the fewest whose share reaches top_p, at least one.

    Both come down to a number of tokens to keep per row, hence to one smallest key to keep.
    """
    users = [i for i, row in enumerate(rows) if _has_top(row)]
    if len(users) < len(rows):
        logits[users] = top_k_top_p(logits[users], [rows[i] for i in users])
        return logits
    vocab = logits.shape[-1]
    limits = [min(row.params.top_k or vocab, vocab) for row in rows]
    width = min(vocab, max(FIRST_WIDTH if limit == vocab else limit for limit in limits))
    limit = _column(logits, limits, torch.int64)
    share = _column(logits, (row.params.top_p for row in rows), torch.float64)
    keys = order_keys(logits)
    whole = integer_weights(logits).sum(-1, dtype=torch.float64, keepdim=True) if max(limits) > width else None
    while True:
        top = keys.topk(width).values  # [rows, width], most likely first
        weights = integer_weights(logits.gather(1, ids_of_keys(top, vocab))).double()
        mass = weights.cumsum(-1)
        total = mass.gather(1, limit.clamp(max=width) - 1)
        total = total if whole is None else torch.where(limit > width, whole, total)
        # A token stays while the tokens before it have not reached the share yet; before the first there is 0.
        count = (mass - weights < share * total).sum(-1, keepdim=True).minimum(limit)
        if width == vocab or bool(((count < width) | (limit <= width)).all()):
            return torch.where(keys < top.gather(1, count - 1), NEG_INF, logits)
        width = min(width * 8, vocab)  # a flat distribution


def _has_penalty(row: SamplingRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _has_top(row: SamplingRow) -> bool:
    return row.params.top_k > 0 or row.params.top_p < 1.0


class Step(NamedTuple):
    used_by: Callable[[SamplingRow], bool]
    apply: Callable[[torch.Tensor, Sequence[SamplingRow]], torch.Tensor]


EDITS = (
    Step(lambda row: row.params.allowed_token_ids is not None, allowed_tokens),
    Step(lambda row: bool(row.bad_words_ids), bad_words),
    Step(lambda row: row.num_output < row.params.min_tokens, min_tokens),
    Step(lambda row: bool(row.params.logit_bias), logit_bias),
    Step(_has_penalty, penalties),
    Step(lambda row: row.params.structured_outputs is not None, structured_tokens),  # last: it has the last word
)
FILTERS = (
    Step(lambda row: row.params.temperature != 1.0, temperature),
    Step(lambda row: row.params.min_p > 0.0, min_p),
    Step(_has_top, top_k_top_p),
)


def in_use(steps: Sequence[Step], rows: Sequence[SamplingRow]) -> list[Step]:
    return [step for step in steps if any(map(step.used_by, rows))]

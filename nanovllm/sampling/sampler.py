"""Logits to tokens: `sample` for the rows that end a step, `prompt_logprobs` for prompt positions.

How a row is drawn is defined in ops/sampling.py: Gumbel noise that depends on its seed, position and token ids alone,
the same on every device. Invalid logits are replaced, because an exception would end the other rows of the batch too:
NaN counts as -inf, what is above 1e30 (+inf too) as 1e30, and a row with nothing left above -1e30 (allowed_token_ids
all banned, or all NaN) takes its lowest allowed id, or token 0 when it has no list. On a CPU one call of C draws all
rows (ops/native/sampling.c). CPU time of a busy core for 16 rows of SmolLM2's 49,152 logits, in C and in PyTorch:
greedy 0.9 and 1.8 ms, temperature 1.4 and 8, top_k=20 top_p=0.95 1.0 and 4.6, top_p=0.9 2.9 and 42, min_p 0.9 and 7.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from nanovllm.ops.native.ops import NativeOps
from nanovllm.ops.sampling import filtered_reference, gumbel_argmax_reference, top_ids
from nanovllm.sampling.rows import SampledTokens, SamplingRow, TokenLogprobs
from nanovllm.sampling.steps import EDITS, NEG_INF, in_use

HUGE_LOGIT = 1e30  # divided by the smallest temperature, 1e-5, and with any bias it is still finite
PROMPT_CHUNK = 64  # prompt positions handled at once: their fp32 and int64 copies are six times a bf16 row


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
    """One token per row of logits [rows, vocab], which may be overwritten."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return SampledTokens([], [])
    with_logprobs = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    edits = in_use(EDITS, rows)
    if with_logprobs or edits:
        logits = mended(logits.float().contiguous(), rows)
    raw_logprobs = logits[with_logprobs].log_softmax(-1) if with_logprobs else None  # of the model, before any edit
    for step in edits:
        logits = step.apply(logits, rows)
    token_ids = _pick(logits, rows)
    reports: list[TokenLogprobs | None] = [None] * len(rows)
    if raw_logprobs is not None:
        num_tops = [rows[i].params.logprobs or 0 for i in with_logprobs]
        chosen = torch.tensor([token_ids[i] for i in with_logprobs], device=logits.device)
        for i, report in zip(with_logprobs, _describe(raw_logprobs, chosen, num_tops)):
            reports[i] = report
    return SampledTokens(token_ids, reports)


def prompt_logprobs(logits: torch.Tensor, next_token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """For each position of logits [positions, vocab]: the next token of the prompt and the num_top best."""
    reports: list[TokenLogprobs] = []
    for part, token_ids in zip(logits.split(PROMPT_CHUNK), next_token_ids.to(logits.device).split(PROMPT_CHUNK)):
        logprobs = mended(part.float(), None).log_softmax(-1)
        reports += _describe(logprobs, token_ids.long(), [num_top] * len(part))
    return reports


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of one row of logits, and the token that was sampled from it."""
    return prompt_logprobs(logits.unsqueeze(0), torch.tensor([token_id]), num_top)[0]


def mended(logits: torch.Tensor, rows: Sequence[SamplingRow] | None) -> torch.Tensor:
    """Every row has a maximum within 1e30 afterwards (see the top of the file); valid rows do not change."""
    sound = logits.amax(-1).abs() <= HUGE_LOGIT
    if bool(sound.all()):
        return logits
    logits = logits.clone()  # the caller of prompt_logprobs keeps its tensor
    for i in (~sound).nonzero().flatten().tolist():
        logits[i] = logits[i].nan_to_num(nan=NEG_INF, posinf=HUGE_LOGIT, neginf=NEG_INF).clamp_(max=HUGE_LOGIT)
        if bool(logits[i].amax() < -HUGE_LOGIT):
            allowed = (rows[i].params.allowed_token_ids if rows is not None else None) or ()
            logits[i, min((t for t in allowed if t < logits.shape[-1]), default=0)] = 0.0
    return logits


@functools.cache
def _kernels() -> NativeOps | None:
    try:
        return NativeOps()
    except ImportError:
        return None


def _pick(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """In C on a CPU that has a compiler, else with PyTorch; both give the same tokens."""
    if logits.device.type == "cpu" and (kernels := _kernels()) is not None:
        return _pick_native(kernels, logits.float().contiguous(), rows)
    if all(row.params.is_greedy for row in rows):
        peak, token_ids = logits.max(-1)  # the first of equal maxima; NaN is the maximum of its row
        picked, sound = torch.stack((token_ids, (peak.abs() <= HUGE_LOGIT).long())).tolist()  # one wait for the device
        if all(sound):
            return picked
    logits = mended(logits.float().contiguous(), rows)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    kinds = [(row.params.is_greedy, _has_filter(row)) for row in rows]
    for kind in set(kinds):
        group = [i for i in range(len(rows)) if kinds[i] == kind]
        token_ids[group] = _draw(logits if len(group) == len(rows) else logits[group], [rows[i] for i in group])
    return token_ids.tolist()


def _pick_native(kernels: NativeOps, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    wanted = [
        (0.0 if p.is_greedy else p.temperature, p.top_p, p.min_p, p.top_k, _signed(seed), len(token_ids))
        for p, seed, token_ids, *_ in rows
    ]
    drawn = kernels.draw(logits, wanted)
    return drawn if min(drawn) >= 0 else kernels.draw(mended(logits, rows), wanted)


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _has_filter(row: SamplingRow) -> bool:
    return row.params.top_k > 0 or row.params.top_p < 1.0 or row.params.min_p > 0.0


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """All of the rows are greedy, or have filters, or neither."""

    def column(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)

    if rows[0].params.is_greedy:
        return logits.max(-1).indices
    temperatures = column((row.params.temperature for row in rows), torch.float32)
    seeds = column((_signed(row.seed) for row in rows), torch.int64)
    positions = column((len(row.token_ids) for row in rows), torch.int64)
    if not _has_filter(rows[0]):
        return gumbel_argmax_reference(logits, temperatures, seeds, positions)
    top_ks = column((row.params.top_k for row in rows), torch.int64)
    top_ps = column((row.params.top_p for row in rows), torch.float64)
    min_ps = column((row.params.min_p for row in rows), torch.float32)
    return filtered_reference(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions)


def _describe(logprobs: torch.Tensor, token_ids: torch.Tensor, num_tops: list[int]) -> list[TokenLogprobs]:
    vocab = logprobs.shape[-1]
    num_tops = [vocab if num_top == -1 else num_top for num_top in num_tops]
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    places = (logprobs > chosen).sum(-1) + 1
    width = min(max(num_tops), vocab)
    best = top_ids(logprobs, width)
    columns = (token_ids, chosen.squeeze(1), places, best, logprobs.gather(1, best))
    reports = []
    for num_top, token, logprob, own, ids, values in zip(num_tops, *(column.tolist() for column in columns)):
        report = TokenLogprobs([token], [logprob], [own])
        for place, (other, value) in enumerate(zip(ids[:num_top], values[:num_top]), start=1):
            if other != token:
                report.token_ids.append(other)
                report.logprobs.append(value)
                report.positions.append(place)
        reports.append(report)
    return reports

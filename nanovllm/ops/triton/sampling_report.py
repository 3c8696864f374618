"""Logprobs of drawn tokens: the token's own, its position among all, and the most likely tokens, without a sort."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.ops.sampler_state import SamplerState
from nanovllm.ops.triton.common import LOWEST
from nanovllm.ops.triton.sampler_common import (
    _CAP,
    _INTS,
    _LEAST,
    _LN2,
    _LOG2E,
    _NUM_LOGPROBS,
    MAX_LOGPROBS,
    UNALIGNED,
    all_tiles,
    kth_largest,
    list_above,
    order,
    raw_logits,
    scratch,
    sorted_list,
    unorder,
)
from nanovllm.ops.triton.sampling import Drawn


@triton.jit(do_not_specialize=["out_stride", "step"], do_not_specialize_on_alignment=UNALIGNED)
def report_kernel(
    logits_ptr, rows_ptr, tokens_ptr, raw_peaks_ptr, raw_sums_ptr, near_ptr, values_ptr, ids_ptr, step,
    out_logprobs_ptr, out_ids_ptr, out_stride, stride, vocab, num_tiles, ints_ptr,
    ALL_TILES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Column 0 of the output: the token's logprob, and its position instead of an id; then the most likely tokens."""
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + lane)
    num_top = tl.load(ints_ptr + row * _INTS + _NUM_LOGPROBS, mask=row >= 0, other=-1)
    if num_top < 0:
        return
    num_top = tl.minimum(num_top, WIDTH - 1)
    logits_ptr += lane * stride
    i = tl.arange(0, ALL_TILES)
    peaks = tl.load(raw_peaks_ptr + lane * num_tiles + i, mask=i < num_tiles, other=float("-inf"))
    sums = tl.load(raw_sums_ptr + lane * num_tiles + i, mask=i < num_tiles, other=0.0)
    peak = tl.maximum(tl.max(peaks, axis=0), LOWEST)
    whole = tl.sum(tl.where(peaks > LOWEST, sums * tl.exp2((peaks - peak) * _LOG2E), 0.0), axis=0)
    log_total = peak + tl.log2(whole) * _LN2
    token = tl.load(tokens_ptr + lane)
    own = raw_logits(logits_ptr, token, token < vocab)
    larger = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        larger += (raw_logits(logits_ptr, column, column < vocab) > own).to(tl.int32)
    values_ptr += lane * _CAP
    ids_ptr += lane * _CAP
    found = tl.full([], _CAP + 1, dtype=tl.int32)
    bound = tl.maximum(kth_largest(order(peaks), num_top), _LEAST)
    if (num_top > 0) & ((bound > _LEAST) | (vocab <= _CAP)):
        state = (0, 0, 0, 0, 0, 0, 0, 0, None, lane)
        found = list_above(
            logits_ptr, row, row, vocab, peaks, bound, near_ptr + lane * num_tiles, values_ptr, ids_ptr, state, False
        )
    out = lane * out_stride + step * WIDTH
    keys, ids = sorted_list(values_ptr, ids_ptr, tl.minimum(found, _CAP))
    c = tl.arange(0, _CAP)
    if found <= _CAP:
        tl.store(out_ids_ptr + out + 1 + c, ids, mask=c < num_top)
        logprobs = tl.where(c < found, unorder(keys) - log_total, float("-inf"))
        tl.store(out_logprobs_ptr + out + 1 + c, logprobs, mask=c < num_top)
    else:  # more equal logits than fit: the next one in order, num_top times
        last_key, last_id = tl.full([], 0xFFFFFFFF, dtype=tl.uint32), tl.full([], -1, dtype=tl.int32)
        for n in range(num_top):
            best_key, best_id = tl.zeros([], dtype=tl.uint32), tl.zeros([], dtype=tl.int32)
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                key = order(raw_logits(logits_ptr, column, column < vocab))
                later = (key < last_key) | ((key == last_key) & (column > last_id))
                key = tl.where(later & (column < vocab), key, 0)
                here = tl.max(key, axis=0)
                first = tl.min(tl.where(key == here, column, vocab), axis=0)
                best_id = tl.where(here > best_key, first, best_id)
                best_key = tl.maximum(here, best_key)
            last_key, last_id = best_key, best_id
            tl.store(out_ids_ptr + out + 1 + n, last_id)
            tl.store(out_logprobs_ptr + out + 1 + n, unorder(last_key) - log_total)
    tl.store(out_logprobs_ptr + out, own - log_total)
    tl.store(out_ids_ptr + out, 1 + tl.sum(larger, axis=0))


@dataclass(frozen=True)
class Reports:
    """Logprobs of some steps: [lanes, steps, 1 + MAX_LOGPROBS]; column 0 is the token's own, and its position."""

    logprobs: torch.Tensor  # float32
    ids: torch.Tensor  # int32

    @classmethod
    def allocate(cls, num_lanes: int, num_steps: int, device: torch.device) -> Reports:
        shape = (num_lanes, num_steps, 1 + MAX_LOGPROBS)
        return cls(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device))


def report(
    logits: torch.Tensor, rows: torch.Tensor, drawn: Drawn, state: SamplerState, reports: Reports, step: int
) -> None:
    """Logprobs of the tokens just drawn, for the lanes whose requests have logprobs, stored as those of `step`."""
    lanes, num_tiles = len(reports.ids), drawn.raw_peaks.shape[1]
    report_kernel[(lanes,)](
        logits, rows, drawn.tokens, drawn.raw_peaks, drawn.raw_sums, *scratch(lanes, num_tiles, logits.device), step,
        reports.logprobs, reports.ids, reports.logprobs.stride(0), logits.stride(0), state.vocab_size, num_tiles,
        state.ints, ALL_TILES=all_tiles(num_tiles), BLOCK=4096, WIDTH=1 + MAX_LOGPROBS, num_warps=8,
    )  # fmt: skip

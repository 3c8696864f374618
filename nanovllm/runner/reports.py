"""Wanted: the logprobs of a step's sequences (SamplingParams.logprobs), from the device's arrays to records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.hardware.staging import Arriving, Transfers
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.runner.step import StepOutput
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import token_logprobs
from nanovllm.scheduling.drafts import MAX_STEPS

if TYPE_CHECKING:
    from nanovllm.ops.triton.sampling_report import Reports

MAX_LOGPROBS = 20  # of ops/triton/sampler_common.py; more are computed from the logits themselves


class Wanted:
    def __init__(self, num_tops: list[int | None], state: SamplerState, transfers: Transfers) -> None:
        """num_tops: SamplingParams.logprobs of each sequence, in the order of the step's rows."""
        self._num_tops, self._state, self._transfers = num_tops, state, transfers
        self._narrow = [i for i, n in enumerate(num_tops) if n is not None and 0 <= n <= MAX_LOGPROBS]
        self._wide = [i for i, n in enumerate(num_tops) if n is not None and not 0 <= n <= MAX_LOGPROBS]
        self.after_step = self._after_step if self._narrow or self._wide else None
        self._num_steps = 0
        self._reports: Reports | None = None
        self._logits: list[torch.Tensor] = []  # of each step, for the wide ones
        self._arriving: tuple[Arriving, Arriving] | None = None

    def _after_step(self, out: StepOutput) -> None:
        """Before the next step overwrites them. Not part of a captured graph: most steps have nothing to report."""
        from nanovllm.ops.triton.sampling_report import Reports, report

        if self._narrow:
            if self._reports is None:
                self._reports = Reports.allocate(self._narrow[-1] + 1, MAX_STEPS, out.logits.device)
            report(out.logits, out.rows, out.drawn, self._state, self._reports, self._num_steps)
        if self._wide:
            self._logits.append(out.logits[self._wide])
        self._num_steps += 1

    def start(self) -> None:
        if self._reports is not None:
            self._arriving = (
                self._transfers.start(self._reports.logprobs[:, : self._num_steps]),
                self._transfers.start(self._reports.ids[:, : self._num_steps]),
            )

    @torch.inference_mode()
    def read(self, tokens: np.ndarray) -> list[list[TokenLogprobs | None]] | None:
        """For each lane and step; None if no sequence has logprobs."""
        if self.after_step is None:
            return None
        drawn = tokens.tolist()
        found: list[list[TokenLogprobs | None]] = [[None] * len(new) for new in drawn]
        if self._arriving is not None:
            logprobs, ids = (arriving.wait().tolist() for arriving in self._arriving)
            for lane in self._narrow:
                num_top = self._num_tops[lane] or 0
                found[lane] = [
                    _record(token, values[: num_top + 1], others[: num_top + 1])
                    for token, values, others in zip(drawn[lane], logprobs[lane], ids[lane])
                ]
        for place, lane in enumerate(self._wide):
            for step, token in enumerate(drawn[lane]):
                if token < 0:  # the text had ended before this step
                    break
                found[lane][step] = token_logprobs(self._logits[step][place], token, self._num_tops[lane] or 0)
        return found


def _record(token: int, logprobs: list[float], ids: list[int]) -> TokenLogprobs:
    """Column 0: the token's own logprob, and its position in the place of an id."""
    record = TokenLogprobs([token], [logprobs[0]], [ids[0]])
    for place, (other, value) in enumerate(zip(ids[1:], logprobs[1:]), start=1):
        if other != token and value > float("-inf"):
            record.token_ids.append(other)
            record.logprobs.append(value)
            record.positions.append(place)
    return record

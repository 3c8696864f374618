"""Wanted: the logprobs that the sequences of a step ask for, from the device's arrays to records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.hardware.staging import Download, Downloads
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import token_logprobs

if TYPE_CHECKING:
    from nanovllm.ops.triton.sampling import Drawn
    from nanovllm.ops.triton.sampling_report import Reports

MAX_LOGPROBS = 20  # of ops/triton/sampler_common.py; more are computed from the logits themselves
MAX_STEPS = 64


class Wanted:
    def __init__(self, num_tops: list[int | None], rows: torch.Tensor, state: SamplerState) -> None:
        """num_tops: what each sequence asks for, in the order of the lanes; rows: of the lanes, on the device."""
        self._num_tops, self._rows, self._state = num_tops, rows, state
        self._narrow = [i for i, n in enumerate(num_tops) if n is not None and 0 <= n <= MAX_LOGPROBS]
        self._wide = [i for i, n in enumerate(num_tops) if n is not None and not 0 <= n <= MAX_LOGPROBS]
        self.after_step = self._after_step if self._narrow or self._wide else None
        self._num_steps = 0
        self._reports: Reports | None = None
        self._logits: list[torch.Tensor] = []  # of each step, for the wide ones
        self._downloads: tuple[Download, Download] | None = None

    def _after_step(self, logits: torch.Tensor, drawn: Drawn) -> None:
        """Before the next step overwrites them. Not part of a captured graph: most steps have nothing to report."""
        from nanovllm.ops.triton.sampling_report import Reports, report

        if self._narrow:
            if self._reports is None:
                self._reports = Reports.allocate(self._narrow[-1] + 1, MAX_STEPS, logits.device)
            report(logits, self._rows, drawn, self._state, self._reports, self._num_steps)
        if self._wide:
            self._logits.append(logits[self._wide])
        self._num_steps += 1

    def start(self, downloads: Downloads) -> None:
        if self._reports is not None:
            self._downloads = (
                downloads.start(self._reports.logprobs[:, : self._num_steps]),
                downloads.start(self._reports.ids[:, : self._num_steps]),
            )

    def read(self, tokens: list[list[int]]) -> list[list[TokenLogprobs | None]] | None:
        """For each lane and step; None if no sequence asks."""
        if self.after_step is None:
            return None
        found: list[list[TokenLogprobs | None]] = [[None] * len(new) for new in tokens]
        if self._downloads is not None:
            logprobs, ids = (download.wait() for download in self._downloads)
            for lane in self._narrow:
                num_top = self._num_tops[lane] or 0
                found[lane] = [
                    _record(token, values[: num_top + 1], others[: num_top + 1])
                    for token, values, others in zip(tokens[lane], logprobs[lane], ids[lane])
                ]
        for place, lane in enumerate(self._wide):
            for step, token in enumerate(tokens[lane]):
                num_top = self._num_tops[lane]
                assert num_top is not None
                found[lane][step] = token_logprobs(self._logits[step][place], token, num_top)
        return found


def _record(token: int, logprobs: list[float], ids: list[int]) -> TokenLogprobs:
    """Column 0: the token's own logprob, and its rank in the place of an id."""
    record = TokenLogprobs([token], [logprobs[0]], [ids[0]])
    for place, (other, value) in enumerate(zip(ids[1:], logprobs[1:]), start=1):
        if other != token and value > float("-inf"):
            record.token_ids.append(other)
            record.logprobs.append(value)
            record.ranks.append(place)
    return record

"""The two samplers of a step: kernels that read parameters from device memory, and the plain sampler.

Both are functions of logits and rows (step.py: `Draw`), and both give the same tokens. The plain one reads the
sequence's tokens on the host, so each step must end before the next begins; the kernels keep what they need on the
device, so a step can be queued before the tokens of the last are on the host. A grammar needs them there in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm.hardware.staging import Transfers
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.reports import Wanted
from nanovllm.sampling.device_rows import DeviceRows
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import sample
from nanovllm.sampling.structured import Grammar, allowed_words
from nanovllm.scheduling.plan import Arrival, PlanEntry


class StepReports(Protocol):
    """The logprobs of a plan's requests (SamplingParams.logprobs)."""

    @property
    def after_step(self) -> Callable[[Any], None] | None:
        """Gets the StepOutput of each step, before the next one overwrites it."""
        ...

    def start(self) -> None:
        """Every step is queued."""
        ...

    def read(self, tokens: np.ndarray) -> list[list[TokenLogprobs | None]] | None: ...


class StepSampler(Protocol):
    def arrive(self, arrivals: Sequence[Arrival]) -> None: ...

    def needs_tokens(self, entries: Sequence[PlanEntry]) -> bool:
        """Whether a step must have ended before the next is begun."""
        ...

    def before_draw(self, entries: Sequence[PlanEntry]) -> None: ...

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Any: ...

    def draw_uncounted(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Any:
        """Tokens that may be dropped: guesses, and what is drawn after them."""
        ...

    def reports(self, entries: Sequence[PlanEntry]) -> StepReports: ...


@dataclass(frozen=True)
class HostDrawn:
    tokens: torch.Tensor
    logprobs: list[TokenLogprobs | None]


class HostReports:
    def __init__(self) -> None:
        self._steps: list[list[TokenLogprobs | None]] = []

    def after_step(self, out: Any) -> None:
        self._steps.append(out.drawn.logprobs)

    def start(self) -> None: ...

    def read(self, tokens: np.ndarray) -> list[list[TokenLogprobs | None]] | None:
        return [list(row) for row in zip(*self._steps)]


class HostSampler:
    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch

    def arrive(self, arrivals: Sequence[Arrival]) -> None: ...

    def needs_tokens(self, entries: Sequence[PlanEntry]) -> bool:
        return True

    def before_draw(self, entries: Sequence[PlanEntry]) -> None: ...

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> HostDrawn:
        pairs = zip(rows.tolist(), positions.tolist())
        drawn = sample(logits, [self._batch.sampling_row(row, position) for row, position in pairs])
        return HostDrawn(torch.from_numpy(np.array(drawn.token_ids, np.int64)).to(logits.device), drawn.logprobs)

    draw_uncounted = draw  # it counts tokens of the batch

    def reports(self, entries: Sequence[PlanEntry]) -> StepReports:
        return HostReports()


class DeviceSampler:
    def __init__(
        self, batch: InputBatch, num_rows: int, vocab_size: int, transfers: Transfers, num_guesses: int = 0
    ) -> None:
        """`num_guesses`: most rows of a step with guesses (draft_loop.py), each of which may have a mask of its own."""
        self._batch = batch
        self._vocab_size = vocab_size
        self._transfers = transfers
        self._first_mask = num_rows  # of those
        self._rows = DeviceRows(num_rows, vocab_size, transfers.device, num_guesses)
        self.state = self._rows.state

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        rows = [self._batch.row(arrival.seq_id) for arrival in arrivals]
        self._rows.fill({row: self._batch.sampling_row(row) for row in rows}, self._transfers.send)

    def needs_tokens(self, entries: Sequence[PlanEntry]) -> bool:
        return any(self._grammar(entry) for entry in entries)

    def before_draw(self, entries: Sequence[PlanEntry]) -> None:
        """Upload which tokens the grammars allow next."""
        masked = {}
        for entry in entries:
            if (grammar := self._grammar(entry)) is not None:
                known = self._batch.sampling_row(row := self._batch.row(entry.seq_id)).output_ids
                if not (known[-1:] < 0).any():  # else this text ended in an earlier step of the visit
                    masked[row] = grammar, known, 0
        if masked:
            words = allowed_words(list(masked.values()), self._vocab_size)
            self._rows.send_masks(list(masked), words, self._transfers.send)

    # ---- grammars in a step with guesses: each row that is fed has a mask of its own

    def begin_guesses(self, entries: Sequence[PlanEntry], per_entry: int) -> np.ndarray:
        """int32: for each row of such a step the line of the masks that it has. A drafter that draws its guesses does
        so without the grammar, whose state after a guess only the host could compute."""
        rows = np.repeat(self._batch.rows(entries), per_entry).astype(np.int32)
        limited = np.repeat([self._grammar(entry) is not None for entry in entries], per_entry)
        free = np.unique(rows[limited]).tolist()
        self._rows.send_masks(
            free, np.full((len(free), -(-self._vocab_size // 32)), -1, np.int32), self._transfers.send
        )
        return np.where(limited, self._first_mask + np.arange(len(rows), dtype=np.int32), rows)

    def mask_guesses(self, entries: Sequence[PlanEntry], fed: np.ndarray, exists: np.ndarray) -> np.ndarray:
        """fed, exists [entries, 1 + guesses]: the newest token and the guesses. Uploads which tokens the grammars allow
        after each of them. Returns which are left: a guess that its grammar forbids is none, nor is one after it."""
        left, masked = exists.copy(), {}
        for i, entry in enumerate(entries):
            if (grammar := self._grammar(entry)) is None:
                continue
            known = self._batch.sampling_row(self._batch.row(entry.seq_id)).output_ids
            draft = fed[i, 1 : exists[i].sum()].astype(np.int32)
            draft = draft[: grammar.num_allowed(known, draft)] if len(draft) else draft
            left[i, 1 + len(draft) :] = False
            for count in range(1 + len(draft)):
                masked[self._first_mask + i * fed.shape[1] + count] = grammar, np.append(known, draft[:count]), count
        words = allowed_words(list(masked.values()), self._vocab_size)
        self._rows.send_masks(list(masked), words, self._transfers.send)
        return left

    def _grammar(self, entry: PlanEntry) -> Grammar | None:
        found = self._batch.arrival(entry.seq_id).params.structured_outputs
        return found if isinstance(found, Grammar) else None

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Any:
        from nanovllm.ops.triton.sampling import draw

        return draw(logits, rows, positions, self.state)

    def draw_uncounted(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor | None = None
    ) -> Any:
        from nanovllm.ops.triton.sampling import draw

        return draw(logits, rows, positions, self.state, rows if masks is None else masks)

    def reports(self, entries: Sequence[PlanEntry]) -> StepReports:
        num_tops = [self._batch.arrival(entry.seq_id).params.logprobs for entry in entries]
        return Wanted(num_tops, self.state, self._transfers)

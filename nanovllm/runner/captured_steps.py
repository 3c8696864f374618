"""Steps that hold a prompt, as captured graphs for common sizes.

A prompt of 1,024 tokens is 4 ms of work for a large GPU and 27 ms of launches for a slow host, so small mixed steps
are replayed too: the step is padded to the next bucket of tokens (their slots are -1, no sequence owns them) and to a
fixed number of entries (of no tokens). Large steps gain nothing: there the launches hide behind the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanovllm.hardware.graphs import Capture
from nanovllm.hardware.staging import FixedUpload, Transfers
from nanovllm.runner.step import Bounds, StepInputs, StepOutput

TOKEN_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
MAX_ENTRIES = 16
ComputeOne = Callable[[Sequence[torch.Tensor], Bounds], StepOutput]  # (the arrays of StepInputs as tensors, ...)


@dataclass
class _Captured:
    upload: FixedUpload
    replay: Callable[[], None]
    out: list[StepOutput]


class CapturedSteps:
    def __init__(
        self, compute: ComputeOne, transfers: Transfers, num_rows: int, num_blocks: int, max_context_len: int
    ) -> None:
        """`num_rows` of sequences, the last of them spare; `num_blocks` of the longest block table."""
        self._compute = compute
        self._transfers = transfers
        self._spare_row, self._num_blocks = num_rows - 1, num_blocks
        self._bounds = Bounds(0, max_context_len)
        self._captured: dict[int, _Captured] = {}

    def capture(self, capture: Capture, max_num_tokens: int) -> None:
        for size in reversed([size for size in TOKEN_BUCKETS if size <= max_num_tokens]):
            upload = self._transfers.fixed(self._padded(StepInputs.empty(), size))
            out: list[StepOutput] = []

            def compute(upload: FixedUpload = upload, out: list[StepOutput] = out) -> None:
                out[:] = [self._compute(upload.tensors, self._bounds)]

            self._captured[size] = _Captured(upload, capture(compute), out)

    def compute_smallest(self) -> None:
        self._compute(self._transfers.send(self._padded(StepInputs.empty(), TOKEN_BUCKETS[0])), self._bounds)

    def run(self, inputs: StepInputs) -> StepOutput | None:
        """None if no captured size holds it."""
        num_tokens, num_entries = len(inputs.tokens), len(inputs.context_lens)
        size = min((size for size in self._captured if size >= num_tokens), default=None)
        if size is None or num_entries > MAX_ENTRIES or len(inputs.logit_rows) > MAX_ENTRIES:
            return None
        found = self._captured[size]
        found.upload.send(self._padded(inputs, size))
        found.replay()
        return found.out[0]

    def _padded(self, inputs: StepInputs, num_tokens: int) -> list:
        return inputs.padded(num_tokens, MAX_ENTRIES, self._num_blocks, self._spare_row)

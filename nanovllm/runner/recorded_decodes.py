"""Decode steps on a CPU, recorded once for each number of sequences and then replayed (ops/native/tape.py).

The calls of a step have fixed addresses, so the integers of a step are copied to where the first step of its size had
them. Sampling is not part of the recording: the plain sampler reads the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.attention.native_backend import NativeBackend
from nanovllm.hardware.staging import FixedUpload, Transfers
from nanovllm.layers.attention import KVCache
from nanovllm.models.transformer import Transformer
from nanovllm.ops.native.ops import MAX_ROWS
from nanovllm.ops.native.tape import Tape
from nanovllm.runner.step import Bounds, Draw, StepInputs, StepOutput, step_of


def can_record(model: Transformer) -> bool:
    """Whether nothing but C functions computes a decode step of few sequences: no experts, one rank. Where a product is
    left to a BLAS after all (float32, more than 8 rows), the tape calls the step as it is."""
    if model.mtp is not None:  # it reads each step (mtp.py), which is no C function
        return False
    return all(layer.fuses and isinstance(layer.attention.backend, NativeBackend) for layer in model.layers)


class RecordedDecodes:
    def __init__(
        self, model: Transformer, caches: list[KVCache], transfers: Transfers, max_model_len: int, draw: Draw
    ) -> None:
        self._model, self._caches, self._transfers, self._draw = model, caches, transfers, draw
        self._max_model_len = max_model_len
        self._tape = Tape(model.ops.kernels)
        self._recorded: dict[int, tuple[FixedUpload, Callable[[], torch.Tensor]]] = {}
        self._block_size = caches[0][0].shape[1]

    def run(self, inputs: StepInputs) -> StepOutput | None:
        """None: not a step of few decodes. One token of a prompt alone is not a decode if more of it follow."""
        size = len(inputs.tokens)
        if size > MAX_ROWS or len(inputs.rows) != size:
            return None
        if size in self._recorded:
            upload, replay = self._recorded[size]
            upload.send(self._padded(inputs))
            logits = replay()
        else:
            logits = self._record(size, inputs)
            upload, _ = self._recorded[size]
        *_, lens, _, rows = upload.tensors
        return StepOutput(rows, logits, self._draw(logits, rows, lens), logits[:0], [])

    def _record(self, size: int, inputs: StepInputs) -> torch.Tensor:
        upload = self._transfers.fixed(self._padded(inputs))
        tokens, positions, slots, lens, tables, _ = upload.tensors
        starts = torch.from_numpy(inputs.query_starts)
        step = step_of(tokens, positions, slots, starts, lens, tables, None, Bounds(size, self._max_model_len))
        replay, logits = self._tape.record(lambda: self._model.logits(self._model(step, self._caches)))
        self._recorded[size] = upload, replay
        return logits

    def _padded(self, inputs: StepInputs) -> list[np.ndarray]:
        """The block tables with room for the longest sequence."""
        tables = np.zeros((len(inputs.tokens), -(-self._max_model_len // self._block_size)), dtype=np.int32)
        tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        return [inputs.tokens, inputs.positions, inputs.slots, inputs.context_lens, tables, inputs.rows]

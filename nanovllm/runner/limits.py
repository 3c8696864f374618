"""StepLimits: how large a step and a sequence may be, resolved once from the options, the model and the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepLimits:
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int

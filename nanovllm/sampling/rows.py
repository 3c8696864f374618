"""Input and output of the sampler, one record per row of logits. No torch: these may be sent to another process.

The sampler has no Sequence. It reads one `SamplingRow` of it, and the sampled token is a function of that row and its
logits alone, never of the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.sampling_params import SamplingParams


class SamplingRow(NamedTuple):  # made for each row of each step; a frozen dataclass takes three times as long
    params: SamplingParams
    seed: int  # 64 bits, always set: the user's, or one the engine derived
    token_ids: np.ndarray  # int32: prompt and output so far; its length is the position of the token being sampled
    num_prompt: int  # the first num_prompt of token_ids are the prompt
    stop_ids: tuple[int, ...] = ()  # eos and stop_token_ids: banned while there are fewer than min_tokens outputs
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    num_drafted: int = 0  # the last so many of token_ids are guesses
    max_len: int = 0  # see Arrival

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def has_penalty(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0

    @property
    def output_ids(self) -> np.ndarray:
        return self.token_ids[self.num_prompt :]


@dataclass(slots=True)
class TokenLogprobs:
    """One position: the sampled (or prompt) token first, then the most likely ones without it."""

    token_ids: list[int]
    logprobs: list[float]
    positions: list[int]  # 1 + the number of strictly more likely tokens for the first; 1, 2, ... for the others


@dataclass(slots=True)
class SampledTokens:
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # None without params.logprobs


def bits_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 words with a bit set for each token."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    ids = np.asarray(token_ids, np.int64)
    flags[ids[ids < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)

"""SamplerState: the sampling parameters of the running sequences, as data on the device.

A captured graph holds the addresses of these arrays, so one graph serves every mix of requests. A row is filled when a
sequence arrives (`sampling/device_rows.py`), read by `ops/triton/sampling.py`, which also counts the tokens it draws.

`counts` has the output up to the place COUNTED. Tokens after it are guesses (runner/draft_loop.py): they lie in
`recent`, and a draw at position p adds those from COUNTED + 1 to p - 1 to the counts. `recent` is a ring, with room for
the longest bad word and for the guesses behind the newest token.

A text that has ended is not computed on: `decode_state.py` compares its length with MAX_LEN, and its newest token, from
the position STOPS_FROM on, with the first NUM_STOPS of its stop ids, which are stored plus one: 0 is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.sampling_params import MAX_BAD_WORD

# Columns of SamplerState.floats and .ints
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = 0, 1, 2, 3, 4, 5, 8
TOP_K, ROW_FLAGS, NUM_LOGPROBS, START_EDITS, NUM_EDITS, COUNTED, MAX_LEN, STOPS_FROM = range(8)
FIRST_STOP, NUM_STOPS, NUM_INTS = 8, 8, 16
FLAG_MASK, FLAG_EDITS, FLAG_PENALTIES = 1, 2, 4
EDIT_FIELDS = 8  # token, bits of the bias, position before which it holds; start, length and earliest place of a word
RECENT = 2 * MAX_BAD_WORD  # newest tokens of a row, guesses too: a bad word, and the 17 places that a step may write


@dataclass(frozen=True)
class SamplerState:
    """One row for each sequence that may run, and one for padding; `mask` has more lines, for rows of guesses."""

    vocab_size: int
    floats: torch.Tensor  # float32 [rows, NUM_FLOATS]
    ints: torch.Tensor  # int32 [rows, NUM_INTS]
    seeds: torch.Tensor  # int64 [rows]
    mask: torch.Tensor  # int32 [rows + guesses, words]: a bit for each token that may be sampled
    counts: torch.Tensor  # int16 [rows, vocab]: how often a token is in the output, for rows with penalties
    prompt: torch.Tensor  # int32 [rows, words]: a bit for each token of the prompt
    recent: torch.Tensor  # int32 [rows, RECENT]: the newest tokens of the output and guesses, at position % RECENT
    edits_address: torch.Tensor  # int64 [1]: where the lists of edits are, int32 [edits, EDIT_FIELDS]
    words_address: torch.Tensor  # int64 [1]: where the tokens of the bad words are, int32

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int, num_guesses: int = 0) -> int:
        words = -(-vocab_size // 32)
        row = 2 * vocab_size + 8 * words + 4 * (NUM_FLOATS + NUM_INTS + RECENT) + 8
        return num_rows * row + num_guesses * 4 * words

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device, num_guesses: int = 0) -> SamplerState:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        words = -(-vocab_size // 32)
        return cls(
            vocab_size,
            zeros(num_rows, NUM_FLOATS, dtype=torch.float32),
            zeros(num_rows, NUM_INTS, dtype=torch.int32),
            zeros(num_rows, dtype=torch.int64),
            zeros(num_rows + num_guesses, words, dtype=torch.int32),
            zeros(num_rows, vocab_size, dtype=torch.int16),
            zeros(num_rows, words, dtype=torch.int32),
            zeros(num_rows, RECENT, dtype=torch.int32),
            zeros(1, dtype=torch.int64),
            zeros(1, dtype=torch.int64),
        )

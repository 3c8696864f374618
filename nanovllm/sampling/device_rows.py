"""DeviceRows: copies the sampling parameters and token history of arriving sequences into a SamplerState.

The truth about a request is its Sequence (scheduling/sequence.py). A row here is a copy for the sampling kernels:
filled when the sequence begins to run, advanced on the device by every sampled token, never read back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.ops import sampler_state as spec
from nanovllm.sampling.rows import SamplingRow, bits_of

Send = Callable[[list[np.ndarray]], list[torch.Tensor]]  # one upload
ALWAYS = 2**31 - 1


class DeviceRows:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, num_guesses: int = 0) -> None:
        self.state = spec.SamplerState.allocate(num_rows, vocab_size, device, num_guesses)
        self._edits: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> its edits and the tokens of its bad words
        self._lists: list[torch.Tensor] = []  # what the addresses in the state point to

    def fill(self, arrivals: dict[int, SamplingRow], send: Send) -> None:
        """row -> the sequence that begins to run in it. Nothing is sent for the other rows."""
        if not arrivals:
            return
        rows = list(arrivals)
        vocab = self.state.vocab_size
        left = [row for row in rows if self._edits.pop(row, None) is not None]
        came = [row for row in rows if self._take_edits(row, arrivals[row])]
        floats = np.zeros((len(rows), spec.NUM_FLOATS), np.float32)
        ints = np.zeros((len(rows), spec.NUM_INTS), np.int32)
        seeds = np.zeros(len(rows), np.uint64)
        for i, (row, arrival) in enumerate(arrivals.items()):
            p = arrival.params
            floats[i, :3] = (0.0 if p.is_greedy else p.temperature, p.top_p, p.min_p)
            floats[i, 3:6] = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            ints[i, :3] = (min(p.top_k, vocab), self._flags(row, arrival), -1 if p.logprobs is None else p.logprobs)
            ints[i, spec.COUNTED], ints[i, spec.MAX_LEN] = len(arrival.token_ids) - 1, arrival.max_len
            ints[i, spec.STOPS_FROM] = min(ALWAYS, arrival.num_prompt + max(0, p.min_tokens - 1))
            stops = [token_id + 1 for token_id in arrival.stop_ids[: spec.NUM_STOPS]]
            ints[i, spec.FIRST_STOP : spec.FIRST_STOP + len(stops)] = stops
            seeds[i] = arrival.seed & (2**64 - 1)
        d_rows, d_floats, d_ints, d_seeds = send([np.array(rows, np.int64), floats, ints, seeds.view(np.int64)])
        self.state.floats.index_copy_(0, d_rows, d_floats)
        self.state.ints.index_copy_(0, d_rows, d_ints)
        self.state.seeds.index_copy_(0, d_rows, d_seeds)
        if left or came:
            self._send_edits(send)
        for row, arrival in arrivals.items():
            self._fill_history(row, arrival, send)

    def _flags(self, row: int, arrival: SamplingRow) -> int:
        p = arrival.params
        masked = p.allowed_token_ids is not None or p.structured_outputs is not None
        flags = spec.FLAG_MASK * masked | spec.FLAG_EDITS * (row in self._edits)
        return flags | spec.FLAG_PENALTIES * arrival.has_penalty

    def _fill_history(self, row: int, arrival: SamplingRow, send: Send) -> None:
        vocab, state = self.state.vocab_size, self.state
        if arrival.has_penalty:
            ids, counts = np.unique(arrival.output_ids[arrival.output_ids < vocab], return_counts=True)
            d_ids, d_counts, d_prompt = send(
                [ids.astype(np.int64), counts.astype(np.int16), bits_of(arrival.token_ids[: arrival.num_prompt], vocab)]
            )
            state.counts[row].zero_()
            state.counts[row].index_copy_(0, d_ids, d_counts)
            state.prompt[row].copy_(d_prompt)
        if arrival.bad_words_ids:
            recent = np.full(spec.RECENT, -1, np.int32)
            first = max(arrival.num_prompt, len(arrival.token_ids) - spec.RECENT)
            recent[np.arange(first, len(arrival.token_ids)) % spec.RECENT] = arrival.token_ids[first:]
            state.recent[row].copy_(send([recent])[0])
        if arrival.params.allowed_token_ids is not None:
            state.mask[row].copy_(send([bits_of(list(arrival.params.allowed_token_ids), vocab)])[0])

    def send_masks(self, lines: list[int], words: np.ndarray, send: Send) -> None:
        """words [lines, vocab / 32]: of the tokens that a grammar allows next, into these lines of the masks."""
        d_lines, d_words = send([np.array(lines, np.int64), words])
        self.state.mask.index_copy_(0, d_lines, d_words)

    # ---- edits -------------------------------------------------------------------------------------------------

    def _take_edits(self, row: int, arrival: SamplingRow) -> bool:
        edits: list[tuple[float, ...]] = []
        words: list[int] = []
        for token, bias in arrival.params.logit_bias.items() if arrival.params.logit_bias else ():
            edits.append((token, bias, ALWAYS, 0, 0, 0))
        until = min(ALWAYS, arrival.num_prompt + arrival.params.min_tokens)  # min_tokens may be as large as an int32
        if arrival.num_output < arrival.params.min_tokens:
            edits += [(token, -np.inf, until, 0, 0, 0) for token in arrival.stop_ids]
        for word in arrival.bad_words_ids:
            edits.append((word[-1], -np.inf, ALWAYS, len(words), len(word) - 1, arrival.num_prompt))
            words += word[:-1]
        if not edits:
            return False
        table = np.zeros((len(edits), spec.EDIT_FIELDS), np.int32)
        for i, (token_id, bias, before, start, length, earliest) in enumerate(edits):
            table[i, :6] = (token_id, np.float32(bias).view(np.int32), before, start, length, earliest)
        self._edits[row] = table, np.array(words, np.int32)
        return True

    def _send_edits(self, send: Send) -> None:
        """The lists of all rows, in new memory: steps in flight still read the old one, and the allocator gives it away
        only behind them. Starts of rows that were there before change with it."""
        tables, words, num_words = [np.zeros((1, spec.EDIT_FIELDS), np.int32)], [np.zeros(1, np.int32)], 1
        starts, first = [], 1
        for edits, own in self._edits.values():
            moved = edits.copy()
            moved[:, 3] += num_words
            tables.append(moved)
            words.append(own)
            starts.append((first, len(edits)))
            first, num_words = first + len(edits), num_words + len(own)
        self._lists = [part.clone() for part in send([np.concatenate(tables), np.concatenate(words)])]
        addresses = np.array([part.data_ptr() for part in self._lists], np.int64)
        d_addresses, d_rows, d_starts = send(
            [addresses, np.array(list(self._edits), np.int64), np.array(starts, np.int32).reshape(-1, 2)]
        )
        self.state.edits_address.copy_(d_addresses[:1])
        self.state.words_address.copy_(d_addresses[1:])
        self.state.ints[:, spec.START_EDITS : spec.NUM_EDITS + 1].index_copy_(0, d_rows, d_starts)

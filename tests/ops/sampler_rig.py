"""Requests of every kind for the sampler's kernels, and a SamplerState that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.sampling.device_rows import DeviceRows
from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling_params import SamplingParams

KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.05},
    {"top_k": 5, "min_p": 0.3, "top_p": 0.5}, {"top_p": 1e-6}, {"top_k": 270, "top_p": 0.99},
    {"min_p": 1e-4, "top_p": 0.8}, {"temperature": 3.0, "top_k": 100},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.3, "top_p": 0.9, "temperature": 0.7}, {"logit_bias": {3: 5.0, 7: -100.0}, "top_k": 3},
    {"min_tokens": 5, "temperature": 0}, {"min_tokens": 4, "temperature": 0},
    {"allowed_token_ids": [5, 9, 11, 200], "top_p": 0.9}, {"allowed_token_ids": [5, 9, 11, 200]},
    {"logprobs": 5, "top_k": 20}, {"logprobs": 20}, {"logprobs": 0, "temperature": 0},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0, "temperature": 0},
]  # fmt: skip
NUM_PROMPT, NUM_OUTPUT = 7, 4  # min_tokens above and at the number of outputs


def make_rows(vocab: int, seed: int = 0) -> list[SamplingRow]:
    """One of each kind; every other one has bad words, of which one is about to be completed."""
    rng, rows = np.random.default_rng(seed), []
    for number, kind in enumerate(KINDS):
        tokens = rng.integers(0, vocab, NUM_PROMPT + NUM_OUTPUT).astype(np.int32)
        words = ((int(tokens[-2]), int(tokens[-1]), 6), (int(tokens[-1]), 3, 1), (8,)) if number % 2 else ()
        params = SamplingParams(**{"temperature": 1.0, **kind})
        rows.append(SamplingRow(params, int(rng.integers(0, 2**63)), tokens, NUM_PROMPT, (2, 4), words))
    return rows


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = {
        "normal": lambda: torch.randn(rows, vocab) * 2,
        "flat": lambda: torch.randn(rows, vocab) * 0.3,
        "peaked": lambda: torch.randn(rows, vocab) * 2 + 25 * (torch.arange(vocab) == vocab // 3),
        "ties": lambda: torch.randint(-3, 4, (rows, vocab)).float(),
        "equal": lambda: torch.full((rows, vocab), -2.5),
        "broken": lambda: torch.randn(rows, vocab) * 2,
    }[kind]()
    if kind == "broken":
        logits[:, ::3] = float("-inf")
        logits[:, 1::7] = float("nan")
    return logits.to(dtype)


def make_state(
    rows: list[SamplingRow], vocab: int, places: list[int], device: str = "cpu", num_guesses: int = 0
) -> DeviceRows:
    """rows[i] is in row places[i] of its state. Two uploads: the lists of edits move."""
    found = DeviceRows(max(places) + 2, vocab, torch.device(device), num_guesses)
    send = sender(device)
    half = len(rows) // 2
    found.fill(dict(zip(places[:half], rows[:half])), send)
    found.fill(dict(zip(places[half:], rows[half:])), send)
    return found


def sender(device: str) -> Callable[[list[np.ndarray]], list[torch.Tensor]]:
    return lambda arrays: [torch.from_numpy(np.ascontiguousarray(array).copy()).to(device) for array in arrays]

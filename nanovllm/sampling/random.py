"""One uniform number per (seed, position): a counter, not a stream.

A generator that is advanced once per step ties a sequence to the batches it happened to be in, and two ranks to each
other's history. A hash of (seed, position) has no history: a preempted sequence, a sequence alone, a sequence among 255
others and every rank draw the same number for the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK64 = 2**64 - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: multiples of it visit all 64-bit numbers evenly


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection in which every input bit flips about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[rows] float64 in [0, 1), 53 random bits each.

    The seed is mixed on its own first: users choose 0, 1, 2, ..., and hash(seed + position) would give seed 1 the
    numbers of seed 0 one position later.
    """
    start = mix64(np.array([seed & MASK64 for seed in seeds], np.uint64) + GOLDEN)
    bits = mix64(start + GOLDEN * (np.array(positions, np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53

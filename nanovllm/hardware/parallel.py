"""Parallel: which rank of how many this process is, and what the ranks say to each other.

One rank needs no process group, no port and no rendezvous: `Parallel()` is complete. Layers ask it for their share of
a size; sizes that do not divide are refused with the sizes that would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.errors import ConfigError


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        if total % self.size:
            good = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
            raise ConfigError(f"tensor_parallel_size={self.size}: {what}={total} does not divide; possible: {good}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert self.size == 1
        return x

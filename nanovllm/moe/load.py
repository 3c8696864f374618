"""ExpertLoad: how many tokens chose each expert of each sparse layer.

A router's choice is a tensor that the step makes anyway; a step's output keeps a reference to it (`choices_of`), which
takes no kernel, and holds it at its address in a captured graph. Counting is done after the step, outside of the graph,
and only while the counts are wanted: a few small kernels for all layers together. While they are not, a step pays
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nanovllm.moe.layer import MoeLayer

WANTED_SECONDS = 300.0  # after a reading: more than the time between two scrapes of a monitor


def choices_of(layers: Iterable[Any]) -> list[torch.Tensor]:
    """What the routers of a model's layers chose last, by sparse layer: int32 [tokens, top_k] each."""
    return [layer.mlp.chosen for layer in layers if isinstance(layer.mlp, MoeLayer)]


class ExpertLoad:
    def __init__(self, num_layers: int, num_experts: int, device: torch.device, window_size: int | None = None) -> None:
        """`window_size`: steps that the window holds. With one, counting never ends; without, it ends when the counts
        have not been read for a while, and goes on with the next reading."""
        self._totals = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._window: torch.Tensor | None = None  # int32 [steps, layers, experts]: a ring, the oldest is overwritten
        if window_size is not None:
            self._window = torch.zeros(window_size, num_layers, num_experts, dtype=torch.int32, device=device)
        self._step = 0
        self._wanted_until = float("-inf")

    @property
    def is_wanted(self) -> bool:
        return self._window is not None or time.monotonic() < self._wanted_until

    def read(self) -> list[list[int]]:
        """Since the first reading, or, with a window, since the start. On a GPU it waits for the steps in flight."""
        self._wanted_until = time.monotonic() + WANTED_SECONDS
        found: list[list[int]] = self._totals.tolist()
        return found

    def recent(self) -> torch.Tensor:
        """int64 [layers, experts]: of the steps in the window."""
        assert self._window is not None
        return self._window.sum(0)

    def add(self, choices: Sequence[torch.Tensor], num_rows: int, is_token: torch.Tensor | None = None) -> None:
        """One step: `choices` by layer. What stands behind the first `num_rows` is padding; which of these are tokens
        says `is_token`, bool [num_rows], and without it all are."""
        ids = torch.stack([chosen[:num_rows] for chosen in choices]).long()  # [layers, rows, top_k]
        ones = torch.ones_like(ids) if is_token is None else is_token[None, :, None].long().expand_as(ids)
        counts = torch.zeros_like(self._totals)
        counts.scatter_add_(1, ids.flatten(1), ones.flatten(1))
        self._totals += counts
        if self._window is not None:
            self._window[self._step % len(self._window)].copy_(counts)
            self._step += 1

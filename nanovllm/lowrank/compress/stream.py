"""Stream: the residual streams of all windows, carried through the model one layer at a time.

Calibration and distillation walk over the layers the same way: `enter` computes attention and the router of a layer,
the caller looks at the rows its experts would see, `leave` adds whatever the experts (the teacher's, or the compressed
ones) give. One layer's experts are in memory at a time; the streams and one layer's rows wait in host memory.

Padding never becomes a row, and nothing but the given windows is ever run (lesson 33: the warm-up was recorded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanovllm.lowrank.compress.text import Windows
from nanovllm.lowrank.compress.windows import Expert, WindowModel

RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HELD_OUT_EVERY = 10  # every tenth window is kept for checking: no fit sees it


@dataclass(frozen=True)
class Rows:
    """What the experts of one layer see. On the host."""

    x: torch.Tensor  # [rows, hidden]
    ids: torch.Tensor  # int64 [rows, top_k]
    weights: torch.Tensor  # [rows, top_k]
    held: torch.Tensor  # bool [rows]

    def of(self, expert: int, held: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(row numbers, router weights) of the rows that chose this expert."""
        rows, place = ((self.ids == expert) & (self.held == held)[:, None]).nonzero(as_tuple=True)
        return rows, self.weights[rows, place]

    def counts(self, num_experts: int) -> list[int]:
        return torch.bincount(self.ids[~self.held].flatten(), minlength=num_experts).tolist()


def parts_of(
    rows: Rows, expert: int, size: int, device: torch.device, held: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(x, router weights) of an expert's rows, `size` rows at a time, on the device."""
    found, weights = rows.of(expert, held)
    if len(found):
        for index, part in zip(found.split(size), weights.split(size)):
            yield rows.x[index].to(device), part.to(device)


def held_out(num_windows: int) -> torch.Tensor:
    """bool [windows]."""
    return torch.arange(num_windows) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def run_dense(experts: list[Expert]) -> RunExperts:
    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for e, expert in enumerate(experts):
            rows, place = (ids == e).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return total

    return run


class Stream:
    @torch.no_grad()
    def __init__(self, model: WindowModel, windows: Windows, chunk: int) -> None:
        """`chunk`: windows computed at a time."""
        self.model, self.windows = model, windows
        self.length = windows.ids.shape[1]
        self._pieces = torch.arange(len(windows)).split(chunk)
        self._h = torch.cat([model.embed(windows.ids[piece]).cpu() for piece in self._pieces])
        self._h = self._h.unflatten(0, (len(windows), self.length))
        self._real = windows.real()
        self._held = held_out(len(windows))[:, None].expand_as(self._real)[self._real]
        self._x = torch.empty_like(self._h)

    @torch.no_grad()
    def enter(self, layer: int) -> Rows | None:
        """None for a dense layer: there is nothing to look at."""
        device = self.model.device.torch_device
        routed = []
        for piece in self._pieces:
            x, h = self.model.attend(layer, self._h[piece].to(device).flatten(0, 1), self.length)
            self._h[piece], self._x[piece] = (t.unflatten(0, (-1, self.length)).cpu() for t in (h, x))
            if self.model.is_sparse(layer):
                routed.append([t.cpu() for t in self.model.route(layer, x)])
        if not routed:
            return None
        ids, weights = (torch.cat(parts).unflatten(0, self._real.shape)[self._real] for parts in zip(*routed))
        return Rows(self._x[self._real], ids.long(), weights, self._held)

    @torch.no_grad()
    def leave(self, layer: int, rows: Rows | None, experts: RunExperts | None = None) -> None:
        device = self.model.device.torch_device
        if rows is None:
            for piece in self._pieces:
                out = self.model.dense_mlp(layer, self._x[piece].to(device).flatten(0, 1))
                self._h[piece] += out.cpu().unflatten(0, (-1, self.length))
            return
        assert experts is not None
        size = self.length * len(self._pieces[0])
        parts = zip(rows.x.split(size), rows.ids.split(size), rows.weights.split(size))
        self._h[self._real] += torch.cat([experts(*(t.to(device) for t in part)).cpu() for part in parts])

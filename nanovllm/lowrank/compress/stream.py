"""All windows carried through the model: layer by layer (`Stream`), or a few of them at once, with gradients.

Calibration, distillation and measurement use the same loop. A layer's experts can be the teacher's or compressed ones:

    stream = Stream(model, windows, chunk)
    for layer, rows in stream.sparse_layers("calibrating"):   # attention, router and dense layers are computed here
        ...                                                   # `rows`: what the experts of this layer receive
        stream.add(rows, experts)

One layer's experts are in memory at a time; the residual streams and one layer's rows are in host memory. Padding never
becomes a row, and nothing but the given windows is ever run: warm-up rows of an engine were once recorded as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from nanovllm.lowrank.compress.model import RunExperts, WindowModel
from nanovllm.lowrank.compress.text import Windows, held_out

ExpertsOf = Callable[[int], RunExperts]  # layer -> how its experts are computed


@dataclass(frozen=True)
class Rows:
    """The inputs of the experts of one layer. On the host."""

    x: torch.Tensor  # [rows, hidden]
    ids: torch.Tensor  # int64 [rows, top_k]
    weights: torch.Tensor  # [rows, top_k]
    held: torch.Tensor  # bool [rows]: of held-out windows

    def of(self, expert: int, held: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(row numbers, router weights) of the rows that chose this expert."""
        rows, choice = ((self.ids == expert) & (self.held == held)[:, None]).nonzero(as_tuple=True)
        return rows, self.weights[rows, choice]

    def counts(self, num_experts: int) -> list[int]:
        return torch.bincount(self.ids[~self.held].flatten(), minlength=num_experts).tolist()

    def batches_of(
        self, expert: int, size: int, device: torch.device, held: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(x, router weights) of an expert's rows, `size` rows at a time, on the device."""
        found, weights = self.of(expert, held)
        if len(found):
            for index, part in zip(found.split(size), weights.split(size)):
                yield self.x[index].to(device), part.to(device)

    def batches(self, size: int, device: torch.device, held: bool | None = None) -> Iterator[list[torch.Tensor]]:
        """[x, ids, weights] of all rows, or of those with this `held`, `size` rows at a time, on the device."""
        tensors = (self.x, self.ids, self.weights)
        chosen = tensors if held is None else [t[self.held == held] for t in tensors]
        for batch in zip(*(t.split(size) for t in chosen)):
            yield [t.to(device) for t in batch]


class Stream:
    @torch.no_grad()
    def __init__(self, model: WindowModel, windows: Windows, chunk: int) -> None:
        """`chunk`: windows computed at a time."""
        self.model, self.length = model, windows.ids.shape[1]
        self._chunks = torch.arange(len(windows)).split(chunk)
        self.h = torch.cat([model.embed(windows.ids[chunk]).cpu() for chunk in self._chunks])
        self.h = self.h.unflatten(0, windows.ids.shape)  # [windows, length, hidden]
        self._real = windows.real()
        self._held = held_out(len(windows))[:, None].expand_as(self._real)[self._real]

    @torch.no_grad()
    def sparse_layers(self, desc: str) -> Iterator[tuple[int, Rows]]:
        """Before the next layer the caller adds the output of this layer's experts, with `add`."""
        model = self.model
        for layer in tqdm(range(model.num_layers), desc=desc, unit="layer", disable=None, leave=False):
            routed = []
            for chunk in self._chunks:
                x, h = model.attend(layer, self.h[chunk].to(model.device.torch_device).flatten(0, 1), self.length)
                if model.is_sparse(layer):
                    routed.append([t.cpu() for t in (x, *model.route(layer, x))])
                else:
                    h = h + model.dense_mlp(layer, x)
                self.h[chunk] = h.unflatten(0, (-1, self.length)).cpu()
            if routed:
                x, ids, weights = (
                    torch.cat(parts).unflatten(0, self._real.shape)[self._real] for parts in zip(*routed)
                )
                yield layer, Rows(x, ids.long(), weights, self._held)

    @torch.no_grad()
    def add(self, rows: Rows, experts: RunExperts) -> None:
        batches = rows.batches(self.length * len(self._chunks[0]), self.model.device.torch_device)
        self.h[self._real] += torch.cat([experts(*batch).cpu() for batch in batches])


def final_states(
    model: WindowModel, windows: Windows, experts: ExpertsOf, chunk: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The input of `model.logits` [windows, length, hidden], and the chosen experts [real tokens, top_k] of each sparse
    layer; on the host."""
    stream, routes = Stream(model, windows, chunk), []
    for layer, rows in stream.sparse_layers("running the text"):
        stream.add(rows, experts(layer))
        routes.append(rows.ids)
    return stream.h, routes


def run_model(model: WindowModel, ids: torch.Tensor, experts: ExpertsOf) -> torch.Tensor:
    """Logits [windows * length, vocab], with gradients: all layers at once, for a few windows."""
    h = model.embed(ids)
    for layer in range(model.num_layers):
        x, h = model.attend(layer, h, ids.shape[1])
        h = h + (experts(layer)(x, *model.route(layer, x)) if model.is_sparse(layer) else model.dense_mlp(layer, x))
    return model.logits(h)

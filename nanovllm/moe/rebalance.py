"""Balancer: under expert parallelism, moves experts between ranks by the load of the last steps, while the engine runs
(EPLB; the arithmetic is balance.py, the docs are docs/expert-balancing.md).

Every rank counts what the routers chose (load.py). The router is whole on every rank and all ranks have all tokens
there, so they count alike. Every `step_interval` steps a pass begins: the counts of the last `window_size` steps are
added up over the ranks, which makes them the same numbers everywhere even if one rank had counted otherwise. So each
rank finds the same arrangements by itself. A pass takes one layer after the other: its arrangement is computed, and if
the busiest rank gets less to do,

    begin     before launch n: what is new on a rank is sent from a rank that has it, place by place, into a spare
              buffer as large as the places of one layer. It only reads weights, as steps do, so it runs beside the
              launches that follow: over a process group of its own, on a GPU on the stream that NCCL has for it
    switch    before launch n + BESIDE: the exchange is waited for (it has mostly ended), the spare buffer is copied to
              its places, and the layer's table on the device is updated

Ranks launch the same plans and count their launches, so all switch at the same one without a message about it. The
switch is queued like a step, between two steps: a step in flight still reads the old weights with the old table, the
next reads the new ones with the new. A place is overwritten when this rank has received all it needs, not when the
others have: so a rank must also know that what it sent has left. `finish` waits for both, in gloo and in NCCL.
Addresses never change. What still waits is the sum of the counts, once a pass.

Not run on several GPUs yet. Two communicators on one card need room for the kernels of both at once, or ranks that
start them in another order would wait for each other; NCCL's kernels take a few multiprocessors each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.hardware.parallel import Parallel
from nanovllm.moe.balance import Arrangement, balancedness, in_order, keep_in_place, rebalance_layer
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.resident import ResidentExperts

logger = logging.getLogger("nanovllm")

LEAST_GAIN = 0.01  # of the busiest rank's load: moving weights for less is not worth it
BESIDE = 2  # launches that an exchange has before it is waited for: one alone may be a short prefill


@dataclass(frozen=True)
class Move:
    """The exchange of a layer that was begun."""

    layer: int
    wanted: Arrangement
    places: list[int]  # those of this rank that get another expert
    finish: list[Callable[[], object]]  # wait for it
    switch_at: int  # before which launch


class Balancer:
    def __init__(self, layers: list[ResidentExperts], load: ExpertLoad, parallel: Parallel, step_interval: int) -> None:
        """`layers`: the sparse ones, with their redundant places (`add_places`)."""
        self.load, self._layers, self._parallel, self._interval = load, layers, parallel, step_interval
        self._arrangements = [layer.spread.arrangement for layer in layers if layer.spread is not None]
        self._num_here = len(self._arrangements[0].experts) // parallel.expert_size
        sizes = [sum(part.shape[1] for part in _parts(layer, self._num_here)) for layer in layers]
        device = _parts(layers[0], self._num_here)[0].device
        self._spare = torch.empty(self._num_here, max(sizes), dtype=torch.uint8, device=device)
        self._steps = 0  # since the last pass began
        self._todo: list[int] = []  # layers that this pass has not looked at, the next one last
        self._recent: list[list[int]] = []  # what it looks at
        self._before_after: list[tuple[float, float]] = []
        self._launches = 0
        self._move: Move | None = None
        self.num_moved = 0  # experts, of all layers and passes

    def before_launch(self, num_steps: int) -> None:
        self._steps += num_steps
        self._launches += 1
        if self._move is not None:
            if self._launches < self._move.switch_at:
                return
            self._switch(self._move)
            self._move = None
        if self._todo:
            self._look_at(self._todo.pop())
            if not self._todo:
                self._log()
        elif self._steps >= self._interval:
            self._steps = 0
            self._recent = self._parallel.all_reduce(self.load.recent()).tolist()
            self._todo = list(reversed(range(len(self._layers))))
            self._before_after = []

    def _look_at(self, number: int) -> None:
        load, present, groups = self._recent[number], self._arrangements[number], self._parallel.expert_size
        wanted = keep_in_place(present, rebalance_layer(load, len(present.experts), num_gpus=groups), groups)
        before, after = (arrangement.gpu_loads(load, groups) for arrangement in (present, wanted))
        if max(after) < max(before) * (1 - LEAST_GAIN):
            self._move = self._begin(number, wanted)
        else:
            after = before
        self._before_after.append((balancedness(before), balancedness(after)))

    def _begin(self, number: int, wanted: Arrangement) -> Move:
        ranks, here, present = self._parallel, self._num_here, self._arrangements[number]
        group, share = divmod(ranks.rank, ranks.ranks_per_expert)
        move = Move(number, wanted, [], [], self._launches + BESIDE)
        for place in range(here):
            sources = _sources(present, wanted, place, here)
            leaving = {to: source % here for to, source in sources.items() if source // here == group}
            sent, received = [0] * ranks.size, [0] * ranks.size
            for to in leaving:
                sent[to * ranks.ranks_per_expert + share] = 1
            if group in sources:
                received[sources[group] // here * ranks.ranks_per_expert + share] = 1
                move.places.append(place)
            for part, room in self._rooms(number) if sources else ():
                found = room[place : place + sum(received)]
                move.finish.append(ranks.begin_exchange(_rows(part, list(leaving.values())), found, sent, received))
            self.num_moved += len(sources)
        return move

    def _switch(self, move: Move) -> None:
        for finish in move.finish:
            finish()
        for part, room in self._rooms(move.layer):
            for place in move.places:
                part[place].copy_(room[place])
        spread = self._layers[move.layer].spread
        assert spread is not None
        spread.set_arrangement(move.wanted)
        self._arrangements[move.layer] = move.wanted

    def _rooms(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(weights of a layer's experts, room for them in the spare buffer), [places, bytes] each."""
        parts = _parts(self._layers[number], self._num_here)
        sizes = [part.shape[1] for part in parts]
        return list(zip(parts, self._spare[:, : sum(sizes)].split(sizes, 1)))

    def _log(self) -> None:
        if self._parallel.rank == 0:
            before, after = (sum(values) / len(values) for values in zip(*self._before_after))
            logger.info(
                "experts balanced: mean / max tokens of a rank %.3f, now %.3f; %d experts moved since the start",
                before,
                after,
                self.num_moved,
            )


def _sources(present: Arrangement, wanted: Arrangement, place: int, num_here: int) -> dict[int, int]:
    """Group of ranks whose `place` gets another expert -> from which place of all. Its own group, if that has the
    expert; otherwise copies take turns, so that one rank does not send to all."""
    found = {}
    for group in range(len(wanted.experts) // num_here):
        expert = wanted.experts[group * num_here + place]
        if expert != present.experts[group * num_here + place]:
            copies = present.copies[expert]
            own = [copy for copy in copies if copy // num_here == group]
            found[group] = own[0] if own else copies[group % len(copies)]
    return found


def _rows(part: torch.Tensor, places: list[int]) -> torch.Tensor:
    """One place, the most frequent case, is sent from where it is; for several ranks it is copied."""
    return part[places[0] : places[0] + 1] if len(places) == 1 else part[places]


def _parts(layer: ResidentExperts, num_here: int) -> list[torch.Tensor]:
    """The weights of a layer's experts as bytes, [places, bytes] each: views."""
    if layer.scaled is not None:
        return [layer.scaled.pool]
    stacks = (layer.gate_up, layer.down)
    return [p.data.view(num_here, -1).view(torch.uint8) for stack in stacks for p in stack.parameters()]


def add_places(layer: ResidentExperts, num_experts: int, num_redundant: int) -> None:
    """Room for redundant experts on this rank: at first, copies of the first ones it has."""
    assert layer.spread is not None
    groups = layer.spread.parallel.expert_size
    arrangement = in_order(num_experts, num_experts + num_redundant, groups)
    own, here = num_experts // groups, (num_experts + num_redundant) // groups
    if layer.scaled is not None and num_redundant:
        pool = layer.scaled.pool
        layer.scaled.set_pool(pool[torch.arange(here, device=pool.device) % own])
    for stack in (layer.gate_up, layer.down) if num_redundant and layer.scaled is None else ():
        for name, old in list(stack.named_parameters()):
            rows = len(old) // own
            new = old.new_empty(here * rows, *old.shape[1:])
            for place in range(here):
                new[place * rows : (place + 1) * rows].copy_(old[place % own * rows : (place % own + 1) * rows])
            setattr(stack, name, nn.Parameter(new, requires_grad=False))
    layer.gate_up_shape = (here, *layer.gate_up_shape[1:])
    layer.down_shape = (here, *layer.down_shape[1:])
    layer.spread.make_table(arrangement, _parts(layer, here)[0].device)

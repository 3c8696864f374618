"""Load balancing of experts over ranks (EPLB): which ranks have which experts, and which of them twice. No torch here.

A layer's experts are chosen unequally, and a step lasts as long as its busiest rank. So there are more places than
experts: each GPU has as many places as the others, every expert has at least one, popular ones have several, and their
tokens are divided between these copies. Three steps, as in DeepSeek's EPLB:

    balanced packing   items by load, largest first, each to the least loaded pack that has room
    replication        one more copy of the expert with the largest load per copy, until all places are taken
    hierarchical       groups of experts to nodes (packed), copies within a node (replicated), copies to GPUs (packed)

One group and one node is the case without hierarchy. docs/expert-balancing.md works an example by hand.
All functions are pure, and equal loads go by number: every rank that has the same loads finds the same arrangement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace

from nanovllm.errors import ConfigError

Loads = Sequence[float]
GOLDEN = 2654435769  # 2**32 divided by the golden ratio: its multiples, modulo 2**32, fill the range evenly


@dataclass(frozen=True)
class Arrangement:
    """Of one layer. `experts[place]`: who is there; the places of GPU 0 come first, each GPU has as many."""

    experts: tuple[int, ...]
    num_experts: int

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The places of each expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return tuple(map(tuple, found))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.copies))

    def gpu_loads(self, load: Loads, num_gpus: int) -> list[float]:
        """If an expert's tokens are divided evenly between its copies."""
        parts = [load[expert] / len(self.copies[expert]) for expert in self.experts]
        each = len(parts) // num_gpus
        return [math.fsum(parts[gpu * each : (gpu + 1) * each]) for gpu in range(num_gpus)]


def choose_copy(token: int, num_copies: int) -> int:
    """Which copy of an expert the token with this index in the step goes to. moe/spread.py has the same in torch."""
    return (token * GOLDEN % 2**32) * num_copies >> 32


def balancedness(gpu_loads: Loads) -> float:
    """mean / max: 1 = all equal, 1/n = one of n has everything. Without load: 1."""
    most = max(gpu_loads)
    return math.fsum(gpu_loads) / len(gpu_loads) / most if most > 0 else 1.0


def pack(loads: Loads, num_packs: int) -> tuple[list[int], list[int]]:
    """(pack, position in it) of each item; all packs get as many."""
    if num_packs < 1 or len(loads) % num_packs:
        good = [n for n in range(1, len(loads) + 1) if len(loads) % n == 0]
        raise ConfigError(f"{len(loads)} items in {num_packs} packs: all must be full; possible: {good}")
    sizes = [0] * num_packs
    open_packs = [(0.0, pack) for pack in range(num_packs)]  # a heap: (load so far, number) of those that have room
    packs, positions = [0] * len(loads), [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        total, least = heappop(open_packs)
        packs[item], positions[item] = least, sizes[least]
        sizes[least] += 1
        if sizes[least] < len(loads) // num_packs:
            heappush(open_packs, (total + loads[item], least))
    return packs, positions


def replicate(loads: Loads, num_places: int) -> list[int]:
    """Who is in each place: every expert in order, then the further copies as they were added."""
    if num_places < len(loads):
        raise ConfigError(f"{num_places} places for {len(loads)} experts: each needs at least one")
    experts, counts = list(range(len(loads))), [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]  # by load per copy, largest first
    heapify(heap)
    while len(experts) < num_places:
        _, busiest = heap[0]
        experts.append(busiest)
        counts[busiest] += 1
        heapreplace(heap, (-loads[busiest] / counts[busiest], busiest))
    return experts


def in_order(num_experts: int, num_places: int, num_gpus: int) -> Arrangement:
    """Without balancing: GPU 0 has the first experts, and so on; places that remain have copies of the GPU's own."""
    check_sizes(num_experts, num_places, num_gpus)
    own, each = num_experts // num_gpus, num_places // num_gpus
    if num_experts % num_gpus:
        good = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ConfigError(f"{num_experts} experts on {num_gpus} GPUs: must divide; possible: {good}")
    return Arrangement(tuple(gpu * own + place % own for gpu in range(num_gpus) for place in range(each)), num_experts)


def rebalance(
    loads: Sequence[Loads], num_places: int, num_groups: int = 1, num_nodes: int = 1, num_gpus: int = 1
) -> list[Arrangement]:
    """One Arrangement for each layer. `loads[layer][expert]`: tokens, or any measure that is not negative."""
    return [rebalance_layer(load, num_places, num_groups, num_nodes, num_gpus) for load in loads]


def rebalance_layer(
    load: Loads, num_places: int, num_groups: int = 1, num_nodes: int = 1, num_gpus: int = 1
) -> Arrangement:
    num_experts = len(load)
    check_loads(load)
    check_sizes(num_experts, num_places, num_gpus, num_groups, num_nodes)
    group_size, groups_per_node = num_experts // num_groups, num_groups // num_nodes
    group_loads = [math.fsum(load[g * group_size : (g + 1) * group_size]) for g in range(num_groups)]
    nodes, positions = pack(group_loads, num_nodes)
    found: list[int] = []
    for node in range(num_nodes):
        here = [0] * groups_per_node  # the node's groups, in the order they were packed
        for group in range(num_groups):
            if nodes[group] == node:
                here[positions[group]] = group
        experts = [group * group_size + i for group in here for i in range(group_size)]
        found += _fill_node(load, experts, num_places // num_nodes, num_gpus // num_nodes)
    arrangement = Arrangement(tuple(found), num_experts)
    if num_experts % num_gpus == 0:  # largest first is not always best: loads may happen to be balanced in order
        plain = in_order(num_experts, num_places, num_gpus)
        if max(plain.gpu_loads(load, num_gpus)) < max(arrangement.gpu_loads(load, num_gpus)):
            return plain
    return arrangement


def _fill_node(load: Loads, experts: list[int], num_places: int, num_gpus: int) -> list[int]:
    """Who is in each place of a node that has these experts."""
    copies = replicate([load[expert] for expert in experts], num_places)
    counts = Counter(copies)
    parts = [load[experts[i]] / counts[i] for i in copies]
    gpus, positions = pack(parts, num_gpus)
    found = [0] * num_places
    for copy, gpu, position in zip(copies, gpus, positions):
        found[gpu * (num_places // num_gpus) + position] = experts[copy]
    return found


def keep_in_place(present: Arrangement, wanted: Arrangement, num_gpus: int) -> Arrangement:
    """`wanted` with the same experts on the same GPUs' worth of places, renumbered so that few weights move: GPUs are
    interchangeable, and so are the places of one. Greedy: the pair of GPUs with the most in common first."""
    each = len(wanted.experts) // num_gpus
    old = [present.experts[gpu * each : (gpu + 1) * each] for gpu in range(num_gpus)]
    new = [wanted.experts[gpu * each : (gpu + 1) * each] for gpu in range(num_gpus)]
    counts = [[Counter(experts) for experts in gpus] for gpus in (old, new)]
    common = [
        (-sum(min(count, theirs[expert]) for expert, count in ours.items()), i, j)
        for i, ours in enumerate(counts[0])
        for j, theirs in enumerate(counts[1])
    ]
    chosen: dict[int, int] = {}  # GPU -> whose places of `wanted` it gets
    for _, gpu, other in sorted(common):
        if gpu not in chosen and other not in chosen.values():
            chosen[gpu] = other
    experts: list[int] = []
    for gpu in range(num_gpus):
        coming = list(new[chosen[gpu]])
        kept: list[int | None] = []
        for expert in old[gpu]:
            stays = expert in coming
            if stays:
                coming.remove(expert)
            kept.append(expert if stays else None)
        experts += [coming.pop(0) if expert is None else expert for expert in kept]
    return Arrangement(tuple(experts), wanted.num_experts)


def check_loads(load: Loads) -> None:
    for expert, value in enumerate(load):
        if not 0 <= value < math.inf:  # NaN fails too
            raise ConfigError(f"load of expert {expert}={value}: must be a number of tokens, from 0 and finite")


def check_sizes(num_experts: int, num_places: int, num_gpus: int, num_groups: int = 1, num_nodes: int = 1) -> None:
    """Refuses what cannot be divided evenly, with the numbers that could."""

    def divisors(number: int, *others: int) -> list[int]:
        return [n for n in range(1, number + 1) if number % n == 0 and all(other % n == 0 for other in others)]

    sizes = {"experts": num_experts, "places": num_places, "GPUs": num_gpus, "groups": num_groups, "nodes": num_nodes}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{size} {name}: must be at least 1")
    if num_places < num_experts or num_places % num_gpus:
        least = -(-num_experts // num_gpus) * num_gpus
        near = max(least, num_places // num_gpus * num_gpus)
        raise ConfigError(
            f"{num_places} places for {num_experts} experts on {num_gpus} GPUs: must be a multiple of the GPUs, not "
            f"fewer than the experts; possible: {[near, near + num_gpus, near + 2 * num_gpus]}, ..."
        )
    if num_experts % num_groups:
        raise ConfigError(f"{num_groups} groups of {num_experts} experts: must divide; {divisors(num_experts)}")
    if num_groups % num_nodes or num_gpus % num_nodes:
        raise ConfigError(
            f"{num_nodes} nodes with {num_groups} groups of experts and {num_gpus} GPUs: must divide both; possible: "
            f"{divisors(num_gpus, num_groups)}"
        )

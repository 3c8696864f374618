"""The balancer's arithmetic: the published example, and what holds for all loads and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import Parallel
from nanovllm.moe.balance import (
    balancedness,
    choose_copy,
    in_order,
    keep_in_place,
    pack,
    rebalance,
    rebalance_layer,
    replicate,
)
from nanovllm.moe.spread import Spread

EXAMPLE = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACES = [
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
]


def test_the_published_example() -> None:
    found = rebalance(EXAMPLE, 16, num_groups=4, num_nodes=2, num_gpus=8)
    assert [layer.experts for layer in found] == PLACES
    shares = [balancedness(layer.gpu_loads(load, 8)) for layer, load in zip(found, EXAMPLE)]
    assert [round(share, 3) for share in shares] == [0.828, 0.805]
    assert found[0].counts == (1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1)
    assert found[0].copies[5] == (0, 2)


@dataclass(frozen=True)
class Case:
    load: list[float]
    num_places: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.num_places, self.num_groups, self.num_nodes, self.num_gpus


numbers = st.one_of(st.integers(0, 10**6), st.floats(0, 1e9), st.just(0), st.just(7))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """With any number of nodes, groups on a node, experts in a group and redundant experts."""
    nodes, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    num_experts, num_gpus = nodes * groups * size, nodes * gpus
    each = -(-num_experts // num_gpus) + draw(st.integers(0, 3))
    load = draw(st.lists(numbers, min_size=num_experts, max_size=num_experts))
    return Case(load, each * num_gpus, nodes * groups, nodes, num_gpus)


@given(cases())
def test_what_always_holds(case: Case) -> None:
    found = rebalance_layer(case.load, *case.sizes)
    assert len(found.experts) == sum(found.counts) == case.num_places
    assert min(found.counts) >= 1
    assert sorted(place for places in found.copies for place in places) == list(range(case.num_places))
    assert found == rebalance_layer(case.load, *case.sizes)
    on_gpus = found.gpu_loads(case.load, case.num_gpus)
    assert math.isclose(math.fsum(on_gpus), math.fsum(case.load), rel_tol=1e-9)
    num_experts = len(case.load)
    if num_experts % case.num_gpus == 0:
        own = num_experts // case.num_gpus
        alone = [math.fsum(case.load[gpu * own : (gpu + 1) * own]) for gpu in range(case.num_gpus)]
        assert max(on_gpus) <= max(alone) * (1 + 1e-9)
    group = num_experts // case.num_groups  # a group and all of its copies are on one node
    nodes: dict[int, set[int]] = {}
    for place, expert in enumerate(found.experts):
        nodes.setdefault(expert // group, set()).add(place * case.num_nodes // case.num_places)
    assert all(len(places) == 1 for places in nodes.values())


@given(cases(), st.randoms(use_true_random=False))
def test_few_weights_move(case: Case, random: object) -> None:
    """The same GPUs in another order, each with its experts in another order: nothing moves at all."""
    now = rebalance_layer(case.load, *case.sizes)
    each = case.num_places // case.num_gpus
    gpus = [list(now.experts[gpu * each : (gpu + 1) * each]) for gpu in range(case.num_gpus)]
    random.shuffle(gpus)  # type: ignore[attr-defined]
    for experts in gpus:
        random.shuffle(experts)  # type: ignore[attr-defined]
    shuffled = type(now)(tuple(expert for experts in gpus for expert in experts), now.num_experts)
    assert keep_in_place(now, shuffled, case.num_gpus) == now
    other = rebalance_layer(case.load[::-1], *case.sizes)
    moved = keep_in_place(now, other, case.num_gpus)

    def contents(arrangement: object) -> list[list[int]]:
        return sorted(sorted(arrangement.experts[g * each : (g + 1) * each]) for g in range(case.num_gpus))  # type: ignore[attr-defined]

    assert contents(moved) == contents(other)


def test_packing_by_hand() -> None:
    """Largest first, to the least loaded that has room: 9 to 0, 8 to 1, 7 to 1, then only 0 has room."""
    assert pack([8, 1, 9, 7], 2) == ([1, 0, 0, 1], [0, 1, 0, 1])
    assert pack([0, 0, 0], 3) == ([0, 1, 2], [0, 0, 0])


def test_replication_by_hand() -> None:
    """10/1 is the largest, then 6/1, then 10/2 and 4/1."""
    assert replicate([4, 10, 6], 6) == [0, 1, 2, 1, 2, 1]
    assert replicate([0, 0], 4) == [0, 1, 0, 0]


def test_the_order_is_kept_where_it_is_better() -> None:
    """Largest first puts 3 + 2 + 2 together; in order both have 6."""
    load = [3, 3, 2, 2, 2]
    assert max(rebalance_layer([*load, 0], 6, num_gpus=2).gpu_loads([*load, 0], 2)) == 7
    assert rebalance_layer([3, 3, 0, 2, 2, 2], 6, num_gpus=2).experts == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("num_copies", [1, 2, 3, 5, 16])
def test_copies_are_used_alike(num_copies: int) -> None:
    for start in (0, 1, 4095):
        found = [choose_copy(token, num_copies) for token in range(start, start + 480)]
        uses = [found.count(copy) for copy in range(num_copies)]
        assert max(uses) - min(uses) <= 4, "consecutive tokens take turns"
    assert 0 <= choose_copy(2**20, num_copies) < num_copies


def test_balancedness() -> None:
    assert balancedness([2, 2]) == 1
    assert balancedness([4, 0, 0, 0]) == 0.25
    assert balancedness([0, 0]) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1])
def test_loads_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"load of expert 2=.*: must be a number of tokens"):
        rebalance_layer([1, 2, value, 3], 4, num_gpus=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((13, 1, 1, 4), r"13 places for 12 experts on 4 GPUs: .*; possible: \[12, 16, 20\]"),
        ((8, 1, 1, 4), r"8 places for 12 experts on 4 GPUs: .*; possible: \[12, 16, 20\]"),
        ((16, 5, 1, 4), r"5 groups of 12 experts: must divide; \[1, 2, 3, 4, 6, 12\]"),
        ((16, 4, 3, 4), r"3 nodes with 4 groups of experts and 4 GPUs: .* possible: \[1, 2, 4\]"),
        ((16, 1, 1, 0), r"0 GPUs: must be at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance_layer([1] * 12, *sizes)


def test_packs_that_would_not_be_full_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 items in 4 packs: all must be full; possible: \[1, 2, 3, 6\]"):
        pack([1] * 6, 4)
    with pytest.raises(ConfigError, match=r"2 places for 3 experts"):
        replicate([1] * 3, 2)
    with pytest.raises(ConfigError, match=r"6 experts on 4 GPUs: must divide; possible: \[1, 2, 3, 6\]"):
        in_order(6, 8, 4)


def test_a_token_finds_the_copy_that_the_arithmetic_says() -> None:
    """moe/spread.py chooses copies on the device, in each rank for its own slice of the tokens."""
    spread = Spread(3, Parallel(0, 2, expert_size=2))
    ids = torch.tensor([[token % 6, (token * 5 + 1) % 6] for token in range(200)], dtype=torch.int32)
    assert spread.places_of(ids, 7) is ids
    arrangement = rebalance_layer([100, 7, 3, 60, 1, 0], 12, num_gpus=2)
    assert max(arrangement.counts) > 2
    spread.make_table(arrangement, torch.device("cpu"))
    table = spread._places
    for first in (0, 4090):
        found = spread.places_of(ids, first).tolist()
        for token, (row, chosen) in enumerate(zip(found, ids.tolist())):
            copies = [arrangement.copies[expert] for expert in chosen]
            assert row == [places[choose_copy(first + token, len(places))] for places in copies]
    spread.set_arrangement(in_order(6, 12, 2))
    assert spread._places is table, "in place: what was captured reads it"
    assert spread.places_of(ids, 0).max() < 12

"""The decisions of offload, simulated: which expert stays and which goes, and that nothing in use is given up."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from itertools import chain, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import ConfigError
from nanovllm.memory.budget import spread
from nanovllm.moe.offload.cache import ExpertCache, ExpertStats
from tests.moe.routing import Routing, simulate_hit_rates


def bring(cache: ExpertCache, layer: int, counts: dict[int, int]):
    selection = cache.select(layer, counts)
    for wave in selection.waves:
        for expert, buffer in wave:
            cache.begin(layer, expert, buffer)
            cache.copied(buffer, cache.num_pieces)
    cache.adopt(layer)
    return selection


def hold(cache: ExpertCache, experts: Sequence[Collection[int]]) -> Sequence[dict[int, None]]:
    """These are in host memory, which has no room for more."""
    cache.held, cache.num_blocks = [dict.fromkeys(some) for some in experts], [len(some) for some in experts]
    return cache.held


def save(cache: ExpertCache, moved: tuple[int, int, int | None]) -> None:
    layer, expert, other = moved
    held = cache.held[layer]
    assert other in held
    assert expert not in held
    del held[other]
    held[expert] = None


def holds_now(cache: ExpertCache, buffers: list[int]) -> set[tuple[int, int] | None]:
    return {cache.content(buffer) for buffer in buffers if cache._is_whole(buffer)}


def check_consistent(cache: ExpertCache) -> None:
    """Every buffer has one role, and what it holds is found: else an interrupt would cost hits for ever."""
    buffers = sorted(buffer for owned in cache._owned for buffer in owned) + sorted(cache._ring)
    assert sorted(buffers) == list(range(cache.num_buffers))
    held = {content: buffer for buffer in buffers if (content := cache.content(buffer)) is not None}
    assert held == cache._buffer_of


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_selection_never_overwrites_what_it_needs(data) -> None:
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(3, num_experts)))
    num_streaming = data.draw(st.integers(top_k, 2 * top_k + 2))
    policy = data.draw(st.sampled_from(["lfu", "lru", "none"]))
    num_cached = data.draw(st.integers(0, num_layers * num_experts))
    cache = ExpertCache(num_layers, num_experts, top_k, num_cached, num_streaming, policy, num_pieces=3)
    blocks = [data.draw(st.integers(0, num_experts)) for _ in range(num_layers)]
    hold(cache, [range(number) for number in blocks])
    quotas = [len(owned) for owned in cache._owned]
    for _ in range(data.draw(st.integers(1, 12))):
        layer = data.draw(st.integers(0, num_layers - 1))
        experts = data.draw(st.sets(st.integers(0, num_experts - 1), min_size=1))
        holds = {buffer: cache.content(buffer) for buffer in range(cache.num_buffers) if cache._is_whole(buffer)}
        selection = cache.select(layer, dict.fromkeys(experts, 1))
        assert all(holds[buffer] == (layer, expert) for expert, buffer in selection.hits.items())
        coming = [expert for wave in selection.waves for expert, _ in wave]
        assert sorted([*selection.hits, *coming]) == sorted(experts)
        in_use = list(selection.hits.values())
        for number, wave in enumerate(selection.waves):
            # On their way or computed on at once: the hits, this wave and the num_ahead - 1 before it.
            window = selection.waves[max(0, number - selection.num_ahead + 1) : number + 1]
            buffers = in_use + [buffer for other in window for _, buffer in other]
            assert len(set(buffers)) == len(buffers)
            for expert, buffer in wave:
                if cache.content(buffer) != (layer, expert) and (moved := cache.rescue(buffer)):
                    assert moved[:2] == cache.content(buffer)
                    kept = (layer, moved[2]) in holds_now(cache, cache._owned[layer])
                    assert kept or moved[0] != layer or moved[2] not in experts, "this call may still need it"
                    save(cache, moved)
                held = cache.begin(layer, expert, buffer)
                if data.draw(st.integers(0, 9)):  # now and then a copy fails
                    cache.copied(buffer, 3)
                else:
                    cache.copied(buffer, data.draw(st.integers(held, 3)))
        kept = set(in_use) & set(cache._owned[layer])
        cache.adopt(layer)
        assert kept <= set(cache._owned[layer])  # what the step chose does not lose its place to what came with it
        check_consistent(cache)
        next_layer = data.draw(st.integers(0, num_layers - 1))
        used = set(in_use) | {buffer for wave in selection.waves for _, buffer in wave}
        budget = data.draw(st.integers(0, 7))
        far = data.draw(st.booleans())
        guessed = {buffer for buffer in range(cache.num_buffers) if cache._contents[buffer].num_guessed}
        guesses = [] if next_layer == layer else cache.guess(next_layer, range(num_experts), budget, far)
        total = 0
        for expert, buffer, upto in guesses:
            assert buffer not in used
            assert not far or buffer not in guessed or cache._buffer_of[next_layer, expert] == buffer
            assert cache.content(buffer) == (next_layer, expert) or cache.rescue(buffer) is None
            held = cache.begin(next_layer, expert, buffer)
            total += upto - held
            cache.copied(buffer, upto, guess=True)
        assert total <= budget
        check_consistent(cache)
        assert [len(owned) for owned in cache._owned] == quotas
        assert [len(held) for held in cache.held] == blocks


def test_quotas_are_even_and_earlier_layers_get_the_rest() -> None:
    cache = ExpertCache(4, 8, 2, num_cached=10, num_streaming=2)
    assert cache.quotas() == [3, 3, 2, 2]
    with pytest.raises(ConfigError, match=r"11 expert buffers with 1 for streaming.*top_k=2"):
        ExpertCache(4, 8, 2, num_cached=10, num_streaming=1)


@pytest.mark.parametrize(
    ("num_streaming", "num_missing", "sizes"),
    [
        (4, 4, [4]),
        (4, 5, [2, 2, 1]),
        (4, 8, [2, 2, 2, 2]),
        (3, 3, [3]),
        (3, 4, [1, 1, 1, 1]),
        (2, 3, [1, 1, 1]),
    ],
)
def test_waves(num_streaming: int, num_missing: int, sizes: list[int]) -> None:
    cache = ExpertCache(1, 8, 2, 0, num_streaming)
    selection = cache.select(0, dict.fromkeys(range(num_missing), 1))
    assert [len(wave) for wave in selection.waves] == sizes


def test_a_hot_miss_takes_the_place_of_the_coldest_and_a_cold_one_does_not() -> None:
    cache = ExpertCache(1, 8, 1, num_cached=2, num_streaming=1)
    for expert in (0, 0, 0, 1):
        bring(cache, 0, {expert: 1})
    first = bring(cache, 0, {2: 1})  # used once, just now: at least as hot as expert 1, so it stays
    assert not first.hits
    assert bring(cache, 0, {0: 1}).hits
    assert bring(cache, 0, {2: 1}).hits
    for _ in range(3):
        bring(cache, 0, {2: 1})
    bring(cache, 0, {5: 1})  # 0 and 2 are both hotter: it stays in the ring
    bring(cache, 0, {6: 1})  # and is overwritten there
    assert not bring(cache, 0, {5: 1}).hits
    assert bring(cache, 0, {0: 1}).hits


def test_policies_differ_where_they_should() -> None:
    def hits(policy: str) -> list[bool]:
        cache = ExpertCache(2, 8, 1, num_cached=2, num_streaming=1, policy=policy)
        found = []
        for expert in (0, 0, 0, 0, 3, 0):
            found.append(bool(bring(cache, 0, {expert: 1}).hits))
            bring(cache, 1, {7 - expert: 1})  # the other layer sweeps the ring
        return found

    assert hits("lfu") == [False, True, True, True, False, True]  # one use does not outweigh four
    assert hits("lru") == [False, True, True, True, False, False]
    assert hits("none") == [False] * 6


def test_a_prompt_seeds_the_heat_but_does_not_drown_it() -> None:
    cache = ExpertCache(1, 4, 1, num_cached=2, num_streaming=1, decay=0.9)
    for _ in range(200):
        bring(cache, 0, {0: 1})
    window = cache._heat[0][0]
    assert window == pytest.approx(10.0)  # 1 / (1 - 0.9)
    bring(cache, 0, {1: 600, 2: 400})
    heat = cache._heat[0]
    assert heat[1] > heat[2] > 0
    assert 0.3 * window < heat[0] < 0.4 * window  # a third of the past remains, however long the prompt
    assert sum(heat) == pytest.approx(window)
    # One decode counts the same whether it is called a prompt of one token or not.
    one, many = (ExpertCache(1, 4, 1, 0, 1, decay=0.9) for _ in range(2))
    for _ in range(3):
        bring(one, 0, {1: 1})
    bring(many, 0, {1: 3})
    assert one._heat[0] == pytest.approx(many._heat[0])


def test_the_ring_remembers_what_it_still_holds() -> None:
    cache = ExpertCache(1, 8, 2, num_cached=0, num_streaming=4)
    bring(cache, 0, {0: 1, 1: 1})
    bring(cache, 0, {2: 1, 3: 1})
    assert set(bring(cache, 0, {0: 1, 3: 1}).hits) == {0, 3}
    bring(cache, 0, {4: 1, 5: 1})  # the two used longest ago go: 1 and 2
    assert set(bring(cache, 0, {0: 1, 3: 1}).hits) == {0, 3}


def global_lru_rate(num_buffers: int, num_layers: int, num_tokens: int) -> float:
    """One LRU for all layers, as similar engines have it."""
    buffers: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = total = 0
    for choices in islice(Routing().tokens(num_layers), num_tokens):
        for layer, experts in enumerate(choices):
            for expert in experts:
                total += 1
                hits += (layer, expert) in buffers
                buffers[layer, expert] = None
                buffers.move_to_end((layer, expert))
                if len(buffers) > num_buffers:
                    buffers.popitem(last=False)
    return hits / total


def test_a_global_lru_never_hits_where_quotas_do() -> None:
    """32 layers of top 2 touch 64 experts before the first layer comes round again."""
    assert global_lru_rate(30, 32, 100) == global_lru_rate(42, 32, 100) == 0.0
    per_layer = simulate_hit_rates([1], "lru", num_layers=32, num_tokens=100)[0]  # 32 buffers and a ring of 4
    assert per_layer > 0.1


def test_hit_rates_of_a_single_sequence() -> None:
    """Skewed popularity, 2, 4 and 6 of 8 experts cached: LRU 0.31-0.49, 0.59-0.70, 0.83-0.87; decayed LFU better."""
    lru = simulate_hit_rates([2, 4, 6], "lru")
    lfu = simulate_hit_rates([2, 4, 6], "lfu")
    for rate, low, high in zip(lru, (0.31, 0.59, 0.83), (0.49, 0.70, 0.87)):
        assert low <= rate <= high, lru
    gains = [b - a for a, b in zip(lru, lfu)]
    assert min(gains) >= 0.005, gains
    assert 0.02 <= gains[0] <= 0.09, gains
    assert 0.02 <= gains[1] <= 0.08, gains
    assert simulate_hit_rates([4], "none")[0] < 0.1
    assert simulate_hit_rates([8], "lfu", num_tokens=400)[0] == pytest.approx(1.0, abs=0.01)


# ---- host memory that cannot hold all --------------------------------------------------------------------------------


def play(
    cached: int,
    in_host: int,
    routing: Routing,
    exclusive: bool = True,
    policy: str = "lfu",
    disk_cost: float = 8.0,
    num_layers: int = 2,
    num_tokens: int = 450,
) -> Counter[str]:
    """Experts that come from host memory and from disk and go back, in the last two thirds of a decode with a prompt
    now and then. Not exclusive: host memory keeps the first ones of each layer for ever, whatever is on the device."""
    cache = ExpertCache(num_layers, routing.num_experts, routing.top_k, cached, 2 * routing.top_k, policy)
    cache.disk_cost = disk_cost
    held = [range(number) for number in spread(in_host, num_layers)[::-1]]
    if exclusive:
        held = hold(cache, held)
    moved: Counter[str] = Counter()
    for number, choices in zip(range(num_tokens), routing.tokens(num_layers, seed=cached)):
        if number == num_tokens // 3:
            moved.clear()
        for layer, experts in enumerate(choices):
            counts = dict.fromkeys(range(routing.num_experts) if number % 50 == 0 else experts, 1)
            for expert, buffer in chain(*cache.select(layer, counts).waves):
                if exclusive and cache.content(buffer) != (layer, expert) and (out := cache.rescue(buffer)):
                    save(cache, out)
                    moved["back"] += 1
                if cache.begin(layer, expert, buffer) < cache.num_pieces:
                    moved["host" if expert in held[layer] else "disk"] += 1
                    cache.copied(buffer, cache.num_pieces)
            cache.adopt(layer)
    return moved


ROUTINGS = {
    "even": Routing(skew=0.0, drift=0.0, repeat=0.0),
    "skewed": Routing(),
    "very skewed": Routing(skew=1.5),
    "drifting": Routing(skew=1.2, drift=0.1),
    "many": Routing(num_experts=24, top_k=4),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_nothing_is_read_from_disk_if_buffers_and_host_memory_hold_all(name: str, policy: str) -> None:
    """With not one place more than there are experts. A third of the decode, with its prompts, fills the buffers."""
    total = 2 * ROUTINGS[name].num_experts
    for cached in (1, total // 3, total // 2, 2 * total // 3, total - 1):
        assert play(cached, total - cached, ROUTINGS[name], False, policy)["disk"] > 0 or cached == total - 1
        assert play(cached, total - cached, ROUTINGS[name], True, policy)["disk"] == 0


@pytest.mark.parametrize("disk_cost", [2.0, 8.0, 50.0])
@pytest.mark.parametrize("name", ROUTINGS)
def test_time_for_copies_is_never_more_than_with_fixed_blocks(name: str, disk_cost: float) -> None:
    """In copies from host memory; a copy back counts as one. Two per cent for luck: with even choices and no cached
    buffer there is nothing to gain."""
    total = 2 * ROUTINGS[name].num_experts
    for cached, in_host in ((0, 0.6), (0.2, 0.3), (0.5, 0.3), (0.3, 0.7), (0.7, 0.7)):
        args = int(cached * total), int(in_host * total), ROUTINGS[name]
        fixed, moving = (play(*args, exclusive, disk_cost=disk_cost) for exclusive in (False, True))
        before, after = (m["host"] + m["back"] + disk_cost * m["disk"] for m in (fixed, moving))
        assert after <= 1.02 * before, (cached, in_host, fixed, moving)
        assert moving["disk"] <= 1.02 * fixed["disk"]
        if cached + in_host >= 1 and disk_cost >= 8:
            assert after < before / 1.8, (cached, in_host, fixed, moving)
            assert moving["back"] < moving["host"] / 4


def test_the_table_of_the_docs_is_this_simulation() -> None:
    text = (Path(__file__).parents[2] / "docs/moe.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:(\d+) and 64 GB .*)?(?:\| )+(even|skewed) \| ([\d., ]+) \| ([\d., ]+) \|$", text, re.M)
    assert len(rows) == 6
    cached = 0
    for card, name, fixed, moving in rows:
        cached = {"80": 43, "24": 11, "11": 3}.get(card, cached)  # of 64, as 174, 43 and 12 of 256
        for stated, exclusive in ((fixed, False), (moving, True)):
            found = play(cached, 42, ROUTINGS[name], exclusive, num_layers=8, num_tokens=900)
            names = ("host", "disk", "back") if exclusive else ("host", "disk")
            assert [float(number) for number in stated.split(",")] == [round(found[n] / 8 / 600, 2) for n in names]


def test_with_room_for_all_in_host_memory_nothing_goes_back() -> None:
    assert play(7, 16, Routing()).keys() == {"host"}


def test_an_expert_that_is_nowhere_else_is_worth_more_in_its_buffer() -> None:
    """Two cached, one in a buffer only. It goes for one that is chosen much more often and not before, and then to the
    host, in place of the hotter one of those that stay."""
    cache = ExpertCache(1, 4, 1, num_cached=2, num_streaming=1)
    hold(cache, [(1, 2, 3)])
    for expert in (0, *[1] * 9):
        bring(cache, 0, {expert: 1})
    kept = cache._owned[0]
    bring(cache, 0, {2: 1})
    bring(cache, 0, {2: 1})
    assert cache._heat[0][2] > cache._heat[0][0] + 0.9
    assert {cache.content(buffer) for buffer in kept} == {(0, 0), (0, 1)}, "a copy back costs more than that"
    for _ in range(3):
        bring(cache, 0, {2: 1})
    (buffer,) = cache._ring
    assert cache.content(buffer) == (0, 0)
    assert cache.rescue(buffer) == (0, 0, 1)
    hold(cache, [(1, 0, 3)])
    assert cache.rescue(buffer) is None


def test_a_disk_as_fast_as_the_link_is_not_avoided() -> None:
    """What an expert costs that is read from disk is what it counts: none in host memory, all alike."""
    cache = ExpertCache(1, 4, 1, num_cached=1, num_streaming=1)
    hold(cache, [(1,)])
    cache.disk_cost = 1.0
    bring(cache, 0, {0: 1})
    bring(cache, 0, {1: 1})
    assert cache.content(cache._owned[0][0]) == (0, 1)


def test_routing_is_skewed_and_has_distinct_choices() -> None:
    draws = [layers[0] for layers in islice(Routing(drift=0.0).tokens(2, seed=1), 2000)]
    assert all(len(set(chosen)) == 2 for chosen in draws)
    counts = sorted(sum(expert in chosen for chosen in draws) for expert in range(8))
    assert counts[-1] > 2 * counts[0]


def test_statistics_of_nothing() -> None:
    assert ExpertStats().hit_rate == ExpertStats().bytes_per_token == ExpertStats().prefetch_precision == 0.0
    later = ExpertStats(hits=3, layer_hits=(1, 2)) - ExpertStats(hits=1)
    assert (later.hits, later.layer_hits) == (2, (1, 2))
    summary = ExpertStats(hits=3, misses=1, bytes_copied=8, tokens=2, layer_hits=(3,)).summary()
    assert (summary["hit_rate"], summary["bytes_per_token"], summary["misses"]) == (0.75, 4.0, 1)
    assert "layer_hits" not in summary

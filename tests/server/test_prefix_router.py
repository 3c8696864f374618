"""Which replica a request goes to: same beginning, same replica, unless that one has too much to do. No Ray here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.server.prefix_router import BLOCK_CHARS, BLOCK_TOKENS, MAX_BLOCKS, PrefixRouter, body_keys, prefix_keys


def text(char: str, num_blocks: int = 2) -> str:
    return char * BLOCK_CHARS * num_blocks


def router_of(*replicas: str, **options: Any) -> PrefixRouter:
    router = PrefixRouter(**options)
    router.set_replicas(replicas)
    return router


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [BLOCK_CHARS, BLOCK_TOKENS])
@pytest.mark.parametrize(("more", "count"), [(-1, 2), (0, 3), (1, 3)])
def test_only_whole_blocks_have_keys(size: int, more: int, count: int) -> None:
    length = 3 * size + more
    prompt = "x" * length if size == BLOCK_CHARS else [7] * length
    assert len(prefix_keys(prompt)) == count
    assert len(set(prefix_keys(prompt))) == count  # the same block at another place is another prefix


def test_so_many_blocks_and_no_more() -> None:
    for prompt in (text("x", MAX_BLOCKS + 3), [7] * BLOCK_TOKENS * (MAX_BLOCKS + 3)):
        assert len(prefix_keys(prompt)) == MAX_BLOCKS


@given(st.text(max_size=400), st.text(max_size=400), st.integers(0, 400))
def test_keys_are_shared_as_far_as_blocks_are(first: str, second: str, common: int) -> None:
    second = first[:common] + second
    same = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    keys = prefix_keys(first), prefix_keys(second)
    shared = [a == b for a, b in zip(*keys)]
    assert shared == [(i + 1) * BLOCK_CHARS <= same for i in range(len(shared))]


def test_salts_and_kinds_share_nothing() -> None:
    keys = [prefix_keys(text("x")), prefix_keys(text("x"), "tenant"), prefix_keys([120] * 4 * BLOCK_TOKENS)]
    assert len({key for chain in keys for key in chain}) == sum(map(len, keys))


def test_conversations_meet_the_same_replica() -> None:
    """What begins alike has the same first keys: the next turn of a conversation, the same instructions."""
    long = "the men of the town sing in the rain " * 20
    turn = {"role": "user", "content": long}
    for one, two in (
        ({"input": [turn]}, {"input": [turn, {"role": "user", "content": "b"}]}),
        ({"messages": [turn], "model": "m"}, {"messages": [turn, {"content": "b", "role": "user"}]}),
        ({"input": long + "a"}, {"input": long + "b"}),
        ({"instructions": long, "input": "a"}, {"instructions": long, "input": "b"}),
        (
            {"system": long, "messages": [{"role": "user", "content": "a"}]},
            {"system": long, "messages": [{"role": "user", "content": "b"}]},
        ),
    ):
        first, second = (body_keys(json.dumps(body).encode()) for body in (one, two))
        assert first
        assert first[:4] == second[:4]
    with_tools, without = ({"messages": [turn], **more} for more in ({"tools": [{"type": "function"}]}, {}))
    assert not set(body_keys(json.dumps(with_tools).encode())) & set(body_keys(json.dumps(without).encode()))
    assert body_keys(b'{"input": 5}') == body_keys(b'{"input": null}') == ()


def test_bodies() -> None:
    def keys(**fields: Any) -> tuple[bytes, ...]:
        return body_keys(json.dumps(fields).encode())

    ids = list(range(3 * BLOCK_TOKENS))
    assert keys(prompt=text("x")) == keys(prompt=[text("x"), text("y")]) == prefix_keys(text("x"))
    assert keys(prompt=ids) == keys(prompt=[ids, [1]]) == prefix_keys(ids)
    assert keys(prompt=text("x"), cache_salt="s") == prefix_keys(text("x"), "s")
    assert keys(prompt=text("x"), cache_salt=None) == prefix_keys(text("x"))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b'{"prompt": 5}', b'{"prompt": []}', b'{"prompt": [[]]}', b"\xff",
             b'{"prompt": {"a": 1}}', b'{"messages": 5}', b'{"messages": [1e999]}', b'{"prompt": [1e30]}',
             b'{"prompt": [99999999999999999999]}', b'{"prompt": "\\ud800"}', b"[" * 100_000,
             b'{"prompt": "' + b"x" * 200 + b'", "cache_salt": "\\ud800"}'],
)  # fmt: skip
def test_what_cannot_be_read_has_no_keys(body: bytes) -> None:
    assert len(body_keys(body)) <= 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_json_is_survived(value: Any) -> None:
    for name in ("prompt", "messages", "cache_salt", "tools"):
        body_keys(json.dumps({"messages": [], "prompt": "", name: value}).encode())


# ---- choices -------------------------------------------------------------------------------------------------------


def test_same_prefix_same_replica_and_others_take_turns() -> None:
    router = router_of("a", "b", "c")
    first = {char: router.choose(prefix_keys(text(char)))[0] for char in "qrstuv"}
    assert sorted(first.values()) == ["a", "a", "b", "b", "c", "c"]
    for char, replica in first.items():
        assert router.choose(prefix_keys(text(char) + "and then something else"))[0] == replica


def test_the_longest_prefix_wins() -> None:
    router = router_of("a", "b", spill=0)
    short, long = prefix_keys(text("x", 1)), prefix_keys(text("x", 1) + text("y", 1))
    assert router.choose(short)[0] == "a"
    router.started("a")
    assert router.choose(long)[0] == "b"  # spilled: now b holds both blocks, a the first
    router.finished("a")
    router.started("b")
    assert router.choose(short)[0] == "a"  # of those who hold it, the one with less to do
    router.finished("b")
    assert router.choose(long)[0] == "b"


@pytest.mark.parametrize("spill", [0, 1, 8])
def test_a_busy_replica_keeps_its_prefix_up_to_the_limit(spill: int) -> None:
    router = router_of("a", "b", spill=spill)
    keys = prefix_keys(text("x"))
    chosen = []
    for _ in range(spill + 2):
        chosen.append(router.choose(keys)[0])
        router.started(chosen[-1])
    assert chosen == ["a"] * (spill + 1) + ["b"]
    assert router.choose(keys)[0] == ("b" if spill else "a")  # both hold it now: the less loaded of the two


def test_a_short_prompt_goes_to_the_least_loaded() -> None:
    router = router_of("a", "b", "c")
    router.started("a")
    router.started("b")
    assert router.choose(()) == ["c", "a", "b"]


def test_replicas_that_leave_and_come() -> None:
    router = router_of("a", "b")
    keys = prefix_keys(text("x"))
    assert router.choose(keys)[0] == "a"
    router.started("a")
    router.set_replicas(["b"])
    assert len(router) == 0
    assert router.choose(keys) == ["b"]
    router.finished("a")  # its request ends with an error, later
    router.set_replicas(["b", "a"])
    assert router.loads == {"b": 0, "a": 0}
    assert router.choose(keys)[0] == "b"
    router.set_replicas([])
    assert router.choose(keys) == []
    router.finished("unknown")


def test_a_new_replica_takes_turns_like_the_others() -> None:
    """Requests one after another: nothing runs when the next comes, so only turns decide."""
    router = router_of("a", "b")
    for _ in range(1000):
        router.choose(())
    router.set_replicas(["a", "b", "new"])
    chosen = [router.choose(())[0] for _ in range(9)]
    assert [chosen.count(replica) for replica in ("a", "b", "new")] == [3, 3, 3]


def test_a_new_replica_does_not_get_all_requests_of_busy_ones() -> None:
    router = router_of("a", "b")
    known = prefix_keys(text("x"))
    for _ in range(40):
        router.started(router.choose(())[0])
    router.choose(known)
    router.set_replicas(["a", "b", "new"])
    assert router.loads["new"] == 0
    assert router.choose(known)[0] != "new", "20 are more than the limit above none, but a cold cache is no remedy"
    chosen = []
    for _ in range(9):
        chosen.append(router.choose(())[0])
        router.started(chosen[-1])
    assert chosen.count("new") == 3


def test_a_new_replica_is_like_the_others_in_the_end() -> None:
    router = router_of("a", "b")
    for _ in range(8):
        router.started(router.choose(())[0])
    router.set_replicas(["a", "b", "new"])
    for _ in range(4):  # for each that it has ended, it takes one more than before
        router.started("new")
        router.finished("new")
    assert router.choose(())[0] == router.choose(())[0] == "new"
    for _ in range(4):
        router.finished("a")
        router.finished("b")
    assert sorted(router.choose(())[0] for _ in range(3)) == ["a", "b", "new"]  # idle: they take turns


def test_all_replicas_new_at_once() -> None:
    router = router_of("a")
    for _ in range(5):
        router.started("a")
    router.set_replicas(["b", "c"])
    assert sorted(router.choose(())[0] for _ in range(2)) == ["b", "c"]


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    router = router_of("a", "b", max_entries=4)
    first, second, third = (prefix_keys(text(char)) for char in "xyz")
    assert [router.choose(keys)[0] for keys in (first, second)] == ["a", "b"]
    assert router.choose(first)[0] == "a"  # used again: second is the oldest now
    assert router.choose(third)[0] == "b"
    assert len(router) == 4
    assert [router.choose(keys)[0] for keys in (third, first)] == ["b", "a"]
    for _ in range(3):
        assert router.choose(third)[0] == "b"
    assert router.choose(second)[0] == "a"  # forgotten: a new prompt like any other


def test_of_a_long_prompt_the_end_is_forgotten_first() -> None:
    router = router_of("a", "b", max_entries=3)
    keys = prefix_keys(text("x", 5))
    assert router.choose(keys)[0] == "a"
    assert router.choose(())[0] == "b"
    assert router.choose(())[0] == "a"
    assert router.choose(keys[:1])[0] == "a"


REPLICAS = ("a", "b", "c", "d")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.text("xy", min_size=0, max_size=4)),
        st.tuples(st.just("finish"), st.integers(0, 20)),
        st.tuples(st.just("replicas"), st.sets(st.sampled_from(REPLICAS))),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 12), st.integers(0, 3))
def test_what_always_holds(steps: list[tuple[str, Any]], max_entries: int, spill: int) -> None:
    router = PrefixRouter(max_entries, spill)
    present: set[str] = set()
    running: list[str] = []
    for kind, value in steps:
        if kind == "replicas":
            present = value
            running = [replica for replica in running if replica in present]
            router.set_replicas(sorted(present))
        elif kind == "finish" and running:
            router.finished(running.pop(value % len(running)))
        elif kind == "choose":
            keys = prefix_keys("".join(text(char, 1) for char in value))
            before = router._weigh()
            order = router.choose(keys)
            assert sorted(order) == sorted(present)
            if order:
                assert before[order[0]] <= min(before.values()) + spill
                if keys and spill:
                    assert router.choose(keys)[0] == order[0]  # nothing happened in between
                router.started(order[0])
                running.append(order[0])
        assert len(router) <= max_entries
        assert router.loads == {replica: running.count(replica) for replica in present}


def test_it_needs_nothing_but_python() -> None:
    code = "import sys, nanovllm.server.prefix_router; sys.exit(bool({'torch', 'ray', 'fastapi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

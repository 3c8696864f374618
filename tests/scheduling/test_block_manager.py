"""BlockManager: sharing, eviction order, hashing."""

from __future__ import annotations

import time

import pytest

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling import block_manager
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.sequence import Sequence, StopRule

SIZE = 4


def make_seq(tokens: list[int], seq_id: int = 0, salt: str = "", reads: bool = True) -> Sequence:
    return Sequence(
        seq_id, list(tokens), len(tokens), StopRule(10), SamplingParams(), cache_salt=salt, reads_prefix_cache=reads
    )


def compute(blocks: BlockManager, seq: Sequence) -> list[int]:
    """Adopt what is cached and compute the rest, as one step does; returns the adopted blocks."""
    matched = blocks.match(seq)
    blocks.adopt(seq, matched)
    num_new = len(seq.token_ids) - seq.num_computed
    assert blocks.reserve(seq, num_new)
    seq.num_computed += num_new
    blocks.publish(seq)
    return matched


def is_cached(blocks: BlockManager, tokens: list[int]) -> int:
    """How many leading blocks of these tokens would be found (one token more, so that the last block counts)."""
    return len(blocks.match(make_seq([*tokens, 99])))


@pytest.mark.parametrize(
    ("num_tokens", "num_shared"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3)]
)
def test_the_last_token_is_always_computed(num_tokens: int, num_shared: int) -> None:
    """The same prompt again must leave at least one token to compute, at k*block-1, k*block, k*block+1."""
    blocks = BlockManager(20, SIZE)
    first, again = make_seq(list(range(num_tokens))), make_seq(list(range(num_tokens)), 1)
    assert compute(blocks, first) == []
    matched = blocks.match(again)
    assert len(matched) == num_shared == (num_tokens - 1) // SIZE
    blocks.adopt(again, matched)
    assert again.num_remaining >= 1
    assert again.block_table == first.block_table[:num_shared]
    assert all(blocks.owners(block) == 2 for block in matched)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_partial_block_has_no_key(num_tokens: int) -> None:
    """A prompt shorter than a block is released, and grown, without a hash for its partial block."""
    blocks = BlockManager(4, SIZE)
    seq = make_seq(list(range(num_tokens)))
    compute(blocks, seq)
    assert blocks.publish(seq) == []
    assert is_cached(blocks, list(range(num_tokens))) == 0
    for token in range(num_tokens, 6):  # decode over the edge of the block: published exactly when it is full
        seq.token_ids.append(token)
        assert blocks.reserve(seq, 1)
        seq.num_computed += 1
        assert len(blocks.publish(seq)) == (token == 3)
    blocks.release(seq)
    assert is_cached(blocks, [0, 1, 2, 3]) == 1
    assert blocks.num_free == 4


def test_a_block_with_an_unknown_token_is_not_published() -> None:
    """With steps in flight a block may be full of tokens of which the last is not known yet."""
    blocks = BlockManager(4, SIZE)
    seq = make_seq([0, 1, 2])
    assert blocks.reserve(seq, 4)
    seq.num_computed = 4
    assert blocks.publish(seq) == []
    seq.token_ids.append(3)
    assert blocks.publish(seq) == seq.block_table[:1]


def test_identical_prompts_of_one_step_share_blocks() -> None:
    """The second of two equal prompts shares what the first is about to compute in the same step."""
    blocks = BlockManager(10, SIZE)
    prompts = [make_seq(list(range(10)), i) for i in range(3)]
    for seq in prompts:
        compute(blocks, seq)
    assert len({tuple(seq.block_table[:2]) for seq in prompts}) == 1
    assert len({seq.block_table[2] for seq in prompts}) == 3
    assert blocks.num_used == 2 + 3
    for seq in prompts:
        blocks.release(seq)
    assert blocks.num_free == 10


def test_both_copies_of_a_block_stay_findable() -> None:
    """Two sequences computed the same block apart; evicting one copy must not hide the other."""
    blocks = BlockManager(4, SIZE)
    first, second = make_seq([0, 1, 2, 3]), make_seq([0, 1, 2, 3], 1)
    compute(blocks, first)
    compute(blocks, second)  # the last token is always computed, so this makes a copy
    copies = [first.block_table[0], second.block_table[0]]
    assert copies[0] != copies[1]
    blocks.release(first)
    other = make_seq([9] * 12, 2)  # takes the two blank blocks and then the only free one with content
    compute(blocks, other)
    assert copies[0] in other.block_table
    assert blocks.match(make_seq([0, 1, 2, 3, 4])) == [copies[1]]
    blocks.release(second)
    assert blocks.match(make_seq([0, 1, 2, 3, 4])) == [copies[1]]


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    """The key of a block is that of its whole prefix."""
    blocks = BlockManager(10, SIZE)
    compute(blocks, make_seq([1, 1, 1, 1, 5, 6, 7, 8]))
    assert is_cached(blocks, [1, 1, 1, 1, 5, 6, 7, 8]) == 2
    assert is_cached(blocks, [2, 2, 2, 2, 5, 6, 7, 8]) == 0
    assert is_cached(blocks, [5, 6, 7, 8]) == 0


def test_salt_separates() -> None:
    """A request with another salt can neither use nor probe the blocks of another tenant."""
    blocks = BlockManager(10, SIZE)
    tokens = list(range(8))
    compute(blocks, make_seq(tokens, salt="alice"))
    assert blocks.match(make_seq([*tokens, 9])) == []
    assert blocks.match(make_seq([*tokens, 9], salt="bob")) == []
    assert len(blocks.match(make_seq([*tokens, 9], salt="alice"))) == 2


def test_a_hash_collision_does_not_splice_foreign_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that maps everything to one key, the tokens still decide."""
    monkeypatch.setattr(block_manager, "_chain", lambda parent, tokens: b"same")
    blocks = BlockManager(10, SIZE)
    compute(blocks, make_seq([1, 2, 3, 4, 5, 6, 7, 8]))
    compute(blocks, make_seq([11, 12, 13, 14, 15, 16, 17, 18]))
    assert blocks.match(make_seq([21, 22, 23, 24, 25])) == []
    assert blocks.match(make_seq([1, 2, 3, 9, 5])) == []
    assert len(blocks.match(make_seq([11, 12, 13, 14, 15, 16, 17, 18, 19]))) == 2


def test_the_key_is_wide_and_sees_every_token() -> None:
    """At least 128 bits, and no way to move tokens between parent and block or to mix up large ids."""
    keys = {
        block_manager._chain(parent, tokens)
        for parent in (b"\0" * 16, b"\1" * 16)
        for tokens in ((1, 2), (2, 1), (258, 0), (2, 1, 0), (2**31 - 1, 0), (0, 2**31 - 1))
    }
    assert len(keys) == 12
    assert min(map(len, keys)) >= 16


def test_eviction_is_least_recently_used() -> None:
    """The cached block that was released longest ago goes first; a block used again is young again."""
    blocks = BlockManager(3, SIZE)
    prompts = {i: [i] * SIZE for i in range(3)}
    for i, tokens in prompts.items():
        seq = make_seq(tokens, i)
        compute(blocks, seq)
        blocks.release(seq)
    reader = make_seq([*prompts[0], 7], 3)
    blocks.adopt(reader, blocks.match(reader))
    blocks.release(reader)
    order = []
    for i in range(10, 13):
        taker = make_seq([i], i)
        assert blocks.reserve(taker, 1)
        order.append([j for j, tokens in prompts.items() if not is_cached(blocks, tokens)])
    assert order == [[1], [1, 2], [0, 1, 2]]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """A tail without its head can never be found again."""
    blocks = BlockManager(4, SIZE)
    tokens = list(range(16))
    seq = make_seq(tokens)
    compute(blocks, seq)
    blocks.release(seq)
    left = []
    for i in range(1, 5):
        assert blocks.reserve(make_seq([50 + i], i), 1)
        left.append(is_cached(blocks, tokens))
    assert left == [3, 2, 1, 0]


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    blocks = BlockManager(2, SIZE)
    cached, partial = make_seq([0, 1, 2, 3]), make_seq([7], 1)
    compute(blocks, cached)
    compute(blocks, partial)
    blocks.release(cached)
    blocks.release(partial)  # younger, but there is nothing in it to find
    assert blocks.reserve(make_seq([9], 2), 1)
    assert is_cached(blocks, [0, 1, 2, 3]) == 1
    assert blocks.reserve(make_seq([9], 3), 1)
    assert is_cached(blocks, [0, 1, 2, 3]) == 0


def test_reserve_is_all_or_nothing() -> None:
    blocks = BlockManager(3, SIZE)
    seq = make_seq(list(range(13)))
    assert not blocks.reserve(seq, 13)
    assert seq.block_table == []
    assert blocks.num_free == 3
    assert blocks.reserve(seq, 12)
    assert blocks.reserve(seq, 12)  # already has them
    assert len(seq.block_table) == 3


def test_caching_can_be_off_for_all_or_for_one_reader() -> None:
    off, on = BlockManager(8, SIZE, enable_prefix_caching=False), BlockManager(8, SIZE)
    for blocks in (off, on):
        compute(blocks, make_seq(list(range(8))))
    assert is_cached(off, list(range(8))) == 0
    assert is_cached(on, list(range(8))) == 2
    # A sequence that needs the logits of every prompt position reads nothing from the cache; others read its blocks.
    reader = make_seq(list(range(20, 29)), 1, reads=False)
    compute(on, reader)
    assert on.match(make_seq(list(range(9)), 2, reads=False)) == []
    assert is_cached(on, list(range(20, 28))) == 2


def test_num_free_without_counts_only_matched_blocks_that_are_free() -> None:
    blocks = BlockManager(5, SIZE)
    owned, gone = make_seq([1] * 4), make_seq([2] * 4, 1)
    compute(blocks, owned)
    compute(blocks, gone)
    blocks.release(gone)
    for tokens, left in [([1] * 5, 4), ([2] * 5, 3), ([3] * 5, 4)]:
        matched = blocks.match(make_seq(tokens, 2))
        assert blocks.num_free_without(matched) == left


def test_a_sequence_that_waits_is_not_matched_from_the_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is new is looked up, until the cache loses a block: then what was found may be gone."""
    blocks = BlockManager(num_blocks=6, block_size=4)
    first = make_seq(list(range(12)))
    compute(blocks, first)
    waiting, looked_up = make_seq(list(range(21)), 1), []
    found = blocks._hash
    monkeypatch.setattr(blocks, "_hash", lambda seq, index: (looked_up.append(index), found(seq, index))[1])
    assert blocks.match(waiting) == blocks.match(waiting) == first.block_table
    assert looked_up == [0, 1, 2, 3, 3]
    owned = list(first.block_table)
    blocks.release(first)
    assert blocks.reserve(make_seq(list(range(50, 66)), 2), 16)  # the three blank blocks and one of the cached ones
    assert blocks.match(waiting) == owned[:2]
    assert looked_up[5:] == [0, 1, 2]


def test_held_twice_and_adopted_between() -> None:
    """Released for step 5, adopted, released again for step 6: it comes back with step 6, and once."""
    blocks = BlockManager(3, SIZE)
    seq = make_seq([1] * 4)
    compute(blocks, seq)
    blocks.release(seq, after=5)
    again = make_seq([1] * 5, 1)
    blocks.adopt(again, blocks.match(again))
    assert blocks.num_held == 0
    blocks.release(again, after=6)
    blocks.retire(5)
    assert (blocks.num_held, blocks.num_free) == (1, 2)
    blocks.retire(6)
    assert (blocks.num_held, blocks.num_free) == (0, 3)
    blocks.retire(7)
    assert blocks.num_free == 3


def seconds_per_block(num_blocks: int) -> float:
    """Time to take 200 cached blocks out of the middle of the free list and put them back, best of several."""
    blocks = BlockManager(num_blocks, 1)
    everything = make_seq(list(range(num_blocks)))
    compute(blocks, everything)
    middle = everything.block_table[num_blocks // 2 : num_blocks // 2 + 200]
    blocks.release(everything)
    best = float("inf")
    for i in range(7):
        seq = make_seq([1], i)
        start = time.perf_counter()
        blocks.adopt(seq, middle)
        blocks.release(seq)
        best = min(best, time.perf_counter() - start)
    return best / 200


def test_work_does_not_grow_with_the_free_list() -> None:
    """A list of free blocks needs time in proportion to its length; a factor of 100 would show."""
    assert seconds_per_block(100_000) < 15 * seconds_per_block(1_000)

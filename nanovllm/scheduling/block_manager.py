"""BlockManager: which sequences own which blocks of the paged KV cache, and which blocks can be found by content.

The cache is num_blocks blocks of block_size slots; a sequence's block_table maps its i-th run of block_size tokens to a
block. A block is in one of three states:

    owned   ref_count > 0: in the block table of that many sequences
    held    ref_count == 0, but a step still in flight may read it (see `release`)
    free    ref_count == 0, in `_free`. It keeps its content and its hash until it is taken for something else, so a
            free block can still be found: the prefix cache costs no memory of its own.

Prefix caching. A block becomes findable (*published*) once it is full. Its key is a chained hash,
h_i = H(h_{i-1}, tokens_i) with h_{-1} = H(salt), so equal keys mean equal *prefixes*, not just equal blocks; 256 bits
and a comparison of the tokens keep a collision from splicing foreign KV into an answer.

Eviction is least recently used: `_free` is ordered, `take` pops its front. A released sequence puts its blocks back
tail first, so the tail of a prefix is evicted before its head: a head without its tail is still useful, a tail
without its head can never be reached.

Every operation is O(1) per block touched.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b

from nanovllm.scheduling.sequence import Sequence


def _chain(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=32).digest()


@dataclass
class Journal:
    """Blocks that became findable, and findable ones taken for other use: events that the plans do not show."""

    published: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queries = 0  # prompt tokens looked up in the prefix cache, and those found
        self.num_hits = 0
        self.journal: Journal | None = None  # set while the engine is watched (telemetry/)
        self._num_forgotten = 0  # times that findable blocks became unfindable
        self.clear()

    def clear(self) -> None:
        """Every block is free and none is findable, whatever an interrupted change has left behind."""
        self._num_forgotten += 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._ref_counts = [0] * self.num_blocks
        self._keys: list[bytes | None] = [None] * self.num_blocks
        self._tokens: list[tuple[int, ...]] = [()] * self.num_blocks
        # Two sequences may each compute the same block; both copies stay findable, so evicting one loses nothing.
        self._found: dict[bytes, dict[int, None]] = {}
        self._next_place = 0
        self._held: deque[tuple[int, list[int]]] = deque()  # (step that must end first, blocks)
        self._held_until: dict[int, int] = {}  # block -> the step it is held for now; an adopted block is not held

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held_until)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> list[int]:
        """Blocks that hold the beginning of seq, which has none yet, without taking them.

        Without the last known token: it is always computed, because the step needs its logits.
        """
        size = self.block_size
        if not (self.enable_prefix_caching and seq.reads_prefix_cache):
            return []
        # A sequence that cannot be admitted is matched at every step: an earlier result is valid until a block is lost.
        matched, seq.matched = seq.matched if seq.matched_at == self._num_forgotten else [], []
        for index in range(len(matched), (len(seq.token_ids) - 1) // size):
            tokens = tuple(seq.token_ids[index * size : (index + 1) * size])
            candidates = self._found.get(self._hash(seq, index))
            block = next((b for b in candidates or () if self._tokens[b] == tokens), None)
            if block is None:
                break
            matched.append(block)
        seq.matched, seq.matched_at = matched, self._num_forgotten
        return matched

    def adopt(self, seq: Sequence, matched: list[int]) -> None:
        """Share the matched blocks: seq counts as computed that far."""
        assert not seq.block_table
        for block in matched:
            self._own(block)
        seq.block_table, seq.matched = list(matched), []
        seq.num_published = len(matched)
        seq.num_computed = len(matched) * self.block_size

    def num_missing(self, seq: Sequence, num_new_tokens: int) -> int:
        return max(0, self.num_blocks_for(seq.num_computed + num_new_tokens) - len(seq.block_table))

    def num_free_without(self, matched: list[int]) -> int:
        """Blocks that would be left to take if the matched ones were adopted."""
        return len(self._free) - sum(block in self._free for block in matched)

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Give seq the blocks for num_new_tokens more than num_computed; False and unchanged if there are too few."""
        missing = self.num_missing(seq, num_new_tokens)
        if missing > len(self._free):
            return False
        if missing:
            seq.block_table += self._take_run(missing, self._place(seq))
        return True

    def publish(self, seq: Sequence) -> list[int]:
        """Make findable every full block below num_computed whose tokens are known; returns the newly published.

        Called when a step is *planned*: within a step every layer writes all K and V before it attends, so another
        sequence of the same step may already share the block. If the step fails, `unpublish` takes it back.
        """
        if not self.enable_prefix_caching:
            return []
        size = self.block_size
        full = min(seq.num_computed, len(seq.token_ids)) // size
        for index in range(seq.num_published, full):
            block, key = seq.block_table[index], self._hash(seq, index)
            self._keys[block] = key
            self._tokens[block] = tuple(seq.token_ids[index * size : (index + 1) * size])
            self._found.setdefault(key, {})[block] = None
        published = seq.block_table[seq.num_published : full]
        seq.num_published = max(seq.num_published, full)
        if self.journal is not None:
            self.journal.published += published
        return published

    def unpublish(self, blocks: list[int]) -> None:
        for block in blocks:
            self._forget(block)

    def release(self, seq: Sequence, after: int | None = None) -> None:
        """seq gives up all its blocks. `after`: the id of the last step in flight that may still read or write them;
        until `retire(after)` they cannot be given to another sequence."""
        freed = []
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0
            if self._ref_counts[block] == 0:
                freed.append(block)
        if after is None:
            self._put_back(freed)
        elif freed:
            self._held.append((after, freed))
            self._held_until.update(dict.fromkeys(freed, after))
        seq.block_table = []
        seq.num_published = seq.num_announced = seq.num_computed = 0

    def retire(self, step_id: int) -> None:
        """Step step_id (and so every earlier one) has ended on the device."""
        while self._held and self._held[0][0] <= step_id:
            # A held block may have been adopted meanwhile (its new owner puts it back), even released and held again.
            step, blocks = self._held.popleft()
            due = [block for block in blocks if self._held_until.get(block) == step]
            for block in due:
                del self._held_until[block]
            self._put_back(due)

    def owners(self, block: int) -> int:
        return self._ref_counts[block]

    def held(self) -> dict[int, int]:
        """block -> the step that must end before it is free."""
        return dict(self._held_until)

    def findable(self) -> tuple[list[int], list[int]]:
        """(free, owned or held)"""
        found = [block for block, key in enumerate(self._keys) if key is not None]
        return [b for b in found if b in self._free], [b for b in found if b not in self._free]

    def _hash(self, seq: Sequence, index: int) -> bytes:
        size = self.block_size
        while len(seq.block_hashes) <= index:
            i = len(seq.block_hashes)
            parent = seq.block_hashes[-1] if i else blake2b(seq.cache_salt.encode(), digest_size=32).digest()
            seq.block_hashes.append(_chain(parent, tuple(seq.token_ids[i * size : (i + 1) * size])))
        return seq.block_hashes[index]

    def _own(self, block: int) -> None:
        self._free.pop(block, None)
        self._held_until.pop(block, None)
        self._ref_counts[block] += 1

    def _place(self, seq: Sequence) -> int:
        """Where seq's next block would best lie: after its last, or, for a new sequence, where it can grow.

        A hint only, among blocks that hold nothing: neighbours let a CPU read a sequence as one view of the cache.
        """
        if seq.block_table:
            return seq.block_table[-1] + 1
        place = self._next_place
        longest = min(seq.num_prompt + seq.stop.max_tokens, 2 * seq.num_prompt + 1024)
        self._next_place = (place + self.num_blocks_for(longest)) % self.num_blocks
        return place

    def _take_run(self, count: int, place: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count and place in self._free and self._keys[place] is None:
            self._own(place)
            taken.append(place)
            place += 1
        return taken + sorted(self._take() for _ in range(count - len(taken)))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self.journal is not None and self._keys[block] is not None:
            self.journal.evicted.append(block)
        self._forget(block)
        assert self._ref_counts[block] == 0
        self._ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._found[key].pop(block)
            if not self._found[key]:
                del self._found[key]
            self._keys[block] = None
            self._num_forgotten += 1

    def _put_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._free[block] = None
            if self._keys[block] is None:
                self._free.move_to_end(block, last=False)  # not findable, so it is taken first

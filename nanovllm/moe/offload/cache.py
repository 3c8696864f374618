"""Which experts are on the device, and which in host memory if it cannot hold all: the decisions of expert offload,
without tensors, so that tests can simulate them.

A slot has room for one expert. `cached` slots belong to a layer and keep what it chooses often. `streaming` slots
form a ring that all layers share: misses arrive there, and so do guesses about the next layer. A miss worth keeping
stays where it arrived and its slot takes the place of the coldest cached one: roles change, no bytes move.

    selection = cache.select(layer, {expert: number of tokens})   what is here, what must come and to which slot
    cache.rescue(slot)                                            before it is overwritten: what should go to the host
    cache.begin(layer, expert, slot) -> pieces already there; cache.copied(slot, pieces)      around each copy
    cache.adopt(layer)                                            roles change; nothing this step uses is given up
    cache.guess(later_layer, experts, num_pieces)                 where pieces of what may come next can go

Why a quota per layer: a token visits the layers in order, so an LRU over all layers drops an expert just before its
layer comes round again. With fewer slots than a token touches (64 in Mixtral 8x7B) it never hits at all.

An expert is copied in pieces and a slot knows how many it holds. A guess, a copy that an error cut short and an expert
that lost its place are then the same thing: a slot that may need only the rest. A slot counts as holding a piece only
after that piece was queued, so whatever interrupts a step leaves the truth behind.

Policies. "lfu": an expert's heat is the number of tokens that chose it, each counting `decay` times as much as the
next; a miss is kept if it is at least as hot as the coldest cached expert. "lru": heat is the time of the last use, and
every miss is kept. "none": nothing is kept, all experts stream; for comparison.

Prompts seed the heat. A call with T tokens counts as T decodes in a row that each chose as the call did on average:
    heat <- heat * d^T + tokens of the expert / T * (1 - d^T) / (1 - d).
No prompt can weigh more than a full window of decodes, (1 - d) * sum d^i = 1; and T is cut at the window's length,
1 / (1 - d), so that other sequences keep a third of their weight however long the prompt.

Host memory that cannot hold all experts of a layer holds other ones than its cached slots, not the same. An expert
that is in a slot and not in host memory is *alone* there. When its slot is to be overwritten it is copied to host
memory, into the block of an expert that is in a cached slot as well and is alone from then on. Once the cached slots
are full there always is one if Q slots and H blocks hold the E experts of the layer: were none in both, they would
hold Q + H >= E experts beside the one that goes. So from then on no expert is read from its file twice. If Q + H < E,
the block of the coldest expert is taken if the difference in heat pays for the copy.

The price is that copy. So what an expert is worth in its slot is counted in copies from host memory: its heat, and, if
it is alone, what giving it up costs: a copy out, or reading it from disk `disk_cost` times as slowly when it is chosen.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from nanovllm.errors import ConfigError
from nanovllm.memory.speed import DISK_BANDWIDTH, LINK_BANDWIDTH

POLICIES = ("lfu", "lru", "none")
# A window of 25 tokens. Simulated with several skews and drifts of Routing: 0.95 to 0.99 differ by a point with half of
# the experts cached; with a quarter, and popularity that drifts, long memories lose up to 6 points.
DECAY = 0.96
# What copying an expert back must gain, in copies. Simulated with Routing, even and skewed, 8 and 128 experts of which
# host and slots hold 70 to 100 %: the time for copies differs by up to 11 % between 1 and 4; 0 takes up to 38 % more.
SAVING = 2.0


@dataclass(frozen=True)
class ExpertStats:
    """Cumulative since the start; the difference of two is the time between them."""

    hits: int = 0  # experts a layer call wanted and found whole, kept from earlier calls
    misses: int = 0  # those whose bytes had to come, guessed in time or not
    disk_misses: int = 0  # of them, those that were not in host memory either
    computed_on_cpu: int = 0  # misses that were computed where they lie
    bytes_copied: int = 0  # to the device
    bytes_from_disk: int = 0  # of them
    bytes_saved: int = 0  # copied back, to host memory that cannot hold all experts
    prefetched_bytes_useful: int = 0
    prefetched_bytes_wasted: int = 0  # the layer chose others, or a miss needed the slot
    stall_seconds: float = 0.0  # the device waited for copies
    tokens: int = 0
    layer_hits: tuple[int, ...] = ()
    layer_misses: tuple[int, ...] = ()

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_copied / max(self.tokens, 1)

    @property
    def prefetch_precision(self) -> float:
        """Of the bytes whose fate is known."""
        return self.prefetched_bytes_useful / max(self.prefetched_bytes_useful + self.prefetched_bytes_wasted, 1)

    def summary(self) -> dict[str, int | float]:
        """For people and JSON: the rates, and the counts behind them."""
        rates = ("hit_rate", "bytes_per_token", "prefetch_precision")
        counts = [f.name for f in fields(self) if not f.name.startswith("layer_")]
        return {name: getattr(self, name) for name in (*rates, *counts)}

    def __sub__(self, earlier: ExpertStats) -> ExpertStats:
        def minus(name: str) -> int | float | tuple[int, ...]:
            now, then = getattr(self, name), getattr(earlier, name)
            if not isinstance(now, tuple):
                return now - then
            return tuple(a - b for a, b in zip(now, then or (0,) * len(now)))

        return ExpertStats(**{f.name: minus(f.name) for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class ExpertWaves:
    hits: dict[int, int]  # expert -> slot that holds all of it
    waves: list[list[tuple[int, int]]]  # (expert, slot) to bring, wave after wave
    num_ahead: int  # so many waves may be on their way at once: a later one overwrites slots of the first of them
    elsewhere: list[int] = field(default_factory=list)  # misses that the caller computes without a slot


@dataclass
class _Content:
    layer: int
    expert: int
    num_pieces: int = 0  # the first so many are there
    num_guessed: int = 0  # of them came as a guess that nobody has asked for yet


class ExpertCache:
    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_cached: int,
        num_streaming: int,
        policy: str = "lfu",
        decay: float = DECAY,
        num_pieces: int = 1,
    ) -> None:
        if num_streaming < top_k:
            raise ConfigError(
                f"{num_cached + num_streaming} expert slots with {num_streaming} for streaming: a token needs "
                f"top_k={top_k} experts at once; raise expert_cache_gb (or gpu_memory_gb) to {top_k} experts or more"
            )
        assert policy in POLICIES
        assert 0 < decay < 1
        self.num_slots, self.num_pieces = num_cached + num_streaming, num_pieces
        self._top_k, self._policy, self._decay = top_k, policy, decay
        each, more = divmod(num_cached, num_layers)  # earlier layers get the remainder
        slots = iter(range(self.num_slots))
        self._owned = [[next(slots) for _ in range(each + (layer < more))] for layer in range(num_layers)]
        self._ring = list(slots)  # the one used longest ago first
        self._contents: list[_Content | None] = [None] * self.num_slots
        self._slot_of: dict[tuple[int, int], int] = {}
        self._torn = False  # an interrupt came while _contents and _slot_of were changed: the former is true
        self._busy: set[int] = set()  # slots of the step in progress
        self._heat = [[0.0] * num_experts for _ in range(num_layers)]
        self._clock = 0
        self._chosen: tuple[int, Collection[int]] = (0, ())  # of the step in progress: layer, experts
        # By layer: experts that host memory holds, and how many it has room for. Put here by who moves them.
        self.held: Sequence[Collection[int]] = [range(num_experts)] * num_layers
        self.num_blocks = [num_experts] * num_layers
        self.disk_cost = LINK_BANDWIDTH / DISK_BANDWIDTH
        self.layer_hits, self.layer_misses = [0] * num_layers, [0] * num_layers
        self.pieces_useful, self.pieces_wasted = [0] * num_layers, [0] * num_layers  # of guesses, by layer

    def quotas(self) -> list[int]:
        """How many experts of each layer are kept."""
        return [0 if self._policy == "none" else len(owned) for owned in self._owned]

    def select(self, layer: int, token_counts: Mapping[int, int], computable: Collection[int] = ()) -> ExpertWaves:
        """`token_counts`: the experts chosen and by how many tokens. A miss in `computable` that is not worth keeping
        is returned as `elsewhere`: the caller computes it without a slot."""
        if self._torn:
            self._slot_of = {(c.layer, c.expert): slot for slot, c in enumerate(self._contents) if c is not None}
            self._torn = False
        self._note(layer, token_counts)
        self._chosen = layer, token_counts
        owned, heat = set(self._owned[layer]), self._heat[layer]
        self._busy = {slot for expert in token_counts if (slot := self._slot_of.get((layer, expert))) is not None}
        hits: dict[int, int] = {}
        own, found, absent, elsewhere = [], [], [], []  # where the experts that must come will go
        empty = [slot for slot in self._owned[layer] if self._contents[slot] is None] if self._policy != "none" else []
        for expert in sorted(token_counts, key=lambda e: (-heat[e], e)):
            slot = self._slot_of.get((layer, expert))
            self._count(layer, slot)
            if slot is None and empty:
                own.append((expert, empty.pop(0)))  # the hottest that come fill the empty slots
            elif slot is None and expert in computable and not self._worth_keeping(layer, heat[expert]):
                elsewhere.append(expert)
            elif slot is None:
                absent.append(expert)
            elif slot not in owned:
                found.append((expert, slot))
            elif self._is_whole(slot):
                hits[expert] = slot
            else:
                own.append((expert, slot))  # a copy that was cut short
        self._settle_guesses(layer, token_counts)
        waves, num_ahead = self._plan_waves(hits, own, found, absent)
        self._busy = set(hits.values()) | {slot for wave in waves for _, slot in wave}
        self._ring.sort(key=self._busy.__contains__)  # stable: what is used now goes to the end
        return ExpertWaves(hits, waves, num_ahead, elsewhere)

    def _plan_waves(
        self, hits: dict[int, int], own: list[tuple[int, int]], found: list[tuple[int, int]], absent: list[int]
    ) -> tuple[list[list[tuple[int, int]]], int]:
        """If all that come find room in the ring they are one wave. Else half a ring at a time, so that one half is
        computed on while the other fills. The k-th expert through a ring of R takes its k mod R-th slot, so a slot is
        overwritten R // size waves later at the earliest: `num_ahead`. The coldest go first: the last ones are still
        in the ring when it is decided what to keep."""
        if len(found) + len(absent) + len(own) <= len(self._ring):
            hits.update((expert, slot) for expert, slot in found if self._is_whole(slot))
            found = [(expert, slot) for expert, slot in found if not self._is_whole(slot)]
        kept = set(hits.values()) | {slot for _, slot in found}
        order = [slot for _, slot in found] + [slot for slot in self._by_worth() if slot not in kept]
        coming = [expert for expert, _ in found] + absent[::-1]
        through = [(expert, order[i % len(order)]) for i, expert in enumerate(coming)]
        if len(coming) + len(own) <= len(self._ring):
            return [through + own] if coming or own else [], 1
        size = max(1, len(self._ring) // 2)
        waves = [part[i : i + size] for part in (through, own) for i in range(0, len(part), size)]
        return waves, len(self._ring) // size

    def content(self, slot: int) -> tuple[int, int] | None:
        """(layer, expert) whose bytes are there, all or some."""
        content = self._contents[slot]
        return None if content is None else (content.layer, content.expert)

    def begin(self, layer: int, expert: int, slot: int) -> int:
        """Before copying into a slot: forgets what it held, unless that is this expert. The pieces it holds of it."""
        content = self._contents[slot]
        if content is None or (content.layer, content.expert) != (layer, expert):
            self._torn = True
            self._drop(slot)
            content = self._contents[slot] = _Content(layer, expert)
            self._slot_of[layer, expert] = slot
            self._torn = False
        return content.num_pieces

    def copied(self, slot: int, num_pieces: int, guess: bool = False) -> None:
        """The first `num_pieces` are there, or queued."""
        content = self._contents[slot]
        assert content is not None
        assert content.num_pieces <= num_pieces <= self.num_pieces
        if guess:
            content.num_guessed += num_pieces - content.num_pieces
        content.num_pieces = num_pieces

    def adopt(self, layer: int) -> None:
        """After the last copy of a call is queued: misses worth more than the layer's coldest cached expert stay."""
        came = [slot for slot in self._ring if slot in self._busy and self._has_all_of(layer, slot)]
        for slot in sorted(came, key=lambda s: -self._worth(layer, s)):
            if not self._worth_keeping(layer, self._worth(layer, slot)):
                break
            coldest = self._coldest(layer)
            assert coldest is not None
            owned = [slot if other == coldest else other for other in self._owned[layer]]
            ring = [coldest] + [other for other in self._ring if other != slot]  # first: this step has no use of it
            self._owned[layer], self._ring = owned, ring  # side by side: no interrupt comes between

    def rescue(self, slot: int) -> tuple[int, int, int | None] | None:
        """(layer, expert, other expert of it): before the slot is overwritten, what it holds should be copied to host
        memory, in place of the other one; None for that: into the block that an interrupt left empty. None instead of
        all: it is there, or not worth that."""
        content = self._contents[slot]
        if content is None or not self._is_alone(content) or self._policy == "none":
            return None
        layer, expert = content.layer, content.expert
        held, heat = self.held[layer], self._heat[layer]
        if len(held) < self.num_blocks[layer]:
            return layer, expert, None
        kept = (self._expert(s) for s in self._owned[layer] if self._is_whole(s))
        if twice := [other for other in kept if other in held]:
            return layer, expert, max(twice, key=heat.__getitem__)  # the hottest: it will stay longest
        needed = self._chosen[1] if layer == self._chosen[0] else ()
        coldest = min((other for other in held if other not in needed), key=heat.__getitem__, default=None)
        if coldest is None or (heat[expert] - heat[coldest]) * min(1.0, self.disk_cost - 1) <= SAVING:
            return None
        return layer, expert, coldest

    def guess(
        self, layer: int, experts: Iterable[int], num_pieces: int, far: bool = False
    ) -> list[tuple[int, int, int]]:
        """(expert, slot, pieces it will then hold) for at most `num_pieces` more pieces, likeliest expert first. Never
        touches a slot of the step in progress, nor one whose content would have to be copied out; `far` (not the very
        next layer): nor another guess."""
        experts = list(experts)
        kept = {self._slot_of.get((layer, expert)) for expert in experts} | self._busy
        free = [slot for slot in self._by_worth() if slot not in kept and not (far and self._is_guess(slot))]
        free = [slot for slot in free if self.rescue(slot) is None]
        fetches = []
        for expert in experts:
            slot, held = self._slot_of.get((layer, expert)), 0
            if slot is not None:
                held = self._contents[slot].num_pieces  # type: ignore[union-attr]
            elif free:
                slot = free.pop(0)
            upto = min(self.num_pieces, held + num_pieces)
            if slot is not None and upto > held:
                num_pieces -= upto - held
                fetches.append((expert, slot, upto))
        return fetches

    def forget(self) -> None:
        """Counts of a warm-up say nothing about the text to come. What the slots hold stays."""
        self._heat = [[0.0] * len(heat) for heat in self._heat]
        self.layer_hits, self.layer_misses = [0] * len(self._heat), [0] * len(self._heat)
        self.pieces_useful, self.pieces_wasted = [0] * len(self._heat), [0] * len(self._heat)

    def _note(self, layer: int, token_counts: Mapping[int, int]) -> None:
        heat = self._heat[layer]
        self._clock += 1
        if self._policy == "lru":
            for expert in token_counts:
                heat[expert] = self._clock
            return
        num_tokens = max(1, sum(token_counts.values()) // self._top_k)
        fade = self._decay ** min(num_tokens, 1 / (1 - self._decay))
        gain = (1 - fade) / (1 - self._decay) / num_tokens
        self._heat[layer] = [heat[e] * fade + gain * token_counts.get(e, 0) for e in range(len(heat))]

    def _count(self, layer: int, slot: int | None) -> None:
        """A hit moved no bytes. A guess that proved right did: it is a miss whose copy came early."""
        content = None if slot is None else self._contents[slot]
        if content is not None and self._is_whole(slot) and not content.num_guessed:
            self.layer_hits[layer] += 1
        else:
            self.layer_misses[layer] += 1
        if content is not None:
            self.pieces_useful[layer] += content.num_guessed
            content.num_guessed = 0

    def _settle_guesses(self, layer: int, demanded: Collection[int]) -> None:
        """The layer has chosen: guesses about it that were wrong are worth no more than any other leftover."""
        for slot in self._ring:
            content = self._contents[slot]
            if content is not None and content.layer == layer and content.expert not in demanded:
                self.pieces_wasted[layer] += content.num_guessed
                content.num_guessed = 0

    def _drop(self, slot: int) -> None:
        content = self._contents[slot]
        if content is not None:
            self.pieces_wasted[content.layer] += content.num_guessed
            self._slot_of.pop((content.layer, content.expert), None)
            self._contents[slot] = None

    def _by_worth(self) -> list[int]:
        """The ring, what is best overwritten first: empty slots, old ones, guesses."""
        return sorted(self._ring, key=lambda slot: (self._contents[slot] is not None) + self._is_guess(slot))

    def _is_guess(self, slot: int) -> bool:
        content = self._contents[slot]
        return content is not None and content.num_guessed > 0

    def _worth_keeping(self, layer: int, worth: float) -> bool:
        coldest = self._coldest(layer)
        if coldest is None or self._policy == "none":
            return False
        return self._policy == "lru" or self._worth(layer, coldest) <= worth

    def _coldest(self, layer: int) -> int | None:
        idle = (slot for slot in self._owned[layer] if slot not in self._busy)
        return min(idle, key=lambda slot: self._worth(layer, slot), default=None)

    def _worth(self, layer: int, slot: int) -> float:
        content = self._contents[slot]
        if content is None:
            return -1.0
        heat = self._heat[layer][content.expert]
        if self._policy == "lru" or not self._is_alone(content):
            return heat
        return heat + min(SAVING, heat * (self.disk_cost - 1))

    def _is_alone(self, content: _Content) -> bool:
        """In its slot, and not in host memory."""
        return content.num_pieces == self.num_pieces and content.expert not in self.held[content.layer]

    def _expert(self, slot: int) -> int:
        content = self._contents[slot]
        assert content is not None
        return content.expert

    def _has_all_of(self, layer: int, slot: int) -> bool:
        content = self._contents[slot]
        return content is not None and content.layer == layer and self._is_whole(slot)

    def _is_whole(self, slot: int | None) -> bool:
        content = None if slot is None else self._contents[slot]
        return content is not None and content.num_pieces == self.num_pieces


@dataclass(frozen=True)
class Routing:
    """Made-up choices of experts, with what is known of real ones: some experts are popular in a layer (Zipf), which
    ones drifts with the text, and a token likes an expert of the token before it."""

    num_experts: int = 8
    top_k: int = 2
    skew: float = 0.7  # popularity of the r-th expert ~ r^-skew
    drift: float = 0.01  # chance per token and layer that two experts change places in popularity
    repeat: float = 0.05  # chance that a choice is one of the last token's

    def tokens(self, num_layers: int, seed: int = 0) -> Iterator[list[list[int]]]:
        """For each token, without end: for each layer the top_k distinct experts."""
        draw = random.Random(seed)
        weights = [(rank + 1) ** -self.skew for rank in range(self.num_experts)]
        ranks = [draw.sample(range(self.num_experts), self.num_experts) for _ in range(num_layers)]
        last: list[list[int]] = [[] for _ in range(num_layers)]
        while True:
            for layer in range(num_layers):
                if draw.random() < self.drift:
                    a, b = draw.sample(range(self.num_experts), 2)
                    ranks[layer][a], ranks[layer][b] = ranks[layer][b], ranks[layer][a]
                last[layer] = self._choose(draw, [weights[rank] for rank in ranks[layer]], last[layer])
            yield [list(chosen) for chosen in last]

    def _choose(self, draw: random.Random, weights: Sequence[float], last: list[int]) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < self.top_k:
            again = [expert for expert in last if expert not in chosen]
            if again and draw.random() < self.repeat:
                chosen.append(draw.choice(again))
            else:
                rest = [0.0 if e in chosen else weight for e, weight in enumerate(weights)]
                chosen += draw.choices(range(self.num_experts), rest)
        return chosen


def simulate_hit_rates(
    cached: Sequence[int],
    policy: str = "lfu",
    routing: Routing | None = None,
    num_layers: int = 8,
    num_tokens: int = 800,
    decay: float = DECAY,
    seed: int = 0,
) -> list[float]:
    """Hit rate of one sequence's decode for each number of experts cached per layer. With few layers the ring, which is
    not of the layer but holds what it held, adds some points."""
    routing = routing or Routing()
    rates = []
    for per_layer in cached:
        cache = ExpertCache(
            num_layers, routing.num_experts, routing.top_k, per_layer * num_layers, 2 * routing.top_k, policy, decay
        )
        for number, choices in zip(range(num_tokens), routing.tokens(num_layers, seed)):
            if number == num_tokens // 10:
                cache.layer_hits, cache.layer_misses = [0] * num_layers, [0] * num_layers  # the start is cold
            for layer, experts in enumerate(choices):
                for wave in cache.select(layer, dict.fromkeys(experts, 1)).waves:
                    for expert, slot in wave:
                        cache.begin(layer, expert, slot)
                        cache.copied(slot, cache.num_pieces)
                cache.adopt(layer)
        hits, misses = sum(cache.layer_hits), sum(cache.layer_misses)
        rates.append(hits / (hits + misses))
    return rates

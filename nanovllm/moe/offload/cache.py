"""Which experts are on the device, and which in host memory if it cannot hold all: the decisions of expert offload,
without tensors, so that tests can simulate them.

An expert buffer has room for one expert. *Cached* buffers belong to a layer and keep what it chooses often. *Streaming*
buffers form a ring that all layers share: misses arrive there, and so do guesses about the next layers. A miss worth
keeping stays where it arrived and its buffer takes the place of the coldest cached one: roles change, no bytes move.

    selection = cache.select(layer, {expert: number of tokens})   what is here, what must come and to which buffer
    cache.rescue(buffer)                                          before it is overwritten: what should go to the host
    cache.begin(layer, expert, buffer) -> pieces already there; cache.copied(buffer, pieces)      around each copy
    cache.adopt(layer)                                            roles change; nothing this step uses is given up
    cache.guess(later_layer, experts, num_pieces)                 where pieces of what may come next can go

Why a quota per layer: a token visits the layers in order, so an LRU over all layers drops an expert just before its
layer comes round again. With fewer buffers than a token touches (64 in Mixtral 8x7B) it never hits at all.

An expert is copied in pieces, and for each buffer the number of pieces it holds is kept. A guess, a copy that an error
cut short and an expert that lost its place are then the same: a buffer that may need only the rest. A piece is counted
only after its copy was queued, so the count is right wherever a step is interrupted.

Policies. "lfu": an expert's heat is the number of tokens that chose it, each counting `decay` times as much as the
next; a miss is kept if it is at least as hot as the coldest cached expert. "lru": heat is the time of the last use, and
every miss is kept. "none": nothing is kept, all experts stream; for comparison.

Prompts seed the heat. A call with T tokens counts as T decodes in a row that each chose as the call did on average:
    heat <- heat * d^T + tokens of the expert / T * (1 - d^T) / (1 - d).
No prompt can weigh more than a full window of decodes, (1 - d) * sum d^i = 1; and T is cut at the window's length,
1 / (1 - d), so that other sequences keep a third of their weight however long the prompt.

Host memory that cannot hold all experts of a layer holds other ones than its cached buffers, not the same. An expert
that is in a buffer and not in host memory is *alone* there. When its buffer is to be overwritten it is copied to host
memory, into the block of an expert that is in a cached buffer as well and is alone from then on. Once the cached
buffers are full there always is one if Q buffers and H blocks hold the E experts of the layer: were none in both, they
would hold Q + H >= E experts beside the one that goes. So from then on no expert is read from its file twice. If
Q + H < E, the block of the coldest expert is taken if the difference in heat pays for the copy.

The price is that copy. So what an expert is worth in its buffer is counted in copies from host memory: its heat, and,
if it is alone, what giving it up costs: a copy out, or reading it from disk `disk_cost` times as slowly when it is
chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.memory.speed import DISK_BANDWIDTH, LINK_BANDWIDTH

POLICIES = ("lfu", "lru", "none")
# A window of 25 tokens. Simulated (tests/moe/routing.py) with several skews and drifts: 0.95 to 0.99 differ by a point
# with half of the experts cached; with a quarter, and popularity that drifts, long memories lose up to 6 points.
DECAY = 0.96
# What copying an expert back must gain, in copies. Simulated with even and skewed choices, 8 and 128 experts of which
# host and buffers hold 70 to 100 %: the time for copies differs by up to 11 % between 1 and 4; 0 takes up to 38 % more.
SAVING = 2.0
NOTHING = (-1, -1)  # the key of an empty buffer


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
    prefetched_bytes_wasted: int = 0  # the layer chose others, or a miss needed the buffer
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
        def minus(name: str) -> Any:
            now, then = getattr(self, name), getattr(earlier, name)
            if not isinstance(now, tuple):
                return now - then
            return tuple(a - b for a, b in zip(now, then or (0,) * len(now)))

        return ExpertStats(**{f.name: minus(f.name) for f in fields(self)})


@dataclass(frozen=True)
class ExpertWaves:
    hits: dict[int, int]  # expert -> buffer that holds all of it
    waves: list[list[tuple[int, int]]]  # (expert, buffer) to bring, wave after wave
    num_ahead: int  # so many waves may be on their way at once: a later one overwrites buffers of the first of them
    elsewhere: list[int] = field(default_factory=list)  # misses that the caller computes without a buffer


class Rescue(NamedTuple):
    """Copy this expert from its buffer to host memory."""

    layer: int
    expert: int
    instead: int | None  # into the block of this expert; None: into the block that an interrupted copy left empty


class Fetch(NamedTuple):
    """Copy pieces of this expert until the buffer holds so many."""

    expert: int
    buffer: int
    num_pieces: int


@dataclass
class _Content:
    """Of a buffer."""

    key: tuple[int, int] = NOTHING  # (layer, expert)
    num_pieces: int = 0  # the first so many are there
    num_guessed: int = 0  # of them came as a guess that no call has confirmed yet


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
                f"{num_cached + num_streaming} expert buffers with {num_streaming} for streaming: a token needs "
                f"top_k={top_k} experts at once; raise expert_cache_gb (or gpu_memory_gb) to {top_k} experts or more"
            )
        assert policy in POLICIES
        assert 0 < decay < 1
        self.num_buffers, self.num_pieces = num_cached + num_streaming, num_pieces
        self._top_k, self._policy, self._decay = top_k, policy, decay
        each, more = divmod(num_cached, num_layers)  # earlier layers get the remainder
        buffers = iter(range(self.num_buffers))
        self._owned = [[next(buffers) for _ in range(each + (layer < more))] for layer in range(num_layers)]
        self._ring = list(buffers)  # the one used longest ago first
        self._contents = [_Content() for _ in range(self.num_buffers)]
        self._buffer_of: dict[tuple[int, int], int] = {}
        self._torn = False  # an interrupt came while _contents and _buffer_of were changed: _contents is right
        self._busy: set[int] = set()  # buffers of the step in progress
        self._heat = [[0.0] * num_experts for _ in range(num_layers)]
        self._clock = 0
        self._chosen: tuple[int, Collection[int]] = (0, ())  # of the step in progress: layer, experts
        # By layer: experts that host memory holds (ExpertStore changes it), and how many it has room for.
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
        is returned as `elsewhere`: the caller computes it without a buffer."""
        if self._torn:
            self._buffer_of = {content.key: b for b, content in enumerate(self._contents) if content.key != NOTHING}
            self._torn = False
        self._note(layer, token_counts)
        self._chosen = layer, token_counts
        owned, heat = set(self._owned[layer]), self._heat[layer]
        self._busy = {buffer for expert in token_counts if (buffer := self._buffer_of.get((layer, expert))) is not None}
        hits: dict[int, int] = {}
        own, found, absent, elsewhere = [], [], [], []  # where the experts that must come will go
        empty = [] if self._policy == "none" else [b for b in self._owned[layer] if self._contents[b].key == NOTHING]
        for expert in sorted(token_counts, key=lambda e: (-heat[e], e)):
            buffer = self._buffer_of.get((layer, expert))
            self._count(layer, buffer)
            if buffer is None and empty:
                own.append((expert, empty.pop(0)))  # the hottest that come fill the empty buffers
            elif buffer is None and expert in computable and not self._worth_keeping(layer, heat[expert]):
                elsewhere.append(expert)
            elif buffer is None:
                absent.append(expert)
            elif buffer not in owned:
                found.append((expert, buffer))
            elif self._is_whole(buffer):
                hits[expert] = buffer
            else:
                own.append((expert, buffer))  # a copy that was cut short
        self._settle_guesses(layer, token_counts)
        waves, num_ahead = self._plan_waves(hits, own, found, absent)
        self._busy = set(hits.values()) | {buffer for wave in waves for _, buffer in wave}
        self._ring.sort(key=self._busy.__contains__)  # stable: what is used now goes to the end
        return ExpertWaves(hits, waves, num_ahead, elsewhere)

    def _plan_waves(
        self, hits: dict[int, int], own: list[tuple[int, int]], found: list[tuple[int, int]], absent: list[int]
    ) -> tuple[list[list[tuple[int, int]]], int]:
        """If all that come find room in the ring they are one wave. Else half a ring at a time, so that one half is
        computed on while the other fills. The k-th expert through a ring of R takes its k mod R-th buffer, so a buffer
        is overwritten R // size waves later at the earliest: `num_ahead`. The coldest go first: the last ones are
        still in the ring when it is decided what to keep."""
        if len(found) + len(absent) + len(own) <= len(self._ring):
            hits.update((expert, buffer) for expert, buffer in found if self._is_whole(buffer))
            found = [(expert, buffer) for expert, buffer in found if not self._is_whole(buffer)]
        kept = set(hits.values()) | {buffer for _, buffer in found}
        order = [buffer for _, buffer in found] + [buffer for buffer in self._by_worth() if buffer not in kept]
        coming = [expert for expert, _ in found] + absent[::-1]
        through = [(expert, order[i % len(order)]) for i, expert in enumerate(coming)]
        if len(coming) + len(own) <= len(self._ring):
            return [through + own] if coming or own else [], 1
        size = max(1, len(self._ring) // 2)
        waves = [part[i : i + size] for part in (through, own) for i in range(0, len(part), size)]
        return waves, len(self._ring) // size

    def content(self, buffer: int) -> tuple[int, int] | None:
        """(layer, expert) whose bytes are there, all or some."""
        key = self._contents[buffer].key
        return None if key == NOTHING else key

    def begin(self, layer: int, expert: int, buffer: int) -> int:
        """Before copying into a buffer: forgets what it held, unless that is this expert. The pieces it holds of it."""
        content, key = self._contents[buffer], (layer, expert)
        if content.key != key:
            self._torn = True
            self.pieces_wasted[content.key[0]] += content.num_guessed  # 0 of an empty one
            self._buffer_of.pop(content.key, None)
            content = self._contents[buffer] = _Content(key)
            self._buffer_of[key] = buffer
            self._torn = False
        return content.num_pieces

    def copied(self, buffer: int, num_pieces: int, guess: bool = False) -> None:
        """The first `num_pieces` are there, or queued."""
        content = self._contents[buffer]
        assert content.num_pieces <= num_pieces <= self.num_pieces
        if guess:
            content.num_guessed += num_pieces - content.num_pieces
        content.num_pieces = num_pieces

    def adopt(self, layer: int) -> None:
        """After the last copy of a call is queued: misses worth more than the layer's coldest cached expert stay."""
        came = [b for b in self._ring if b in self._busy and self._is_whole(b) and self._contents[b].key[0] == layer]
        for buffer in sorted(came, key=lambda s: -self._worth(layer, s)):
            if not self._worth_keeping(layer, self._worth(layer, buffer)):
                break
            coldest = self._coldest(layer)
            assert coldest is not None
            owned = [buffer if other == coldest else other for other in self._owned[layer]]
            ring = [coldest] + [other for other in self._ring if other != buffer]  # first: this step has no use of it
            self._owned[layer], self._ring = owned, ring  # side by side: no interrupt comes between

    def rescue(self, buffer: int) -> Rescue | None:
        """Before the buffer is overwritten: what to copy to host memory. None: it is there, or not worth a copy."""
        content = self._contents[buffer]
        if not self._is_alone(content) or self._policy == "none":
            return None
        layer, expert = content.key
        held, heat = self.held[layer], self._heat[layer]
        if len(held) < self.num_blocks[layer]:
            return Rescue(layer, expert, None)
        kept = (self._contents[b].key[1] for b in self._owned[layer] if self._is_whole(b))
        if twice := [other for other in kept if other in held]:
            return Rescue(layer, expert, max(twice, key=heat.__getitem__))  # the hottest: it will stay longest
        needed = self._chosen[1] if layer == self._chosen[0] else ()
        coldest = min((other for other in held if other not in needed), key=heat.__getitem__, default=None)
        if coldest is None or (heat[expert] - heat[coldest]) * min(1.0, self.disk_cost - 1) <= SAVING:
            return None
        return Rescue(layer, expert, coldest)

    def guess(self, layer: int, experts: Iterable[int], num_pieces: int, far: bool = False) -> list[Fetch]:
        """Copies of at most `num_pieces` more pieces, likeliest expert first. Never into a buffer of the step in
        progress, nor into one whose content would have to be copied out; `far` (not the very next layer): nor into
        another guess."""
        experts = list(experts)
        kept = {self._buffer_of.get((layer, expert)) for expert in experts} | self._busy
        free = [b for b in self._by_worth() if b not in kept and not (far and self._contents[b].num_guessed)]
        free = [buffer for buffer in free if self.rescue(buffer) is None]
        fetches = []
        for expert in experts:
            buffer, held = self._buffer_of.get((layer, expert)), 0
            if buffer is not None:
                held = self._contents[buffer].num_pieces
            elif free:
                buffer = free.pop(0)
            upto = min(self.num_pieces, held + num_pieces)
            if buffer is not None and upto > held:
                num_pieces -= upto - held
                fetches.append(Fetch(expert, buffer, upto))
        return fetches

    def forget(self) -> None:
        """After a warm-up, whose choices do not predict those of a text. What the buffers hold stays."""
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

    def _count(self, layer: int, buffer: int | None) -> None:
        """A hit moved no bytes. A guess that proved right did: it is a miss whose copy came early."""
        content = _Content() if buffer is None else self._contents[buffer]
        if content.num_pieces == self.num_pieces and not content.num_guessed:
            self.layer_hits[layer] += 1
        else:
            self.layer_misses[layer] += 1
        self.pieces_useful[layer] += content.num_guessed
        content.num_guessed = 0

    def _settle_guesses(self, layer: int, demanded: Collection[int]) -> None:
        """The layer has chosen: a guess about it that was wrong is overwritten as early as any other leftover."""
        for content in (self._contents[buffer] for buffer in self._ring):
            if content.key[0] == layer and content.key[1] not in demanded:
                self.pieces_wasted[layer] += content.num_guessed
                content.num_guessed = 0

    def _by_worth(self) -> list[int]:
        """The ring, what is best overwritten first: empty buffers, old ones, guesses."""

        def worth(buffer: int) -> int:
            content = self._contents[buffer]
            return (content.key != NOTHING) + (content.num_guessed > 0)

        return sorted(self._ring, key=worth)

    def _worth_keeping(self, layer: int, worth: float) -> bool:
        coldest = self._coldest(layer)
        if coldest is None or self._policy == "none":
            return False
        return self._policy == "lru" or self._worth(layer, coldest) <= worth

    def _coldest(self, layer: int) -> int | None:
        idle = (buffer for buffer in self._owned[layer] if buffer not in self._busy)
        return min(idle, key=lambda buffer: self._worth(layer, buffer), default=None)

    def _worth(self, layer: int, buffer: int) -> float:
        content = self._contents[buffer]
        if content.key == NOTHING:
            return -1.0
        heat = self._heat[layer][content.key[1]]
        if self._policy == "lru" or not self._is_alone(content):
            return heat
        return heat + min(SAVING, heat * (self.disk_cost - 1))

    def _is_alone(self, content: _Content) -> bool:
        """In its buffer, and not in host memory."""
        layer, expert = content.key
        return content.num_pieces == self.num_pieces and expert not in self.held[layer]

    def _is_whole(self, buffer: int) -> bool:
        return self._contents[buffer].num_pieces == self.num_pieces

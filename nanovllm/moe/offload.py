"""Experts that do not all fit on the device: chosen ones are computed from slots, missing ones are copied in meanwhile.

One call of a layer:

    1. the chosen ids, and guesses of the next layers' (their routers applied to this layer's input), go to the host in
       one download: the only time the host waits;
    2. the cache says what is here (hits) and where the rest goes (waves);
    3. copies of the first waves are queued, then part of what the next layers may want: as much as the copy engine
       can move before the next one asks for something;
    4. hits are computed while misses travel, then each wave as it arrives;
    5. the parts are added.

The output is that of resident experts, bit for bit: a pair (token, expert) gives the same numbers whichever slot its
expert is in and whichever pass it is in, all pairs of an expert are in one pass, and the sum is taken once. Only
`cpu_misses` departs from that: the CPU adds up in another order.

A decode step of few tokens may also run in two halves, so that most of a layer can be captured as a graph (see
executor/relay.py): `start` computes the hits by a table on the device that says which slot holds which expert, without
asking the host; meanwhile the host learns what was chosen, and `finish` brings and computes the rest, mostly nothing.

The life of an expert's bytes is in three hands: `ExpertStore` (where they come from), `ExpertCache` (which slot they
go to), `Slot` (when that slot may be written and read).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from nanovllm.hardware.copies import CopyStream, Mark, Slot, StallClock, open_copy_stream, reading
from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import Uploader
from nanovllm.layers.build import Build
from nanovllm.model_config import MoeConfig
from nanovllm.moe.cache import ExpertCache, ExpertStats, Selection
from nanovllm.moe.store import ExpertShape, ExpertStore
from nanovllm.ops import moe as plain
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.loader import Place

PIECE_BYTES = 4 << 20  # grain of a guess: 75 us at 55 GB/s. Pieces that follow each other travel in one copy.
GUESS_LAYERS = 2  # when the next layer's likely experts are all here, idle time goes to the one after it
GUESS_TOKENS = 64  # longer calls want nearly all experts and fill the ring with them: nothing to guess, no room for it
CPU_TOKENS = 2  # cpu_misses: an expert that more tokens want is worth its copy
SMALL_TABLE = 64  # see _tables


@dataclass(frozen=True)
class OffloadOptions:
    num_cached: int  # slots, over all layers
    num_streaming: int
    policy: str = "lfu"
    prefetch: bool = True
    cpu_misses: bool = False
    host_bytes: int | None = None  # None: most of what is available
    piece_bytes: int = PIECE_BYTES


@dataclass(frozen=True)
class Chosen:
    """What one download brings."""

    ids: np.ndarray  # int32 [tokens, top_k]
    guesses: list[list[int]]  # experts of the next layer, likeliest first, and of those after it
    rows: tuple[torch.Tensor, torch.Tensor] | None  # cpu_misses: x and weights on the host


class IdleTime:
    """How much the copy engine can move while nobody needs it: from the end of a layer's own copies to the next
    layer's first. The medians of the last times it happened, for calls of about as many tokens, with and without
    misses; the host's own time to react is part of it."""

    def __init__(self, stream: CopyStream, bandwidth: float | None, piece_bytes: int) -> None:
        self._stream, self._bandwidth, self._piece_bytes = stream, bandwidth, piece_bytes
        self._gaps: dict[tuple[bool, int], deque[float]] = {}
        self._reactions: deque[float] = deque(maxlen=9)
        self._began: tuple[int, tuple[bool, int], Mark] | None = None
        self._asked = 0.0

    def ask(self, layer: int) -> Mark | None:
        """Before a download: the engine's idle time ends about here. None if it is not worth measuring."""
        follows = self._began is not None and self._began[0] + 1 == layer
        return self._stream.mark_compute(timed=True) if follows and self._bandwidth else None

    def answered(self, asked: Mark | None) -> None:
        """After it."""
        self._asked = time.perf_counter()
        if asked is not None and self._began is not None:
            _, kind, began = self._began
            gap = self._stream.seconds(began, asked)  # None: copies are still under way, there was no gap
            self._gaps.setdefault(kind, deque(maxlen=9)).append(max(gap or 0.0, 0.0))

    def pieces(self, layer: int, has_misses: bool, num_tokens: int) -> int:
        """After a layer's own copies were queued: pieces that may follow them."""
        self._reactions.append(time.perf_counter() - self._asked)
        if not self._bandwidth:
            return 0
        kind = (has_misses, num_tokens.bit_length())
        self._began = (layer, kind, self._stream.mark_copies(timed=True))
        if kind not in self._gaps:
            return 0
        seconds = statistics.median(self._gaps[kind]) + statistics.median(self._reactions)
        return int(seconds * self._bandwidth / self._piece_bytes)


class Offload:
    """One per engine. `experts` builds the layers' parts, `places` is for the loader, `watch_gates` comes after it."""

    def __init__(
        self, moe: MoeConfig, hidden: int, build: Build, device: Device, options: OffloadOptions,
        checkpoint: Checkpoint | None = None, stream: CopyStream | None = None,
    ) -> None:  # fmt: skip
        layers = tuple(i for i, sparse in enumerate(moe.layers) if sparse)
        self.shape = shape = ExpertShape(layers, moe.num_experts, hidden, moe.intermediate_size, build.dtype)
        self._top_k, self._ops, self._device, self._options = moe.top_k, build.ops, device, options
        num_pieces = -(-shape.num_bytes // options.piece_bytes)
        while shape.numel % num_pieces:  # whole pieces, so that bytes are counted exactly; 84 for Mixtral 8x7B
            num_pieces += 1
        self._piece = shape.numel // num_pieces  # numbers
        self.cache = ExpertCache(
            len(layers), moe.num_experts, moe.top_k, options.num_cached, options.num_streaming, options.policy,
            num_pieces=num_pieces,
        )  # fmt: skip
        self.stream = stream or open_copy_stream(device)
        pool = torch.empty(self.cache.num_slots, shape.numel, dtype=shape.dtype, device=device.torch_device)
        self._gate_up, self._down = shape.views(pool)
        self._slots = [Slot(memory, self.stream) for memory in pool]
        self.store = ExpertStore(shape, device, self.stream, checkpoint, options.host_bytes)
        self._stalls = StallClock(self.stream)
        self.idle = IdleTime(self.stream, self._measure_bandwidth(pool[-1]), self._piece * shape.dtype.itemsize)
        self._uploader = Uploader(device) if device.is_gpu else None
        self._numbers = torch.arange(-1, len(pool), dtype=torch.int32, device=device.torch_device).split(1)
        self._gates_after: list[torch.Tensor] = []  # routers of the layers after each, stacked: one product for all
        # Slot of every expert that `start` may compute, -1 = none: on the device, and what the host has queued of it.
        # Where an interrupt makes them differ, the device has *more*: the host then computes such a pair once more.
        counts = (len(layers), moe.num_experts)
        self._table = torch.full(counts, -1, dtype=torch.int32, device=device.torch_device)
        self._announced = np.full(counts, -1, dtype=np.int32)
        self._announces = False
        self._bytes_copied = self._tokens = self._computed_on_cpu = 0
        self._closed = False

    def _measure_bandwidth(self, memory: torch.Tensor) -> float | None:
        block = self.store.any_block()
        count = min(self.shape.numel, (64 << 20) // self.shape.dtype.itemsize)
        return None if block is None else self.stream.bandwidth(block[:count], memory[:count])

    def experts(self, layer: int, moe: MoeConfig, hidden: int, build: Build) -> OffloadedExperts:
        """`Parts.experts` of the model; `layer` counts all layers."""
        return OffloadedExperts(self, self.shape.layers.index(layer))

    def places(self) -> dict[str, dict[str, Place]]:
        return self.store.places()

    def watch_gates(self, gates: list[torch.Tensor]) -> None:
        """Router weights [experts, hidden] of the sparse layers in order: with them the next layers are guessed."""
        assert len(gates) == len(self.shape.layers)
        stacked = [torch.cat(gates[i + 1 : i + 1 + GUESS_LAYERS]) for i in range(len(gates) - 1)]
        for old, new in zip(self._gates_after, stacked):
            old.copy_(new)  # a captured graph knows the address
        self._gates_after = self._gates_after or stacked

    def compute(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One token on a GPU: what Python asks of torch, at up to 23 us a call on a slow host. Before the first copy:
        guess 3, mark 1, cat 3, download 6. Per miss: wait 1, slices 2, copy 1, mark 1, and the same for a guess. Hidden
        behind the copies: empty 1, tables 2, sum 1; per pass the launches of expert_pairs, wait and marks 4."""
        assert not self._closed
        if len(x) == 0:
            return torch.empty_like(x)
        question = self.question(layer, x, ids, weights)
        asked = self.idle.ask(layer)
        answer = self.stream.download(question)
        self.idle.answered(asked)
        pairs = x.new_empty(*ids.shape, self.shape.hidden)
        self._complete(layer, x, weights, pairs, self._read(layer, x, ids, answer), done=())
        return self._ops.sum_pairs(pairs)

    # ---- in two halves -----------------------------------------------------------------------------------------

    def start(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        """Rows of `pairs` whose experts are on the device. No host, fixed addresses: may be captured."""
        self._announces = True
        slots = self._table[layer].index_select(0, ids.view(-1)).view(ids.shape)
        self._ops.expert_pairs(x, self._gate_up, self._down, slots, weights, pairs)

    def finish(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor,
        answer: np.ndarray,
    ) -> None:  # fmt: skip
        """The other rows. `answer`: what `question` asked, on the host; `start` was queued since the last `finish`."""
        assert not self._closed
        chosen = self._read(layer, x, ids, answer)
        done = np.flatnonzero(self._announced[layer] >= 0).tolist()
        self._complete(layer, x, weights, pairs, chosen, done)

    def _complete(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor, chosen: Chosen,
        done: Collection[int],
    ) -> None:  # fmt: skip
        """Bring what is missing and compute the rows of all chosen experts but those already `done`."""
        counts = np.bincount(chosen.ids.ravel(), minlength=self.shape.num_experts)
        token_counts = {int(expert): int(counts[expert]) for expert in counts.nonzero()[0]}
        selection = self.cache.select(layer, token_counts, self._computable(layer, token_counts, chosen))
        here = [(expert, slot) for expert, slot in selection.hits.items() if expert not in done]
        passes = ([here] if here else []) + selection.waves
        small = chosen.ids.size * len(passes) <= SMALL_TABLE
        tables = None if small else self._tables(chosen.ids, passes)
        for wave in selection.waves[: selection.num_ahead]:
            self._bring(layer, wave)
        if len(selection.waves) <= selection.num_ahead:
            self._look_ahead(layer, chosen, selection)
        tables = self._tables(chosen.ids, passes) if tables is None else tables
        first_wave = len(passes) - len(selection.waves)
        for number, members in enumerate(passes):
            with reading([self._slots[slot] for _, slot in members], self._stalls):
                self._ops.expert_pairs(x, self._gate_up, self._down, tables[number], weights, pairs)
            self._announce(layer, members)
            coming = number - first_wave + selection.num_ahead
            if number >= first_wave and coming < len(selection.waves):
                self._bring(layer, selection.waves[coming])
                if coming + 1 == len(selection.waves):
                    self._look_ahead(layer, chosen, selection)
        if selection.elsewhere:
            self._compute_on_cpu(layer, selection.elsewhere, chosen, pairs)
        self._tokens += len(x) if layer == 0 else 0

    def _announce(self, layer: int, members: list[tuple[int, int]]) -> None:
        """The computing queue has waited for these: `start` may use them from now on. Four bytes each, copied on the
        device from numbers that are there: an upload would queue behind the experts (see copies.py)."""
        for expert, slot in members if self._announces else ():
            if self._announced[layer, expert] != slot:
                self._table[layer, expert : expert + 1].copy_(self._numbers[slot + 1])
                self._announced[layer, expert] = slot

    def _retract(self, slot: int, layer: int, expert: int) -> None:
        """Before a slot is filled with this expert: `start` must not look for its old one there any more. What was
        started until now may still read it, so the copy waits for that."""
        content = self.cache.content(slot)
        if content is None or content == (layer, expert) or self._announced[content] != slot:
            return
        self._announced[content] = -1
        self._table[content[0], content[1] : content[1] + 1].copy_(self._numbers[0])
        self._slots[slot].used_until_now()

    def question(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """int32 [...]: what the host must know, put together on the device; may be captured."""
        numbers = [ids]
        if self._num_guessed(layer, len(x)):
            logits = self._ops.linear(x, self._gates_after[layer])  # [tokens, layers * experts]
            numbers.append(self._ops.route(logits.view(-1, self.shape.num_experts), self._top_k, False)[0])
        if self._wants_rows(len(x)):
            numbers += [weights.view(torch.int32), x.contiguous().view(torch.int32)]
        return torch.cat([part.reshape(-1) for part in numbers]) if len(numbers) > 1 else ids.reshape(-1)

    def _num_guessed(self, layer: int, num_tokens: int) -> int:
        """Layers whose experts are guessed by the way."""
        if not self._options.prefetch or layer >= len(self._gates_after) or num_tokens > GUESS_TOKENS:
            return 0
        return len(self._gates_after[layer]) // self.shape.num_experts

    def _wants_rows(self, num_tokens: int) -> bool:
        return self._options.cpu_misses and num_tokens <= SMALL_TABLE

    def _read(self, layer: int, x: torch.Tensor, ids: torch.Tensor, answer: np.ndarray) -> Chosen:
        num_guessed, size = self._num_guessed(layer, len(x)), ids.numel()
        sizes = [size] + [size * num_guessed] * bool(num_guessed)
        parts = np.split(answer, np.cumsum(sizes))
        guesses = []
        if num_guessed:
            by_layer = parts[1].reshape(len(x), num_guessed, -1).swapaxes(0, 1).reshape(num_guessed, -1)
            guesses = [_most_wanted(row.tolist()) for row in by_layer]
        rows = None
        if self._wants_rows(len(x)):
            host_weights, host_x = (torch.from_numpy(part) for part in (parts[-1][:size], parts[-1][size:]))
            rows = host_x.view(x.dtype).view(x.shape), host_weights.view(torch.float32).view(ids.shape)
        return Chosen(parts[0].reshape(ids.shape), guesses, rows)

    def _computable(self, layer: int, token_counts: dict[int, int], chosen: Chosen) -> set[int]:
        if chosen.rows is None:
            return set()
        few = (expert for expert, count in token_counts.items() if count <= CPU_TOKENS)
        return {expert for expert in few if self.store.in_memory(layer, expert)}

    def _tables(self, ids: np.ndarray, passes: list[list[tuple[int, int]]]) -> torch.Tensor:
        """[passes, tokens, top_k]: the slot of each pair's expert if it is in that pass, else -1.

        A large table is uploaded, and must be before any expert: the copy engine serves in order, and the hits would
        wait for the misses. A small one is put together on the device from numbers that are already there: their
        addresses travel as arguments of one kernel, past the engine."""
        tables = np.full((len(passes), *ids.shape), -1, dtype=np.int32)
        slot_of = np.empty(self.shape.num_experts, dtype=np.int32)
        for table, members in zip(tables, passes):
            slot_of.fill(-1)
            for expert, slot in members:
                slot_of[expert] = slot
            np.take(slot_of, ids, out=table)
        if self._uploader is None or not passes:
            return torch.from_numpy(tables)
        if tables.size <= SMALL_TABLE:
            return torch.cat([self._numbers[slot + 1] for slot in tables.ravel().tolist()]).view(tables.shape)
        return self._uploader.send([tables])[0]

    def _bring(self, layer: int, wave: list[tuple[int, int]]) -> None:
        for expert, slot in wave:
            self._retract(slot, layer, expert)
            held = self.cache.begin(layer, expert, slot)
            if held < self.cache.num_pieces:
                self._fill(layer, expert, slot, held, self.cache.num_pieces)
                self.cache.copied(slot, self.cache.num_pieces)

    def _look_ahead(self, layer: int, chosen: Chosen, selection: Selection) -> None:
        """All copies of this call are queued: decide what stays, and use the time until the next layer asks."""
        self.cache.adopt(layer)
        num_pieces = self.idle.pieces(layer, bool(selection.waves), len(chosen.ids))
        for later, guesses in enumerate(chosen.guesses, layer + 1):
            wanted = [expert for expert in guesses if self.store.in_memory(later, expert)]
            for expert, slot, upto in self.cache.guess(later, wanted, num_pieces, far=later > layer + 1):
                self._retract(slot, later, expert)
                held = self.cache.begin(later, expert, slot)
                self._fill(later, expert, slot, held, upto)
                self.cache.copied(slot, upto, guess=True)
                num_pieces -= upto - held

    def _fill(self, layer: int, expert: int, slot: int, first_piece: int, last_piece: int) -> None:
        start, stop = first_piece * self._piece, last_piece * self._piece
        self._slots[slot].fill(partial(self.store.send, layer, expert, start, stop))
        self._bytes_copied += (stop - start) * self.shape.dtype.itemsize

    def _compute_on_cpu(self, layer: int, experts: list[int], chosen: Chosen, pairs: torch.Tensor) -> None:
        assert chosen.rows is not None
        x, weights = chosen.rows
        results, places = [], []
        for expert in experts:
            rows, columns = np.nonzero(chosen.ids == expert)
            gate_up, down = self.shape.views(self.store.block(layer, expert)[None])
            slots = torch.zeros(len(rows), 1, dtype=torch.int32)
            results.append(plain.expert_pairs(x[rows], gate_up, down, slots, weights[rows, columns][:, None])[:, 0])
            places.append(rows * self._top_k + columns)
        found, where = torch.cat(results), np.concatenate(places)
        if self._uploader is None:
            sent = [found.view(torch.uint8), torch.from_numpy(where)]
        else:
            sent = self._uploader.send([found.view(torch.uint8).numpy(), where])
        pairs.view(-1, self.shape.hidden).index_copy_(0, sent[1], sent[0].view(pairs.dtype))
        self._computed_on_cpu += len(experts)

    def stats(self) -> ExpertStats:
        cache, piece = self.cache, self._piece * self.shape.dtype.itemsize
        return ExpertStats(
            hits=sum(cache.layer_hits),
            misses=sum(cache.layer_misses),
            computed_on_cpu=self._computed_on_cpu,
            bytes_copied=self._bytes_copied,
            prefetched_bytes_useful=cache.pieces_useful * piece,
            prefetched_bytes_wasted=cache.pieces_wasted * piece,
            stall_seconds=self._stalls.seconds(),
            tokens=self._tokens,
            layer_hits=tuple(cache.layer_hits),
            layer_misses=tuple(cache.layer_misses),
        )

    def describe(self) -> dict[str, object]:
        options, store = self._options, self.store
        return {
            "placement": "offload", "policy": options.policy, "prefetch": options.prefetch,
            "cpu_misses": options.cpu_misses, "cached_slots": options.num_cached,
            "streaming_slots": options.num_streaming, "expert_bytes": self.shape.num_bytes,
            "in_host_memory": store.num_in_memory, "on_disk": store.num_on_disk,
        }  # fmt: skip

    def forget(self) -> None:
        """After a warm-up: its tokens must not decide what stays on the device, nor show in the statistics."""
        self.cache.forget()
        self._stalls = StallClock(self.stream)
        self._bytes_copied = self._tokens = self._computed_on_cpu = 0

    def close(self) -> None:
        """Waits for copies in flight, then gives the host memory back. The device's goes with the last reference."""
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
            self.store.close()
            del self._gate_up, self._down, self._slots


def _most_wanted(experts: list[int]) -> list[int]:
    """Distinct, by how often they are named; the router's order among equals."""
    counts: dict[int, int] = {}
    for expert in experts:
        counts[expert] = counts.get(expert, 0) + 1
    return sorted(counts, key=lambda expert: -counts[expert])


class OffloadedExperts:
    """Meets `Experts` (layer.py). No module and no parameters: the experts live in the store."""

    graph_safe = False  # the host looks at what was chosen

    def __init__(self, offload: Offload, layer: int) -> None:
        self.offload, self.layer = offload, layer  # layer: among the sparse ones

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.offload.compute(self.layer, x, ids, weights)

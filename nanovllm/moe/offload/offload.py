"""Experts that do not all fit on the device: chosen ones are computed from slots, missing ones are copied in meanwhile.

One call of a layer:

    1. the chosen ids, and guesses of the next layers' (their routers applied to this layer's input), go to the host in
       one download: the only time the host waits;
    2. the cache says what is here (hits) and where the rest goes (waves);
    3. copies of the first waves are queued, then part of what the next layers may want: as much as the copy engine
       can move before the next one asks for something;
    4. hits are computed while misses travel, then each wave as it arrives; the parts are added.

The output is that of resident experts, bit for bit: a pair (token, expert) gives the same numbers whichever slot its
expert is in and whichever pass it is in, all pairs of an expert are in one pass, and the sum is taken once. Only
`cpu_misses` departs from that: the CPU adds up in another order.

A decode step of few tokens may also run in two halves, so that most of a layer can be captured (runner/relay.py):
`start` computes the hits by a table on the device of which expert is where; meanwhile the host learns what was chosen,
and `finish` brings and computes the rest, mostly nothing.

The life of an expert's bytes is in three hands: `ExpertStore` (where they come from), `ExpertCache` (which slot they
go to), `Slot` (when that slot may be written and read).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import mul

import numpy as np
import torch

from nanovllm.hardware.copies import CopyStream, Slot, StallClock, open_copy_stream, reading
from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import Uploader
from nanovllm.layers.build import Build
from nanovllm.memory.speed import DISK_BANDWIDTH, LINK_BANDWIDTH
from nanovllm.model_config import MoeConfig
from nanovllm.moe.offload.cache import ExpertCache, ExpertStats, ExpertWaves
from nanovllm.moe.offload.experts import OffloadedExperts
from nanovllm.moe.offload.idle import IdleTime
from nanovllm.moe.offload.store import ExpertShape, ExpertStore
from nanovllm.moe.projections import cut_expert
from nanovllm.ops import moe as plain
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm
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


class Offload:
    """One per engine. `experts` builds the layers' parts, `places` is for the loader, `watch_gates` comes after it."""

    def __init__(
        self,
        moe: MoeConfig,
        hidden: int,
        build: Build,
        device: Device,
        options: OffloadOptions,
        checkpoint: Checkpoint | None = None,
        stream: CopyStream | None = None,
        forms: tuple[ExpertForm, ...] | None = None,
    ) -> None:
        """`forms` of the sparse layers: None = dense."""
        layers = tuple(i for i, sparse in enumerate(moe.layers) if sparse)
        forms = forms or (ExpertForm.dense(hidden, moe.intermediate_size),) * len(layers)
        shares, shards = zip(*(cut_expert(form, build.parallel) for form in forms))
        self.shape = shape = ExpertShape(layers, moe.num_experts, shares, build.dtype, shards)
        self._whole, self._build = forms, build
        self._top_k, self._ops, self._device, self._options = moe.top_k, build.ops, device, options
        num_pieces = shape.num_pieces(options.piece_bytes)
        self._pieces = [form.numel // num_pieces for form in shares]  # numbers in one, by layer
        self.cache = self._open_cache(options, num_pieces)
        self.stream = stream or open_copy_stream(device)
        pool = torch.empty(self.cache.num_slots, shape.numel, dtype=shape.dtype, device=device.torch_device)
        self._views = [shape.views(pool, layer) for layer in range(len(layers))]
        self._between: list[torch.Tensor | None] = [None] * len(layers)  # low-rank: what follows SiLU (ops/moe.py)
        self._slots = [Slot(memory, self.stream) for memory in pool]
        self._stalls = StallClock(self.stream)
        self._uploader = Uploader(device) if device.is_gpu else None
        self._numbers = torch.arange(-1, len(pool), dtype=torch.int32, device=device.torch_device).split(1)
        self._gates_after: list[torch.Tensor] = []  # routers of the layers after each, stacked: one product for all
        # Slot of every expert that `start` may compute, -1 = none: on the device, and what the host has queued of it.
        # Where an interrupt makes them differ, the device has *more*: the host then computes such a pair once more.
        shape_of_table = (len(layers), moe.num_experts)
        self._table = torch.full(shape_of_table, -1, dtype=torch.int32, device=device.torch_device)
        self._announced = [[-1] * moe.num_experts for _ in layers]
        self._announces = False
        self._bytes_copied = self._bytes_read = self._bytes_saved = self._disk_misses = self._tokens = self._on_cpu = 0
        self._prefetches = options.prefetch
        self._closed = False
        # Locks host memory: last.
        self.store = ExpertStore(shape, device, self.stream, checkpoint, options.host_bytes, self.cache.quotas())
        try:
            bandwidth = self._measure_bandwidth(pool[-1])
            self.cache.held, self.cache.num_blocks = self.store.held, self.store.num_blocks
            self.cache.disk_cost = max(1.0, (bandwidth or LINK_BANDWIDTH) / DISK_BANDWIDTH)
            self.idle = IdleTime(self.stream, bandwidth, shape.num_bytes // num_pieces)
        except BaseException:
            self.store.close()
            raise

    def _open_cache(self, options: OffloadOptions, num_pieces: int) -> ExpertCache:
        return ExpertCache(
            len(self.shape.layers),
            self.shape.num_experts,
            self._top_k,
            options.num_cached,
            options.num_streaming,
            options.policy,
            num_pieces=num_pieces,
        )

    def _measure_bandwidth(self, memory: torch.Tensor) -> float | None:
        block = self.store.any_block()
        if block is None:
            return None
        count = min(len(block), (64 << 20) // self.shape.dtype.itemsize)
        return self.stream.bandwidth(block[:count], memory[:count])

    def experts(self, layer: int, moe: MoeConfig, hidden: int, build: Build) -> OffloadedExperts:
        """`Parts.experts` of the model; `layer` counts all layers."""
        number = self.shape.layers.index(layer)
        made = OffloadedExperts(self, number, self._whole[number], self._build)
        self._between[number] = made.between
        return made

    def places(self) -> dict[str, dict[str, Place]]:
        return self.store.places()

    def watch_gates(self, gates: list[torch.Tensor]) -> None:
        """Router weights [experts, hidden] of the sparse layers in order: with them the next layers are guessed."""
        assert len(gates) == len(self.shape.layers)
        stacked = [torch.cat(gates[i + 1 : i + 1 + GUESS_LAYERS]) for i in range(len(gates) - 1)]
        for old, new in zip(self._gates_after, stacked):
            old.copy_(new)  # a captured graph knows the address
        self._gates_after = self._gates_after or stacked

    def compute(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, z: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weighted sum of what the experts give. `z`: what they read, if not x (low-rank ones).

        One token on a GPU: what Python asks of torch, at up to 23 us a call on a slow host. Before the first copy:
        guess 3, mark 1, cat 3, download 6. Per miss: wait 1, slices 2, copy 1, mark 1, and the same for a guess. Hidden
        behind the copies: empty 1, tables 2, sum 1; per pass the launches of expert_pairs, wait and marks 4."""
        assert not self._closed
        z, size = x if z is None else z, self.shape.forms[layer].out_size
        if len(x) == 0:
            return x.new_empty(0, size)
        question = self.question(layer, x, ids, weights, z)
        asked = self.idle.ask(layer)
        answer = self.stream.download(question)
        self.idle.answered(asked)
        pairs = x.new_empty(*ids.shape, size)
        self._complete(layer, z, weights, pairs, self._read(layer, z, ids, answer), started=False)
        return self._ops.sum_pairs(pairs)

    def _compute_pairs(
        self, layer: int, z: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        between = self._between[layer]
        more = {} if between is None else {"between": between}
        self._ops.expert_pairs(z, *self._views[layer], slots, weights, pairs, **more)

    # ---- in two halves: z is what the experts read, `enter(x)` of the layer ------------------------------------------

    def start(self, layer: int, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor) -> None:
        """Rows of `pairs` whose experts are on the device. No host, fixed addresses: may be captured."""
        self._announces = True
        slots = self._table[layer].index_select(0, ids.view(-1)).view(ids.shape)
        self._compute_pairs(layer, z, slots, weights, pairs)

    def finish(
        self,
        layer: int,
        z: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        pairs: torch.Tensor,
        answer: np.ndarray,
    ) -> None:
        """The other rows. `answer`: what `question` asked, on the host; `start` was queued since the last `finish`."""
        assert not self._closed
        self._complete(layer, z, weights, pairs, self._read(layer, z, ids, answer), started=True)

    def has_all(self, layer: int, num_pairs: int, answer: np.ndarray) -> bool:
        """Whether `start` computed every row: then the next layer may begin at once, and `take_note` can wait."""
        announced = self._announced[layer]
        return all(announced[expert] >= 0 for expert in answer[:num_pairs].tolist())

    def take_note(self, layer: int, z: torch.Tensor, ids: torch.Tensor, answer: np.ndarray) -> None:
        """In place of `finish` where nothing was missing: count the choice, and use the link for a guess."""
        chosen = self._read(layer, z, ids, answer)
        selection = self.cache.select(layer, _count_tokens(chosen.ids))
        assert not selection.waves
        self.cache.adopt(layer)
        self._guess(layer, chosen, self.idle.pieces_late())
        self._tokens += len(z) if layer == 0 else 0

    def _complete(
        self, layer: int, z: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor, chosen: Chosen, started: bool
    ) -> None:
        """Bring what is missing and compute the rows of all chosen experts but those that `start` has computed."""
        token_counts, announced = _count_tokens(chosen.ids), self._announced[layer]
        selection = self.cache.select(layer, token_counts, self._computable(layer, token_counts, chosen))
        here = [(e, slot) for e, slot in selection.hits.items() if not (started and announced[e] >= 0)]
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
                self._compute_pairs(layer, z, tables[number], weights, pairs)
            self._announce(layer, members)
            coming = number - first_wave + selection.num_ahead
            if number >= first_wave and coming < len(selection.waves):
                self._bring(layer, selection.waves[coming])
                if coming + 1 == len(selection.waves):
                    self._look_ahead(layer, chosen, selection)
        if selection.elsewhere:
            self._compute_on_cpu(layer, selection.elsewhere, chosen, pairs)
        self._tokens += len(z) if layer == 0 else 0

    def _announce(self, layer: int, members: list[tuple[int, int]]) -> None:
        """The computing queue has waited for these: `start` may use them from now on. Four bytes each, copied on the
        device from numbers that are there: an upload would queue behind the experts (see copies.py)."""
        for expert, slot in members if self._announces else ():
            if self._announced[layer][expert] != slot:
                self._table[layer, expert : expert + 1].copy_(self._numbers[slot + 1])
                self._announced[layer][expert] = slot

    def _retract(self, slot: int, layer: int, expert: int) -> None:
        """Before a slot is filled with this expert: its old one may have to go to host memory first, and `start` must
        not look for it there any more. What was started until now may still read it, so the copy waits for that."""
        content = self.cache.content(slot)
        if content is None or content == (layer, expert):
            return
        if moved := self.cache.rescue(slot):
            self._slots[slot].save(partial(self.store.save, *moved))
            self._bytes_saved += self.shape.layer_bytes[content[0]]
        if self._announced[content[0]][content[1]] != slot:
            return
        self._announced[content[0]][content[1]] = -1
        self._table[content[0], content[1] : content[1] + 1].copy_(self._numbers[0])
        self._slots[slot].used_until_now()

    def question(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, z: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int32 [...]: what the host must know, put together on the device; may be captured. Routers are asked about
        x; z is what experts read, if not that."""
        numbers = [ids]
        if self._num_guessed(layer, len(x)):
            logits = self._ops.linear(x, self._gates_after[layer])  # [tokens, layers * experts]
            numbers.append(self._ops.route(logits.view(-1, self.shape.num_experts), self._top_k, False)[0])
        if self._wants_rows(len(x)):
            numbers += [weights.view(torch.int32), (x if z is None else z).contiguous().view(torch.int32)]
        return torch.cat([part.reshape(-1) for part in numbers]) if len(numbers) > 1 else ids.reshape(-1)

    def _num_guessed(self, layer: int, num_tokens: int) -> int:
        """Layers whose experts are guessed by the way."""
        if not self._options.prefetch or layer >= len(self._gates_after) or num_tokens > GUESS_TOKENS:
            return 0
        return len(self._gates_after[layer]) // self.shape.num_experts

    def _wants_rows(self, num_tokens: int) -> bool:
        return self._options.cpu_misses and num_tokens <= SMALL_TABLE

    def _read(self, layer: int, z: torch.Tensor, ids: torch.Tensor, answer: np.ndarray) -> Chosen:
        num_tokens, size = len(z), ids.numel()
        num_guessed = self._num_guessed(layer, num_tokens)
        guesses = []
        if num_guessed:
            flat = answer[size : size * (1 + num_guessed)].reshape(num_tokens, num_guessed, -1)
            guesses = [_most_wanted(flat[:, later].ravel().tolist()) for later in range(num_guessed)]
        rows = None
        if self._wants_rows(num_tokens):
            rest = torch.from_numpy(answer[size * (1 + num_guessed) :])
            rows = rest[size:].view(z.dtype).view(z.shape), rest[:size].view(torch.float32).view(ids.shape)
        return Chosen(answer[:size].reshape(ids.shape), guesses, rows)

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
                self._disk_misses += not self.store.in_memory(layer, expert)
                self._fill(layer, expert, slot, held, self.cache.num_pieces)
                self.cache.copied(slot, self.cache.num_pieces)

    def _look_ahead(self, layer: int, chosen: Chosen, selection: ExpertWaves) -> None:
        """All copies of this call are queued: decide what stays, and use the time until the next layer asks."""
        self.cache.adopt(layer)
        self._guess(layer, chosen, self.idle.pieces(layer, bool(selection.waves), len(chosen.ids)))

    def _guess(self, layer: int, chosen: Chosen, num_pieces: int) -> None:
        if not self._prefetches or num_pieces <= 0:
            return
        for later, guesses in enumerate(chosen.guesses, layer + 1):
            wanted = [expert for expert in guesses if self.store.in_memory(later, expert)]
            for expert, slot, upto in self.cache.guess(later, wanted, num_pieces, far=later > layer + 1):
                self._retract(slot, later, expert)
                held = self.cache.begin(later, expert, slot)
                self._fill(later, expert, slot, held, upto)
                self.cache.copied(slot, upto, guess=True)
                num_pieces -= upto - held

    def _fill(self, layer: int, expert: int, slot: int, first_piece: int, last_piece: int) -> None:
        start, stop = first_piece * self._pieces[layer], last_piece * self._pieces[layer]
        self._slots[slot].fill(partial(self.store.send, layer, expert, start, stop))
        num_bytes = (stop - start) * self.shape.dtype.itemsize
        self._bytes_copied += num_bytes
        self._bytes_read += 0 if self.store.in_memory(layer, expert) else num_bytes

    def _compute_on_cpu(self, layer: int, experts: list[int], chosen: Chosen, pairs: torch.Tensor) -> None:
        assert chosen.rows is not None
        z, weights = chosen.rows
        between = self._between[layer]
        between = None if between is None else between.cpu()  # the host waits; nobody has asked for speed here yet
        results, places = [], []
        for expert in experts:
            rows, columns = np.nonzero(chosen.ids == expert)
            views = self.shape.views(self.store.block(layer, expert)[None], layer)
            slots, share = torch.zeros(len(rows), 1, dtype=torch.int32), weights[rows, columns][:, None]
            results.append(plain.expert_pairs(z[rows], *views, slots, share, between=between)[:, 0])
            places.append(rows * self._top_k + columns)
        found, where = torch.cat(results), np.concatenate(places)
        if self._uploader is None:
            sent = [found.view(torch.uint8), torch.from_numpy(where)]
        else:
            sent = self._uploader.send([found.view(torch.uint8).numpy(), where])
        pairs.view(-1, pairs.shape[2]).index_copy_(0, sent[1], sent[0].view(pairs.dtype))
        self._on_cpu += len(experts)

    def stats(self) -> ExpertStats:
        cache, itemsize = self.cache, self.shape.dtype.itemsize
        return ExpertStats(
            hits=sum(cache.layer_hits),
            misses=sum(cache.layer_misses),
            disk_misses=self._disk_misses,
            computed_on_cpu=self._on_cpu,
            bytes_copied=self._bytes_copied,
            bytes_from_disk=self._bytes_read,
            bytes_saved=self._bytes_saved,
            prefetched_bytes_useful=itemsize * sum(map(mul, cache.pieces_useful, self._pieces)),
            prefetched_bytes_wasted=itemsize * sum(map(mul, cache.pieces_wasted, self._pieces)),
            stall_seconds=self._stalls.seconds(),
            tokens=self._tokens,
            layer_hits=tuple(cache.layer_hits),
            layer_misses=tuple(cache.layer_misses),
        )

    def describe(self) -> dict[str, object]:
        options, store = self._options, self.store
        return {
            "placement": "offload",
            "policy": options.policy,
            "prefetch": self._prefetches,
            "cpu_misses": options.cpu_misses,
            "cached_slots": options.num_cached,
            "streaming_slots": options.num_streaming,
            "expert_bytes": self.shape.num_bytes,
            "in_host_memory": store.num_in_memory,
            "on_disk": store.num_on_disk(self.cache.quotas()),
        }

    def forget(self) -> None:
        """After a warm-up: its tokens must not decide what stays on the device, nor show in the statistics."""
        self.cache.forget()
        self._stalls = StallClock(self.stream)
        self._bytes_copied = self._bytes_read = self._bytes_saved = self._disk_misses = self._tokens = self._on_cpu = 0

    def restart(self, num_cached: int, policy: str, prefetch: bool) -> None:
        """Between two requests: an empty cache with these settings. Host memory, slots and captured graphs stay, so a
        benchmark can compare settings without locking all experts anew. At most as many slots as there are; and who
        wants guesses must have opened it with them, because captured questions are as long as they are."""
        options, cache = self._options, self.cache
        assert num_cached + options.num_streaming <= len(self._slots)
        assert options.prefetch or not prefetch
        self._device.synchronize()
        self._options, self._prefetches = replace(options, num_cached=num_cached, policy=policy), prefetch
        self.cache = self._open_cache(self._options, cache.num_pieces)
        self.cache.held, self.cache.num_blocks, self.cache.disk_cost = cache.held, cache.num_blocks, cache.disk_cost
        self._announced = [[-1] * self.shape.num_experts for _ in self.shape.layers]
        self._table.fill_(-1)
        self.forget()

    def close(self) -> None:
        """Waits for copies in flight, then gives the host memory back. The device's goes with the last reference."""
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
            self.store.close()
            del self._views, self._slots


def _count_tokens(ids: np.ndarray) -> dict[int, int]:
    """Expert -> pairs that name it."""
    if ids.size > SMALL_TABLE:
        experts, counts = np.unique(ids, return_counts=True)
        return dict(zip(experts.tolist(), counts.tolist()))
    found: dict[int, int] = {}
    for expert in ids.ravel().tolist():
        found[expert] = found.get(expert, 0) + 1
    return found


def _most_wanted(experts: list[int]) -> list[int]:
    """Distinct, by how often they are named; the router's order among equals."""
    counts: dict[int, int] = {}
    for expert in experts:
        counts[expert] = counts.get(expert, 0) + 1
    return sorted(counts, key=lambda expert: -counts[expert])

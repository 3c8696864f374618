"""Experts that do not all fit on the device: chosen ones are computed from expert buffers, missing ones are copied in
meanwhile.

One call of a layer:

    1. the chosen ids, and guesses of the next layers' (their routers applied to this layer's input), go to the host in
       one download: the only time the host waits;
    2. the cache decides where what is missing goes (waves); the rest is here (hits);
    3. copies of the first waves are queued, then part of what the next layers may want: as much as the copy engine
       can move before the next layer's own copies;
    4. hits are computed while misses travel, then each wave as it arrives; the parts are added.

The output is that of resident experts, bit for bit: a pair (token, expert) gives the same numbers whichever buffer its
expert is in and whichever pass it is in, all pairs of an expert are in one pass, and the sum is taken once. Only
`cpu_misses` departs from that: the CPU adds up in another order.

A decode step of few tokens may also run as captured segments (runner/relay.py): `compute_present` computes what is here
by a table on the device; meanwhile the host reads what was chosen, and `compute_missing` brings and computes the rest,
mostly nothing.

Who decides what about an expert's bytes: `ExpertStore` where they come from, `ExpertCache` which buffer they go to,
`ExpertBuffer` when that buffer may be written and read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import mul

import numpy as np
import torch

from nanovllm.hardware.bandwidth import copy_bandwidth
from nanovllm.hardware.copies import CopyStream, ExpertBuffer, StallClock, open_copy_stream, reading
from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import transfers_of
from nanovllm.layers.build import Build
from nanovllm.memory.speed import DISK_BANDWIDTH, LINK_BANDWIDTH
from nanovllm.model_config import MoeConfig
from nanovllm.moe.offload.cache import ExpertCache, ExpertStats
from nanovllm.moe.offload.idle import IdleTime
from nanovllm.moe.offload.report import ExpertCall, HostRouting, RoutingReport
from nanovllm.moe.offload.shape import ExpertShape
from nanovllm.moe.offload.store import ExpertStore
from nanovllm.moe.offload.table import BufferTable, is_small
from nanovllm.moe.projections import SharedProjections, cut_expert
from nanovllm.moe.scaled import dense_form
from nanovllm.ops.opset import PLAIN, choose_ops
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm
from nanovllm.weights.loader import LoadTarget

PIECE_BYTES = 4 << 20  # grain of a guess: 75 us at 55 GB/s. Pieces that follow each other travel in one copy.
CPU_TOKENS = 2  # cpu_misses: an expert that more tokens want is worth its copy


@dataclass(frozen=True)
class OffloadOptions:
    num_cached: int  # buffers, over all layers
    num_streaming: int
    policy: str = "lfu"
    prefetch: bool = True
    cpu_misses: bool = False
    host_bytes: int | None = None  # None: most of what is available
    piece_bytes: int = PIECE_BYTES


@dataclass
class _Counts:
    """Of ExpertStats, what is counted here."""

    disk_misses: int = 0
    computed_on_cpu: int = 0
    bytes_copied: int = 0
    bytes_from_disk: int = 0
    bytes_saved: int = 0
    tokens: int = 0


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
        forms = forms or (dense_form(moe, hidden, build),) * len(layers)
        shares, shards = zip(*(cut_expert(form, build.parallel) for form in forms))
        dtype = torch.uint8 if shares[0].is_bytes else build.dtype
        self.shape = shape = ExpertShape(layers, moe.num_experts, shares, dtype, shards)
        self._whole, self._build = forms, build
        self._top_k, self._ops, self._device, self._options = moe.top_k, build.ops, device, options
        num_pieces = shape.num_pieces(options.piece_bytes)
        self._piece_sizes = [form.length // num_pieces for form in shares]  # numbers in a piece, by layer
        self.cache = self._open_cache(num_pieces)
        self.stream = stream or open_copy_stream(device)
        pool = torch.empty(self.cache.num_buffers, shape.numel, dtype=shape.dtype, device=device.torch_device)
        self._views = [shape.views(pool, layer) for layer in range(len(layers))]
        self._between: list[torch.Tensor | None] = [None] * len(layers)  # low-rank: what follows SiLU (ops/moe.py)
        self._buffers = [ExpertBuffer(memory, self.stream) for memory in pool]
        self._transfers = transfers_of(device)
        self._table = BufferTable(len(layers), moe.num_experts, len(pool), self._transfers)
        self.report = RoutingReport(build.ops, moe.num_experts, moe.top_k, options.prefetch, options.cpu_misses)
        self._stalls, self._counts = StallClock(self.stream), _Counts()
        self._prefetches, self._closed = options.prefetch, False
        self._on_cpu = choose_ops(False, torch.float32) if options.cpu_misses else PLAIN
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

    def _open_cache(self, num_pieces: int) -> ExpertCache:
        sizes, options = (len(self.shape.layers), self.shape.num_experts, self._top_k), self._options
        return ExpertCache(*sizes, options.num_cached, options.num_streaming, options.policy, num_pieces=num_pieces)

    def _measure_bandwidth(self, memory: torch.Tensor) -> float | None:
        """Bytes per second to the device. None where copies do not run beside computing."""
        block = self.store.any_block()
        if block is None or not self._device.is_gpu:
            return None
        count = min(len(block), (64 << 20) // self.shape.dtype.itemsize)
        return copy_bandwidth(block[:count], memory[:count], self._device)

    def experts(self, layer: int, moe: MoeConfig, hidden: int, build: Build) -> OffloadedExperts:
        """`Parts.experts` of the model; `layer` counts all layers."""
        number = self.shape.layers.index(layer)
        made = OffloadedExperts(self, number, self._whole[number], self._build, not moe.shared_size)
        self._between[number] = made.between
        return made

    def places(self) -> dict[str, dict[str, LoadTarget]]:
        return self.store.places()

    def watch_gates(self, gates: list[torch.Tensor]) -> None:
        """Router weights [experts, hidden] of the sparse layers in order: with them the next layers are guessed."""
        assert len(gates) == len(self.shape.layers)
        self.report.watch_gates(gates)

    def compute(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, z: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weighted sum of what the experts give. `z`: what they read, if not x (low-rank ones).

        One token on a GPU: calls of torch, at up to 23 us each on a slow host. Before the first copy: guess 3, mark 1,
        cat 3, download 6. Per miss: wait 1, slices 2, copy 1, mark 1, and the same for a guess. Hidden behind the
        copies: empty 1, tables 2, sum 1; per pass the launches of expert_pairs, wait and marks 4."""
        size = self.shape.forms[layer].out_size
        if len(x) == 0:
            return x.new_empty(0, size)
        call = ExpertCall(layer, x if z is None else z, ids, weights, x.new_empty(*ids.shape, size))
        packed = self.report.pack(call, x)
        mark = self.idle.before_download(layer)
        report = self.stream.download(packed)
        self.idle.after_download(mark)
        self._bring_and_compute(call, self.report.unpack(call, report), set())
        return self._ops.sum_pairs(call.pairs)

    def _compute_pairs(self, call: ExpertCall, buffers: torch.Tensor) -> None:
        between = self._between[call.layer]
        more = {} if between is None else {"between": between}
        self._ops.expert_pairs(call.z, *self._views[call.layer], buffers, call.weights, call.pairs, **more)

    # ---- in captured segments ----------------------------------------------------------------------------------------

    def compute_present(self, call: ExpertCall) -> None:
        """Rows of `call.pairs` whose experts are on the device. No host, fixed addresses: may be captured."""
        self._compute_pairs(call, self._table.find(call.layer, call.ids))

    def has_all(self, call: ExpertCall, report: np.ndarray) -> bool:
        """Whether `compute_present` computed every row: then the next layer may begin at once, and `note_hits` can
        wait."""
        return all(self._table.has(call.layer, expert) for expert in report[: call.ids.numel()].tolist())

    def compute_missing(self, call: ExpertCall, report: np.ndarray) -> None:
        """The other rows. `report`: the host's copy of what `RoutingReport.pack` gave; `compute_present` of this call
        has been queued."""
        routing = self.report.unpack(call, report)
        done = {e for e in routing.ids.ravel().tolist() if self._table.has(call.layer, e)}
        self._bring_and_compute(call, routing, done)

    def note_hits(self, call: ExpertCall, report: np.ndarray) -> None:
        """In place of `compute_missing` where nothing was missing: counts the choice, and uses the link for guesses."""
        routing = self.report.unpack(call, report)
        selection = self.cache.select(call.layer, routing.token_counts())
        assert not selection.waves
        self.cache.adopt(call.layer)
        self._guess(call.layer, routing, self.idle.pieces_late())
        self._counts.tokens += len(call.z) if call.layer == 0 else 0

    # ---- what is missing ---------------------------------------------------------------------------------------------

    def _bring_and_compute(self, call: ExpertCall, routing: HostRouting, done: set[int]) -> None:
        """Brings what is missing and computes the rows of all chosen experts but `done`."""
        assert not self._closed
        token_counts = routing.token_counts()
        computable: set[int] = set()
        if routing.rows is not None:
            few = (expert for expert, count in token_counts.items() if count <= CPU_TOKENS)
            computable = {expert for expert in few if self.store.in_memory(call.layer, expert)}
        selection = self.cache.select(call.layer, token_counts, computable)
        waves, num_ahead = selection.waves, selection.num_ahead
        here = [(expert, buffer) for expert, buffer in selection.hits.items() if expert not in done]
        passes = ([here] if here else []) + waves
        tables = None if is_small(routing.ids, passes) else self._table.of_passes(routing.ids, passes)
        for wave in waves[:num_ahead]:
            self._bring(call.layer, wave)
        if len(waves) <= num_ahead:
            self._look_ahead(call.layer, routing, bool(waves))
        if tables is None and passes:
            tables = self._table.of_passes(routing.ids, passes)
        first_wave = len(passes) - len(waves)
        for number, members in enumerate(passes):
            assert tables is not None
            with reading([self._buffers[buffer] for _, buffer in members], self._stalls):
                self._compute_pairs(call, tables[number])
            self._table.add(call.layer, members)
            coming = number - first_wave + num_ahead
            if number >= first_wave and coming < len(waves):
                self._bring(call.layer, waves[coming])
                if coming + 1 == len(waves):
                    self._look_ahead(call.layer, routing, True)
        if selection.elsewhere:
            self._compute_on_cpu(call, selection.elsewhere, routing)
        self._counts.tokens += len(call.z) if call.layer == 0 else 0

    def _bring(self, layer: int, wave: list[tuple[int, int]]) -> None:
        for expert, buffer in wave:
            if self._fill(layer, expert, buffer, self.cache.num_pieces):
                self._counts.disk_misses += not self.store.in_memory(layer, expert)

    def _look_ahead(self, layer: int, routing: HostRouting, has_misses: bool) -> None:
        """All copies of this call are queued: decides what stays, and uses the time until the next layer's copies."""
        self.cache.adopt(layer)
        self._guess(layer, routing, self.idle.pieces(layer, has_misses, len(routing.ids)))

    def _guess(self, layer: int, routing: HostRouting, num_pieces: int) -> None:
        if not self._prefetches or num_pieces <= 0:
            return
        for later, guesses in enumerate(routing.guesses, layer + 1):
            wanted = [expert for expert in guesses if self.store.in_memory(later, expert)]
            for fetch in self.cache.guess(later, wanted, num_pieces, far=later > layer + 1):
                num_pieces -= self._fill(later, *fetch, guess=True)

    def _fill(self, layer: int, expert: int, buffer: int, num_pieces: int, guess: bool = False) -> int:
        """Queues copies until the buffer holds so many pieces of the expert. How many were copied."""
        self._vacate(layer, expert, buffer)
        held = self.cache.begin(layer, expert, buffer)
        if held == num_pieces:
            return 0
        start, stop = held * self._piece_sizes[layer], num_pieces * self._piece_sizes[layer]
        self._buffers[buffer].fill(partial(self.store.send, layer, expert, start, stop))
        num_bytes = (stop - start) * self.shape.dtype.itemsize
        self._counts.bytes_copied += num_bytes
        self._counts.bytes_from_disk += 0 if self.store.in_memory(layer, expert) else num_bytes
        self.cache.copied(buffer, num_pieces, guess)
        return num_pieces - held

    def _vacate(self, layer: int, expert: int, buffer: int) -> None:
        """Before a buffer is filled with this expert: its old one may have to go to host memory first, and captured
        segments must not look for it there any more. What was queued until now may still read it, so the copy waits for
        that."""
        content = self.cache.content(buffer)
        if content is None or content == (layer, expert):
            return
        if moved := self.cache.rescue(buffer):
            self._buffers[buffer].save(partial(self.store.save, *moved))
            self._counts.bytes_saved += self.shape.layer_bytes[content[0]]
        if self._table.remove(*content, buffer):
            self._buffers[buffer].used_until_now()

    def _compute_on_cpu(self, call: ExpertCall, experts: list[int], routing: HostRouting) -> None:
        assert routing.rows is not None
        z, weights = routing.rows
        between = self._between[call.layer]
        between = None if between is None else between.cpu()  # the host waits; not optimised
        results, places = [], []
        for expert in experts:
            rows, columns = np.nonzero(routing.ids == expert)
            views = self.shape.views(self.store.block(call.layer, expert)[None], call.layer)
            buffers, share = torch.zeros(len(rows), 1, dtype=torch.int32), weights[rows, columns][:, None]
            results.append(self._on_cpu.expert_pairs(z[rows], *views, buffers, share, between=between)[:, 0])
            places.append(rows * self._top_k + columns)
        found, where = self._transfers.send([torch.cat(results).view(torch.uint8).numpy(), np.concatenate(places)])
        call.pairs.view(-1, call.pairs.shape[2]).index_copy_(0, where, found.view(call.pairs.dtype))
        self._counts.computed_on_cpu += len(experts)

    # ---- from outside ------------------------------------------------------------------------------------------------

    def stats(self) -> ExpertStats:
        cache, itemsize = self.cache, self.shape.dtype.itemsize
        return ExpertStats(
            hits=sum(cache.layer_hits),
            misses=sum(cache.layer_misses),
            prefetched_bytes_useful=itemsize * sum(map(mul, cache.pieces_useful, self._piece_sizes)),
            prefetched_bytes_wasted=itemsize * sum(map(mul, cache.pieces_wasted, self._piece_sizes)),
            stall_seconds=self._stalls.seconds(),
            layer_hits=tuple(cache.layer_hits),
            layer_misses=tuple(cache.layer_misses),
            **vars(self._counts),
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
            "expert_dtype": self.shape.numbers,
            "in_host_memory": store.num_in_memory,
            "on_disk": store.num_on_disk(self.cache.quotas()),
        }

    def forget(self) -> None:
        """After a warm-up: its tokens must not decide what stays on the device, nor show in the statistics."""
        self.cache.forget()
        self._stalls, self._counts = StallClock(self.stream), _Counts()

    def restart(self, num_cached: int, policy: str, prefetch: bool) -> None:
        """Between two requests: an empty cache with these settings. Host memory, buffers and captured graphs stay, so a
        benchmark can compare settings without locking all experts anew. At most as many buffers as there are; and
        prefetch only if it was opened with prefetch, because reports in captured segments have a fixed length."""
        options, old = self._options, self.cache
        assert num_cached + options.num_streaming <= len(self._buffers)
        assert options.prefetch or not prefetch
        self._device.synchronize()
        self._options, self._prefetches = replace(options, num_cached=num_cached, policy=policy), prefetch
        self.cache = self._open_cache(old.num_pieces)
        self.cache.held, self.cache.num_blocks, self.cache.disk_cost = old.held, old.num_blocks, old.disk_cost
        self._table.clear()
        self.forget()

    def close(self) -> None:
        """Waits for copies in flight, then gives the host memory back. The device's goes with the last reference."""
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
            self.store.close()
            del self._views, self._buffers


class OffloadedExperts(SharedProjections):
    """A layer's part of `Offload`: meets `Experts` (moe/layer.py), dense or low-rank. The projections that low-rank
    experts share are parameters."""

    graph_safe = False  # the host reads what was chosen

    def __init__(self, offload: Offload, layer: int, form: ExpertForm, build: Build, reduces: bool) -> None:
        """`layer`: among the sparse ones. `form`: of whole experts."""
        super().__init__(form, build, reduces)
        self.offload, self.layer = offload, layer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.leave(self.offload.compute(self.layer, x, ids, weights, self.enter(x)))

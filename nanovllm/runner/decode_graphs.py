"""Decode as one captured graph per batch size: forward, sampling and the advance of the state, replayed k times.

Launching a decode step's 300 kernels from Python takes longer than running them, so the launches are recorded once and
replayed by the driver. What a graph reads must stay at fixed addresses: the `lanes` below, which `begin` fills on
every visit of the host, and which the graph itself advances from token to token. Buckets are fine (1, 2, 4, then every
8), because as sequences end, padding would otherwise dominate; all graphs share one memory pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanovllm.attention.base import AttentionBatch
from nanovllm.hardware.device import Device
from nanovllm.hardware.graphs import capture_graph
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.ops.sampler_state import SamplerState
from nanovllm.runner.relay import Relay, relays

if TYPE_CHECKING:
    from nanovllm.ops.triton.sampling import Drawn

AfterStep = Callable[[torch.Tensor, "Drawn"], None]
MAX_STEPS = 64  # most replays between two visits (EngineConfig.decode_steps is bounded by it)


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8; the last covers max_num_seqs whatever it is."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    sizes += list(range(8, max_num_seqs, 8))
    return [*sizes, max_num_seqs]


@dataclass(frozen=True)
class Lanes:
    rows: torch.Tensor  # int32 [lanes]: the sequence's row, -1 = padding
    tokens: torch.Tensor  # int64 [lanes]
    positions: torch.Tensor  # int64
    context_lens: torch.Tensor  # int32, 0 = padding
    slots: torch.Tensor  # int64, -1 = padding
    block_tables: torch.Tensor  # int32 [lanes, most blocks]
    out: torch.Tensor  # int64 [lanes, MAX_STEPS]: what each replay sampled
    step: torch.Tensor  # int32 [1]: replays since the visit began

    @classmethod
    def allocate(cls, num_lanes: int, num_blocks: int, device: torch.device) -> Lanes:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(num_lanes, dtype=torch.int32) - 1, zeros(num_lanes), zeros(num_lanes),
            zeros(num_lanes, dtype=torch.int32), zeros(num_lanes) - 1,
            zeros(num_lanes, num_blocks, dtype=torch.int32), zeros(num_lanes, MAX_STEPS), zeros(1, dtype=torch.int32),
        )  # fmt: skip

    def first(self, count: int) -> Lanes:
        parts = (self.rows, self.tokens, self.positions, self.context_lens, self.slots, self.block_tables, self.out)
        return Lanes(*(part[:count] for part in parts), self.step)


class DecodeGraphs:
    def __init__(
        self, model: Transformer, caches: list[KVCache], device: Device, max_num_seqs: int, max_model_len: int,
        block_size: int, eager: bool, state: SamplerState,
    ) -> None:  # fmt: skip
        self._model = model
        self._state = state
        self._caches = caches
        self._device = device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._eager = eager
        self.sizes = bucket_sizes(max_num_seqs)
        self.lanes = Lanes.allocate(max_num_seqs, -(-max_model_len // block_size), device.torch_device)
        self._newest: dict[int, tuple[torch.Tensor, Drawn]] = {}  # what the newest replay of a size left
        self._arange = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device.torch_device)
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self) -> None:
        """Largest first: its memory then serves all others."""
        pool = None

        def captured(function: Callable[[], None]) -> Callable[[], None]:
            nonlocal pool
            replay, pool = capture_graph(function, pool)
            return replay

        for size in reversed(self.sizes):
            compute = partial(self._compute, size)
            if self._eager or not (self._model.graph_safe or relays(self._model, size)):
                self._replays[size] = compute
            elif self._model.graph_safe:
                self._replays[size] = captured(compute)
            else:
                sample = partial(self._sample, size)
                relay = Relay(self._model, self._caches, self._step(size), sample, captured, pin=True)
                self._replays[size] = relay.run

    def compute_each(self) -> None:
        for size in self.sizes:
            self._compute(size)

    @contextlib.contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Kernel by kernel, as it was before the capture: for who wants to look inside a step."""
        captured, self._replays = self._replays, {size: partial(self._compute, size) for size in self.sizes}
        try:
            yield
        finally:
            self._replays = captured

    def size_for(self, num_lanes: int) -> int:
        return next(size for size in self.sizes if size >= num_lanes)

    def run(self, num_lanes: int, num_steps: int, after_each: AfterStep | None = None) -> None:
        """`after_each` gets the logits and what was drawn, which the next replay overwrites."""
        size = self.size_for(num_lanes)
        replay = self._replays[size]
        for _ in range(num_steps):
            replay()
            if after_each is not None:
                after_each(*self._newest[size])

    def _compute(self, size: int) -> None:
        self._sample(size, self._model(self._step(size), self._caches))

    def _step(self, size: int) -> Step:
        lanes = self.lanes.first(size)
        batch = AttentionBatch(
            query_lens=[1] * size,
            context_lens=[],
            spans=[],
            device_query_starts=self._arange[: size + 1],
            device_context_lens=lanes.context_lens,
            device_block_tables=lanes.block_tables,
            slots=lanes.slots,
            num_decodes=size,
            max_context_len=self._max_model_len,
        )
        return Step(lanes.tokens, lanes.positions, None, batch)

    def _sample(self, size: int, hidden: torch.Tensor) -> None:
        from nanovllm.ops.triton.decode_state import advance
        from nanovllm.ops.triton.sampling import draw

        lanes, logits = self.lanes.first(size), self._model.logits(hidden)
        # The token being drawn stands one position after the one just fed.
        drawn = draw(logits, lanes.rows, lanes.context_lens, self._state)
        self._newest[size] = (logits, drawn)
        advance(
            drawn.tokens, lanes.tokens, lanes.positions, lanes.context_lens, lanes.slots, lanes.block_tables, lanes.out,
            lanes.step, self._block_size,
        )  # fmt: skip

"""What the tests of offload share: experts in memory, a resident answer to compare with, and a device that does its
copies as late as it may and checks the order of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.hardware.copies import CopyStream, Mark
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import MoeConfig
from nanovllm.moe.offload.offload import Offload, OffloadOptions
from nanovllm.moe.offload.store import ExpertStore
from nanovllm.ops.opset import PLAIN, Ops
from nanovllm.weights.loader import OnDisk

CPU = Device(torch.device("cpu"))
HIDDEN, SIZE = 32, 32


class CountingStream(CopyStream):
    num_downloads = num_copies = bytes_copied = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        self.bytes_copied += source.numel() * source.element_size()
        self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def download(self, tensor: torch.Tensor) -> np.ndarray:
        self.num_downloads += 1
        return super().download(tensor)


class LazyStream(CountingStream):
    """A copy happens only when something waits for it; computing happens at once. A kernel that reads too early
    reads old bytes, a source that is rewritten too early sends wrong ones, and a copy that does not wait for the last
    kernel that read its target is caught by number: `reads` has, for a buffer, the first mark after its last use."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_queued = 0
        self.reads: dict[int, int] = {}  # address of a buffer's memory -> number of the mark
        self.buffer_bytes = 0

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for address, number in self.reads.items():
            if address <= target.data_ptr() < address + self.buffer_bytes:
                assert self._copies_after >= number, "overwritten while a kernel may still read it"
        self._queue.append((target, source))
        self._num_queued += 1

    def note_read(self, address: int) -> None:
        self.reads[address] = self._num_marks + 1

    def _run(self, upto: int) -> None:
        while self._queue and self._num_queued - len(self._queue) < upto:
            target, source = self._queue.pop(0)
            target.copy_(source)

    def _record_copies(self, timed: bool) -> int:
        return self._num_queued

    def _record_compute(self, timed: bool) -> float:
        return 0.0

    def _make_compute_wait(self, point: int) -> None:
        self._run(point)

    def wait(self, mark: Mark) -> None:
        self._run(mark.point)

    def synchronize(self) -> None:
        self._run(self._num_queued)


class FixedIdle:
    """So many pieces of idle time after every layer, whatever the clock."""

    def __init__(self, pieces: int) -> None:
        self.num_pieces = pieces

    def before_download(self, layer: int) -> None: ...

    def after_download(self, mark: object) -> None: ...

    def pieces(self, layer: int, has_misses: bool, num_tokens: int) -> int:
        return self.num_pieces

    def pieces_late(self) -> int:
        return self.num_pieces


@dataclass
class Rig:
    offload: Offload
    stream: CountingStream
    moe: MoeConfig
    reference: list[tuple[torch.Tensor, torch.Tensor]]  # gate_up and down of every layer
    gates: list[torch.Tensor]
    files: ReferenceFiles

    def layer(self, number: int):
        return self.offload.experts(number, self.moe, HIDDEN, None)

    def resident(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return PLAIN.sum_pairs(PLAIN.expert_pairs(x, *self.reference[layer], ids, weights))


def checked_ops(stream: CopyStream) -> Ops:
    def expert_pairs(x, gate_up, down, buffers, weights, out=None, **more):
        if isinstance(stream, LazyStream):
            for buffer in set(buffers.flatten().tolist()) - {-1}:
                stream.note_read(gate_up[buffer].data_ptr())
        return PLAIN.expert_pairs(x, gate_up, down, buffers, weights, out, **more)

    return replace(PLAIN, expert_pairs=expert_pairs)


class ReferenceFiles:
    """Stands for the model's files: what `expert.part` of a layer is called, and the numbers under that name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_reads = 0

    def names(self) -> list[str]:
        return []

    def location(self, name: str) -> None:
        return None  # read through `read`, as what has another form

    def packed_forms(self) -> dict[str, str]:
        return {}

    def read(self, name: str) -> torch.Tensor:
        self.num_reads += 1
        return self.tensors[name]


def make_rig(
    num_layers: int,
    num_experts: int,
    top_k: int,
    options: OffloadOptions,
    dtype: torch.dtype = torch.float32,
    lazy: bool = True,
    num_pieces: int = 0,
    checkpoint=None,
) -> Rig:
    moe = MoeConfig(num_experts, top_k, SIZE, True, (True,) * num_layers)
    stream = LazyStream() if lazy else CountingStream()
    build = Build(dtype, CPU.torch_device, checked_ops(stream), Parallel())
    files = ReferenceFiles()
    offload = Offload(moe, HIDDEN, build, CPU, options, checkpoint or files, stream)
    stream.buffer_bytes = offload.shape.num_bytes
    offload.idle = FixedIdle(num_pieces)
    generator = torch.Generator().manual_seed(1)
    shapes = (num_experts, 2 * SIZE, HIDDEN), (num_experts, HIDDEN, SIZE)
    reference = [tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes) for _ in range(num_layers)]
    for layer, (gate_up, down) in enumerate(reference):
        for expert in range(num_experts):
            for part, numbers in zip(("gate", "up", "down"), (*gate_up[expert].split(SIZE), down[expert])):
                files.tensors[f"{layer}.{expert}.{part}"] = numbers
    if checkpoint is None:
        fill_places(offload.store, files)
    gates = [torch.randn(num_experts, HIDDEN, generator=generator).to(dtype) for _ in range(num_layers)]
    offload.watch_gates(gates)
    return Rig(offload, stream, moe, reference, gates, files)


def fill_places(store: ExpertStore, checkpoint) -> None:
    """What the loader does. Tensors are called `layer.expert.part`."""
    for target, parts in store.places().items():
        layer = int(target.split(".")[1])
        for part, place in parts.items():
            expert, which = part.split(".") if "." in part else (part, "down")
            name = f"{layer}.{expert}.{which}"
            if isinstance(place, OnDisk):
                place.remember(name)
                place = place.copy
            if place is not None:
                place.copy_(checkpoint.read(name))


def random_call(rig: Rig, num_tokens: int, generator: torch.Generator, spread: int | None = None):
    """x, ids, weights; `spread`: only the first so many experts are chosen."""
    dtype = rig.offload.shape.dtype
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    pool = max(spread or rig.moe.num_experts, rig.moe.top_k)
    ids = torch.rand(num_tokens, pool, generator=generator).argsort(1)[:, : rig.moe.top_k].int().contiguous()
    return x, ids, torch.rand(num_tokens, rig.moe.top_k, generator=generator)

"""ExpertStore: where experts wait for their turn, in page-locked host memory or on disk.

An expert is one block of 3 x I x H numbers, [gate | up | down], the layout it has in a slot of the device: one copy
brings it there. Blocks are locked one by one until the limit is reached or the system refuses; the other experts stay
in the model's files and are read when they are wanted, in chunks through two small locked buffers: while one chunk
travels to the device the next is read. That tier is as slow as the disk, and it needs no memory.

Files are read with `preadv`, not through a mapping: a file that shrinks while it is served is then an error with its
name. Numbers of another dtype than the device computes in are converted chunk by chunk.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware.copies import CopyStream, Mark
from nanovllm.hardware.device import Device
from nanovllm.hardware.pinned import HostBlock, available_host_bytes
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.loader import OnDisk, Place
from nanovllm.weights.safetensors_folder import Location

logger = logging.getLogger("nanovllm")

CHUNK_BYTES = 16 << 20
HOST_SHARE = 0.8  # of the memory that is available, if the user sets no limit
GIB = 2**30


@dataclass(frozen=True)
class ExpertShape:
    layers: tuple[int, ...]  # numbers of the sparse layers in the model
    num_experts: int  # in one layer
    hidden: int
    intermediate: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [..., 2I, H] and down [..., H, I] of blocks [..., 3*I*H]."""
        split, lead = 2 * self.intermediate * self.hidden, block.shape[:-1]
        gate_up = block[..., :split].view(*lead, 2 * self.intermediate, self.hidden)
        return gate_up, block[..., split:].view(*lead, self.hidden, self.intermediate)


@dataclass
class _Chunk:
    block: HostBlock
    sent: Mark | None = None


@dataclass
class _File:
    """An expert on disk: its three tensors."""

    parts: dict[str, Location] = field(default_factory=dict)


class ExpertStore:
    def __init__(
        self, shape: ExpertShape, device: Device, stream: CopyStream, checkpoint: Checkpoint | None,
        host_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`checkpoint`: where experts without room in host memory are read from; None = dummy weights, nowhere."""
        self.shape = shape
        self._stream, self._checkpoint = stream, checkpoint
        self._blocks: dict[tuple[int, int], HostBlock] = {}
        self._files: dict[tuple[int, int], _File] = {}
        self._open: dict[Path, int] = {}
        self._raw = torch.empty(0, dtype=torch.uint8)  # as stored, before it is converted
        self._chunks: list[_Chunk] = []
        self._turn = 0
        try:
            self._reserve(device, int(available_host_bytes() * HOST_SHARE) if host_bytes is None else host_bytes)
        except BaseException:
            self.close()
            raise

    def _reserve(self, device: Device, host_bytes: int) -> None:
        """The first experts of every layer get memory, so that all layers have the same share on disk."""
        shape = self.shape
        keys = [(layer, expert) for expert in range(shape.num_experts) for layer in range(len(shape.layers))]
        num_fit = host_bytes // shape.num_bytes
        reason = f"the limit is {host_bytes / GIB:.2f} GiB"
        for key in keys[:num_fit]:
            try:
                self._blocks[key] = HostBlock(shape.numel, shape.dtype, device)
            except MemoryError as error:
                reason = f"the system refused more: {error}"
                break
        rest = keys[len(self._blocks) :]
        if rest:
            self._stay_on_disk(rest, reason, device)

    def _stay_on_disk(self, keys: list[tuple[int, int]], reason: str, device: Device) -> None:
        total = len(keys) + len(self._blocks)
        locked, wanted = (count * self.shape.num_bytes / GIB for count in (len(self._blocks), total))
        figures = f"{locked:.2f} of {wanted:.2f} GiB of experts are in locked host memory ({reason})"
        remedy = f"give expert_host_gb={-(-wanted * 100 // 1) / 100} (and a machine that has it)"
        if self._checkpoint is None:
            raise ConfigError(f"{figures}, and dummy weights have no files to read the others from: {remedy}")
        names = self._checkpoint.names()
        if names and self._checkpoint.location(names[0]) is None:
            raise ConfigError(
                f"{figures}, and experts in a GGUF file cannot be read from disk as they are needed: {remedy}, or use "
                "the model's safetensors"
            )
        logger.warning("%s; the other %d of %d are read from disk when they are needed, which is slow: %s",
                       figures, len(keys), total, remedy)  # fmt: skip
        self._files = {key: _File() for key in keys}
        size = min(CHUNK_BYTES // self.shape.dtype.itemsize, self.shape.numel)
        try:
            self._chunks = [_Chunk(HostBlock(size, self.shape.dtype, device)) for _ in range(2)]
        except MemoryError as error:
            raise ConfigError(f"not even {2 * CHUNK_BYTES >> 20} MiB of host memory can be locked ({error})") from error

    def places(self) -> dict[str, dict[str, Place]]:
        """For the loader: parameter as it would be called -> part -> where it goes."""
        shape = self.shape
        places: dict[str, dict[str, Place]] = {}
        for layer, number in enumerate(shape.layers):
            gate_up = places[f"layers.{number}.mlp.experts.gate_up.weight"] = {}
            down = places[f"layers.{number}.mlp.experts.down.weight"] = {}
            for expert in range(shape.num_experts):
                parts = self._expert_places(layer, expert)
                gate_up[f"{expert}.gate"], gate_up[f"{expert}.up"], down[str(expert)] = parts
        return places

    def _expert_places(self, layer: int, expert: int) -> list[Place]:
        shape, block = self.shape, self._blocks.get((layer, expert))
        if block is not None:
            gate_up, down = shape.views(block.tensor)
            return [*gate_up.split(shape.intermediate), down]
        sizes = {"gate": (shape.intermediate, shape.hidden), "up": (shape.intermediate, shape.hidden)}
        sizes["down"] = (shape.hidden, shape.intermediate)
        return [OnDisk(size, partial(self._remember, (layer, expert), part)) for part, size in sizes.items()]

    def _remember(self, key: tuple[int, int], part: str, name: str) -> None:
        assert self._checkpoint is not None
        location = self._checkpoint.location(name)
        assert location is not None
        self._files[key].parts[part] = location
        if location.path not in self._open:  # now: another file of that name may have other numbers later
            self._open[location.path] = _open_file(location.path)
        if location.dtype != self.shape.dtype:  # a miss allocates nothing
            size = len(self._chunks[0].block.tensor) * location.dtype.itemsize
            self._raw = self._raw if len(self._raw) >= size else torch.empty(size, dtype=torch.uint8)

    @property
    def num_in_memory(self) -> int:
        return len(self._blocks)

    @property
    def num_on_disk(self) -> int:
        return len(self._files)

    def in_memory(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._blocks

    def block(self, layer: int, expert: int) -> torch.Tensor:
        return self._blocks[layer, expert].tensor

    def any_block(self) -> torch.Tensor | None:
        return next((block.tensor for block in self._blocks.values()), None)

    def send(self, layer: int, expert: int, start: int, stop: int, memory: torch.Tensor) -> None:
        """Queues the copy of numbers start..stop of an expert to the same place in `memory`."""
        if (layer, expert) in self._blocks:
            self._stream.copy(memory[start:stop], self._blocks[layer, expert].tensor[start:stop])
            return
        file = self._files[layer, expert]
        assert len(file.parts) == 3, "the loader has told where it is"
        while start < stop:
            end = min(stop, start + len(self._chunks[0].block.tensor))
            chunk = self._chunks[self._turn]
            self._turn = (self._turn + 1) % len(self._chunks)
            if chunk.sent is not None:
                self._stream.wait(chunk.sent)  # the buffer is still being read
            buffer = chunk.block.tensor[: end - start]
            self._read(file, start, buffer)
            self._stream.copy(memory[start:end], buffer)
            chunk.sent = self._stream.mark_copies()
            start = end

    def _read(self, file: _File, start: int, buffer: torch.Tensor) -> None:
        """Numbers from `start` of the block [gate | up | down]; a chunk may reach over two of them."""
        size = self.shape.hidden * self.shape.intermediate
        for number, part in enumerate(("gate", "up", "down")):
            first, last = max(start, number * size), min(start + len(buffer), (number + 1) * size)
            if first < last:
                self._read_part(file.parts[part], first - number * size, buffer[first - start : last - start])

    def _read_part(self, location: Location, start: int, buffer: torch.Tensor) -> None:
        raw = buffer
        if location.dtype != buffer.dtype:
            raw = self._raw[: len(buffer) * location.dtype.itemsize].view(location.dtype)
        view = memoryview(raw.view(torch.uint8).numpy())
        offset = location.offset + start * location.dtype.itemsize
        try:
            while view:
                count = os.preadv(self._open[location.path], [view], offset)
                if count == 0:
                    raise ModelError(
                        f"{location.path}: ends before byte {offset + len(view)}: it was cut or replaced while it is "
                        "served; restore it and start the engine again"
                    )
                view, offset = view[count:], offset + count
        except OSError as error:
            raise ModelError(f"{location.path}: an expert cannot be read ({error.strerror})") from error
        if raw is not buffer:
            buffer.copy_(raw)

    def close(self) -> None:
        """Copies must have ended: memory is unlocked here."""
        for block in [*self._blocks.values(), *(chunk.block for chunk in self._chunks)]:
            block.close()
        self._blocks.clear()
        self._chunks.clear()
        while self._open:
            os.close(self._open.popitem()[1])


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}), but experts are to be read from it") from error

"""ExpertStore: where experts are while they are not on the device, in page-locked host memory or on disk.

An expert is one block of numbers, [gate | up | down], or of bytes with scales behind them (weights/expert_form.py), the
form it has in an expert buffer: one copy brings it there.
Its sizes are the layer's own (weights/expert_form.py): those of low-rank experts differ from layer to layer. One of
several ranks of a tensor-parallel engine stores, and reads, its own share of each expert. Blocks are locked one by one
until the limit is reached or the system refuses; the other experts stay in the model's files and are read when they
are wanted, in chunks through two small locked buffers: while one chunk travels to the device the next is read. That
tier is as slow as the disk, and it needs no memory.

Where some experts are in memory and some are not, an expert does not keep its block for ever (cache.py says why):
`save` gives it to another expert of the layer, whose bytes come back from the device. Files never change, so after any
interrupt an expert without a block is read from its file.

Files are read with `preadv`, not through a mapping: a file that shrinks while it is served is then an error with its
name. Numbers of another dtype than the device computes in are converted chunk by chunk. Low-rank experts are stored in
another form than they are computed in: from disk they are read and transposed a matrix at a time, into memory of its
own. Correct, and slower still. Of experts in fewer bits the scales stay in memory (a thousandth of the experts in 8-bit
floats, a sixteenth in 4 bits). 8-bit floats are read as they are; integers lie in another order in files, and are taken
apart and packed anew whenever they are read, and so is what the file has in more bits.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError, ModelError
from nanovllm.hardware.copies import CopyStream, Mark
from nanovllm.hardware.device import Device
from nanovllm.hardware.disk_memory import bytes_of
from nanovllm.hardware.parallel import Shard
from nanovllm.hardware.pinned import HostBlock, available_host_bytes
from nanovllm.layers.integers import IntegerTarget
from nanovllm.memory.budget import GIB, fit_host, gib
from nanovllm.moe.integers import integer_parts, pack_part
from nanovllm.moe.offload.shape import ExpertShape
from nanovllm.moe.scaled import by_part, part_target, put_scales, quantise, scale_views, whole_shape
from nanovllm.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm.weights.fp8 import Fp8Blocks
from nanovllm.weights.loader import LoadTarget, OnDisk, PackedTarget, ShardTarget, as_target
from nanovllm.weights.shards import Location

logger = logging.getLogger("nanovllm")

CHUNK_BYTES = 16 << 20
HOST_SHARE = 0.8  # of the memory that is available, if the user sets no limit


@dataclass
class _Chunk:
    block: HostBlock
    sent: Mark | None = None


@dataclass(frozen=True)
class _Packed:
    """A part of an expert in integers, which are in another order in their file."""

    layer: int
    part: str
    name: str


@dataclass(frozen=True)
class _Part:
    """One of an expert's tensors on disk: its place in a file or, where that is another form, its name."""

    source: Location | str | _Packed
    rows: int
    columns: int  # numbers in a row of this rank's share
    shard: Shard | None  # which piece of the tensor that is; None: all

    def spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Where `count` numbers from `start` of the share lie in the whole: (first, how many), in order."""
        if self.shard is None or self.shard.dim == 0:
            yield start + (0 if self.shard is None else self.shard.start * self.columns), count
            return
        while count:
            row, column = divmod(start, self.columns)
            size = min(self.columns - column, count)
            yield row * self.shard.total + self.shard.start + column, size
            start, count = start + size, count - size


class ExpertStore:
    def __init__(
        self,
        shape: ExpertShape,
        device: Device,
        stream: CopyStream,
        checkpoint: Checkpoint | None,
        host_bytes: int | None = None,
        quotas: Sequence[int] = (),
    ) -> None:
        """`checkpoint`: where experts without room in host memory are read from; None = dummy weights, nowhere.
        `quotas`: how many of each layer the device can keep instead."""
        self.shape = shape
        self._stream, self._checkpoint, self._device = stream, checkpoint, device.torch_device
        self._blocks: list[list[HostBlock]] = [[] for _ in shape.layers]  # by layer
        self.held: list[dict[int, HostBlock]] = [{} for _ in shape.layers]  # expert -> the one that holds it now
        self._saved: Mark | None = None
        self._files: dict[tuple[int, int], dict[str, _Part]] = {}  # (layer, expert) -> its parts on disk
        # The same for 8-bit floats -> the bytes of its block from form.scales_start on
        self._scales: dict[tuple[int, int], torch.Tensor] = {}
        self._open: dict[Path, int] = {}
        self._reader: Checkpoint | None = None  # of experts in integers
        self._raw = torch.empty(0, dtype=torch.uint8)  # as stored, before it is converted
        # A matrix that several chunks take their numbers from
        self._converted: tuple[str | Location | _Packed, torch.Tensor] | None = None
        self._chunks: list[_Chunk] = []
        self._next_chunk = 0
        try:
            host_bytes = int(available_host_bytes() * HOST_SHARE) if host_bytes is None else host_bytes
            self._reserve(device, host_bytes, quotas or [0] * len(shape.layers))
        except BaseException:
            self.close()
            raise

    def _reserve(self, device: Device, host_bytes: int, quotas: Sequence[int]) -> None:
        """In the order of `fit_host`, whose sum is all that matters here."""
        shape, layers = self.shape, range(len(self.shape.layers))
        keys = [(layer, expert) for expert in range(shape.num_experts) for layer in reversed(layers)]
        fitting = fit_host(host_bytes, shape.layer_bytes, shape.num_experts)
        reason = f"the limit is {gib(host_bytes)}"
        for layer, expert in keys[: sum(fitting)]:
            try:
                block = HostBlock(shape.forms[layer].length, shape.dtype, device)
            except MemoryError as error:
                reason = f"the system refused more: {error}"
                break
            self._blocks[layer].append(block)
            self.held[layer][expert] = block
        if self.num_in_memory < len(keys):
            self._stay_on_disk(keys, reason, device, self.num_on_disk(quotas))

    def _stay_on_disk(self, keys: list[tuple[int, int]], reason: str, device: Device, num_left: int) -> None:
        """`num_left`: so many have no room on the device either."""
        sizes, num_rest = self.shape.layer_bytes, len(keys) - self.num_in_memory
        locked = sum(size * len(blocks) for size, blocks in zip(sizes, self._blocks))
        wanted = sum(sizes) * self.shape.num_experts
        figures = f"{gib(locked)} of {gib(wanted)} of experts are in locked host memory ({reason})"
        remedy = f"give expert_host_gb={math.ceil(wanted / GIB * 100) / 100} (and a machine that has it)"
        if self._checkpoint is None:
            raise ConfigError(f"{figures}, and dummy weights have no files to read the others from: {remedy}")
        names = self._checkpoint.names()
        if names and not self.shape.is_integers and self._checkpoint.location(names[0]) is None:
            raise ConfigError(
                f"{figures}, and experts in a GGUF file cannot be read from disk as they are needed: {remedy}, or use "
                "the model's safetensors"
            )
        figures += f"; the other {num_rest} of {len(keys)} are read from disk"
        if num_left == 0:
            logger.info("%s once: host and device together hold all", figures)
        else:
            rest = f"except {num_rest - num_left} that the device has room for"
            logger.warning("%s whenever they are needed, %s. That is slow: %s", figures, rest, remedy)
        self._files = {key: {} for key in keys}
        if self.shape.is_scaled:
            ends = [form.length - form.scales_start for form in self.shape.forms]
            self._scales = {key: torch.zeros(ends[key[0]], dtype=torch.uint8) for key in keys}
        size = min(CHUNK_BYTES // self.shape.dtype.itemsize, self.shape.numel)
        try:
            self._chunks = [_Chunk(HostBlock(size, self.shape.dtype, device)) for _ in range(2)]
        except MemoryError as error:
            raise ConfigError(f"not even {2 * CHUNK_BYTES >> 20} MiB of host memory can be locked ({error})") from error

    def places(self) -> dict[str, dict[str, LoadTarget]]:
        """For the loader: parameter as it would be called -> part -> where it goes."""
        shape = self.shape
        places: dict[str, dict[str, LoadTarget]] = {}
        for layer, number in enumerate(shape.layers):
            gate_up = places[f"layers.{number}.mlp.experts.gate_up.weight"] = {}
            down = places[f"layers.{number}.mlp.experts.down.weight"] = {}
            for expert in range(shape.num_experts):
                parts = self._expert_places(layer, expert)
                gate_up[f"{expert}.gate"], gate_up[f"{expert}.up"], down[str(expert)] = parts
        return places

    def _expert_places(self, layer: int, expert: int) -> list[LoadTarget]:
        form, block = self.shape.forms[layer], self.held[layer].get(expert)
        copies: list[torch.Tensor | ShardTarget | PackedTarget | None] = [None] * 3
        if block is not None and self.shape.is_scaled:
            shards = [(part, self.shape.shard(layer, part)) for part in form.parts]
            copies = [part_target(form, part, shard, block.tensor, self._device) for part, shard in shards]
        elif block is not None:
            gate_up, down = self.shape.views(block.tensor, layer)
            targets = zip(form.parts, (*gate_up.split(form.intermediate), down))
            copies = [as_target(target, self.shape.shard(layer, part)) for part, target in targets]
        if not self._files:
            return [copy for copy in copies if copy is not None]
        places: list[LoadTarget] = []
        for part, copy in zip(form.parts, copies):
            whole = whole_shape(form, part, self.shape.shard(layer, part))
            places.append(OnDisk(whole, partial(self._remember, (layer, expert), part), copy))
        return places

    def _remember(self, key: tuple[int, int], part: str, name: str) -> None:
        assert self._checkpoint is not None
        form, shard = self.shape.forms[key[0]], self.shape.shard(key[0], part)
        if form.integers is not None:
            self._remember_integers(key, part, name)
            return
        location = self._checkpoint.bytes_location(name) if self.shape.is_scaled else None
        location = location or self._checkpoint.location(name)
        if location is None and name in self._quantised:
            raise ConfigError(
                f"{self._checkpoint.path}: {name} is quantised and would be expanded, and such experts cannot be read "
                "from disk as they are needed; raise expert_host_gb until all fit, or leave quantization out"
            )
        self._files[key][part] = _Part(name if location is None else location, *form.parts[part], shard)
        if location is None:
            return
        if location.path not in self._open:  # now: another file of that name may have other numbers later
            self._open[location.path] = _open_file(location.path)
        if location.dtype != self.shape.dtype and not self.shape.is_scaled:  # a miss allocates nothing
            size = len(self._chunks[0].block.tensor) * location.dtype.itemsize
            self._raw = self._raw if len(self._raw) >= size else torch.empty(size, dtype=torch.uint8)
        if self.shape.is_scaled:
            self._remember_scales(key, part, name)

    @cached_property
    def _quantised(self) -> frozenset[str]:
        """Tensors of the files."""
        return frozenset() if self._checkpoint is None else frozenset(self._checkpoint.packed_forms())

    def _remember_scales(self, key: tuple[int, int], part: str, name: str) -> None:
        assert self._checkpoint is not None
        found, here = self._checkpoint.read_packed(name), self._files[key][part]
        scale = by_part(*scale_views(self.shape.forms[key[0]], self._scales[key]))[part]
        if isinstance(found, Fp8Blocks):
            put_scales(scale, found if here.shard is None else found.cut(here.shard))
        else:
            self._quantise(here, scale)

    def _remember_integers(self, key: tuple[int, int], part: str, name: str) -> None:
        """Its factors stay in memory; its words are made from the file whenever they are wanted."""
        form, shard = self.shape.forms[key[0]], self.shape.shard(key[0], part)
        size = form.part_size(part)
        self._files[key][part] = _Part(_Packed(key[0], part, name), 1, size, shard)
        _, factors = self._pack(key[0], part, name, shard)
        whole = torch.zeros(form.length, dtype=torch.uint8)
        tail = self._scales[key]
        whole[form.scales_start :].copy_(tail)
        integer_parts(form, whole)[part][1].copy_(factors)
        tail.copy_(whole[form.scales_start :])

    def _pack(self, layer: int, part: str, name: str, shard: Shard | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and factors of a part, packed on the device."""
        assert self._checkpoint is not None
        if self._reader is None:  # of its own: the model's checkpoint is closed when all is loaded
            self._reader = open_checkpoint(self._checkpoint.path)
        form, taken = self.shape.forms[layer], list[torch.Tensor]()

        def take(name: str, found: Any) -> None:
            taken.extend(pack_part(form, part, self._device, name, found))

        IntegerTarget(whole_shape(form, part, shard), shard, True, take).fill(name, self._reader)
        return taken[0], taken[1]

    @property
    def num_blocks(self) -> list[int]:
        return [len(blocks) for blocks in self._blocks]

    @property
    def num_in_memory(self) -> int:
        return sum(self.num_blocks)

    def num_on_disk(self, quotas: Sequence[int]) -> int:
        """Experts that neither host memory nor the cached buffers have room for."""
        return sum(max(self.shape.num_experts - blocks - quota, 0) for blocks, quota in zip(self.num_blocks, quotas))

    def in_memory(self, layer: int, expert: int) -> bool:
        return expert in self.held[layer]

    def block(self, layer: int, expert: int) -> torch.Tensor:
        if self._saved is not None:
            self._stream.wait(self._saved)
        return self.held[layer][expert].tensor

    def any_block(self) -> torch.Tensor | None:
        return next((block.tensor for blocks in self._blocks for block in blocks), None)

    def save(self, layer: int, expert: int, instead: int | None, memory: torch.Tensor) -> None:
        """Queues the copy of a whole expert from `memory`, that of its buffer, to the block of the expert `instead` of
        the same layer. The block belongs to neither until the copy is queued; None: a block that an interrupt left
        so."""
        held = self.held[layer]
        block = (set(self._blocks[layer]) - set(held.values())).pop() if instead is None else held.pop(instead)
        self._stream.copy(block.tensor, memory[: len(block.tensor)])
        self._saved = self._stream.mark_copies()
        held[expert] = block

    def send(self, layer: int, expert: int, start: int, stop: int, memory: torch.Tensor) -> None:
        """Queues the copy of numbers start..stop of an expert to the same place in `memory`."""
        if expert in self.held[layer]:
            self._stream.copy(memory[start:stop], self.held[layer][expert].tensor[start:stop])
            return
        assert len(self._files[layer, expert]) == 3, "the loader recorded where each part is"
        while start < stop:
            end = min(stop, start + len(self._chunks[0].block.tensor))
            chunk = self._chunks[self._next_chunk]
            self._next_chunk = (self._next_chunk + 1) % len(self._chunks)
            if chunk.sent is not None:
                self._stream.wait(chunk.sent)  # the buffer is still being read
            buffer = chunk.block.tensor[: end - start]
            self._read(layer, expert, start, buffer)
            self._stream.copy(memory[start:end], buffer)
            chunk.sent = self._stream.mark_copies()
            start = end

    def _read(self, layer: int, expert: int, start: int, buffer: torch.Tensor) -> None:
        """Numbers from `start` of the block [gate | up | down]; a chunk may reach over two of them."""
        form, file, begin = self.shape.forms[layer], self._files[layer, expert], 0
        for part in form.parts:
            end = begin + form.part_size(part)
            first, last = max(start, begin), min(start + len(buffer), end)
            if first < last:
                self._read_part(file[part], first - begin, buffer[first - start : last - start])
            begin = end
        first, last = max(start, form.scales_start), start + len(buffer)
        if self.shape.is_scaled and first < last:
            scales = self._scales[layer, expert]
            buffer[first - start :].copy_(scales[first - form.scales_start : last - form.scales_start])

    def _read_part(self, part: _Part, start: int, buffer: torch.Tensor) -> None:
        location = part.source
        if isinstance(location, _Packed):
            if self._converted is None or self._converted[0] != location:
                self._converted = None  # before the next is allocated
                words, _ = self._pack(location.layer, location.part, location.name, part.shard)
                self._converted = location, words.cpu().view(torch.uint8).flatten()
            buffer.copy_(self._converted[1][start : start + len(buffer)])
            return
        if isinstance(location, str):
            buffer.copy_(self._in_our_format(location, part.shard)[start : start + len(buffer)])
            return
        if self.shape.is_scaled and location.dtype != buffer.dtype:
            if self._converted is None or self._converted[0] != location:
                self._converted = None  # before the next is allocated
                self._converted = location, self._quantise(part)
            buffer.copy_(self._converted[1][start : start + len(buffer)])
            return
        raw = buffer
        if location.dtype != buffer.dtype:
            raw = self._raw[: len(buffer) * location.dtype.itemsize].view(location.dtype)
        self._read_stored(part, location, start, raw)
        if raw is not buffer:
            buffer.copy_(raw)

    def _read_stored(self, part: _Part, location: Location, start: int, raw: torch.Tensor) -> None:
        view, size = bytes_of(raw), location.dtype.itemsize
        for first, count in part.spans(start, len(raw)):
            self._pread(location, location.offset + first * size, view[: count * size])
            view = view[count * size :]

    def _quantise(self, part: _Part, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of a matrix that is stored in more bits; its scales go to `scale`."""
        assert isinstance(part.source, Location)
        found = torch.empty(part.rows * part.columns, dtype=part.source.dtype)
        self._read_stored(part, part.source, 0, found)
        q = torch.empty(part.rows, part.columns, dtype=torch.float8_e4m3fn)
        scale = torch.empty(part.rows) if scale is None else scale
        quantise(found.view(q.shape), q, scale, self._device)
        return q.view(torch.uint8).flatten()

    def _pread(self, location: Location, offset: int, view: memoryview) -> None:
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

    def _in_our_format(self, name: str, shard: Shard | None) -> torch.Tensor:
        """All our numbers of a tensor in our form. Chunks of it follow each other, so the last one is kept."""
        assert self._checkpoint is not None
        if self._converted is None or self._converted[0] != name:
            self._converted = None  # before the next is allocated
            if shard is None:
                found = self._checkpoint.read(name)
            else:
                found = self._checkpoint.read_slice(name, shard.dim, shard.start, shard.length)
            self._converted = name, found.flatten()
        return self._converted[1]

    def close(self) -> None:
        """Copies must have ended: memory is unlocked here."""
        for block in [*chain(*self._blocks), *(chunk.block for chunk in self._chunks)]:
            block.close()
        self._blocks, self._chunks = [], []
        for held in self.held:  # the cache has the same dicts
            held.clear()
        while self._open:
            os.close(self._open.popitem()[1])
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}), but experts are to be read from it") from error

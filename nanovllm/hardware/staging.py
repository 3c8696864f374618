"""Moving small arrays to a GPU and back without waiting, and without the classic race.

A copy from pinned memory returns before it has read that memory. Code that writes the buffer again too early changes a
copy that is still under way: wrong tokens, rarely, on a busy card. Here that cannot be written by mistake: a buffer has
one owner, `_Staging`, which reuses it only after the event of its last copy; a result has one owner, `Download`, which
is read through `wait()` alone. `Transfers`, `FixedUpload` and `HostResult` are the versions for a CPU, where nothing
moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from nanovllm.hardware.device import Device


class Arriving(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> np.ndarray:
        """Once."""


@dataclass(frozen=True)
class HostResult:
    host: np.ndarray

    def wait(self) -> np.ndarray:
        return self.host


class FixedUpload:
    """Tensors at fixed addresses, for a captured graph: shapes are those of the first arrays."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = [array.copy() for array in arrays]
        self.tensors = [torch.from_numpy(place) for place in self._arrays]

    def send(self, arrays: list[np.ndarray]) -> None:
        for place, array in zip(self._arrays, arrays):
            place[...] = array


class Transfers:
    def __init__(self, device: Device) -> None:
        self.device = device.torch_device

    def send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """The same arrays on the device. They are valid for work queued on the current stream from now on."""
        return [torch.from_numpy(array) for array in arrays]

    def fixed(self, arrays: list[np.ndarray]) -> FixedUpload:
        return FixedUpload(arrays)

    def start(self, tensor: torch.Tensor) -> Arriving:
        return HostResult(tensor.numpy().copy())  # a step that is called again may write the same memory

    def reset(self) -> None:
        """Nothing is on its way any more: buffers whose owner was dropped are free."""


def transfers_of(device: Device) -> Transfers:
    return PinnedTransfers(device) if device.is_gpu else Transfers(device)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

ALIGN = 16  # each array begins at a multiple, so that a view of the right dtype is legal


@dataclass
class _Buffer:
    memory: torch.Tensor  # pinned bytes
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class _Staging:
    """Pinned buffers used in turn; each waits for the copy that last read it before it is written again."""

    def __init__(self, num_buffers: int, size: int) -> None:
        self._buffers = [_Buffer(torch.empty(size, dtype=torch.uint8).pin_memory()) for _ in range(num_buffers)]
        self._next = 0

    def copy(self, arrays: list[np.ndarray], places: list[slice], target: torch.Tensor) -> None:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.copied.synchronize()  # usually long ago
        if len(buffer.memory) < len(target):
            buffer.memory = torch.empty(1 << (len(target) - 1).bit_length(), dtype=torch.uint8).pin_memory()
        host = buffer.memory.numpy()
        for place, array in zip(places, arrays):
            host[place] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        target.copy_(buffer.memory[: len(target)], non_blocking=True)
        buffer.copied.record()


def _places(arrays: list[np.ndarray]) -> tuple[list[slice], int]:
    places, size = [], 0
    for array in arrays:
        places.append(slice(size, size + array.nbytes))
        size += -(-array.nbytes // ALIGN) * ALIGN
    return places, max(size, ALIGN)


def _views(memory: torch.Tensor, arrays: list[np.ndarray], places: list[slice]) -> list[torch.Tensor]:
    dtypes = [torch.from_numpy(array[:0].reshape(-1)).dtype for array in arrays]
    return [memory[place].view(dtype).view(array.shape) for place, dtype, array in zip(places, dtypes, arrays)]


class PinnedTransfers(Transfers):
    """`send` packs arrays into one pinned buffer and sends them in one copy: each copy costs the host tens of
    microseconds whatever its size. Pinned buffers for results live as long as this does: torch aborts the process if
    pinned memory is freed after the card was lost, and a step that fails drops its Download first."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._owner = device
        self._staging = _Staging(num_buffers=3, size=1 << 16)
        self._free: list[torch.Tensor] = []  # for results
        self._busy: list[torch.Tensor] = []

    def send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        places, size = _places(arrays)
        sent = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._staging.copy(arrays, places, sent)
        return _views(sent, arrays, places)

    def fixed(self, arrays: list[np.ndarray]) -> StaticUpload:
        return StaticUpload(self.device, arrays)

    def start(self, tensor: torch.Tensor) -> Download:
        size = tensor.numel() * tensor.element_size()
        found = next((i for i, buffer in enumerate(self._free) if len(buffer) >= size), None)
        if found is None:
            buffer = torch.empty(1 << max(size - 1, 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        else:
            buffer = self._free.pop(found)
        self._busy.append(buffer)
        return Download(tensor, buffer, self)

    def take_back(self, buffer: torch.Tensor) -> None:
        self._busy = [other for other in self._busy if other is not buffer]
        self._free.append(buffer)

    def reset(self) -> None:
        self._owner.synchronize()  # an interrupted upload may still be read, and has recorded no event
        self._free, self._busy = self._free + self._busy, []


class StaticUpload(FixedUpload):
    def __init__(self, device: torch.device, arrays: list[np.ndarray]) -> None:
        self._places, size = _places(arrays)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._staging = _Staging(num_buffers=2, size=size)
        self.tensors = _views(self._memory, arrays, self._places)
        self.send(arrays)

    def send(self, arrays: list[np.ndarray]) -> None:
        self._staging.copy(arrays, self._places, self._memory)


class Download:
    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor, owner: PinnedTransfers) -> None:
        self._buffer, self._owner = buffer, owner
        self._host = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> np.ndarray:
        """Once: the buffer is then used for another."""
        self._arrived.synchronize()
        found = self._host.numpy().copy()
        self._owner.take_back(self._buffer)
        return found

"""Moving small arrays to a GPU and back without waiting, and without the classic race.

A copy from pinned memory returns before it has read that memory. Whoever writes the buffer again too early changes a copy
that is still under way: wrong tokens, rarely, on a busy card. Here that cannot be written by mistake: a buffer has one
owner, `Uploader`, which reuses it only after the event of its last copy; a result has one owner, `Download`, which
is read through `wait()` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.hardware.device import Device

ALIGN = 16  # each array begins at a multiple, so that a view of the right dtype is legal


@dataclass
class _Buffer:
    memory: torch.Tensor  # pinned bytes
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Uploader:
    """Packs arrays into one pinned buffer and sends them in one copy. Each copy costs the host tens of microseconds
    whatever its size, so a step sends one."""

    def __init__(self, device: Device, num_buffers: int = 3) -> None:
        self._device = device
        self._buffers = [_Buffer(torch.empty(1 << 16, dtype=torch.uint8).pin_memory()) for _ in range(num_buffers)]
        self._next = 0

    def send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """The same arrays on the device. They are valid for work queued on the current stream from now on."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // ALIGN) * ALIGN
        buffer = self._take(size)
        host = buffer.memory.numpy()
        for start, array in zip(starts, arrays):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        sent = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        sent.copy_(buffer.memory[:size], non_blocking=True)
        buffer.copied.record()
        return [
            sent[start : start + array.nbytes].view(torch.from_numpy(array[:0].reshape(-1)).dtype).view(array.shape)
            for start, array in zip(starts, arrays)
        ]

    def _take(self, size: int) -> _Buffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.copied.synchronize()  # the copy that last used this buffer has read it; usually long ago
        if len(buffer.memory) < size:
            buffer.memory = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8).pin_memory()
        return buffer


class Download:
    """A device tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> list:
        self._arrived.synchronize()
        return self._host.tolist()

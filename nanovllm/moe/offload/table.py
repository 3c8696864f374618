"""Where the experts are, for the kernels: numbers of expert buffers as tensors of the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from nanovllm.hardware.staging import Transfers

SMALL_TABLE = 64  # numbers


class BufferTable:
    """[layers, experts] on the device: the buffer of every expert that a captured segment may compute, -1 = none. The
    host has a copy with what it has queued. Where an interrupt makes the two differ, the device has *more*: the host
    then computes such a pair once more.

    Numbers are written by copies on the device, from numbers that lie there already. An upload would queue behind the
    copies of experts (hardware/copies.py)."""

    def __init__(self, num_layers: int, num_experts: int, num_buffers: int, transfers: Transfers) -> None:
        where = transfers.device
        self._transfers, self._num_experts = transfers, num_experts
        self._numbers = torch.arange(-1, num_buffers, dtype=torch.int32, device=where).split(1)
        self._device = torch.full((num_layers, num_experts), -1, dtype=torch.int32, device=where)
        self._host = [[-1] * num_experts for _ in range(num_layers)]
        self._is_used = False  # no segment reads it until the first `find`

    def find(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """The buffers of these experts, like ids. No host, fixed addresses: may be captured."""
        self._is_used = True
        return self._device[layer].index_select(0, ids.view(-1)).view(ids.shape)

    def has(self, layer: int, expert: int) -> bool:
        return self._host[layer][expert] >= 0

    def add(self, layer: int, members: Iterable[tuple[int, int]]) -> None:
        """(expert, buffer): computing has been made to wait for their copies."""
        for expert, buffer in members if self._is_used else ():
            if self._host[layer][expert] != buffer:
                self._write(layer, expert, buffer)
                self._host[layer][expert] = buffer

    def remove(self, layer: int, expert: int, buffer: int) -> bool:
        """Before the buffer is overwritten. True: what was queued until now may still read it by this table."""
        if self._host[layer][expert] != buffer:
            return False
        self._host[layer][expert] = -1
        self._write(layer, expert, -1)
        return True

    def clear(self) -> None:
        self._host = [[-1] * self._num_experts for _ in self._host]
        self._device.fill_(-1)

    def _write(self, layer: int, expert: int, buffer: int) -> None:
        self._device[layer, expert : expert + 1].copy_(self._numbers[buffer + 1])

    def of_passes(self, ids: np.ndarray, passes: list[list[tuple[int, int]]]) -> torch.Tensor:
        """[passes, tokens, top_k]: the buffer of each pair's expert if it is in that pass, else -1.

        A large one is uploaded, and must be before any expert is: a copy engine serves copies in order, and the hits
        would wait for the misses. A small one is put together on the device: the addresses of its numbers are
        arguments of one kernel, so the copy engine has no part in it."""
        tables = np.full((len(passes), *ids.shape), -1, dtype=np.int32)
        buffer_of = np.empty(self._num_experts, dtype=np.int32)
        for table, members in zip(tables, passes):
            buffer_of.fill(-1)
            for expert, buffer in members:
                buffer_of[expert] = buffer
            np.take(buffer_of, ids, out=table)
        if self._transfers.device.type != "cpu" and is_small(ids, passes):
            return torch.cat([self._numbers[buffer + 1] for buffer in tables.ravel().tolist()]).view(tables.shape)
        return self._transfers.send([tables])[0]


def is_small(ids: np.ndarray, passes: list[list[tuple[int, int]]]) -> bool:
    return ids.size * len(passes) <= SMALL_TABLE

"""HugePages: memory for the weights of a CPU, in pages of 2 MB.

A step reads every weight once. In pages of 4 KB each 64 lines need another address to be looked up, and the processor
does not ask for memory beyond the page that it reads. Linux gives large pages on request, to mappings that hold whole
ones: a matrix of 300 KB with memory of its own gets none, so many of them share a mapping.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

PAGE = 2 << 20
CHUNK = 32 << 20  # bytes of a mapping, unless a tensor needs more; what is not used of it takes no memory
ALIGN = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in SETTING.read_text()
    except OSError:
        return False


class HugePages:
    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A mapping lives as long as a tensor in it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-num_bytes // ALIGN) * ALIGN
        if size <= len(self._left):
            found, self._left = self._left, self._left[size:]
        else:
            found = _mapping(max(size, CHUNK))
            # The larger rest is kept: small tensors between large ones would each begin a page of their own.
            self._left = max(self._left, found[size:], key=len)
        return found[:num_bytes].view(dtype).view(*shape)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers there."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _mapping(size: int) -> torch.Tensor:
    size = -(-size // PAGE) * PAGE
    try:
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return torch.empty(size, dtype=torch.uint8, device="cpu")  # whose error says how much is missing
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]

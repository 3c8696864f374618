"""DiskMemory: tensors in a file, which the operating system reads as they are used and drops where memory is short.

It keeps in memory what was used last, as far as there is room: a cache of experts that needs no code. The file has no
name, so nothing of it is left behind, however the process ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware.host import is_in_memory

logger = logging.getLogger("nanovllm")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, to be read or written."""
    numbers: Any = tensor.view(torch.uint8).numpy()  # a buffer, which numpy's stubs do not say for every Python
    return memoryview(numbers)


class DiskMemory:
    def __init__(self, folder: Path) -> None:
        self.folder, self.num_bytes = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (open as long as this is)
        except OSError as error:
            raise self._refuse(error) from error
        if is_in_memory(folder):
            logger.warning("%s is in memory: experts there take as much of it as if they were not offloaded", folder)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, in the file."""
        if tensor.numel() == 0:
            return tensor
        raw = bytes_of(tensor.contiguous().flatten())
        start = -(-self.num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.num_bytes = start + len(raw)
        try:
            # Not through the mapping: there a full disk is no error but a signal, which ends the process.
            done = 0
            while done < len(raw):
                done += os.pwrite(self._file.fileno(), raw[done:], start + done)
            mapped = mmap.mmap(self._file.fileno(), len(raw), offset=start)
        except OSError as error:
            raise self._refuse(error) from error
        return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)

    def _refuse(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.folder}: no file for quantised experts ({error.strerror}, after {self.num_bytes >> 20} MiB); make "
            "room there, or set NANOVLLM_CACHE to a folder on a larger disk"
        )

"""Page-locked host memory, from which a GPU copies at full speed without the CPU's help.

Torch's own allocator of such memory rounds up to powers of two: an expert of 352 MB would take 512 MB. So ordinary
memory is locked through the runtime instead, at page borders (two registrations must not share a page), and
registered memory must be released before it is freed: `close`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch

from nanovllm.hardware.device import Device


class HostBlock:
    """`tensor`: uninitialised memory on the host, locked if the device is a GPU. Raises MemoryError if the operating
    system or the driver refuses."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: Device) -> None:
        self._registered: int | None = None
        self._device = device.torch_device
        if not device.is_gpu:
            try:
                self.tensor = torch.empty(num_elements, dtype=dtype)
            except RuntimeError as error:  # torch raises "can't allocate memory" this way
                raise MemoryError(str(error)) from error
            return
        locked = -(-num_elements * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, locked)  # begins at a page, as torch's memory does not
        except (OSError, ValueError) as error:
            raise MemoryError(f"{locked} bytes of host memory: {error}") from error
        self.tensor = torch.frombuffer(memory, dtype=dtype, count=num_elements)
        self._register(self.tensor.data_ptr(), locked)

    def _register(self, address: int, num_bytes: int) -> None:
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, num_bytes, 0)
        if int(error) != 0:
            _clear_last_error(self._device)
            raise MemoryError(f"cudaHostRegister of {num_bytes} bytes: {error}")
        self._registered = address

    def close(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None


def _clear_last_error(device: torch.device) -> None:
    """The runtime keeps the code of a failed call until it is read, and torch reads it after its next launch: an
    unrelated kernel would raise. So launch one here and drop its error."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def available_host_bytes() -> int:
    """What a process may still allocate: of the machine, or of its control group (a container) if that has less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    with contextlib.suppress(OSError, ValueError, KeyError):
        available = _numbers("/proc/meminfo")["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = _numbers(str(group / "memory.stat")).get("inactive_file", 0)  # given back when needed
        available = min(available, limit - used + cached)
    return max(available, 0)


def _numbers(path: str) -> dict[str, int]:
    """Lines of "name number ..."."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}

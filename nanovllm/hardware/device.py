"""Device: the GPU or CPU that a rank computes on, behind one interface. Outside of
hardware/ and the kernels no module uses torch.cuda.

On the CPU every method has its nearest meaning (memory of the machine, nothing to synchronise), so callers need no
branches.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware.host import cpu_name

# Compute capability -> the name of the architecture.
ARCHITECTURES = {(7, 0): "Volta", (7, 5): "Turing", (8, 9): "Ada Lovelace", 8: "Ampere", 9: "Hopper"}
ARCHITECTURES |= {10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}


@dataclass(frozen=True)
class Device:
    torch_device: torch.device

    @classmethod
    def choose(cls, wanted: str) -> Device:
        has_gpu = torch.cuda.is_available()
        if wanted == "cuda" and not has_gpu:
            raise ConfigError(
                "device='cuda': torch sees no GPU here (driver missing, or a CPU build of torch); use device='cpu'"
            )
        if wanted == "cpu" or not has_gpu:
            return cls(torch.device("cpu"))
        return cls(torch.device("cuda", torch.cuda.current_device()))

    @classmethod
    def of_rank(cls, wanted: str, rank: int) -> Device:
        """The rank-th GPU; all ranks share a CPU."""
        device = cls.choose(wanted)
        if not device.is_gpu:
            return device
        if rank >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size: rank {rank} has no GPU, this machine has {torch.cuda.device_count()}; use fewer"
            )
        return cls(torch.device("cuda", rank))

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def name(self) -> str:
        if self.is_gpu:
            return torch.cuda.get_device_name(self.torch_device)
        return f"{cpu_name()} ({torch.get_num_threads()} threads)"

    @property
    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self.torch_device) if self.is_gpu else None

    @property
    def architecture(self) -> str:
        if self.capability is None:
            return platform.machine()
        return ARCHITECTURES.get(self.capability) or ARCHITECTURES.get(self.capability[0], "unknown")

    def resolve_dtype(self, wanted: str, checkpoint: str) -> torch.dtype:
        """auto = fp32 on a CPU (its bf16 and fp16 paths are slower than they look); on a GPU the checkpoint's own,
        in 16 bits. Turing and older have no bf16 units."""
        if wanted == "auto":
            if not self.is_gpu:
                return torch.float32
            wanted = checkpoint if checkpoint in ("float16", "bfloat16") else "bfloat16"
            if self.capability is not None and self.capability < (8, 0):
                wanted = "float16"
        if wanted == "bfloat16" and self.capability is not None and self.capability < (8, 0):
            raise ConfigError(f"dtype='bfloat16': {self.name} ({self.architecture}) has none; use dtype='float16'")
        dtype = getattr(torch, wanted)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def is_lost(self) -> bool:
        """After an illegal access, a failed assertion in a kernel or a memory error of the card, every call fails until
        the process ends. Running out of memory is not of this kind. Waits for what runs."""
        try:
            self.synchronize()
        except RuntimeError:  # torch.AcceleratorError is one
            return True
        return False

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver or the operating system sees them."""
        if self.is_gpu:
            return torch.cuda.mem_get_info(self.torch_device)
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def allocated_bytes(self) -> int:
        """In use by this process's tensors; 0 on a CPU, where they are not counted."""
        return torch.cuda.memory_allocated(self.torch_device) if self.is_gpu else 0

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """The most that `function` held at once beyond what was held before it."""
        if not self.is_gpu:
            return 0
        before = self.allocated_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        function()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device) - before
        torch.cuda.empty_cache()
        return peak

    def limit_memory(self, num_bytes: int | None) -> None:
        """torch may take so much of the card and no more, as if the card were smaller. None = all of it."""
        if self.is_gpu:
            share = 1.0 if num_bytes is None else num_bytes / self.memory()[1]
            torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def release_cached(self) -> None:
        if self.is_gpu:
            torch.cuda.empty_cache()


def keep_for_ever(thing: object) -> None:
    """What lies in pinned memory or on a lost card must never be freed: torch would abort the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU, or of the host (torch's CPU allocator raises a RuntimeError with these words)."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)

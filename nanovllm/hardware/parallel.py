"""Parallel: which rank of how many this process is, and what the ranks say to each other.

One rank needs no process group, no port and no rendezvous: `Parallel()` is complete. Layers ask it for their share of
a size; sizes that do not divide are refused with the sizes that would. The group is an object that is handed on, not
the process-wide default one of torch.distributed: two engines in one process do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from nanovllm.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Shard:
    """Which part of a checkpoint's tensor this rank has: `length` of `total` along `dim`, from `start` on."""

    dim: int
    start: int
    length: int
    total: int


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False, repr=False)  # a process group of torch; None for one rank

    def share(self, total: int, what: str) -> int:
        if total % self.size:
            good = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
            raise ConfigError(f"tensor_parallel_size={self.size}: {what}={total} does not divide; possible: {good}")
        return total // self.size

    def shard(self, dim: int, total: int, what: str) -> Shard:
        share = self.share(total, what)
        return Shard(dim, self.rank * share, share, total)

    def share_kv_heads(self, total: int) -> tuple[int, int]:
        """(how many this rank has, the first of them). With fewer heads than ranks, neighbours hold the same one."""
        if self.size <= total:
            share = self.share(total, "num_key_value_heads")
            return share, self.rank * share
        if self.size % total:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: with num_key_value_heads={total} it must divide them or be a "
                f"multiple; possible: {[n for n in range(1, 65) if total % n == 0 or n % total == 0]}"
            )
        return 1, self.rank * total // self.size

    def shard_vocab(self, total: int) -> Shard:
        """Odd vocabularies are padded: all ranks have as many rows, the last of them fewer that mean something."""
        share = -(-total // self.size)
        start = min(self.rank * share, total)
        return Shard(0, start, min(share, total - start), total)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension, the same on all."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def gather_numbers(self, number: int) -> list[int]:
        """One from each rank."""
        if self.size == 1:
            return [number]
        device = "cuda" if "nccl" in type(self.group).__name__.lower() else "cpu"
        parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        self.group.allgather([parts], [torch.tensor([number], dtype=torch.int64, device=device)]).wait()
        return [int(part) for part in parts]


def open_store(port: int, size: int, is_master: bool, timeout: float, host: str = LOOPBACK) -> Any:
    """Where the ranks find each other. The master opens it on `port`, 0 = any free one; `.port` says which."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, size, is_master=is_master, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def connect(store: Any, rank: int, size: int, device: torch.device, timeout: float) -> Parallel:
    """All ranks call this; it returns when all have. NCCL between GPUs, gloo between CPUs."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        torch.cuda.set_device(device)
        return Parallel(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
    options = dist.ProcessGroupGloo._Options()
    # By name or by default gloo would listen on whatever address the host's name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = limit
    return Parallel(rank, size, dist.ProcessGroupGloo(store, rank, size, options))

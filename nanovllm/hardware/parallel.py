"""Parallel: which rank of how many this process is, and the collectives between the ranks.

One rank needs no process group, no port and no rendezvous: `Parallel()` is complete. It computes a layer's share of a
size; sizes that do not divide are refused with the sizes that would. The group is an object that is handed on, not
the process-wide default one of torch.distributed: two engines in one process have one each.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError

LOOPBACK = "127.0.0.1"
MAX_RANKS = 64  # numbers of ranks that messages name


@dataclass(frozen=True)
class Shard:
    """Which part of a checkpoint's tensor this rank has: `length` of `total` along `dim`, from `start` on."""

    dim: int
    start: int
    length: int
    total: int

    @property
    def num_ranks(self) -> int:
        """Of which each has a part of this length."""
        return self.total // self.length

    def good_ranks(self, unit: int) -> list[int]:
        """Numbers of ranks that do not cut within a unit. One never does."""
        return [n for n in range(1, MAX_RANKS + 1) if n == 1 or self.total % (n * unit) == 0]


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False, repr=False)  # a process group of torch; None for one rank
    expert_size: int = 1  # experts are spread over so many groups of neighbouring ranks, each group has its own
    background: Any = field(default=None, compare=False, repr=False)  # a second group of the same ranks, beside steps

    @property
    def ranks_per_expert(self) -> int:
        """So many neighbouring ranks have an equal share of an expert each."""
        return self.size // self.expert_size

    def share(self, total: int, what: str) -> int:
        if total % self.size:
            good = [n for n in range(1, total + 1) if total % n == 0 and n <= MAX_RANKS]
            raise ConfigError(f"tensor_parallel_size={self.size}: {what}={total} does not divide; possible: {good}")
        return total // self.size

    def shard(self, dim: int, total: int, what: str) -> Shard:
        share = self.share(total, what)
        return Shard(dim, self.rank * share, share, total)

    def shard_expert(self, total: int) -> Shard:
        """This rank's share of an expert's intermediate size, cut along dimension 0."""
        what, ranks = "intermediate size of an expert", self.ranks_per_expert
        if self.expert_size == 1:
            return self.shard(0, total, what)
        if total % ranks:
            good = [n for n in range(1, self.size + 1) if self.size % n == 0 and total % (self.size // n) == 0]
            raise ConfigError(
                f"expert_parallel_size={self.expert_size} of {self.size} ranks cuts each expert in {ranks}: {what}="
                f"{total} does not divide; possible: {good}"
            )
        return Shard(0, self.rank % ranks * (total // ranks), total // ranks, total)

    def experts_here(self, total: int) -> range:
        """Numbers of the experts that this rank has (a share of), of a layer's `total`."""
        if total % self.expert_size:
            good = [n for n in range(1, self.size + 1) if self.size % n == 0 and total % n == 0]
            raise ConfigError(
                f"expert_parallel_size={self.expert_size}: {total} experts in a layer do not divide; with "
                f"tensor_parallel_size={self.size} possible: {good}"
            )
        first = self.rank // self.ranks_per_expert * (total // self.expert_size)
        return range(first, first + total // self.expert_size)

    def share_kv_heads(self, total: int) -> tuple[int, int]:
        """(how many this rank has, the first of them). With fewer heads than ranks, neighbours have the same one."""
        if self.size <= total:
            share = self.share(total, "num_key_value_heads")
            return share, self.rank * share
        if self.size % total:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: with num_key_value_heads={total} it must divide them or be a "
                f"multiple; possible: {[n for n in range(1, MAX_RANKS + 1) if total % n == 0 or n % total == 0]}"
            )
        return 1, self.rank * total // self.size

    def shard_vocab(self, total: int) -> Shard:
        """All ranks have as many rows; those past the end of the vocabulary are padding."""
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
        return x if self.size == 1 else torch.cat(self._gather(x).unbind(), dim=-1)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors one below the other, rank 0's first; all have as many rows."""
        return x if self.size == 1 else self._gather(x).flatten(0, 1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(self.size, *x.shape)
        self.group.allgather([list(found)], [x.contiguous()]).wait()
        return found

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """int64 [ranks]: number i goes to rank i; number i of the result comes from rank i."""
        found = torch.empty_like(counts)
        self.group.alltoall_base(found, counts, [], []).wait()
        return found

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """The first `sent[0]` rows go to rank 0, the next to rank 1, ...; the result has the rows from
        rank 0 first. As bytes: gloo and NCCL do not take every dtype."""
        found = rows.new_empty(sum(received), *rows.shape[1:])
        self.group.alltoall_base(found.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent).wait()
        return found

    def begin_exchange(
        self, rows: torch.Tensor, found: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], object]:
        """`exchange_rows` of bytes into `found`, beside the steps that follow: what it returns waits for it (on a GPU:
        makes the work that is queued next wait). Until then `rows` is not written and `found` not read. The second
        group has an order of its own, so ranks may be at unlike places of a step; all begin the same exchanges in the
        same order."""
        work = self.background.alltoall_base(found, rows, received, sent)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            work.wait()
            return rows, found  # which also keeps their memory until then

        return finish

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers: for facts on which all base the same decision, such as free memory."""
        return min(self.gather_numbers(number))

    def count_neighbours(self) -> int:
        """Ranks on this machine, this one included: they share its memory."""
        if self.size == 1:
            return 1
        here = digest(machine_name().encode())
        return self.gather_numbers(here).count(here)

    def gather_numbers(self, number: int) -> list[int]:
        """One from each rank."""
        if self.size == 1:
            return [number]
        device = "cuda" if "nccl" in type(self.group).__name__.lower() else "cpu"
        found: list[int] = self.gather_rows(torch.tensor([number], dtype=torch.int64, device=device)).tolist()
        return found


def digest(data: bytes) -> int:
    """A number below 2**56, which fits an int64, for comparing data between ranks."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def machine_name() -> str:
    """The same for all processes of a machine, in whatever container or network they are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()


def open_store(port: int, size: int, is_master: bool, timeout: float, host: str = LOOPBACK) -> Any:
    """Where the ranks find each other. The master opens it on `port`, 0 = any free one, then `.port` has its number. It
    listens on `host` alone: by default TCPStore listens on every interface, whatever host it is given."""
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout)
    if not is_master:
        return TCPStore(host, port, size, is_master=False, timeout=limit)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, port))
        listener.listen(max(128, size))
        found = listener.getsockname()[1]
        store = TCPStore(
            host,
            found,
            size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            use_libuv=True,
        )
        listener.detach()  # the store closes it
    return store


def own_address(peer: str) -> str:
    """The address of this machine on the interface that leads to `peer`."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # of a datagram socket: finds the route, sends nothing
        return str(probe.getsockname()[0])


def limit_waiting(parallel: Parallel, timeout: float) -> None:
    """From now on a rank waits no longer than that for the others. (Loading may take one of them minutes.)"""
    for group in _groups(parallel):
        group._set_default_timeout(timedelta(seconds=timeout))


def give_up(parallel: Parallel) -> None:
    """End the collectives that wait, on the GPU too. From another thread than the one that waits."""
    for group in _groups(parallel):
        group.abort()


def disconnect(parallel: Parallel) -> None:
    """Drop the groups: their sockets and threads stay until the last reference to them goes, and the traceback of an
    error may keep the Parallel alive. An exchange that is under way is waited for, or fails with the rank it waits
    for."""
    object.__setattr__(parallel, "group", None)
    object.__setattr__(parallel, "background", None)


def _groups(parallel: Parallel) -> list[Any]:
    return [group for group in (parallel.group, parallel.background) if group is not None]


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    address: str = LOOPBACK,
    background: bool = False,
) -> Parallel:
    """All ranks call this; it returns when all have. NCCL between GPUs, gloo between CPUs. `address`: of this machine,
    where the others reach it. `background`: with a second group, for exchanges beside steps."""
    from torch.distributed import PrefixStore

    group = _open_group(PrefixStore("steps", store), rank, size, device, timeout, address)
    if not background:
        return Parallel(rank, size, group)
    second = _open_group(PrefixStore("background", store), rank, size, device, timeout, address)
    parallel = Parallel(rank, size, group, background=second)
    # NCCL connects the ranks and takes memory for it at the first exchange: now, before free memory is measured.
    rows, each = torch.zeros(size, 1, dtype=torch.uint8, device=device), [1] * size
    parallel.begin_exchange(rows, torch.empty_like(rows), each, each)()
    return parallel


def _open_group(store: Any, rank: int, size: int, device: torch.device, timeout: float, address: str) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        # By default NCCL's watchdog ends a process that waits too long, the caller's included; here a lost rank is an
        # EngineDeadError (ranks/faults.py).
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By name or by default gloo would listen on whatever address the host's name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)

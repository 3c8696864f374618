"""TorchrunExecutor: this process is one of several that torchrun started, on one machine or more.

    torchrun --nproc-per-node 2 script.py                      # LLM(..., tensor_parallel_size=2) in the script

Every rank runs the whole script: same prompts, same scheduler, same plans, so nobody sends any. That holds because
nothing in the engine decides by the clock or by chance; what the script decides must be the same on all ranks, too.
It is checked when requests arrive: all ranks must be about to run the same plan. Every rank gets all outputs; print
them on rank 0 (`os.environ["RANK"] == "0"`). A server is not such a script: its requests come to one rank alone.

The store in which the ranks find each other is torchrun's own. Addresses: where all ranks are on one machine, they talk
over the loopback interface; else over the one that leads to MASTER_ADDR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineDeadError, NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import LOOPBACK, Parallel, connect, own_address
from nanovllm.model_config import ModelConfig
from nanovllm.ranks.faults import GRACE_SECONDS, STARTUP_SECONDS, Report
from nanovllm.ranks.local import ALONE, LocalExecutor
from nanovllm.ranks.several import SeveralRanks, check_sizes
from nanovllm.ranks.wire import encode_plan
from nanovllm.runner.limits import StepLimits
from nanovllm.scheduling.plan import StepPlan
from nanovllm.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Place:
    """What torchrun told this process about itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place | None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(environ.get(name, "").isdigit() for name in names) or not environ.get("MASTER_ADDR"):
            return None
        rank, size, local_rank, local_size = (int(environ[name]) for name in names)
        return cls(rank, size, local_rank, local_size, environ["MASTER_ADDR"])

    def address(self) -> str:
        """Where the other ranks reach this one."""
        if self.local_size == self.size:
            return LOOPBACK
        found = own_address(str(socket.getaddrinfo(self.master, None)[0][4][0]))
        if found.startswith("127.") or found == "::1":
            raise ConfigError(
                f"MASTER_ADDR={self.master} is a loopback address on this machine, so no other can reach it: give "
                f"torchrun the address of a network interface"
            )
        return found


def open_own_store(place: Place) -> Any:
    """torchrun's store, under a name of this engine's own: a script may make several, one after the other or at once,
    but all ranks make them in the same order."""
    from torch.distributed import PrefixStore, rendezvous

    limit = timedelta(seconds=STARTUP_SECONDS)
    store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.size, timeout=limit))
    number = store.add(f"nanovllm/engines/{place.rank}", 1)
    return PrefixStore(f"nanovllm/{number}", store)


def digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


class TorchrunExecutor(SeveralRanks):
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
    ) -> None:
        place = Place.of(os.environ)
        assert place is not None, "choose.py looked"
        super().__init__(place.rank, place.size, config.worker_timeout)
        check_sizes(config, model_config)
        self._store: Any = None
        parallel = ALONE
        try:
            if place.size > 1:
                self._store = open_own_store(place)
                address = place.address()
                parallel = connect(self._store, place.rank, place.size, device.torch_device, STARTUP_SECONDS, address)
                self._parallel = parallel
                self._compare(parallel, json.dumps(dataclasses.asdict(config)).encode(), "options")
            self._inner = LocalExecutor(config, model_config, checkpoint, device, limits, parallel)
            parallel.gather_numbers(0)  # all are ready
            self._set_alarm(device)
        except BaseException as error:
            cause = self._cause(Report.of(place.rank, error)) if isinstance(error, Exception) else str(error)
            self._dead = cause
            self.close()
            if isinstance(error, NanoVLLMError) or not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"starting {place.size} ranks failed: {cause}") from error

    def _compare(self, parallel: Parallel, data: bytes, what: str) -> None:
        found = parallel.gather_numbers(digest(data))
        others = [rank for rank, number in enumerate(found) if number != found[0]]
        if others:
            raise EngineDeadError(
                f"ranks {others} were given other {what} than rank 0: under torchrun every rank must run the same "
                f"script on the same input"
            )

    def _tell(self, plan: StepPlan) -> None:
        assert self._inner is not None
        if plan.arrivals:
            self._compare(self._inner.parallel, encode_plan(plan), "requests")

    def _publish(self, report: Report) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store went with the rank that had it
                self._store.set(f"report/{report.rank}", json.dumps([report.kind, report.text]))

    def _look(self) -> list[Report]:
        """In a thread: a store whose machine hangs does not answer, whatever timeout it was given."""
        found: list[Report] = []
        thread = threading.Thread(target=self._read_reports, args=(found,), name="nanovllm-reports", daemon=True)
        thread.start()
        thread.join(GRACE_SECONDS)
        return list(found)

    def _read_reports(self, found: list[Report]) -> None:
        store = self._store
        with contextlib.suppress(RuntimeError):
            for rank in range(self._size if store is not None else 0):
                if rank != self._rank and store.check([f"report/{rank}"]):
                    found.append(Report(rank, *json.loads(store.get(f"report/{rank}"))))

    def close(self) -> None:
        super().close()
        self._store = None

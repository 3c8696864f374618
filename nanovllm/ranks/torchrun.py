"""TorchrunExecutor: this process is one of several that torchrun started, on one machine or more.

    torchrun --nproc-per-node 2 script.py                      # LLM(..., tensor_parallel_size=2) in the script

Every rank runs the whole script: same prompts, same scheduler, same plans, so no plan is sent. That holds because
nothing in the engine decides by the clock or by chance; what the script decides must be the same on all ranks, too.
This is checked when requests arrive: all ranks must be about to run the same plan. Every rank gets all outputs; print
them on rank 0 (`os.environ["RANK"] == "0"`). A server is not such a script: its requests come to one rank alone.

The store in which the ranks find each other is torchrun's own. Where all ranks are on one machine, they are connected
over the loopback interface; else over the one that leads to MASTER_ADDR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nanovllm.errors import ConfigError, EngineDeadError
from nanovllm.hardware.parallel import LOOPBACK, connect, digest, own_address
from nanovllm.ranks.faults import GRACE_SECONDS, STARTUP_SECONDS, Report
from nanovllm.ranks.several import SeveralRanks
from nanovllm.ranks.wire import encode_plan
from nanovllm.scheduling.plan import StepPlan


@dataclass(frozen=True)
class Place:
    """What torchrun has set in the environment of this process."""

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


class TorchrunExecutor(SeveralRanks):
    _store: Any = None

    def _connect(self) -> None:
        place = Place.of(os.environ)
        assert place is not None, "choose.py has checked this"
        self._rank = place.rank
        if place.size > 1:
            self._store = open_own_store(place)
            device, where = self._device.torch_device, (place.address(), self._config.enable_eplb)
            self._parallel = connect(self._store, place.rank, place.size, device, STARTUP_SECONDS, *where)
            self._compare(json.dumps(dataclasses.asdict(self._config)).encode(), "options")

    def _await_ready(self) -> None:
        self._parallel.gather_numbers(0)

    def _compare(self, data: bytes, what: str) -> None:
        found = self._parallel.gather_numbers(digest(data))
        others = [rank for rank, number in enumerate(found) if number != found[0]]
        if others:
            raise EngineDeadError(
                f"ranks {others} were given other {what} than rank 0: under torchrun every rank must run the same "
                f"script on the same input"
            )

    def _send_plan(self, plan: StepPlan) -> None:
        """Nothing is sent: every rank has made the same plan, which is checked."""
        if plan.arrivals:
            self._compare(encode_plan(plan), "requests")

    def _publish(self, report: Report) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store went with the rank that had it
                self._store.set(f"report/{report.rank}", json.dumps([report.kind, report.text]))

    def _reports(self) -> list[Report]:
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

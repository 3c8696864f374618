"""MultiprocessExecutor: one process per rank on this machine. Rank 0 is here, the others are workers (worker.py).

Plans go to the workers as bytes through socket pairs, which have no name and no port; the ranks find each other on a
free port of the loopback interface. Workers send back faults, and, between two steps, answers to pings.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import torch

from nanovllm.errors import EngineDeadError
from nanovllm.hardware.parallel import connect, limit_waiting, open_store
from nanovllm.ranks.faults import (
    CONNECT_SECONDS,
    FAILED,
    GRACE_SECONDS,
    LOST,
    STARTUP_SECONDS,
    LostTouchError,
    Report,
    no_answer,
)
from nanovllm.ranks.several import SeveralRanks, kill_at_exit, options_for
from nanovllm.ranks.wire import encode_plan, receive, send
from nanovllm.scheduling.plan import StepPlan

CLOSE_SECONDS = 3.0
KILL_SECONDS = 0.2  # for workers of a dead engine to end by themselves


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    fault: Report | None = None
    pinged_at: float | None = None  # None: the answer has come

    def ping(self) -> None:
        """The answer comes after all plans before it are launched."""
        if self.pinged_at is None:
            self.pinged_at = time.monotonic()
            with contextlib.suppress(OSError):  # its process has ended, which report() finds
                send(self.connection, b"Q")

    def report(self) -> Report | None:
        """Its fault, or how its process ended; None while it runs. Never waits."""
        while self.fault is None and select.select([self.connection], [], [], 0)[0]:
            message = receive(self.connection)
            if message is None:
                break
            if message[0] == b"A":
                self.pinged_at = None
                continue
            kind = LOST if message[0] == b"L" else FAILED
            self.fault = Report(self.rank, kind, message[1].decode(errors="replace"))
        if self.fault is None and self.process.poll() is not None:
            code = self.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self.fault = Report(self.rank, FAILED, f"its process {how}")
        return self.fault

    def await_message(self, kind: bytes, deadline: float) -> None:
        """`H` or `R`; another message, or none, raises EngineDeadError."""
        while not select.select([self.connection], [], [], 0.2)[0]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                break
        else:
            message = receive(self.connection)
            if message is not None and message[0] == kind:
                return
            if message is not None:
                raise EngineDeadError(f"rank {self.rank}: {message[1].decode(errors='replace')}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        fault = self.report()
        text = fault.text if fault else f"not started after {STARTUP_SECONDS:.0f} s"
        raise EngineDeadError(f"rank {self.rank}: {text}")


def start_worker(rank: int) -> Worker:
    here, there = socket.socketpair()
    with there:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "nanovllm.ranks.worker", str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=env)
    return Worker(rank, process, here)


class MultiprocessExecutor(SeveralRanks):
    def _connect(self) -> None:
        size = self._size
        self._workers: list[Worker] = []
        self._reading = threading.Lock()  # the alarm's thread reads reports too
        if size == 1:
            return
        store = open_store(0, size, is_master=True, timeout=STARTUP_SECONDS)
        threads = max(1, torch.get_num_threads() // size)
        options = {**options_for(self._config, self._limits), "size": size, "port": store.port, "threads": threads}
        for rank in range(1, size):
            self._workers.append(start_worker(rank))
        self._finalizer = kill_at_exit(self, [worker.process for worker in self._workers])
        for worker in self._workers:
            send(worker.connection, b"I", json.dumps({**options, "rank": worker.rank}).encode())
        deadline = time.monotonic() + STARTUP_SECONDS
        for worker in self._workers:
            worker.await_message(b"H", deadline)
        limit, background = max(self._timeout, CONNECT_SECONDS), self._config.enable_eplb
        self._parallel = connect(store, 0, size, self._device.torch_device, limit, background=background)
        limit_waiting(self._parallel, STARTUP_SECONDS)

    def _await_ready(self) -> None:
        for worker in self._workers:
            worker.await_message(b"R", time.monotonic() + STARTUP_SECONDS)
            worker.connection.settimeout(self._timeout)  # a worker that hangs reads no plans

    def _send_plan(self, plan: StepPlan) -> None:
        data = encode_plan(plan)
        for worker in self._workers:
            try:
                send(worker.connection, b"P", data)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    worker.fault = Report(worker.rank, FAILED, no_answer(self._timeout))
                raise LostTouchError(f"rank {worker.rank} took no plan") from error

    def _reports(self) -> list[Report]:
        with self._reading:
            return [report for worker in self._workers if (report := worker.report())]

    def _find_dead(self) -> list[Report]:
        found, now = [report for report in self._reports() if report.kind == FAILED], time.monotonic()
        silent = [w for w in self._workers if w.pinged_at is not None and now - w.pinged_at > self._timeout]
        return found or [Report(worker.rank, FAILED, no_answer(self._timeout)) for worker in silent]

    def _ping(self) -> None:
        for worker in self._workers:
            worker.ping()

    def _abandon(self) -> None:
        with self._reading:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()  # ends its loop
        deadline = time.monotonic() + (CLOSE_SECONDS if self._dead is None else KILL_SECONDS)
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()  # also a stopped one
                worker.process.wait()

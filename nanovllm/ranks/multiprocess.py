"""MultiprocessExecutor: one process per rank on this machine. Rank 0 is here, the others are workers (worker.py).

Plans go to the workers as bytes through socket pairs, which have no name and no port; the ranks find each other on a
free port of the loopback interface. What comes back is trouble, and, between two steps, that a worker is well.
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

from nanovllm.config import EngineConfig
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import connect, limit_waiting, open_store
from nanovllm.model_config import ModelConfig
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
from nanovllm.ranks.local import ALONE, LocalExecutor
from nanovllm.ranks.several import SeveralRanks, check_sizes, kill_at_exit, options_for
from nanovllm.ranks.wire import encode_plan, receive, send
from nanovllm.runner.limits import StepLimits
from nanovllm.scheduling.plan import StepPlan
from nanovllm.weights.checkpoint import Checkpoint

CLOSE_SECONDS = 3.0
KILL_SECONDS = 0.2  # for workers of a dead engine to end by themselves


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    said: Report | None = None
    asked: float | None = None  # when, if the answer has not come yet

    def ask(self) -> None:
        """It answers when it has launched all plans before."""
        if self.asked is None:
            self.asked = time.monotonic()
            with contextlib.suppress(OSError):  # its process has ended, which report() finds
                send(self.connection, b"Q")

    def report(self) -> Report | None:
        """What it said before it ended, or how it ended; None while it is well. Never waits."""
        while self.said is None and select.select([self.connection], [], [], 0)[0]:
            message = receive(self.connection)
            if message is None:
                break
            if message[0] == b"A":
                self.asked = None
                continue
            kind = {b"F": FAILED, b"L": LOST}.get(message[0], FAILED)
            self.said = Report(self.rank, kind, message[1].decode(errors="replace"))
        if self.said is None and self.process.poll() is not None:
            code = self.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self.said = Report(self.rank, FAILED, f"its process {how}")
        return self.said

    def await_word(self, kind: bytes, deadline: float) -> None:
        """`H` or `R`, or else EngineDeadError."""
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
        said = self.report()
        text = said.text if said else f"not started after {STARTUP_SECONDS:.0f} s"
        raise EngineDeadError(f"rank {self.rank}: {text}")


def start_worker(rank: int) -> Worker:
    here, there = socket.socketpair()
    with there:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "nanovllm.ranks.worker", str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=env)
    return Worker(rank, process, here)


class MultiprocessExecutor(SeveralRanks):
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
    ) -> None:
        super().__init__(0, config.tensor_parallel_size, config.worker_timeout)
        check_sizes(config, model_config)
        self._workers: list[Worker] = []
        self._looking = threading.Lock()  # the alarm's thread looks too
        try:
            self._start(config, model_config, checkpoint, device, limits)
        except BaseException as error:
            own = Report.of(0, error)
            quick = not isinstance(error, Exception) or isinstance(error, NanoVLLMError)
            cause = own.text if quick else self._cause(own)
            self._dead = cause
            self.close()
            if quick:
                raise
            raise EngineDeadError(f"starting {self._size} ranks failed: {cause}") from error

    def _start(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        limits: StepLimits,
    ) -> None:
        size, parallel = self._size, ALONE
        if size > 1:
            store = open_store(0, size, is_master=True, timeout=STARTUP_SECONDS)
            threads = max(1, torch.get_num_threads() // size)
            options = {**options_for(config, limits), "size": size, "port": store.port, "threads": threads}
            for rank in range(1, size):
                self._workers.append(start_worker(rank))
            self._finalizer = kill_at_exit(self, [worker.process for worker in self._workers])
            for worker in self._workers:
                send(worker.connection, b"I", json.dumps({**options, "rank": worker.rank}).encode())
            deadline = time.monotonic() + STARTUP_SECONDS
            for worker in self._workers:
                worker.await_word(b"H", deadline)
            parallel = connect(store, 0, size, device.torch_device, max(self._timeout, CONNECT_SECONDS))
            limit_waiting(parallel, STARTUP_SECONDS)
            self._parallel = parallel
        self._inner = LocalExecutor(config, model_config, checkpoint, device, limits, parallel)
        for worker in self._workers:
            worker.await_word(b"R", time.monotonic() + STARTUP_SECONDS)
            worker.connection.settimeout(self._timeout)  # a worker that hangs reads no plans
        self._set_alarm(device)

    def _tell(self, plan: StepPlan) -> None:
        if self._workers:
            data = encode_plan(plan)
            for worker in self._workers:
                try:
                    send(worker.connection, b"P", data)
                except OSError as error:
                    if isinstance(error, TimeoutError):
                        worker.said = Report(worker.rank, FAILED, no_answer(self._timeout))
                    raise LostTouchError(f"rank {worker.rank} took no plan") from error

    def _look(self) -> list[Report]:
        with self._looking:
            return [report for worker in self._workers if (report := worker.report())]

    def _find_dead(self) -> list[Report]:
        found, now = [report for report in self._look() if report.kind == FAILED], time.monotonic()
        silent = [w for w in self._workers if w.asked is not None and now - w.asked > self._timeout]
        return found or [Report(worker.rank, FAILED, no_answer(self._timeout)) for worker in silent]

    def _ask(self) -> None:
        for worker in self._workers:
            worker.ask()

    def _abandon(self) -> None:
        with self._looking:
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

"""MultiprocessExecutor: one process per rank on this machine. Rank 0 is here, the others are workers (worker.py).

Plans go to the workers as bytes through socket pairs; tensors go between the ranks (NCCL, gloo); nothing comes back but
trouble. A step in which any rank fails is the end of the engine: the others have half of it. Every request in it, and
every one after it, is told which rank and why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineDeadError, NanoVLLMError
from nanovllm.executor.limits import StepLimits
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.model_runner import InFlight
from nanovllm.executor.wire import encode_plan, receive, send
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel, connect, open_store
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts
from nanovllm.ops.opset import PLAIN
from nanovllm.scheduling.plan import StepPlan, StepResult
from nanovllm.weights.checkpoint import Checkpoint

STARTUP_SECONDS = 600.0  # to load the weights
CLOSE_SECONDS = 3.0
GRACE_SECONDS = 2.0  # for a rank to say why, after another noticed


@dataclass(frozen=True)
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket

    def trouble(self) -> str | None:
        """What it said before it ended, or how it ended; None while it is well. Never waits."""
        if select.select([self.connection], [], [], 0)[0]:
            message = receive(self.connection)
            if message is not None and message[0] == b"E":
                return f"rank {self.rank}: {message[1].decode(errors='replace')}"
            if message is None:
                code = self.process.poll()
                how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
                return f"rank {self.rank}: its process {how}"
        code = self.process.poll()
        return None if code is None else f"rank {self.rank}: its process ended with code {code}"


def start_worker(rank: int) -> Worker:
    here, there = socket.socketpair()
    with there:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "nanovllm.executor.worker", str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=env)
    return Worker(rank, process, here)


def refuse_offload(config: EngineConfig) -> None:
    """Several ranks hold all their experts, each a share of every one."""
    if config.expert_placement == "offload" or config.expert_cache_gb is not None:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: offloaded experts run on one rank; use 1, or leave "
            f"expert_placement and expert_cache_gb out"
        )


def check_sizes(config: ModelConfig, size: int) -> None:
    """A model that does not divide by so many ranks is refused before any of them is started."""
    build = Build(torch.float32, torch.device("meta"), PLAIN, Parallel(0, size))
    find_family(config)(config, Parts(build, SdpaBackend(), 2))


class MultiprocessExecutor:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint, device: Device,
        limits: StepLimits,
    ) -> None:  # fmt: skip
        size, timeout = config.tensor_parallel_size, config.worker_timeout
        refuse_offload(config)
        check_sizes(model_config, size)
        self._dead: str | None = None
        self._workers: list[Worker] = []
        self._inner: LocalExecutor | None = None
        try:
            store = open_store(0, size, is_master=True, timeout=STARTUP_SECONDS)
            threads = max(1, torch.get_num_threads() // size)
            for rank in range(1, size):
                self._workers.append(start_worker(rank))
                options = {
                    "rank": rank, "size": size, "port": store.port, "timeout": timeout, "threads": threads,
                    "config": dataclasses.asdict(config), "limits": dataclasses.astuple(limits),
                }  # fmt: skip
                send(self._workers[-1].connection, b"I", json.dumps(options).encode())
            parallel = connect(store, 0, size, device.torch_device, timeout)
            self._inner = LocalExecutor(config, model_config, checkpoint, device, limits, parallel)
            self._await_ready()
        except BaseException as error:
            said = None if isinstance(error, KeyboardInterrupt) else self._find_trouble(GRACE_SECONDS)
            self.close()
            if said is not None and isinstance(error, Exception) and not isinstance(error, NanoVLLMError):
                raise EngineDeadError(f"starting {size} ranks failed: {said}") from error
            raise

    def _await_ready(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        for worker in self._workers:
            while not select.select([worker.connection], [], [], 0.2)[0]:
                if time.monotonic() > deadline or worker.process.poll() is not None:
                    raise EngineDeadError(f"rank {worker.rank} did not start within {STARTUP_SECONDS:.0f} s")
            message = receive(worker.connection)
            if message is None or message[0] != b"R":
                said = "its process ended" if message is None else message[1].decode(errors="replace")
                raise EngineDeadError(f"rank {worker.rank}: {said}")

    def __getattr__(self, name: str) -> Any:
        """Device, cache layout, selection, overlap and the like are rank 0's."""
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def launch(self, plan: StepPlan) -> InFlight:
        if self._dead is None:
            self._dead = self._find_trouble(0.0)
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}; create a new engine")
        assert self._inner is not None
        try:
            data = encode_plan(plan)
            for worker in self._workers:
                send(worker.connection, b"P", data)
            flight = self._inner.launch(plan)
        except BaseException as error:
            raise self._died(error) from error
        return InFlight(lambda: self._wait(flight))

    def _wait(self, flight: InFlight) -> StepResult:
        try:
            return flight.result()
        except BaseException as error:
            raise self._died(error) from error

    def _died(self, error: BaseException) -> BaseException:
        """Ranks that are a step apart never meet again, so any failure ends all of them; the cause is told."""
        said = self._find_trouble(GRACE_SECONDS) if isinstance(error, Exception) else None
        self._dead = said or f"rank 0: {type(error).__name__}: {error}"
        self._stop_workers()
        return EngineDeadError(self._dead) if isinstance(error, Exception) else error

    def _find_trouble(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while True:
            found = next((said for worker in self._workers if (said := worker.trouble())), None)
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()  # ends its loop
        deadline = time.monotonic() + (CLOSE_SECONDS if self._dead is None else 0.2)
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()  # also a stopped one
                worker.process.wait()
        self._workers = []

    def close(self) -> None:
        self._stop_workers()
        if self._inner is not None:
            self._inner.close()

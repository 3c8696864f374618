"""A rank other than 0, in a process of its own: `python -m nanovllm.ranks.worker FD`.

FD is one end of a socket pair that the parent made; it has no name and no port, so no other process can reach it. Over
it come the options (JSON), then plans, in order. The worker builds its shards and runs every plan as rank 0 does. It
returns no tokens: all ranks sample alike. When the socket closes, the worker ends too: a parent that dies leaves no
process behind.

    parent  I options                         P plan   P plan ...  Q ping                 (end of the connection)
    worker             H (here)   R (ready)                                    A answer   F failed | L lost touch
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.ranks.wire import decode_plan, receive, send

if TYPE_CHECKING:
    from nanovllm.hardware.device import Device
    from nanovllm.hardware.parallel import Parallel
    from nanovllm.ranks.local import LocalExecutor
    from nanovllm.runner.model_runner import InFlight
    from nanovllm.sampling.structured import Grammars
    from nanovllm.scheduling.plan import StepPlan, StepResult
    from nanovllm.weights.checkpoint import Checkpoint


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; only the parent acts on it
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = receive(connection)
    if first is None:
        return 0
    options = json.loads(first[1])
    try:
        serve(connection, options)
    except BaseException as error:
        from nanovllm.ranks.faults import FAILED, Report

        report = Report.of(options["rank"], error)
        try:
            send(connection, b"F" if report.kind == FAILED else b"L", report.text.encode())
        except OSError:
            return 0  # the parent is gone, which is the cause
        if report.kind == FAILED:
            traceback.print_exc()
        return 1
    return 0


def serve(connection: socket.socket, options: dict[str, Any]) -> None:
    import torch

    from nanovllm.hardware.device import Device
    from nanovllm.hardware.parallel import connect, limit_waiting, open_store
    from nanovllm.ranks.faults import STARTUP_SECONDS

    rank, size, config = options["rank"], options["size"], options["config"]
    device = Device.of_rank(config["device"], rank)
    if not device.is_gpu:
        torch.set_num_threads(options["threads"])
    store = open_store(options["port"], size, is_master=False, timeout=STARTUP_SECONDS)
    send(connection, b"H")
    parallel = connect(store, rank, size, device.torch_device, STARTUP_SECONDS, background=config["enable_eplb"])
    follower = Follower(open_executor(config, options["limits"], device, parallel), config)
    limit_waiting(parallel, config["worker_timeout"])
    # A service manager sends SIGTERM to all processes, too, and a server ends when running requests have. From now on
    # this process ends with its socket, for which it waits below; before, a collective may wait for minutes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(connection, b"R")
    while (message := receive(connection)) is not None:
        if message[0] == b"P":
            follower.launch(message[1])
        else:
            send(connection, b"A")
    follower.close()


def open_model(name: str) -> Checkpoint:
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model

    return open_checkpoint(resolve_model(name, offline=True, progress=False))


def open_executor(
    config_fields: dict[str, Any], limits: list[int], device: Device, parallel: Parallel
) -> LocalExecutor:
    """A rank's part of the model, from what can be sent to another process."""
    from nanovllm.config import EngineConfig
    from nanovllm.model_config import ModelConfig
    from nanovllm.ranks.local import LocalExecutor
    from nanovllm.runner.limits import StepLimits

    config = EngineConfig(**config_fields)
    with contextlib.closing(open_model(config.model)) as checkpoint:
        model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        return LocalExecutor(config, model_config, checkpoint, device, StepLimits(*limits), parallel)


def open_grammars(config_fields: dict[str, Any]) -> Grammars:
    """All ranks sample alike, so each masks its logits itself. The tokenizer is read only for this."""
    from nanovllm.model_config import ModelConfig
    from nanovllm.sampling.structured import Grammars

    with contextlib.closing(open_model(config_fields["model"])) as model:
        facts = ModelConfig.from_hf(model.config, model.generation_config)
    with contextlib.closing(open_model(config_fields["tokenizer"] or config_fields["model"])) as source:
        return Grammars(source.load_tokenizer(), facts.vocab_size, facts.eos_token_ids)


class Follower:
    """Runs plans that come as bytes, in order, as many at once as the runner overlaps."""

    def __init__(self, executor: LocalExecutor, config_fields: dict[str, Any]) -> None:
        self.executor = executor
        self._config_fields = config_fields
        self._grammars: Grammars | None = None  # opened by the first request that needs it
        self._flights: deque[InFlight] = deque()

    def launch(self, data: bytes) -> None:
        if len(self._flights) >= self.executor.overlap:
            self.result()
        self._flights.append(self.executor.launch(self._compiled(decode_plan(data))))

    def _compiled(self, plan: StepPlan) -> StepPlan:
        if all(arrival.params.structured_outputs is None for arrival in plan.arrivals):
            return plan
        self._grammars = self._grammars or open_grammars(self._config_fields)
        compile_params = self._grammars.compiled
        arrivals = [replace(arrival, params=compile_params(arrival.params)) for arrival in plan.arrivals]
        return replace(plan, arrivals=tuple(arrivals))

    def result(self) -> StepResult:
        """Of the oldest plan whose result was not taken yet."""
        return self._flights.popleft().result()

    def close(self) -> None:
        self._flights.clear()
        self.executor.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of a collective library that waits for dead peers must not keep the process.
    os._exit(code)

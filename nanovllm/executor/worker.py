"""A rank other than 0, in a process of its own: `python -m nanovllm.executor.worker FD`.

FD is one end of a socket pair that the parent made: no name, no port, nobody else can reach it. Over it come the
options (JSON), then plans, in order. The worker builds its shards, runs every plan as rank 0 does, and says nothing:
all ranks sample alike. What it says is `ready`, or in words why it ends. When the socket closes, it ends too: a parent
that dies leaves no orphans.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections import deque
from typing import Any

from nanovllm.executor.wire import decode_plan, receive, send


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = receive(connection)
    if first is None:
        return 0
    try:
        serve(connection, json.loads(first[1]))
    except BaseException as error:
        try:
            send(connection, b"E", f"{type(error).__name__}: {error}".encode()[:4000])
        except OSError:
            return 0  # the parent is gone: that is why
        traceback.print_exc()
        return 1
    return 0


def serve(connection: socket.socket, options: dict[str, Any]) -> None:
    from nanovllm.config import EngineConfig
    from nanovllm.executor.limits import StepLimits
    from nanovllm.executor.local import LocalExecutor
    from nanovllm.hardware.device import Device
    from nanovllm.hardware.parallel import connect, open_store
    from nanovllm.model_config import ModelConfig
    from nanovllm.weights.checkpoint import open_checkpoint
    from nanovllm.weights.resolve import resolve_model

    rank, size, timeout = options["rank"], options["size"], options["timeout"]
    config = EngineConfig(**options["config"])
    device = Device.of_rank(config.device, rank)
    if not device.is_gpu:
        import torch

        torch.set_num_threads(options["threads"])
    store = open_store(options["port"], size, is_master=False, timeout=timeout)
    parallel = connect(store, rank, size, device.torch_device, timeout)
    checkpoint = open_checkpoint(resolve_model(config.model, offline=True, progress=False))
    try:
        model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        limits = StepLimits(*options["limits"])
        executor = LocalExecutor(config, model_config, checkpoint, device, limits, parallel)
    finally:
        checkpoint.close()
    send(connection, b"R")
    flights: deque[Any] = deque()
    while (message := receive(connection)) is not None and message[0] == b"P":
        if len(flights) >= executor.overlap:
            flights.popleft().result()
        flights.append(executor.launch(decode_plan(message[1])))
    executor.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of a collective library that waits for dead peers must not keep the process.
    os._exit(code)

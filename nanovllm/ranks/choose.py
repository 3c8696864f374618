"""Which executor an engine gets, and on which device its rank computes (contract.py lists the executors).

Without distributed_executor_backend one rank is local; several are processes of this machine, or, in a script that
torchrun started with as many ranks, the ranks of that script.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.ranks.contract import Executor
from nanovllm.ranks.local import LocalExecutor
from nanovllm.ranks.multiprocess import MultiprocessExecutor
from nanovllm.ranks.torchrun import Place, TorchrunExecutor

MakeExecutor = Callable[..., Executor]  # (config, model_config, checkpoint, device, limits)


def choose_executor(config: EngineConfig) -> tuple[MakeExecutor, Device]:
    name, size = config.distributed_executor_backend, config.tensor_parallel_size
    if name is None:
        started = Place.of(os.environ)
        name = "local" if size == 1 else "torchrun" if started and started.size == size else "multiprocess"
    if name == "local":
        if size > 1:
            raise ConfigError(
                f"distributed_executor_backend='local' is one rank, tensor_parallel_size={size}: use 'mp', 'ray' or "
                f"'torchrun', or leave it out"
            )
        return LocalExecutor, Device.choose(config.device)
    if name == "ray":
        from nanovllm.ranks.ray_cluster import RayExecutor

        return RayExecutor, Device.choose(config.device)
    if name == "torchrun":
        place = Place.of(os.environ)
        if place is None or place.size != size:
            found = "not started by torchrun" if place is None else f"started by torchrun with {place.size} ranks"
            raise ConfigError(
                f"distributed_executor_backend='torchrun', tensor_parallel_size={size}: this process was {found}; run "
                f"`torchrun --nproc-per-node {size} script.py` or the like"
            )
        if config.speculative_method is not None and size > 1:
            raise ConfigError(
                f"speculative_method={config.speculative_method!r}: under torchrun every rank makes its own plans, and "
                "how many tokens are guessed follows times, which differ between ranks; leave it out, or let the "
                "engine start the ranks (distributed_executor_backend='mp' or 'ray', without torchrun)"
            )
        return TorchrunExecutor, Device.of_rank(config.device, place.local_rank)
    device = Device.of_rank(config.device, 0) if size > 1 else Device.choose(config.device)
    return MultiprocessExecutor, device

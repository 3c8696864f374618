"""Capturing a function's kernel launches as a graph that the driver replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Capture(Protocol):
    def __call__(self, function: Callable[[], None], trial: bool = True) -> Callable[[], None]:
        """What replays the function. `trial` as in `capture_graph`."""
        ...


def shared_pool() -> Capture:
    """Captures that share their memory: no graph may be replayed while the results of another are still needed."""
    pool = None

    def capture(function: Callable[[], None], trial: bool = True) -> Callable[[], None]:
        nonlocal pool
        replay, pool = capture_graph(function, pool, trial)
        return replay

    return capture


def capture_graph(function: Callable[[], None], pool: Any | None, trial: bool = True) -> tuple[Callable[[], None], Any]:
    """(replay, memory pool for the next capture). The function is run once first, outside the capture: kernels are
    compiled and libraries set up at their first launch, which a capture does not allow. Without `trial` that has
    happened already, and running it now would change what it works on."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if trial:
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        function()
    return graph.replay, pool or graph.pool()

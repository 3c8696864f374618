"""Capturing a function's kernel launches as a graph that the driver replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # function -> what replays it


def shared_pool() -> Capture:
    """Captures that use one another's memory: none of them is replayed while what another left is still needed."""
    pool = None

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        nonlocal pool
        replay, pool = capture_graph(function, pool)
        return replay

    return capture


def capture_graph(function: Callable[[], None], pool: Any | None) -> tuple[Callable[[], None], Any]:
    """(replay, memory pool for the next capture). The function is run once first, outside the capture: kernels are
    compiled and libraries set up at their first launch, which a capture does not allow."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        function()
    return graph.replay, pool or graph.pool()

"""How long work takes on a device, and what it launches there.

A GPU runs behind the host: reading a clock around a call measures the launch, not the work. Events lie in the stream
between the kernels themselves.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from nanovllm.hardware.device import Device

REPEATS = 9


def time_on_device(function: Callable[[], object], device: Device) -> float:
    """Seconds of one call: the median of several, after one that is not counted."""
    function()
    return statistics.median(_time_once(function, device) for _ in range(REPEATS))


def _time_once(function: Callable[[], object], device: Device) -> float:
    if not device.is_gpu:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@dataclass(frozen=True)
class Launch:
    kernel: str
    num_programs: int  # thread blocks of the grid


def record_launches(function: Callable[[], object], device: Device) -> list[Launch]:
    """The kernels that one call launches, as the driver saw them; empty on a CPU or where the driver reports none."""
    if not device.is_gpu:
        return []
    function()  # compiles, tunes and allocates: launches that a later call does not make
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))  # the only form of a profile that has the grids
        events = json.loads(file.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [Launch(e["name"], prod(e["args"]["grid"])) for e in kernels]

"""How busy the GPU was: the share of time in which some kernel ran, as the driver's own tool samples it.

Busy is not fast: one small kernel after another counts as 100 %. Beside it belongs the share of the card's limit.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Iterator

import torch

from nanovllm.hardware.device import Device

SAMPLE_MS = 100


class Utilisation:
    percent: float | None = None  # None: a CPU, no tool on this machine, or too short a time for a sample


@contextlib.contextmanager
def sampled(device: Device) -> Iterator[Utilisation]:
    """The tool runs beside the measured work, in a process of its own, and is ended with it."""
    found = Utilisation()
    tool = shutil.which("nvidia-smi") if device.is_gpu else None
    if tool is None:
        yield found
        return
    uuid = torch.cuda.get_device_properties(device.torch_device).uuid
    query = [tool, f"--id=GPU-{uuid}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen(
        [*query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield found
    finally:
        sampler.terminate()
        lines, _ = sampler.communicate()
        samples = [int(line) for line in lines.splitlines() if line.strip().isdigit()]
        # The driver's figure looks back over its last period: the first samples still show what was before.
        if len(samples) > 4:
            found.percent = statistics.mean(samples[2:])

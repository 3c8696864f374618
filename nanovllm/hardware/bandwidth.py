"""Measured bandwidth of this machine's links and memory, from which `nanovllm plan --measure` predicts speed."""

from __future__ import annotations

import torch

from nanovllm.hardware.device import Device
from nanovllm.hardware.timing import time_on_device

COPY_BYTES = 256 * 10**6  # long enough that starting the copy does not count, short enough to pin anywhere


def host_to_device_bandwidth(device: Device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second from page-locked host memory; without a GPU, from one place in memory to another."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)  # written, so that its pages exist
    if device.is_gpu:
        source = source.pin_memory()
    return copy_bandwidth(source, torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device), device)


def copy_bandwidth(source: torch.Tensor, target: torch.Tensor, device: Device) -> float:
    """Bytes per second of a copy between these."""
    return source.nbytes / time_on_device(lambda: target.copy_(source, non_blocking=True), device)


def read_bandwidth(device: Device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second of the device's own memory. A copy on the device reads and writes, so it counts twice."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / time_on_device(lambda: target.copy_(source), device)

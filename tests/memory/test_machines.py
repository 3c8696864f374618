"""Bandwidths of an estimate: assumed by the size of the card, measured, or given."""

from __future__ import annotations

import pytest

from nanovllm.errors import ConfigError
from nanovllm.hardware import bandwidth
from nanovllm.hardware.device import Device
from nanovllm.memory.budget import GIB, Memory
from nanovllm.memory.machines import LINKS, READS, find_links
from nanovllm.memory.options import PlanOptions


@pytest.mark.parametrize(
    ("size", "link", "read"),
    [
        (12, (12, 25), (350, 600)),
        (12.1, (12, 25), (450, 1000)),
        (24, (12, 25), (450, 1000)),
        (24.1, (25, 55), (700, 1000)),
        (139, (25, 55), (4000, 4800)),
    ],
)
def test_assumed(size: float, link: tuple[int, int], read: tuple[int, int]) -> None:
    (slow, fast), notes = find_links(PlanOptions(), Memory(int(size * GIB), 0))
    assert (slow.host_to_gpu, fast.host_to_gpu) == (link[0] * 1e9, link[1] * 1e9)
    assert (slow.gpu_read, fast.gpu_read) == (read[0] * 1e9, read[1] * 1e9)
    assert f" {link[0]} or " in notes[0]
    assert f" {link[1]} GB/s (assumed)" in notes[0]
    assert all(low <= high for _, low, high in (*LINKS, *READS))


def test_given_counts_more_than_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card = Device.choose("cpu"), Memory(11 * GIB, 0)
    assert bandwidth.host_to_device_bandwidth(cpu, 10**6) > 1e7  # the measuring itself runs on any machine
    assert bandwidth.read_bandwidth(cpu, 10**6) > 1e7
    monkeypatch.setattr(bandwidth, "host_to_device_bandwidth", lambda device: 7e9)
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: 800e9)
    (slow, fast), notes = find_links(PlanOptions(measure=True), card)
    assert slow == fast
    assert (slow.host_to_gpu, slow.gpu_read) == (7e9, 800e9)
    assert "7 GB/s (measured)" in notes[0]
    (slow, _), _ = find_links(PlanOptions(measure=True, bandwidth_gbs=3), card)
    assert (slow.host_to_gpu, slow.gpu_read) == (3e9, 800e9)
    (slow, fast), notes = find_links(PlanOptions(bandwidth_gbs=25, gpu_read_gbs=600), card)
    assert slow == fast
    assert notes == ("host to GPU: 25 GB/s (given)", "disk: 3 GB/s", "GPU memory: 600 GB/s (given)")
    with pytest.raises(ConfigError):
        find_links(PlanOptions(gpu_read_gbs=float("inf")), card)

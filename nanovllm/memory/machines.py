"""What a card and the links around it do in a second: given, measured here, measured on one H200, or assumed by the
size of the card. Beside each figure is a note with its source.

Links between GPUs and between hosts were never measured. torch is imported inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.errors import ConfigError
from nanovllm.memory.budget import GIB, Memory
from nanovllm.memory.options import PlanOptions
from nanovllm.memory.scaling import Link, Machine
from nanovllm.memory.speed import Links

# GB/s that cards of so many GiB are sold with: (up to GiB, slow, fast), the link to the host and their own memory.
LINKS = ((24, 12, 25), (2**20, 25, 55))
LINK_NAMES = {12: "PCIe 3 x16", 25: "PCIe 4 x16", 55: "PCIe 5 x16"}
READS = ((12, 350, 600), (24, 450, 1000), (48, 700, 1000), (100, 1900, 3350), (2**20, 4000, 4800))
# What one H200 reaches: benchmarks/results/2026-11-15-h200-bench-kernels.json
H200_READ, H200_FLOPS = 4.33e12, 786e12
LARGE_CARD = 100  # GiB; larger ones are taken for an H200
# (up to GiB, TFLOP/s of 16-bit matrix products that cards of that size are sold with)
TFLOPS = ((12, 40), (24, 120), (48, 180), (LARGE_CARD, 600))
# Assumed. Bandwidth: four fifths of what is sold, in one direction, and nine tenths of a network's.
INSIDE = {
    "nvlink": (Link(360e9, 2e-6), "NVLink 4"),
    "pcie": (Link(40e9, 5e-6), "PCIe 5 x16"),
}
NETWORKS = {
    "ethernet": (Link(11e9, 25e-6), "100 Gb/s Ethernet"),
    "infiniband": (Link(45e9, 5e-6), "400 Gb/s InfiniBand"),
}
Notes = tuple[str, ...]


@dataclass(frozen=True)
class Hardware:
    """Cards that are all alike, and the links around them."""

    memory: Memory  # of one card, and of a whole host
    links: tuple[Links, Links]  # slow, fast
    link_notes: Notes
    machine: Machine
    machine_notes: Notes  # of the card, of the link inside a host, of the network

    @classmethod
    def find(cls, options: PlanOptions) -> Hardware:
        memory = find_memory(options)
        links, link_notes = find_links(options, memory)
        return cls(memory, links, link_notes, *find_machine(options, memory, (links[0].gpu_read, links[1].gpu_read)))


def find_memory(options: PlanOptions) -> Memory:
    from nanovllm.hardware.device import Device

    host_gb = options.host_memory_gb
    if host_gb is not None and not 0 < host_gb < 2**20:
        raise ConfigError(f"host_memory_gb={host_gb}: must be a positive number of gigabytes, or left out")
    host = Device.choose("cpu").memory()[1] if host_gb is None else int(host_gb * GIB)
    if options.gpu_memory_gb is not None:
        return Memory(int(options.gpu_memory_gb * GIB), host, options.gpu_memory_utilization)
    device = Device.choose("auto")
    if not device.is_gpu:
        raise ConfigError("gpu_memory_gb: there is no GPU here; give the card's size, e.g. --gpu-memory-gb 11")
    return Memory(device.memory()[1], host, options.gpu_memory_utilization)


def find_links(options: PlanOptions, memory: Memory) -> tuple[tuple[Links, Links], Notes]:
    for name in ("bandwidth_gbs", "disk_gbs", "gpu_read_gbs"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name}={value}: must be a positive number of gigabytes (10^9 bytes) per second")
    bandwidth, read = options.bandwidth_gbs, options.gpu_read_gbs
    if options.measure:
        measured = measure_links()
        bandwidth, read = bandwidth or measured[0], read or measured[1]
    size = memory.gpu_bytes / GIB
    link = (bandwidth, bandwidth) if bandwidth else next((a, b) for most, a, b in LINKS if size <= most)
    reads = (read, read) if read else next((a, b) for most, a, b in READS if size <= most)
    how = "measured" if options.measure else "given"
    named = " or ".join(f"{LINK_NAMES[int(gbs)]} {gbs}" for gbs in link) if bandwidth is None else ""
    notes = (
        f"host to GPU: {named} GB/s (assumed)" if named else f"host to GPU: {bandwidth:.4g} GB/s ({how})",
        f"disk: {options.disk_gbs:.4g} GB/s",
        f"GPU memory: {read:.4g} GB/s ({how})" if read else f"GPU memory: {reads[0]} to {reads[1]} GB/s (assumed)",
    )
    slow, fast = (Links(link[i] * 1e9, options.disk_gbs * 1e9, reads[i] * 1e9) for i in range(2))
    return (slow, fast), notes


def measure_links() -> tuple[float, float]:
    """GB/s (host to device, of the device's own memory)"""
    from tqdm import tqdm

    from nanovllm.hardware.bandwidth import host_to_device_bandwidth, read_bandwidth
    from nanovllm.hardware.device import Device

    links = tqdm((host_to_device_bandwidth, read_bandwidth), "measuring", unit="link", disable=None, leave=False)
    to_device, of_device = (link(Device.choose("auto")) / 1e9 for link in links)
    return to_device, of_device


def find_machine(options: PlanOptions, memory: Memory, reads: tuple[float, float]) -> tuple[Machine, Notes]:
    """`reads`: bytes per second of the GPU's memory, at least and at most; equal if given or measured."""
    size = memory.gpu_bytes / GIB
    read, flops = sum(reads) / 2, options.gpu_tflops
    how_read, how_flops = "given" if reads[0] == reads[1] else "assumed", "given" if flops else "assumed"
    if size > LARGE_CARD and reads[0] != reads[1]:
        read, how_read = H200_READ, "measured on an H200"
    if flops is None and size > LARGE_CARD:
        flops, how_flops = H200_FLOPS / 1e12, "measured on an H200"
    flops = flops or next(tflops for most, tflops in TFLOPS if size <= most)
    _check_positive("gpu_tflops", flops)
    link, link_note = _find_link("link", options.link, INSIDE, options.link_gbs, options.link_us)
    network, network_note = _find_link("network", options.network, NETWORKS, options.network_gbs, options.network_us)
    notes = (
        f"a GPU reads {read / 1e9:,.0f} GB/s ({how_read}) and computes {flops:.4g} TFLOP/s ({how_flops})",
        f"between GPUs of a host {link_note}",
        f"between hosts {network_note}",
    )
    return Machine(read, flops * 1e12, link, network), notes


def _find_link(
    name: str, chosen: str, known: dict[str, tuple[Link, str]], gbs: float | None, us: float | None
) -> tuple[Link, str]:
    if chosen not in known:
        raise ConfigError(f"{name}={chosen!r}: must be one of {', '.join(known)}; or give {name}_gbs and {name}_us")
    link, title = known[chosen]
    for part, value in (("gbs", gbs), ("us", us)):
        if value is not None:
            _check_positive(f"{name}_{part}", value)
    link = Link(link.bytes_per_second if gbs is None else gbs * 1e9, link.latency if us is None else us / 1e6)
    given = (gbs is not None) + (us is not None)
    how = ("assumed", "given in part", "given")[given]
    title = "" if given == 2 else f"{title}, "
    return link, f"{title}{link.bytes_per_second / 1e9:.4g} GB/s and {link.latency * 1e6:.4g} us ({how})"


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < 1e6:
        raise ConfigError(f"{name}={value}: must be a positive number below 1e6")

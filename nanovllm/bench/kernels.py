"""The attention kernels alone, against PyTorch's on dense tensors and against what this card was just seen to reach.

Prefill is arithmetic, so its limit is a large matrix product; decode reads every key and value once for little
arithmetic, so its limit is a plain read of memory. The last table is the classic crossover: attention that writes its
scores to memory (a matrix per head, so memory grows with the square of the length, in several launches) against the
flash kernel that never holds more than a tile of them. All are timed in captured graphs, as the engine runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.bench.report import Columns, print_rows
from nanovllm.bench.workload import parse_counts
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.hardware.graphs import capture_graph
from nanovllm.hardware.timing import record_launches, time_on_device

BLOCK_SIZE = 64
CACHE_BYTES = 160e6  # decode runs over more layers than this: keys left in the L2 cache would look like a faster card
Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Heads:
    num_q: int
    num_kv: int
    size: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        values = parse_counts("--heads", text, 1)
        if len(values) != 3 or values[0] % values[1]:
            raise ConfigError(f"--heads {text!r}: write query heads, KV heads (a divisor), size: 16,8,128")
        return cls(*values)


def parse_shapes(option: str, text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word.strip()) for word in text.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {text!r}: write batch x length with commas between, for example 8x2048,64x1024")
    return [(int(m[1]), int(m[2])) for m in found if m]


def choose_gpu() -> Device:
    device = Device.choose("auto")
    if not device.is_gpu:
        raise ConfigError("bench kernels: needs a GPU, and torch sees none here; bench crossover runs on a CPU too")
    return device


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """q, k, v [batch, heads, length, size]; hidden [length, length] is True where a key lies in the future."""
    scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)  # [batch, heads, length, length]: the point
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v


def replay_seconds(calls: Calls, device: Device) -> float:
    """Of one of the calls, all captured in one graph."""

    def run() -> None:
        for call in calls:
            call()

    replay, _ = capture_graph(run, None)
    return time_on_device(replay, device) / len(calls)


@dataclass(frozen=True)
class Lab:
    """Builds the inputs of a measurement and gives the calls to time."""

    device: Device
    dtype: torch.dtype
    heads: Heads

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device.torch_device)

    def paged(self, batch: int, length: int) -> tuple[torch.Tensor, ...]:
        """(k, v, context_lens, block_tables), blocks in random order as after hours of serving."""
        per_seq, where = -(-length // BLOCK_SIZE), self.device.torch_device
        k, v = (self.rand(batch * per_seq, BLOCK_SIZE, self.heads.num_kv, self.heads.size) for _ in range(2))
        tables = torch.randperm(batch * per_seq, device=where).int().view(batch, per_seq)
        return k, v, torch.full((batch,), length, dtype=torch.int32, device=where), tables

    def prefill(self, batch: int, length: int) -> Calls:
        from nanovllm.ops.triton.prefill_attention import prefill_attention

        k, v, lens, tables = self.paged(batch, length)
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=self.device.torch_device)
        q = self.rand(batch * length, self.heads.num_q, self.heads.size)
        out, scale = torch.empty_like(q), self.heads.size**-0.5
        return [lambda: prefill_attention(q, k, v, starts, lens, tables, scale, out=out)]

    def decode(self, batch: int, length: int) -> Calls:
        from nanovllm.ops.triton.decode_attention import decode_attention, launch_for

        layers = [self.paged(batch, length) for _ in range(self.num_layers(batch, length))]
        q = self.rand(batch, self.heads.num_q, self.heads.size)
        out, scale, launch = torch.empty_like(q), self.heads.size**-0.5, launch_for(q, self.heads.num_kv, length)
        attend = partial(decode_attention, scale=scale, launch=launch, out=out)
        return [partial(attend, q, *layer) for layer in layers]

    def dense(self, batch: int, length: int, num_new: int) -> Calls:
        """PyTorch's best for the same numbers, on dense tensors: no blocks, one length."""
        causal = num_new > 1
        q = self.rand(batch, self.heads.num_q, num_new, self.heads.size)
        layers = [
            self.rand(2, batch, self.heads.num_kv, length, self.heads.size)
            for _ in range(1 if causal else self.num_layers(batch, length))
        ]
        attend = partial(scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
        return [partial(attend, q, *kv) for kv in layers]

    def naive(self, length: int) -> Calls:
        q, k, v = (self.rand(1, self.heads.num_q, length, self.heads.size) for _ in range(3))
        hidden = torch.ones(length, length, dtype=torch.bool, device=self.device.torch_device).triu_(1)
        return [lambda: naive_attention(q, k, v, hidden)]

    def num_layers(self, batch: int, length: int) -> int:
        return min(64, max(2, int(CACHE_BYTES // self.kv_bytes(batch, length)) + 1))

    def kv_bytes(self, batch: int, length: int) -> int:
        return 2 * batch * length * self.heads.num_kv * self.heads.size * self.dtype.itemsize

    def flops(self, batch: int, length: int) -> float:
        return 4 * self.heads.num_q * self.heads.size * batch * length * (length + 1) / 2

    def seconds(self, build: Callable[..., Calls], *sizes: int) -> float | None:
        """Of one call; None: it does not fit."""
        try:
            return replay_seconds(build(*sizes), self.device)
        except torch.OutOfMemoryError:
            return None
        finally:
            self.device.release_cached()


def measure_ceilings(lab: Lab) -> dict[str, float]:
    size = min(4 << 30, lab.device.memory()[0] // 8)
    source = torch.zeros(size // 4, dtype=torch.float32, device=lab.device.torch_device)
    target = torch.empty_like(source)
    a, b, out = (lab.rand(8192, 8192) for _ in range(3))
    return {
        "read_bytes_per_second": source.nbytes / time_on_device(source.sum, lab.device),
        "copy_bytes_per_second": 2 * source.nbytes / time_on_device(lambda: target.copy_(source), lab.device),
        "matmul_flops": 2 * 8192**3 / time_on_device(lambda: torch.mm(a, b, out=out), lab.device),
    }


def measure_shapes(lab: Lab, phase: str, shapes: list[tuple[int, int]], limit: float) -> list[dict[str, Any]]:
    """`limit`: FLOP/s for prefill, bytes per second for decode; so is `rate`."""
    rows, is_prefill = [], phase == "prefill"
    for batch, length in shapes:
        ours = lab.seconds(lab.prefill if is_prefill else lab.decode, batch, length)
        sdpa = lab.seconds(lab.dense, batch, length, length if is_prefill else 1)
        work = lab.flops(batch, length) if is_prefill else lab.kv_bytes(batch, length)
        rate = None if ours is None else work / ours
        rows.append(
            {
                "shape": f"{batch}x{length}",
                "triton_seconds": ours,
                "sdpa_seconds": sdpa,
                "rate": rate,
                "share_of_limit": None if rate is None else rate / limit,
            }
        )
    return rows


def measure_crossover(lab: Lab, lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"length": length, "score_bytes": lab.heads.num_q * length**2 * lab.dtype.itemsize}
        for name, build, sizes in (("naive", lab.naive, (length,)), ("flash", lab.prefill, (1, length))):
            seconds = lab.seconds(build, *sizes)
            launches = [] if seconds is None else record_launches(build(*sizes)[0], lab.device)
            row |= {f"{name}_seconds": seconds, f"{name}_grids": [launch.num_programs for launch in launches]}
        rows.append(row)
    return rows


def measure(lab: Lab, shapes: dict[str, list[tuple[int, int]]], lengths: list[int]) -> dict[str, Any]:
    ceilings = measure_ceilings(lab)
    bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
    return {
        "ceilings": ceilings,
        "prefill": measure_shapes(lab, "prefill", shapes["prefill"], ceilings["matmul_flops"]),
        "decode": measure_shapes(lab, "decode", shapes["decode"], bandwidth),
        "crossover": measure_crossover(lab, lengths),
    }


def print_kernels(found: dict[str, Any]) -> None:
    read, copy, flops = (rate / 1e12 for rate in found["ceilings"].values())
    print(f"this card reads {read:.2f} TB/s, copies {copy:.2f} TB/s and multiplies {flops:.0f} TFLOP/s")
    for phase, unit in (("prefill", "TFLOP/s"), ("decode", "TB/s")):
        columns: Columns = [
            ("batch x length", "shape"),
            ("triton", "triton_seconds", 1e6),
            ("SDPA, dense", "sdpa_seconds", 1e6),
        ]
        columns += [(unit, "rate", 1e-12)]
        columns += [("of this card's", lambda row: "-" if row["rate"] is None else f"{row['share_of_limit']:.0%}")]
        print_rows(f"{phase}: microseconds", found[phase], columns, missing="OOM")
    columns = [("length", "length"), ("naive us", "naive_seconds", 1e6), ("flash us", "flash_seconds", 1e6)]
    columns += [("scores MiB", "score_bytes", 2**-20)]
    columns += [("naive launches: their grids", lambda row: _grids(row["naive_grids"]))]
    columns += [("flash", lambda row: _grids(row["flash_grids"]))]
    print_rows("prefill of one sequence: scores in memory against flash", found["crossover"], columns, missing="OOM")


def _grids(grids: list[int]) -> str:
    return f"{len(grids)}: {', '.join(map(str, grids))}" if grids else "-"

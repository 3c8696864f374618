"""Timings of the Triton kernels, as the engine runs them: in a captured graph, over more data than the L2 cache holds.

`timing_jobs()` gives (name, build) pairs; build makes the inputs and returns a Timed. Beside the kernels stand their
peers (SDPA on dense tensors, cuBLAS) and a handful of tile choices each.
"""
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from kernel_checks import BF16, DEVICE, Launch, Tile, paged_cache, rand

from nanovllm.ops.triton import activation as t_activation
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import gemv
from nanovllm.ops.triton import norm as t_norm
from nanovllm.ops.triton import prefill_attention as prefill

L2_BYTES = 160e6  # inputs of a timing exceed this together: three times the cache
HEADS, HEAD_DIM = (16, 8), 128  # Qwen3-0.6B
PREFILL_SHAPES = ((8, 2048), (64, 1024), (2, 8192))
DECODE_SHAPES = ((256, 840), (64, 1024), (64, 2048), (8, 1024))
LAYOUTS = tuple(itertools.product((False, True), (16, 64, 256)))  # (stored head by head, block size)
MIXED = (100, 1580)  # lengths drawn evenly from here instead of one length: 840 on average
Builds = list[tuple[str, Callable[[], "Timed"]]]


@dataclass
class Timed:
    """Calls that each read `num_bytes` or compute `flops`."""

    calls: list[Callable]
    num_bytes: float = 0.0
    flops: float = 0.0


@functools.lru_cache(maxsize=1)
def shared_cache(batch, length, block_size, by_head, num_kv_heads, copies):
    """`copies` layers of cache; jobs that differ in the launch only follow each other and share them, so that a
    difference is not one of where blocks happen to lie."""
    lens = [length] * batch
    if length == MIXED:
        lens = torch.randint(*MIXED, (batch,), generator=torch.Generator().manual_seed(0)).tolist()
    return [paged_cache(lens, block_size, num_kv_heads, HEAD_DIM, BF16, by_head) for _ in range(copies)]


def time_prefill(batch, length, tile, block_size=256, by_head=False, heads=HEADS):
    def build() -> Timed:
        k, v, lens, tables = shared_cache(batch, length, block_size, by_head, heads[1], 1)[0]
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        q = rand(batch * length, heads[0], HEAD_DIM)
        out = torch.empty_like(q)
        flops = 4 * HEAD_DIM * heads[0] * batch * length * (length + 1) / 2
        call = lambda: prefill.prefill_attention(  # noqa: E731
            q, k, v, starts, lens, tables, HEAD_DIM**-0.5, out=out, tile=tile
        )
        return Timed([call], flops=flops)

    return build


def time_sdpa(batch, length, heads=HEADS):
    def build() -> Timed:
        q = rand(batch, heads[0], length, HEAD_DIM)
        k, v = rand(batch, heads[1], length, HEAD_DIM), rand(batch, heads[1], length, HEAD_DIM)
        flops = 4 * HEAD_DIM * heads[0] * batch * length * (length + 1) / 2
        return Timed([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)], flops=flops)

    return build


def time_decode(batch, length, launch=None, block_size=64, by_head=False, heads=HEADS):
    def build() -> Timed:
        mean = sum(MIXED) / 2 if length == MIXED else length
        copies = max(2, int(L2_BYTES // (batch * mean * heads[1] * HEAD_DIM * 4)) + 1)
        layers = shared_cache(batch, length, block_size, by_head, heads[1], copies)
        num_bytes = int(layers[0][2].sum()) * heads[1] * HEAD_DIM * 4
        q = rand(batch, heads[0], HEAD_DIM)
        chosen = launch or decode.launch_for(q, heads[1], 4096)
        workspace = decode.DecodeWorkspace.allocate(batch, heads[0], chosen, HEAD_DIM, q.device)
        out = torch.empty_like(q)
        calls = [lambda layer=layer: decode.decode_attention(
                     q, *layer, HEAD_DIM**-0.5, chosen, out=out, workspace=workspace)
                 for layer in layers]  # fmt: skip
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_linear(rows, n, k, cublas=False):
    def build() -> Timed:
        num_bytes = n * k * 2
        weights = [rand(n, k, scale=k**-0.5) for _ in range(max(2, int(L2_BYTES // num_bytes) + 1))]
        x = rand(rows, k)
        if cublas:
            out = torch.empty(rows, n, dtype=BF16, device=DEVICE)
            return Timed([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights], num_bytes=num_bytes)
        return Timed([lambda w=w: gemv.gemv(x, w) for w in weights], num_bytes=num_bytes)

    return build


SHAPES_SMALL = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
SHAPES_LARGE = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}


def time_layer(rows, shapes, parts, fused):
    """The linear maps named in `parts` with what stands around them in a layer: fused, or kernel by kernel.

    qkv: norm before it; o and down: residual sum after it (kernel by kernel it is part of the next norm, counted
    there); gate_up: norm before, silu(gate) * up after.
    """

    def build() -> Timed:
        num_bytes = sum(shapes[name][0] * shapes[name][1] * 2 for name in parts)
        layers = [{name: rand(*shapes[name], scale=shapes[name][1] ** -0.5) for name in parts}
                  for _ in range(max(2, int(L2_BYTES // num_bytes) + 1))]  # fmt: skip
        hidden = shapes["qkv"][1]
        gain, residual, x = rand(hidden), rand(rows, hidden), rand(rows, hidden)
        heads, middle = rand(rows, shapes["o"][1]), rand(rows, shapes["down"][1])

        def run(weights) -> None:
            if "qkv" in parts and fused:
                gemv.gemv(residual, weights["qkv"], norm=(gain, 1e-6))
            elif "qkv" in parts:
                gemv.gemv(t_norm.add_rms_norm(x, residual, gain, 1e-6)[0], weights["qkv"])
            if "o" in parts:
                gemv.gemv(heads, weights["o"], residual=residual if fused else None, out=residual if fused else x)
            if "gate_up" in parts and fused:
                gemv.gemv(residual, weights["gate_up"], norm=(gain, 1e-6), gated=True, out=middle)
            elif "gate_up" in parts:
                normed = t_norm.add_rms_norm(x, residual, gain, 1e-6)[0]
                t_activation.silu_mul(gemv.gemv(normed, weights["gate_up"]), out=middle)
            if "down" in parts:
                gemv.gemv(middle, weights["down"], residual=residual if fused else None, out=residual if fused else x)

        return Timed([lambda weights=weights: run(weights) for weights in layers], num_bytes=num_bytes)

    return build


def name_of(batch, length, by_head, block_size) -> str:
    return f"{batch}x{'mixed' if length == MIXED else length} {'HND' if by_head else 'NHD'} bs{block_size}"


def prefill_jobs() -> Builds:
    """Layouts and block sizes by the rule, then tiles at one layout, then a short prompt."""
    jobs: Builds = []
    for (batch, length), (by_head, block_size) in itertools.product(PREFILL_SHAPES, LAYOUTS):
        name = f"prefill {name_of(batch, length, by_head, block_size)} rule"
        jobs.append((name, time_prefill(batch, length, None, block_size, by_head)))
    tiles = [Tile(128, 64, 4, 2, True, True), Tile(128, 64, 4, 3, True), Tile(128, 64, 4, 3, True, True)]
    tiles += [Tile(64, 64, 4, 2, True, True), Tile(64, 64, 4, 3, True), Tile(128, 128, 8, 2, True, True)]
    for (batch, length), tile in itertools.product((*PREFILL_SHAPES, (1, 1024)), (None, *tiles)):
        label = "rule" if tile is None else (
            f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{' one' if tile.one_loop else ''}")
        jobs.append((f"prefill {batch}x{length} tile {label}", time_prefill(batch, length, tile, 64)))
    for tile, (batch, length) in itertools.product((Tile(128, 64, 8, 3), Tile(128, 64, 4, 2)), PREFILL_SHAPES[:2]):
        name = f"prefill {batch}x{length} NHD bs16 128x64 w{tile.num_warps} s{tile.num_stages}"
        jobs.append((name, time_prefill(batch, length, tile, 16)))
    jobs += [(f"prefill {batch}x{length} SDPA dense", time_sdpa(batch, length)) for batch, length in PREFILL_SHAPES]
    jobs.append(("prefill 2x8192 rule 32/8 heads", time_prefill(2, 8192, None, 64, False, (32, 8))))
    return jobs


def decode_jobs() -> Builds:
    """Layouts and block sizes by the rule, beside what it was before (one tile in flight); then other launches."""
    splits = {(256, 840): 1, (64, 1024): 4, (64, 2048): 4, (8, 1024): 16, (256, MIXED): 1}
    others = [Launch(1, 32, 2, 4), Launch(1, 64, 4, 2), Launch(1, 64, 4, 3), Launch(1, 16, 1, 3), Launch(1, 16, 1, 4),
              Launch(1, 32, 1, 3), Launch(1, 32, 2, 3, max_registers=128)]  # fmt: skip
    jobs: Builds = []
    for (batch, length), (by_head, block_size) in itertools.product((*DECODE_SHAPES, (256, MIXED)), LAYOUTS):
        launches: list[Launch | None] = [None]
        count = splits[batch, length]
        if length == 840:
            launches.append(Launch(count, 32, 2, 2, ahead=False))
        if block_size == 64 and (batch, length) in ((256, 840), (64, 1024)):
            launches += [replace(launch, num_splits=count) for launch in others]
        if block_size == 64 and by_head:
            launches += [Launch(count * 2), Launch(max(count // 2, 1))] if count > 1 else [Launch(2)]
        if block_size == 64 and by_head and batch == 8:
            launches += [Launch(count, fused_merge=True), Launch(8, 64, 4, 3), Launch(16, 64, 4, 2)]
        for launch in dict.fromkeys(launches):
            name = f"decode {name_of(batch, length, by_head, block_size)} {label_of(launch)}"
            jobs.append((name, time_decode(batch, length, launch, block_size, by_head)))
    for launch in (None, Launch(8), Launch(16, 64, 4, 3), Launch(16, 16, 1, 3), Launch(16, fused_merge=True)):
        jobs.append((f"decode 1x1024 HND bs64 {label_of(launch)}", time_decode(1, 1024, launch, 64, True)))
    return jobs


def label_of(launch: Launch | None) -> str:
    if launch is None:
        return "rule"
    label = f"s{launch.num_splits} n{launch.block_n} w{launch.num_warps} st{launch.num_stages}"
    label += f" r{launch.max_registers}" if launch.max_registers else ""
    return label + ("" if launch.ahead else " not ahead") + (" fused" if launch.fused_merge else "")


def linear_jobs() -> Builds:
    jobs: Builds = []
    for model, shapes in (("0.6B", SHAPES_SMALL), ("8B", SHAPES_LARGE)):
        for name, shape in {**shapes, "head": (151936, shapes["qkv"][1])}.items():
            jobs.append((f"linear {model} {name} m1 gemv", time_linear(1, *shape)))
            for rows in (2, 4) if name in ("gate_up", "head") else ():
                jobs.append((f"linear {model} {name} m{rows} gemv", time_linear(rows, *shape)))
                jobs.append((f"linear {model} {name} m{rows} cuBLAS", time_linear(rows, *shape, cublas=True)))
        groups = [(name, (name,)) for name in shapes] + [("all four", tuple(shapes))]
        for (name, parts), rows, fused in itertools.product(groups, (1, 2), (True, False)):
            if rows > 1 and len(parts) == 1:
                continue
            label = f"layer {model} {name} m{rows} {'fused' if fused else 'apart'}"
            jobs.append((label, time_layer(rows, shapes, parts, fused)))
    return jobs


def timing_jobs() -> Builds:
    return prefill_jobs() + decode_jobs() + linear_jobs()

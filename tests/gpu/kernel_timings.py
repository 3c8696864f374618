"""Timings of the Triton kernels, as the engine runs them: in a captured graph, over more data than the L2 cache holds.

`timing_jobs()` gives (name, build) pairs; build makes the inputs and returns a Timed. Beside the kernels stand their
peers (SDPA on dense tensors, cuBLAS) and a handful of tile choices each.
"""
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernel_checks import BF16, DEVICE, FP32, Launch, Tile, paged_cache, rand

from nanovllm.ops.triton import activation as t_activation
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import decode_state, gemv, qk_norm_rope
from nanovllm.ops.triton import norm as t_norm
from nanovllm.ops.triton import prefill_attention as prefill
from nanovllm.ops.triton import sampling as t_sampling

L2_BYTES = 160e6  # inputs of a timing exceed this together: three times the cache
PREFILL_SHAPES = ((8, 2048), (2, 8192), (64, 1024))
PREFILL_TILES = (
    Tile(128, 128, 8, 2), Tile(128, 128, 8, 2, True), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3, True),
    Tile(128, 64, 4, 3, True), Tile(64, 128, 4, 2, True), Tile(64, 64, 4, 3),
)  # fmt: skip
Builds = list[tuple[str, Callable[[], "Timed"]]]


@dataclass
class Timed:
    """Calls that each read `num_bytes` or compute `flops`."""

    calls: list[Callable]
    num_bytes: float = 0.0
    flops: float = 0.0


def time_prefill(batch, length, tile, block_size=256, heads=(16, 8), head_dim=128):
    def build() -> Timed:
        k, v, lens, tables = paged_cache([length] * batch, block_size, heads[1], head_dim, BF16)
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        q = rand(batch * length, heads[0], head_dim)
        out = torch.empty_like(q)
        flops = 4 * head_dim * heads[0] * batch * length * (length + 1) / 2
        call = lambda: prefill.prefill_attention(  # noqa: E731
            q, k, v, starts, lens, tables, head_dim**-0.5, out=out, tile=tile
        )
        return Timed([call], flops=flops)

    return build


def time_sdpa(batch, length, heads=(16, 8), head_dim=128):
    def build() -> Timed:
        q = rand(batch, heads[0], length, head_dim)
        k, v = rand(batch, heads[1], length, head_dim), rand(batch, heads[1], length, head_dim)
        flops = 4 * head_dim * heads[0] * batch * length * (length + 1) / 2
        return Timed([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)], flops=flops)

    return build


def time_decode(batch, length, launch=None, block_size=256, heads=(16, 8), head_dim=128):
    def build() -> Timed:
        num_bytes = batch * length * heads[1] * head_dim * 4
        layers = [paged_cache([length] * batch, block_size, heads[1], head_dim, BF16)
                  for _ in range(max(2, int(L2_BYTES // num_bytes) + 1))]  # fmt: skip
        q = rand(batch, heads[0], head_dim)
        chosen = launch or decode.launch_for(q, heads[1], 4096)
        workspace = decode.DecodeWorkspace.allocate(batch, heads[0], chosen.num_splits, head_dim, q.device)
        out = torch.empty_like(q)
        calls = [lambda layer=layer: decode.decode_attention(
                     q, layer[0], layer[1], layer[2], layer[3], head_dim**-0.5, chosen, out=out, workspace=workspace)
                 for layer in layers]  # fmt: skip
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_linear(rows, n, k, block=None, gated=False, cublas=False):
    def build() -> Timed:
        num_bytes = n * k * 2
        weights = [rand(n, k, scale=k**-0.5) for _ in range(max(2, int(L2_BYTES // num_bytes) + 1))]
        x, gain, residual = rand(rows, k), rand(k), rand(rows, n)
        if cublas:
            out = torch.empty(rows, n, dtype=BF16, device=DEVICE)
            return Timed([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights], num_bytes=num_bytes)
        if gated:
            calls = [lambda w=w: gemv.gemv(x, w, norm=(gain, 1e-6), gated=True, block=block) for w in weights]
        else:
            calls = [lambda w=w: gemv.gemv(x, w, residual=residual, block=block) for w in weights]
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_sampling(rows, tiles):
    def build() -> Timed:
        logits = [rand(rows, 151936) for _ in range(max(2, int(L2_BYTES // (rows * 151936 * 2)) + 1))]
        temperatures, seeds = torch.full((rows,), 0.6, device=DEVICE), torch.arange(rows, device=DEVICE)
        calls = [lambda x=x: t_sampling.sample(x, temperatures, seeds, seeds, tiles_per_program=tiles) for x in logits]
        return Timed(calls, num_bytes=rows * 151936 * 2)

    return build


def time_small(kind, tokens):
    def build() -> Timed:
        x, residual, weight, gate_up = rand(tokens, 1024), rand(tokens, 1024), rand(1024), rand(tokens, 6144)
        if kind == "norm":
            return Timed([lambda: t_norm.add_rms_norm(x, residual, weight, 1e-6)] * 8, num_bytes=tokens * 1024 * 8)
        if kind == "silu":
            return Timed([lambda: t_activation.silu_mul(gate_up)] * 8, num_bytes=tokens * 3072 * 6)
        if kind == "advance":
            ints = [torch.ones(tokens, dtype=torch.long, device=DEVICE) for _ in range(5)]
            tables = torch.zeros(tokens, 64, dtype=torch.int32, device=DEVICE)
            out, step = torch.zeros(tokens, 16, dtype=torch.long, device=DEVICE), ints[4][:1].int()
            return Timed([lambda: decode_state.advance(*ints, tables, out, step, 64)] * 8)
        qkv, cos_sin = rand(tokens, 32 * 128), rand(4096, 128, dtype=FP32)
        positions, slots = torch.arange(tokens, device=DEVICE) % 4096, torch.randperm(tokens, device=DEVICE)
        cache = torch.zeros(2, -(-tokens // 256), 256, 8, 128, dtype=BF16, device=DEVICE)
        weights = (rand(128), rand(128))
        call = lambda: qk_norm_rope.qk_norm_rope(  # noqa: E731
            qkv, weights, 1e-6, cos_sin, positions, cache[0], cache[1], slots, 16
        )
        return Timed([call] * 8, num_bytes=tokens * 4096 * 4)

    return build


def prefill_jobs() -> Builds:
    jobs: Builds = []
    for tile, (batch, length) in itertools.product(PREFILL_TILES, PREFILL_SHAPES):
        label = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{' tma' if tile.use_desc else ''}"
        jobs.append((f"prefill {batch}x{length} {label}", time_prefill(batch, length, tile)))
    for batch, length in PREFILL_SHAPES:
        jobs.append((f"prefill {batch}x{length} SDPA dense", time_sdpa(batch, length)))
    jobs.append(("prefill 8x2048 bs16", time_prefill(8, 2048, Tile(128, 64, 8, 3), 16)))
    jobs.append(("prefill 8x2048 bs64", time_prefill(8, 2048, Tile(128, 64, 8, 3), 64)))
    jobs.append(("prefill 8x2048 bs64 tma", time_prefill(8, 2048, Tile(128, 64, 8, 3, True), 64)))
    jobs.append(("prefill 2x8192 32/8 heads", time_prefill(2, 8192, Tile(128, 128, 8, 2, True), 256, (32, 8))))
    jobs.append(("prefill 1x1024", time_prefill(1, 1024, None)))
    return jobs


def decode_jobs() -> Builds:
    options = {
        (256, 840): [None, Launch(1, 32, 2, 3), Launch(2, 32, 2, 3), Launch(1, 64, 4, 2), Launch(2, 64, 4, 3)],
        (64, 1024): [None, Launch(2, 32, 2, 3), Launch(8, 32, 2, 3), Launch(4, 64, 4, 3), Launch(4, 32, 2, 3, True)],
        (64, 2048): [None, Launch(2, 32, 2, 3), Launch(8, 32, 2, 3), Launch(8, 64, 4, 3)],
        (8, 1024): [None, Launch(16, 64, 4, 3), Launch(8, 64, 4, 3), Launch(16, 32, 2, 3), Launch(16, 64, 4, 3, True)],
        (1, 1024): [None, Launch(16, 64, 4, 3), Launch(16, 64, 4, 3, True), Launch(16, 32, 2, 3, True),
                    Launch(16, 64, 2, 2)],
        (1, 4000): [None, Launch(32, 64, 4, 3), Launch(64, 64, 4, 3, True)],
    }  # fmt: skip
    jobs: Builds = []
    for (batch, length), launches in options.items():
        for launch in launches:
            label = "rule" if launch is None else (
                f"s{launch.num_splits} n{launch.block_n} w{launch.num_warps} st{launch.num_stages}"
                f"{' fused' if launch.fused_merge else ''}")  # fmt: skip
            jobs.append((f"decode {batch}x{length} {label}", time_decode(batch, length, launch)))
    jobs.append(("decode 256x840 bs16 rule", time_decode(256, 840, None, 16)))
    return jobs


def linear_jobs() -> Builds:
    jobs: Builds = []
    small = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
    small["head"] = (151936, 1024)
    large = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    for model, shapes in (("0.6B", small), ("8B", large)):
        for name, (n, k) in shapes.items():
            gated = name == "gate_up"
            for rows in (1, 2, 4, 8) if name in ("qkv", "o", "down") or model == "8B" else (1, 4):
                jobs.append((f"linear {model} {name} m{rows} gemv", time_linear(rows, n, k, None, gated)))
                jobs.append((f"linear {model} {name} m{rows} cuBLAS", time_linear(rows, n, k, cublas=True)))
            for block in ((1, 512), (1, 1024), (1, 2048), (2, 512), (2, 1024), (4, 512)):
                label = f"linear {model} {name} m1 {block[0]}x{block[1]}"
                jobs.append((label, time_linear(1, n, k, block, gated)))
    return jobs


def timing_jobs() -> Builds:
    jobs = prefill_jobs() + decode_jobs() + linear_jobs()
    for rows, tiles in ((256, 1), (256, 2), (256, 4), (64, 4), (1, 1), (1, 4)):
        jobs.append((f"sampling {rows}x151936 t{tiles}", time_sampling(rows, tiles)))
    for kind, tokens in itertools.product(("norm", "silu", "rope"), (1, 256, 16384)):
        jobs.append((f"{kind} {tokens}", time_small(kind, tokens)))
    jobs.append(("advance 256", time_small("advance", 256)))
    return jobs

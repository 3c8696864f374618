"""Timings of the Triton kernels, as the engine runs them: in a captured graph, over more data than the L2 cache holds.

`timing_jobs()` gives (name, build) pairs; build makes the inputs and returns a Timed. Beside the kernels stand their
peers (SDPA on dense tensors, cuBLAS). The tables of tile choices in the kernels' docstrings were measured with the same
harness, by giving `prefill_attention` a tile and `decode_attention` a launch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from kernel_checks import BF16, DEVICE, float_weight, integer_weight, rand

from nanovllm.ops.opset import triton_ops
from nanovllm.ops.triton import activation as t_activation
from nanovllm.ops.triton import decode_attention as decode
from nanovllm.ops.triton import gemv, integers, matmul, mla_decode, mla_prefill, qk_norm_rope
from nanovllm.ops.triton import norm as t_norm
from nanovllm.ops.triton import prefill_attention as prefill
from nanovllm.ops.triton import sampling as t_sampling
from nanovllm.ops.triton.common import empty_rows
from nanovllm.sampling.rows import SamplingRow
from nanovllm.sampling_params import SamplingParams
from tests.ops.kernel_rig import paged_cache
from tests.ops.sampler_rig import make_state

L2_BYTES = 160e6  # inputs of a timing exceed this together: three times the cache
HEADS, HEAD_DIM = (16, 8), 128  # Qwen3-0.6B
BLOCK_SIZE = 64
PREFILL_SHAPES = ((8, 2048), (2, 8192), (64, 1024), (1, 1024))
DECODE_SHAPES = ((256, 840), (64, 1024), (64, 2048), (8, 1024), (1, 1024))
Builds = list[tuple[str, Callable[[], "Timed"]]]


@dataclass
class Timed:
    """Calls that each read `num_bytes` or compute `flops`."""

    calls: list[Callable]
    num_bytes: float = 0.0
    flops: float = 0.0


def copies(num_bytes: float) -> range:
    """As many inputs as exceed the L2 cache, but at most 64: what one row reads is a matter of latency only."""
    return range(min(64, max(2, int(L2_BYTES // num_bytes) + 1)))


def time_prefill(batch, length, block_size=BLOCK_SIZE):
    def build() -> Timed:
        k, v, lens, tables = paged_cache([length] * batch, block_size, HEADS[1], HEAD_DIM, BF16, device=DEVICE)
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        q = rand(batch * length, HEADS[0], HEAD_DIM)
        out = torch.empty_like(q)
        flops = 4 * HEAD_DIM * HEADS[0] * batch * length * (length + 1) / 2
        call = lambda: prefill.prefill_attention(q, k, v, starts, lens, tables, HEAD_DIM**-0.5, out=out)  # noqa: E731
        return Timed([call], flops=flops)

    return build


def time_sdpa(batch, length):
    def build() -> Timed:
        q = rand(batch, HEADS[0], length, HEAD_DIM)
        k, v = rand(batch, HEADS[1], length, HEAD_DIM), rand(batch, HEADS[1], length, HEAD_DIM)
        flops = 4 * HEAD_DIM * HEADS[0] * batch * length * (length + 1) / 2
        return Timed([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)], flops=flops)

    return build


def time_decode(batch, length, block_size=BLOCK_SIZE):
    def build() -> Timed:
        num_bytes = batch * length * HEADS[1] * HEAD_DIM * 4
        lens = [length] * batch
        layers = [paged_cache(lens, block_size, HEADS[1], HEAD_DIM, BF16, device=DEVICE) for _ in copies(num_bytes)]
        q = rand(batch, HEADS[0], HEAD_DIM)
        out, launch = torch.empty_like(q), decode.launch_for(q, HEADS[1], 4096)
        calls = [
            lambda layer=layer: decode.decode_attention(q, *layer, HEAD_DIM**-0.5, launch, out=out) for layer in layers
        ]
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_mla_decode(batch, length, heads=16):
    """DeepSeek-V2-Lite: what is read are the latents, 1,152 bytes a token."""

    def build() -> Timed:
        num_bytes = batch * length * 576 * 2
        layers = [paged_cache([length] * batch, BLOCK_SIZE, 1, 576, BF16, device=DEVICE) for _ in copies(num_bytes)]
        q, q_pe = rand(heads, batch, 512).transpose(0, 1), rand(batch, heads, 64)
        calls = [
            lambda layer=layer: mla_decode.latent_decode(q, q_pe, layer[0][:, :, 0], *layer[2:], 0.07, 4096)
            for layer in layers
        ]
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_mla_prompt(batch, length, heads=16):
    def build() -> Timed:
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        q_nope, q_pe = rand(batch * length, heads, 192).split((128, 64), dim=2)
        kv, k_pe = rand(batch * length, heads, 256), rand(batch * length, 576)[:, 512:]
        flops = 2 * (192 + 128) * heads * batch * length * (length + 1) / 2
        call = lambda: mla_prefill.latent_piece(q_nope, q_pe, kv, k_pe, starts, starts, 0.07, True)  # noqa: E731
        return Timed([call], flops=flops)

    return build


def time_linear(rows, n, k, cublas=False):
    def build() -> Timed:
        num_bytes = n * k * 2
        weights = [rand(n, k, scale=k**-0.5) for _ in copies(num_bytes)]
        x = rand(rows, k)
        if cublas:
            out = torch.empty(rows, n, dtype=BF16, device=DEVICE)
            return Timed([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights], num_bytes=num_bytes)
        return Timed([lambda w=w: gemv.gemv(x, w) for w in weights], num_bytes=num_bytes)

    return build


SHAPES_SMALL = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
SHAPES_LARGE = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}


def time_layer(rows, shapes, fused):
    """The four linear maps of a layer with what stands around them: fused into them, or kernel by kernel (where the
    residual sum of o and down is part of the next norm)."""

    def build() -> Timed:
        num_bytes = sum(n * k * 2 for n, k in shapes.values())
        layers = [{name: rand(n, k, scale=k**-0.5) for name, (n, k) in shapes.items()} for _ in copies(num_bytes)]
        hidden = shapes["qkv"][1]
        gain, residual, x = rand(hidden), rand(rows, hidden), rand(rows, hidden)
        heads, middle = rand(rows, shapes["o"][1]), rand(rows, shapes["down"][1])

        def run_fused(weights) -> None:
            gemv.gemv(residual, weights["qkv"], norm=(gain, 1e-6))
            gemv.gemv(heads, weights["o"], residual=residual, out=residual)
            gemv.gemv(residual, weights["gate_up"], norm=(gain, 1e-6), gated=True, out=middle)
            gemv.gemv(middle, weights["down"], residual=residual, out=residual)

        def run_apart(weights) -> None:
            gemv.gemv(t_norm.add_rms_norm(x, residual, gain, 1e-6)[0], weights["qkv"])
            gemv.gemv(heads, weights["o"], out=x)
            normed = t_norm.add_rms_norm(x, residual, gain, 1e-6)[0]
            t_activation.silu_mul(gemv.gemv(normed, weights["gate_up"]), out=middle)
            gemv.gemv(middle, weights["down"], out=x)

        run = run_fused if fused else run_apart
        return Timed([lambda weights=weights: run(weights) for weights in layers], num_bytes=num_bytes)

    return build


def time_matmul(rows, n, k, gated=False):
    """As the engine calls it; nothing where the rule prefers cuBLAS."""

    def build() -> Timed:
        weights = [rand(n, k, scale=k**-0.5) for _ in copies(n * k * 2)]
        x = empty_rows(rows, k, weights[0]).normal_()
        launch = matmul.launch_for(x, weights[0], gated)
        assert launch is not None
        return Timed([lambda w=w: matmul.matmul(x, w, launch, gated=gated) for w in weights], num_bytes=n * k * 2)

    return build


def matmul_jobs() -> Builds:
    jobs: Builds = []
    for model, shapes in (("0.6B", SHAPES_SMALL), ("8B", SHAPES_LARGE)):
        for (name, (n, k)), rows in itertools.product(shapes.items(), (8, 24, 48, 64, 128)):
            gated = name == "gate_up"
            if matmul.choose_launch(rows, n // 2 if gated else n, k, gated) is not None:
                jobs.append((f"matmul {model} {name} m{rows}", time_matmul(rows, n, k, gated)))
            jobs.append((f"matmul {model} {name} m{rows} cuBLAS", time_linear(rows, n, k, cublas=True)))
    return jobs


def time_integers(rows, n, k, bits, group, has_offset=True, kernel="integer_linear", **options):
    """As the engine calls it; or one of its kernels at rows or with a block that the rule does not take."""

    def build() -> Timed:
        num_bytes = n * k * bits / 8 + n * (k / group) * 4
        weights = [integer_weight(n, k, bits, group, has_offset) for _ in copies(num_bytes)]
        x, run = rand(rows, k), getattr(integers, kernel)
        if kernel == "expand_words":
            num_bytes += n * k * 2
            return Timed([lambda w=w: run(w, BF16) for w in weights], num_bytes=num_bytes)
        return Timed([lambda w=w: run(x, w, **options) for w in weights], num_bytes=num_bytes)

    return build


def integer_jobs() -> Builds:
    """Qwen3-8B's matrices. The share of the bandwidth at 1 to 8 rows is the figure to reach (70 %)."""
    jobs: Builds = []
    for name, shape in SHAPES_LARGE.items():
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            jobs.append((f"int4-128 {name} m{rows}", time_integers(rows, *shape, 4, 128)))
        for label, form in {"int4-32": (4, 32), "Q4_0": (4, 32, False), "Q8_0": (8, 32, False)}.items():
            jobs += [(f"{label} {name} m{rows}", time_integers(rows, *shape, *form)) for rows in (1, 8, 64)]
        jobs.append((f"int4-128 {name} expand", time_integers(1, *shape, 4, 128, kernel="expand_words")))
        for rows in (1, 2, 512):
            job = time_integers(rows, *shape, 4, 128, kernel="integer_matmul")
            jobs.append((f"int4-128 {name} m{rows} matmul", job))
    return jobs


def time_floats(rows, n, k, block):
    def build() -> Timed:
        num_bytes = n * k + 4 * (n * k / block**2 if block else n)
        weights = [float_weight(n, k, block) for _ in copies(num_bytes)]
        x, linear = rand(rows, k), triton_ops().linear
        return Timed([lambda w=w: linear(x, w) for w in weights], num_bytes=num_bytes)

    return build


def float_jobs() -> Builds:
    return [
        (f"fp8 {'blocks' if block else 'rows'} {name} m{rows}", time_floats(rows, *shape, block))
        for name, shape in SHAPES_LARGE.items()
        for block in (0, 128)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
    ]


def time_sampling(rows, vocab=151936, **params):
    def build() -> Timed:
        num_bytes = rows * vocab * 2
        logits = [rand(rows, vocab, scale=3) for _ in copies(num_bytes)]
        index = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        row = SamplingRow(SamplingParams(temperature=0.6, **params), 1, np.arange(9, dtype=np.int32), 5)
        held = make_state([row] * rows, vocab, list(range(rows)), str(DEVICE))
        calls = [lambda x=x: t_sampling.draw(x, index, index, held.state) for x in logits]
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_norm(rows, hidden=1024):
    def build() -> Timed:
        num_bytes = rows * hidden * 2 * 4  # x and residual read, both outputs written
        pairs, gain = [(rand(rows, hidden), rand(rows, hidden)) for _ in copies(num_bytes)], rand(hidden)
        calls = [lambda x=x, r=r: t_norm.add_rms_norm(x, r, gain, 1e-6, residual_out=r) for x, r in pairs]
        return Timed(calls, num_bytes=num_bytes)

    return build


def time_silu(rows, size=3072):
    def build() -> Timed:
        num_bytes = rows * size * 2 * 3
        inputs = [rand(rows, 2 * size) for _ in copies(num_bytes)]
        return Timed([lambda x=x: t_activation.silu_mul(x) for x in inputs], num_bytes=num_bytes)

    return build


def time_rope(rows):
    def build() -> Timed:
        width = (HEADS[0] + 2 * HEADS[1]) * HEAD_DIM
        num_bytes = rows * width * 2 * 2
        inputs = [rand(rows, width) for _ in copies(num_bytes)]
        cache = torch.zeros(2, rows // BLOCK_SIZE + 1, BLOCK_SIZE, HEADS[1], HEAD_DIM, dtype=BF16, device=DEVICE)
        weights, cos_sin = (rand(HEAD_DIM), rand(HEAD_DIM)), rand(4096, HEAD_DIM, dtype=torch.float32)
        slots = torch.randperm(rows, device=DEVICE)
        positions = torch.arange(rows, device=DEVICE) % 4096
        calls = [
            lambda x=x: qk_norm_rope.qk_norm_rope(
                x, weights, 1e-6, cos_sin, positions, cache[0], cache[1], slots, HEADS[0]
            )
            for x in inputs
        ]
        return Timed(calls, num_bytes=num_bytes)

    return build


def linear_jobs() -> Builds:
    jobs: Builds = []
    for model, shapes in (("0.6B", SHAPES_SMALL), ("8B", SHAPES_LARGE)):
        for name, rows in itertools.product(("gate_up", "head"), (1, 2, 4)):
            shape = shapes["gate_up"] if name == "gate_up" else (151936, shapes["qkv"][1])
            jobs.append((f"linear {model} {name} m{rows} gemv", time_linear(rows, *shape)))
            jobs.append((f"linear {model} {name} m{rows} cuBLAS", time_linear(rows, *shape, cublas=True)))
        for rows, fused in itertools.product((1, 2), (True, False)):
            jobs.append((f"layer {model} m{rows} {'fused' if fused else 'apart'}", time_layer(rows, shapes, fused)))
    return jobs


def timing_jobs() -> Builds:
    jobs = [(f"prefill {batch}x{length}", time_prefill(batch, length)) for batch, length in PREFILL_SHAPES]
    jobs += [(f"prefill {batch}x{length} SDPA dense", time_sdpa(batch, length)) for batch, length in PREFILL_SHAPES]
    jobs += [(f"decode {batch}x{length}", time_decode(batch, length)) for batch, length in DECODE_SHAPES]
    jobs += [("prefill 8x2048 bs16", time_prefill(8, 2048, 16)), ("decode 256x840 bs16", time_decode(256, 840, 16))]
    jobs += [(f"mla decode {b}x{n}", time_mla_decode(b, n)) for b, n in ((32, 4096), *DECODE_SHAPES)]
    jobs += [(f"mla prompt {b}x{n}", time_mla_prompt(b, n)) for b, n in PREFILL_SHAPES]
    jobs += linear_jobs()
    jobs += matmul_jobs()
    jobs += integer_jobs()
    jobs += float_jobs()
    for rows in (1, 64, 256):
        jobs.append((f"sampling {rows} rows", time_sampling(rows)))
        jobs.append((f"sampling {rows} rows, top_k=20 top_p=0.95", time_sampling(rows, top_k=20, top_p=0.95)))
        jobs.append((f"sampling {rows} rows, top_p=0.9", time_sampling(rows, top_p=0.9)))
    for rows in (1, 256, 16384):
        jobs += [(f"norm {rows} rows", time_norm(rows)), (f"silu {rows} rows", time_silu(rows))]
        jobs.append((f"rope {rows} rows", time_rope(rows)))
    return jobs

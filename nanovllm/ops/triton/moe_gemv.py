"""Experts of a token or two: every pair is a matrix-vector product of its own, no sorting, no tensor cores.

At one token no two pairs share an expert, and all that counts is reading weights at the speed of memory. As in
`gemv.py`, a program is one warp that reads BLOCK_N rows of a weight, BLOCK_K columns at a time, straight into
registers. By Little's law so much must be on its way: 4.46 TB/s over some 1 us of latency is 4.5 MB, 34 KB on each
of 132 multiprocessors. 32 warps live on one, and each loads 1 KB of gate and 1 KB of up (BLOCK_K = 512), unrolled
twice: 128 KB. The down product, 4096 outputs of 14336 columns for two experts, is 8192 such warps, two rounds on the
card: enough without cutting K, so the order of every sum is fixed.

The pair is the fastest index of the grid: two tokens that want the same expert read the same rows at the same time, and
the second reading comes from the L2 cache. SPLIT and SHARED: as in `moe_gemm.py`. FORM and SCALED (8-bit floats): as
in `moe_weights.py`; the bytes of a row are half as many, so a program takes more rows or longer ones.

These are not launched dependent (`common.py:start_next`): they can load nothing before they wait, and with two or three
times as many programs as the card holds each would wait anew. Measured on an H200, DeepSeek-V2-Lite, one token: 36.9 us
for the two with it, 30.0 without.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.triton.moe_weights import num_scales, scales_at, stored_form, to_float


@triton.jit
def _load(ptrs, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr):
    """evict_first: a weight is read once a step and need not stay in the cache."""
    if SIZE % BLOCK_K == 0:
        w = tl.load(ptrs + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(ptrs + k[None, :], mask=k[None, :] < SIZE, other=0, eviction_policy="evict_first")
    return to_float(w, tl.float32, FORM)


@triton.jit
def _scaled(x, scale_ptr, k, SIZE: tl.constexpr, SCALED: tl.constexpr):
    """x times the scales of its columns, where blocks have them."""
    if SCALED > 1:
        return x * tl.load(scale_ptr + k // SCALED, mask=k < SIZE, other=0.0)
    else:
        return x


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "buffers_ptr"])
def gate_up_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    buffers_ptr,
    out_ptr,
    x_stride,
    buffer_stride,
    scale_stride,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    FORM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    buffer = tl.load(buffers_ptr + pair).to(tl.int64)
    if buffer < 0:
        return
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    gate_ptrs = weight_ptr + buffer * buffer_stride + tl.where(n < OUT_SIZE, n, 0)[:, None] * SIZE
    up_ptrs = gate_ptrs + OUT_SIZE * SIZE
    gate_scale = scale_ptr + buffer * scale_stride
    up_scale = gate_scale + num_scales(OUT_SIZE, SIZE, SCALED)
    gate_block, up_block = scales_at(gate_scale, first, SIZE, SCALED), scales_at(up_scale, first, SIZE, SCALED)
    x_ptr += pair // TOP_K * x_stride
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        g = _load(gate_ptrs, k, SIZE, BLOCK_K, FORM)
        u = _load(up_ptrs, k, SIZE, BLOCK_K, FORM)
        x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
        gate += tl.sum(g * _scaled(x, gate_block, k, SIZE, SCALED)[None, :], axis=1)
        if SPLIT:
            x = tl.load(x_ptr + SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
        up += tl.sum(u * _scaled(x, up_block, k, SIZE, SCALED)[None, :], axis=1)
    if SCALED == 1:
        gate *= tl.load(gate_scale + n, mask=n < OUT_SIZE, other=0.0)
        up *= tl.load(up_scale + n, mask=n < OUT_SIZE, other=0.0)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + pair * OUT_SIZE + n, active.to(out_ptr.dtype.element_ty), mask=n < OUT_SIZE)


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "buffers_ptr", "weights_ptr"])
def down_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    buffers_ptr,
    weights_ptr,
    out_ptr,
    buffer_stride,
    scale_stride,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    FORM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    buffer = tl.load(buffers_ptr + pair).to(tl.int64)
    if buffer < 0:
        return
    if SHARED:
        buffer = buffer * 0
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    weight_ptrs = weight_ptr + buffer * buffer_stride + tl.where(n < OUT_SIZE, n, 0)[:, None] * SIZE
    scale_ptr += buffer * scale_stride
    block_scale = scales_at(scale_ptr, first, SIZE, SCALED)
    x_ptr += pair * SIZE
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
        w = _load(weight_ptrs, k, SIZE, BLOCK_K, FORM)
        total += tl.sum(w * _scaled(x, block_scale, k, SIZE, SCALED)[None, :], axis=1)
    if SCALED == 1:
        total *= tl.load(scale_ptr + n, mask=n < OUT_SIZE, other=0.0)
    if not SHARED:
        total *= tl.load(weights_ptr + pair)
    tl.store(out_ptr + pair * OUT_SIZE + n, total.to(out_ptr.dtype.element_ty), mask=n < OUT_SIZE)


def gate_up_gemv(
    x: torch.Tensor, weight: torch.Tensor | ScaledStack, buffers: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """x [T, H] or [T, 2H], weight [S, 2I, H], buffers [T, k] -> [T * k, I], silu(gate) * up; rows without a buffer are
    not written."""
    size, out_size = weight.shape[2], weight.shape[1] // 2
    out = torch.empty((buffers.numel(), out_size), dtype=x.dtype, device=x.device)
    numbers, scale, strides, form = stored_form(weight)
    tensors = (x, numbers, scale, buffers, out, x.stride(0), *strides)
    facts = {"SIZE": size, "OUT_SIZE": out_size, "TOP_K": buffers.shape[1], "SPLIT": x.shape[1] != size, **form}
    _launch(gate_up_gemv_kernel, tensors, facts, buffers, block)
    return out


def down_gemv(
    active: torch.Tensor,
    weight: torch.Tensor | ScaledStack,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    block: tuple[int, int],
) -> None:
    """active [T * k, I], weight [S, H, I] -> out [T, k, H], times the router's weights; for a weight [H, I] as in
    `moe_gemm.py`."""
    (out_size, size), is_shared = weight.shape[-2:], len(weight.shape) == 2
    numbers, scale, strides, form = stored_form(weight)
    tensors = (active, numbers, scale, buffers, weights, out, *strides)
    facts = {"SIZE": size, "OUT_SIZE": out_size, "SHARED": is_shared, **form}
    _launch(down_gemv_kernel, tensors, facts, buffers, block)


def between_gemv(
    active: torch.Tensor, weight: torch.Tensor, buffers: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """active [T * k, I], weight [R, I] -> [T * k, R]; rows without a buffer are not written."""
    out = torch.empty((len(active), len(weight)), dtype=active.dtype, device=active.device)
    down_gemv(active, weight, buffers, active, out, block)
    return out


def _launch(
    kernel: Any, tensors: tuple[Any, ...], facts: dict[str, int], buffers: torch.Tensor, block: tuple[int, int]
) -> None:
    assert facts["SCALED"] <= 1 or facts["SCALED"] % block[0] == 0, "a program's outputs are in one row of blocks"
    grid = (buffers.numel(), triton.cdiv(facts["OUT_SIZE"], block[0]))
    kernel[grid](*tensors, **facts, BLOCK_N=block[0], BLOCK_K=block[1], num_warps=1)

"""Experts of a token or two: every pair is a matrix-vector product of its own, no sorting, no tensor cores.

At one token no two pairs share an expert, and all that counts is reading weights at the speed of memory. As in
`gemv.py`, a program is one warp that reads BLOCK_N rows of a weight, BLOCK_K columns at a time, straight into
registers. By Little's law so much must be on its way: 4.46 TB/s over some 1 us of latency is 4.5 MB, 34 KB on each
of 132 multiprocessors. 32 warps live on one, and each loads 1 KB of gate and 1 KB of up (BLOCK_K = 512), unrolled
twice: 128 KB. The down product, 4096 outputs of 14336 columns for two experts, is 8192 such warps, two rounds on the
card: enough without cutting K, so the order of every sum is fixed.

The pair is the fastest index of the grid: two tokens that want the same expert read the same rows at the same time, and
the second reading comes from the L2 cache. SPLIT and SHARED: as in `moe_gemm.py`.

These are not launched dependent (`common.py:start_next`): they can load nothing before they wait, and with two or three
times as many programs as the card holds each would wait anew. Measured on an H200, DeepSeek-V2-Lite, one token: 36.9 us
for the two with it, 30.0 without.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _row_product(x_ptr, weight_ptrs, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 [BLOCK_N]: x [SIZE] times the rows that begin at weight_ptrs [BLOCK_N, 1]."""
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
        w = _load(weight_ptrs, k, SIZE, BLOCK_K)
        total += tl.sum(w * x[None, :], axis=1)
    return total


@triton.jit
def _load(ptrs, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """evict_first: a weight is read once a step and need not stay in the cache."""
    if SIZE % BLOCK_K == 0:
        w = tl.load(ptrs + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(ptrs + k[None, :], mask=k[None, :] < SIZE, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["buffers_ptr"])
def gate_up_gemv_kernel(
    x_ptr,
    weight_ptr,
    buffers_ptr,
    out_ptr,
    x_stride,
    buffer_stride,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    buffer = tl.load(buffers_ptr + pair).to(tl.int64)
    if buffer < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    gate_ptrs = weight_ptr + buffer * buffer_stride + tl.where(n < OUT_SIZE, n, 0)[:, None] * SIZE
    up_ptrs = gate_ptrs + OUT_SIZE * SIZE
    x_ptr += pair // TOP_K * x_stride
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        g = _load(gate_ptrs, k, SIZE, BLOCK_K)
        u = _load(up_ptrs, k, SIZE, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(g * x, axis=1)
        if SPLIT:
            x = tl.load(x_ptr + SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)[None, :]
        up += tl.sum(u * x, axis=1)
    active = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + pair * OUT_SIZE + n, active.to(out_ptr.dtype.element_ty), mask=n < OUT_SIZE)


@triton.jit(do_not_specialize_on_alignment=["buffers_ptr", "weights_ptr"])
def down_gemv_kernel(
    x_ptr,
    weight_ptr,
    buffers_ptr,
    weights_ptr,
    out_ptr,
    buffer_stride,
    SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    buffer = tl.load(buffers_ptr + pair).to(tl.int64)
    if buffer < 0:
        return
    if SHARED:
        buffer = buffer * 0
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ptrs = weight_ptr + buffer * buffer_stride + tl.where(n < OUT_SIZE, n, 0)[:, None] * SIZE
    total = _row_product(x_ptr + pair * SIZE, weight_ptrs, SIZE, BLOCK_N, BLOCK_K)
    if not SHARED:
        total *= tl.load(weights_ptr + pair)
    tl.store(out_ptr + pair * OUT_SIZE + n, total.to(out_ptr.dtype.element_ty), mask=n < OUT_SIZE)


def gate_up_gemv(x: torch.Tensor, weight: torch.Tensor, buffers: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x [T, H] or [T, 2H], weight [S, 2I, H], buffers [T, k] -> [T * k, I], silu(gate) * up; rows without a buffer are
    not written."""
    size, out_size = weight.shape[2], weight.shape[1] // 2
    out = torch.empty((buffers.numel(), out_size), dtype=x.dtype, device=x.device)
    tensors = (x, weight, buffers, out, x.stride(0), weight.stride(0))
    facts = {"SIZE": size, "OUT_SIZE": out_size, "TOP_K": buffers.shape[1], "SPLIT": x.shape[1] != size}
    _launch(gate_up_gemv_kernel, tensors, facts, buffers, block)
    return out


def down_gemv(
    active: torch.Tensor,
    weight: torch.Tensor,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    block: tuple[int, int],
) -> None:
    """active [T * k, I], weight [S, H, I] -> out [T, k, H], times the router's weights; for a weight [H, I] as in
    `moe_gemm.py`."""
    (out_size, size), is_shared = weight.shape[-2:], weight.dim() == 2
    tensors = (active, weight, buffers, weights, out, 0 if is_shared else weight.stride(0))
    _launch(down_gemv_kernel, tensors, {"SIZE": size, "OUT_SIZE": out_size, "SHARED": is_shared}, buffers, block)


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
    grid = (buffers.numel(), triton.cdiv(facts["OUT_SIZE"], block[0]))
    kernel[grid](*tensors, **facts, BLOCK_N=block[0], BLOCK_K=block[1], num_warps=1)

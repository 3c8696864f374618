"""A linear map of 3 to 128 rows on Hopper: out = x @ weight.T, or the parts of that sum (plain twin: F.linear).

With so few rows a product reads its weight once and does little else, so what counts is that all multiprocessors read
and that nothing waits. out^T = W x^T: the tensor cores take 64 outputs at least on one side, and any multiple of 8 rows
on the other. A program owns BLOCK_N outputs of BLOCK_M rows; the copy engine (TMA) brings tiles of both operands to
shared memory, several steps ahead. Programs of the next kernel start while this one ends (dependent launch), which
cuBLAS's products do not allow: 1 to 1.5 us on either side.

Few outputs are few programs: 1024 outputs are 16 of them, an H200 has 132 multiprocessors. So the inputs are cut into
`splits` pieces, and the kernel that reads the result adds up its parts (`splits.py`): the norm (o and down), or RoPE
(qkv).

Measured on an H200 in a captured chain, us, this kernel (cuBLAS), with the splits that `choose_launch` takes:

    Qwen3-0.6B      4096 x 1024    1024 x 2048    6144 x 1024, gated    1024 x 3072
    8 rows           3.7 (5.0)      2.9 (5.8)      5.6 (6.1)             3.5 (6.7)
    24               3.8 (5.3)      3.1 (5.9)      5.8 (6.2)             3.7 (7.4)
    48               4.2 (5.4)      3.5 (5.9)      7.0 (6.4)             4.1 (7.2)
    128              5.9 (5.5)      4.9 (6.0)      8.5 (6.2)             5.7 (7.3)
    256              7.0 (6.4)      5.7 (6.5)                            6.5 (7.8)
    Qwen3-8B        6144 x 4096    4096 x 4096    24576 x 4096, gated   4096 x 12288
    8               15.9 (16.4)     9.9 (12.9)    51.5 (55.7)           26.4 (30.7)
    24              16.6 (17.1)    10.3 (13.3)    51.5 (51.5)           27.0 (29.9)
    48              16.1 (17.2)    10.8 (13.9)    56.6 (52.2)           28.2 (31.1)
    128             19.5 (17.5)    13.1 (14.4)    57.8 (55.6)           32.9 (34.0)
    256             28.9 (22.0)    18.6 (18.3)                          47.4 (43.3)

cuBLAS's gate and up take another launch for SiLU, and none of its kernels starts before the last one has ended. Whole
steps of Qwen3-0.6B, us: 16 rows 1,283 (1,575), 32 rows 1,667 (1,940), 64 rows 2,336 (2,554); with the products of o and
down alone 128 rows 4,203 (4,292), 256 rows 7,194 (7,183), and with all of them 4,332 and 7,376.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.ops.triton.common import (
    capability,
    dependent_launch,
    dot,
    next_power_of_2,
    start_next,
    wait_for_last,
    with_room,
)
from nanovllm.ops.triton.splits import MOST_SPLITS, empty_parts

FEWEST_ROWS, MOST_ROWS = 3, 128
HOPPER = (9, 0)  # measured there only
BLOCK_N = 64
LARGE = 4096 * 4096  # weights of a matrix, see choose_launch


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def matmul_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    out_size,
    num_steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    first_n, first_m, split = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M, tl.program_id(2)
    wait_for_last(DEPENDENT)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(split * num_steps, (split + 1) * num_steps):
        weight = weight_desc.load([first_n, step * BLOCK_K])
        x = tl.trans(x_desc.load([first_m, step * BLOCK_K]))
        total += dot(weight, x)
        if GATED:
            up_total += dot(weight_desc.load([out_size + first_n, step * BLOCK_K]), x)
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    if HAS_BIAS:  # of the first piece
        has_bias = (n < out_size) & (split == 0)
        total += tl.load(bias_ptr + n, mask=has_bias, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias_ptr + out_size + n, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    out_ptr += split.to(tl.int64) * num_rows * out_size
    offsets = m.to(tl.int64)[:, None] * out_size + n[None, :]
    ok = (m < num_rows)[:, None] & (n < out_size)[None, :]
    tl.store(out_ptr + offsets, tl.trans(total).to(out_ptr.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class MatmulLaunch:
    block_m: int
    block_k: int
    num_stages: int
    splits: int = 1


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    launch: MatmulLaunch,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x [rows, K] and weight [N, K] of 16 bits -> [rows, N], or [splits, rows, N] in fp32 if there are splits. gated:
    the weight holds gate and up, and the result is silu(gate) * up, [rows, N / 2]. `launch` divides K."""
    (rows, size), splits = x.shape, launch.splits
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.stride(1) == weight.stride(1) == 1
    assert size % (launch.block_k * splits) == 0
    assert splits == 1 or not gated
    out, dependent = empty_parts(splits, out_size, x), dependent_launch(x.device)
    grid = (triton.cdiv(out_size, BLOCK_N), triton.cdiv(rows, launch.block_m), splits)
    matmul_kernel[grid](
        TensorDescriptor.from_tensor(with_room(x, launch.block_m), [launch.block_m, launch.block_k]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, launch.block_k]),
        x if bias is None else bias,
        out,
        rows,
        out_size,
        size // (launch.block_k * splits),
        BLOCK_M=launch.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=launch.block_k,
        HAS_BIAS=bias is not None,
        GATED=gated,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=4,
        num_stages=launch.num_stages,
    )
    return out


def launch_for(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> MatmulLaunch | None:
    """None: cuBLAS is faster, or this kernel does not fit x, the weight or the card."""
    (rows, size), out_size = x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    if not FEWEST_ROWS <= rows <= MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if capability(x.device) != HOPPER or not weight.is_contiguous():
        return None
    if x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:  # what the copy engine can read
        return None
    return choose_launch(rows, out_size, size, gated)


def choose_launch(rows: int, out_size: int, size: int, gated: bool = False) -> MatmulLaunch | None:
    """None where the table above has cuBLAS ahead. Splits, a power of two, as long as there are at most two programs
    for each multiprocessor of an H200, and two steps or more in each."""
    block_m = max(16, next_power_of_2(rows))
    is_large = out_size * size * (2 if gated else 1) > LARGE
    if block_m >= (64 if is_large else 128) and (gated or out_size > size):
        return None
    block_k, stages = {16: (128, 4), 32: (128, 4), 64: (128, 3), 128: (64, 4)}[block_m]
    tiles, splits = triton.cdiv(out_size, BLOCK_N), 1
    while not gated and splits < MOST_SPLITS and 2 * splits * tiles <= 264 and size // block_k >= 4 * splits:
        splits *= 2
    return MatmulLaunch(block_m, block_k, stages, splits) if size % (block_k * splits) == 0 else None

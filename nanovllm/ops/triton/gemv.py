"""A linear map of 1 to 8 rows at the speed of memory: out = epilogue(prologue(x) @ weight.T).

At batch 1 a linear layer reads every weight for one multiplication. A GEMM kernel cut for tensor cores leaves most of
the bandwidth unused there (cuBLAS on an H200: 0.3-2.1 TB/s of 4.4 on Qwen3-0.6B's shapes): it has too few programs and
too few bytes in flight. Here a program is one warp and owns BLOCK_N rows of the weight: its lanes read 16 bytes each,
neighbouring lanes neighbouring bytes, BLOCK_K columns at a time, multiply by the same columns of x in fp32 and add up;
one shuffle tree a chunk gives the row's dot product. A single warp needs no shared memory and no barrier, the 1-D tile
of x lies in the lanes exactly as the weight's columns do, and no two programs share an output, so the result does not
depend on timing. To hide a latency of 0.7 us at 4.4 TB/s some 24 KB must be in flight on every multiprocessor: with
1024 outputs (8 warps on each) a warp must request 4 KB before it waits, which is why few outputs need a long BLOCK_K.

A program computes its outputs for all rows of x. Fusions, each a constexpr, make a batch-1 layer seven kernels:

- norm_weight (prologue): RMSNorm of x. The norm is a scalar factor per row, so it need not come first:
      sum_k W[n,k] g[k] x[k] s = s * sum_k W[n,k] (g[k] x[k]),   s = rsqrt(mean x^2 + eps),
  and the squares are summed in the same loop that multiplies. Every program repeats that sum; x is in the cache.
- gated (epilogue): weight holds gate and up stacked, [2 * size, K]; a program computes both rows of its outputs and
  writes silu(gate) * up.
- residual (epilogue): added to the output, which is then the new residual stream. It may be `out` itself.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import next_power_of_2

MAX_ROWS = 8  # beyond, a warp multiplies more than it reads, and tensor cores win


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, residual_ptr, out_ptr, x_stride, weight_stride, out_size, eps,
    SIZE: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < out_size
    # Outputs past the end read row 0: cheaper than a mask on every weight.
    weight_ptrs = weight_ptr + tl.where(inside, n, 0).to(tl.int64)[:, None] * weight_stride
    up_ptrs = weight_ptrs + out_size.to(tl.int64) * weight_stride
    r = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up_total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, loop_unroll_factor=2):
        k = start + tl.arange(0, BLOCK_K)
        w = _load_weight(weight_ptrs, k, SIZE, BLOCK_K)
        if GATED:
            u = _load_weight(up_ptrs, k, SIZE, BLOCK_K)
        if HAS_NORM:
            g = tl.load(norm_weight_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
        for i in tl.static_range(NUM_ROWS):
            x = tl.load(x_ptr + i * x_stride + k, mask=k < SIZE, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += tl.where(r == i, tl.sum(x * x, axis=0), 0.0)
                x *= g
            total += tl.where(r[None, :] == i, tl.sum(w * x[None, :], axis=1)[:, None], 0.0)
            if GATED:
                up_total += tl.where(r[None, :] == i, tl.sum(u * x[None, :], axis=1)[:, None], 0.0)
    if HAS_NORM:
        scale = tl.rsqrt(squares / SIZE + eps)[None, :]
        total *= scale
        up_total *= scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_total += tl.load(bias_ptr + out_size + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    offsets = r[None, :] * out_size + n[:, None]
    ok = inside[:, None] & (r[None, :] < NUM_ROWS)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _load_weight(ptrs, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """evict_first: a weight is read once a step, and need not stay in the cache."""
    if SIZE % BLOCK_K == 0:
        w = tl.load(ptrs + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(ptrs + k[None, :], mask=k[None, :] < SIZE, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x [1..8, K], weight [N, K] -> [rows, N], or [rows, N / 2] when gated. norm = (weight [K], eps); residual
    [rows, N] contiguous. `block` = (BLOCK_N, BLOCK_K) overrides the choice.
    """
    rows, size = x.shape
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    assert 1 <= rows <= MAX_ROWS
    assert weight.stride(1) == 1
    assert x.stride(1) == 1
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device) if out is None else out
    block_n, block_k = block or choose_block(rows, size, out_size, gated)
    gemv_kernel[(triton.cdiv(out_size, block_n),)](
        x, weight, x if bias is None else bias, x if norm is None else norm[0], x if residual is None else residual,
        out, x.stride(0), weight.stride(0), out_size, 0.0 if norm is None else norm[1],
        SIZE=size, NUM_ROWS=rows, ROWS=next_power_of_2(rows), BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, GATED=gated, HAS_RESIDUAL=residual is not None,
        num_warps=1,
    )  # fmt: skip
    return out


def choose_block(rows: int, size: int, out_size: int, gated: bool) -> tuple[int, int]:
    """(outputs a program, columns a step). Few outputs: one a warp and long steps. More rows: x is read from the L1
    once a program, so more outputs share it, with shorter steps to stay within the registers.

    Measured on an H200 for one row, the best of 1x512, 1x1024, 1x2048, 2x512, 2x1024, 4x512 (us, against 1x1024):
    4096 x 1024: 2x1024 (4.06, 4.36); 1024 x 2048: 1x2048 (3.19); 151936 x 1024: 2x1024 (80, 95); 6144 x 4096: 1x2048
    (14.2, 15.0); 4096 x 4096: 1x2048 (10.8, 11.5); 24576 x 4096 gated: 1x512 (57.8, 59.4); 4096 x 12288: 1x512 (26.0).
    """
    if rows > 1:
        block_n, block_k = (2, 1024) if rows == 2 else (4, 512)
    elif size <= 1024:
        block_n, block_k = (1 if gated or out_size <= 2048 else 2), 1024
    else:
        block_n, block_k = 1, 2048 if out_size <= 2048 or (size <= 4096 and not gated) else 512
    block_k = min(block_k, next_power_of_2(size))
    while size % block_k and block_k > 512:  # an exact multiple needs no masks
        block_k //= 2
    return block_n, block_k


def prefers_gemv(rows: int, out_size: int, size: int) -> bool:
    """Whether `gemv` beats cuBLAS, as measured on an H200 (us, gemv / cuBLAS; out x in):

        rows   4096x1024  1024x2048  1024x3072  151936x1024  6144x4096  4096x4096  24576x4096  4096x12288
        1       4.1/5.4   3.2/12.7   3.8/6.7      80/88      14.2/16.3  10.8/13.1   58/58        26/31
        2       4.2/5.3   4.0/12.8   4.4/6.8        -        15.1/16.5  11.8/12.8   61/58        28/31
        4       5.2/5.3   6.5/8.6    8.1/6.8      85/88      17.9/16.5  14.6/12.9   79/58        38/31
        8       7.3/5.3   9.7/5.9     16/6.8        -          40/17      23/13    126/62        63/32

    Only the batch sizes that decode graphs are captured for (1, 2, 4): any other would be compiled in mid-run.
    """
    if rows == 1:
        return True
    if rows == 2:
        return size <= 2048 or out_size <= 16384
    if rows == 4:
        return out_size * size <= 1024 * 2048 or (out_size >= 65536 and size <= 1024)
    return False

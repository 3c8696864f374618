"""Residual addition and RMSNorm in one pass (twin of `ops/norm.py`).

One program owns one row and holds it in registers, so x and the residual are read once and the sum and the normed row
written once: 4 passes over a row against 9 or so for separate operators, and one launch. The sum is rounded to the
input dtype before its squares are taken, and the normed row before the product with the weight, as the twin does.
`residual_out` may be the residual itself. A product that comes in parts (`matmul.py`) is added up on the way.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import (
    dependent_launch,
    empty_rows,
    load_sum,
    next_power_of_2,
    parts_of,
    start_next,
    wait_for_last,
)


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    x_stride,
    part_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    inside = i < SIZE
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(DEPENDENT)
    dtype = out_ptr.dtype.element_ty
    x = load_sum(x_ptr + row * x_stride + i, inside, part_stride, PARTS)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + i, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_out_ptr + row * SIZE + i, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + i, ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = empty_rows(len(x), x.shape[1], x)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, x + residual). x [rows, size] or [parts, rows, size] and residual [rows, size], with any row stride; the
    outputs are contiguous."""
    out = empty_rows(len(residual), residual.shape[1], residual) if out is None else out
    residual_out = torch.empty_like(out) if residual_out is None else residual_out
    _launch(x, residual, weight, eps, out, residual_out)
    return out, residual_out


def _launch(x, residual, weight, eps, out, residual_out) -> None:
    (rows, size), (parts, part_stride) = out.shape, parts_of(x)
    assert x.stride(-1) == 1
    assert out.is_contiguous()
    assert residual_out is None or residual_out.is_contiguous()
    if rows == 0:
        return
    tile, dependent = next_power_of_2(size), dependent_launch(x.device)
    # With 4 elements a thread a row takes the shortest time, and many rows as long as with more (H200, 2 / 8 warps, us,
    # steps of Qwen3-0.6B: 16 rows 1,269 / 1,215, 32 rows 1,648 / 1,594, 64 rows 2,349 / 2,306, 128 rows 3,826 / 3,777,
    # 256 rows 6,695 / 6,701; 16,384 rows alone 44.9 / 41.6).
    norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if residual_out is None else residual_out,
        x.stride(-2),
        part_stride,
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        TILE=tile,
        PARTS=parts,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=min(max(tile // 128, 1), 8),
    )

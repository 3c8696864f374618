"""silu(gate) * up (twin of `ops/activation.py`).

One program owns a tile of one row's output and reads the matching tiles of both halves of [tokens, 2 * size]. The
activation is rounded to the output dtype before the product, as the twin does. A product that comes in parts
(`integers_matmul.py`) is added up on the way.
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
def silu_mul_kernel(
    gate_up_ptr, out_ptr, stride, part_stride, size, TILE: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < size
    gate = load_sum(gate_up_ptr + row * stride + i, inside, part_stride, PARTS)
    up = load_sum(gate_up_ptr + row * stride + size + i, inside, part_stride, PARTS)
    dtype = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + i, (active * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, like: torch.Tensor | None = None) -> torch.Tensor:
    """gate_up [rows, 2 * size] or [parts, rows, 2 * size]. `like`: has the dtype of the result."""
    (rows, size), (parts, part_stride) = gate_up.shape[-2:], parts_of(gate_up)
    size //= 2
    out = empty_rows(rows, size, gate_up if like is None else like) if out is None else out
    assert gate_up.stride(-1) == 1
    assert out.is_contiguous()
    if rows == 0:
        return out
    tile, dependent = min(next_power_of_2(size), 1024), dependent_launch(out.device)
    facts = {"TILE": tile, "PARTS": parts, "DEPENDENT": dependent, "launch_pdl": dependent, "num_warps": 4}
    silu_mul_kernel[(rows, triton.cdiv(size, tile))](gate_up, out, gate_up.stride(-2), part_stride, size, **facts)
    return out

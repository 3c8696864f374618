"""silu(gate) * up (twin of `ops/activation.py`).

One program owns a tile of one row's output and reads the matching tiles of both halves of [tokens, 2 * size]. The
activation is rounded to the input dtype before the product, as the twin does.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import dependent_launch, empty_rows, next_power_of_2, start_next, wait_for_last


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, stride, size, TILE: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < size
    gate = tl.load(gate_up_ptr + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + i, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + i, (active * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(rows, size, gate_up) if out is None else out
    assert gate_up.stride(1) == 1
    assert out.is_contiguous()
    if rows == 0:
        return out
    tile, dependent = min(next_power_of_2(size), 1024), dependent_launch(out.device)
    facts = {"TILE": tile, "DEPENDENT": dependent, "launch_pdl": dependent, "num_warps": 4}
    silu_mul_kernel[(rows, triton.cdiv(size, tile))](gate_up, out, gate_up.stride(0), size, **facts)
    return out

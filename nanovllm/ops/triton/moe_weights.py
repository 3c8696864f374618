"""How the expert kernels read a weight: numbers of the model's dtype, or 8-bit floats with scales (twin: `ops/fp8.py`).

A weight is memory of buffers, one matrix in each, with rows without gaps. In 8-bit floats it is bytes, converted in
registers (`e4m3.py`): all 256 of them are exact in fp16, bf16 and fp32, so the product is one of ordinary numbers and
the input is not rounded. Its scales lie in the same buffer, [gate | up | down] after all bytes, so that one copy brings
an expert with its scales. Where they are applied, without a product for each weight:

    of a row       out[m, n] = scale[n] * sum_k x[m, k] q[n, k]                           once, after the whole sum
    of a block     out[m, n] = sum_b scale[n // 128, b] * sum_(k in b) x[m, k] q[n, k]    after each 128 columns

So a step of a matrix product over columns must not reach over a block: BLOCK_K divides 128 there (`launch_options`). A
matrix-vector product takes longer steps, and multiplies x instead: all outputs of a program are in one row of blocks.

Another way of storing experts is another FORM here: what the loads give, and what follows a sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.triton.e4m3 import PLAIN, form_of, from_e4m3


@triton.jit
def to_float(stored, FLOAT: tl.constexpr, FORM: tl.constexpr):
    """A loaded tile as numbers. FORM 0: they are numbers."""
    if FORM == 0:
        return stored.to(FLOAT)
    else:
        return from_e4m3(stored, FLOAT, FORM)


@triton.jit
def scales_at(scale_ptr, n, SIZE: tl.constexpr, SCALED: tl.constexpr):
    """Where the scales of row n begin. SCALED: 0 for none, 1 for one of each row, 128 for those of blocks."""
    if SCALED > 1:
        return scale_ptr + n // SCALED * ((SIZE + SCALED - 1) // SCALED)
    else:
        return scale_ptr + n


@triton.jit
def num_scales(OUT_SIZE: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr):
    """Of a matrix [OUT_SIZE, SIZE]: so many of gate lie before those of up."""
    if SCALED > 1:
        return ((OUT_SIZE + SCALED - 1) // SCALED) * ((SIZE + SCALED - 1) // SCALED)
    else:
        return OUT_SIZE


def stored_form(
    weight: torch.Tensor | ScaledStack,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], dict[str, Any]]:
    """(numbers or bytes, scales, strides of both between buffers, constants of the kernels). A weight [rows, columns]
    is one for all buffers."""
    if isinstance(weight, torch.Tensor):
        stride = 0 if weight.dim() == 2 else weight.stride(0)
        return weight, weight, (stride, 0), {"FORM": PLAIN, "SCALED": 0}
    facts = {"FORM": form_of(weight.q, weight.scale), "SCALED": weight.block or 1}
    return weight.q.view(torch.uint8), weight.scale, (weight.q.stride(0), weight.scale.stride(0)), facts

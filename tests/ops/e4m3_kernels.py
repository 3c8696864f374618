"""The conversions of ops/triton/e4m3.py as kernels of their own, for tests under the interpreter and on a card."""

import triton
import triton.language as tl

from nanovllm.ops.triton.e4m3 import from_e4m3, to_e4m3


@triton.jit
def read_kernel(stored_ptr, out_ptr, FORM: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, from_e4m3(tl.load(stored_ptr + i), out_ptr.dtype.element_ty, FORM))


@triton.jit
def write_kernel(x_ptr, out_ptr, size, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + i, to_e4m3(tl.load(x_ptr + i, mask=i < size, other=0.0)), mask=i < size)

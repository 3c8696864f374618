"""One bf16 product by `ops/triton/common.py:dot` under Triton's interpreter; prints the largest error and the largest
entry (`test_interpreter_dot.py` runs this file, because the mode is fixed when a kernel is decorated)."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import INTERPRETED, dot

SIZE = 16


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    tl.store(out + places, dot(tl.load(a + places), tl.load(b + places)))


if __name__ == "__main__":
    assert INTERPRETED, "set TRITON_INTERPRET=1"
    torch.manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE).bfloat16()
    out = torch.empty(SIZE, SIZE)
    product_kernel[(1,)](a, b, out, SIZE)
    expected = a.float() @ b.float()
    print(float((out - expected).abs().max()), float(expected.abs().max()))

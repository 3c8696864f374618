"""Products whose inputs are cut into pieces, because they have too few outputs for all multiprocessors. Each program
adds up one piece, in fp32: the result comes in parts, [splits, rows, N].

The kernel that reads the product adds its parts in their order: a norm, RoPE or SiLU, which is launched anyway
(`common.py:load_sum`). Where nothing does that, `add_splits` does. So the output does not depend on which program ends
first, as it would with atomic additions.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import INTERPRETED, dependent_launch, empty_rows, start_next, wait_for_last

MOST_SPLITS = 8
TILE = 512


@triton.jit
def hold(sums):
    """The same, once all products that they are sums of have ended: see the top of `integers_matmul.py`."""
    if INTERPRETED:
        return sums
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["num", "num_splits"])
def add_splits_kernel(parts_ptr, out_ptr, num, num_splits, TILE: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(num_splits):
        total += tl.load(parts_ptr + i, mask=i < num, other=0.0)
        parts_ptr += num
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < num)


def add_splits(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[rows, N] of the dtype of `like`."""
    splits, rows, size = parts.shape
    out, num, dependent = empty_rows(rows, size, like), rows * size, dependent_launch(parts.device)
    launch = {"DEPENDENT": dependent, "launch_pdl": dependent}
    add_splits_kernel[(triton.cdiv(num, TILE),)](parts, out, num, splits, TILE=TILE, **launch, num_warps=4)
    return out


def empty_parts(splits: int, out_size: int, x: torch.Tensor) -> torch.Tensor:
    """For a product with x [rows, K]: [splits, rows, out_size] in fp32, or [rows, out_size] if nothing is cut."""
    if splits == 1:
        return empty_rows(len(x), out_size, x)
    return torch.empty((splits, len(x), out_size), dtype=torch.float32, device=x.device)


def choose_splits(tiles: int, steps: int, num_multiprocessors: int) -> int:
    """Three programs for each multiprocessor where there are fewer tiles, but at least 4 steps a program: a split costs
    4 bytes an output to write and to read. A power of two, so that most neighbouring numbers of rows add in the same
    order."""
    most = min(3 * num_multiprocessors // tiles, steps // 4, MOST_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 0 else 1

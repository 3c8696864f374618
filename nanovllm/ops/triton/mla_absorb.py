"""The two products around an absorbed decode of a few rows (layers/mla.py): W_UK applied to the query, W_UV to the
result, the latter together with the merge of the splits.

W_UK and W_UV of DeepSeek-V2-Lite are 2 MB each: half a microsecond to read. As batched products of cuBLAS each took 3.4
us of a layer's 88 at one row, the merge 3, and neither can start before the kernel before it has ended. Here a program
loads its part of the weight before it waits (`common.py:wait_for_last`), so only the arithmetic is left after the wait.
There are 128 programs for each row. Every row reads the weights again, from the L2 cache: for a few rows only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import dependent_launch, next_power_of_2, start_next, wait_for_last
from nanovllm.ops.triton.decode_attention import DecodeWorkspace, merge_parts

FEW_ROWS = 4  # beyond, cuBLAS reads the weights once for all rows
COLUMNS = 64  # of the latent, a program of absorb
OUTPUTS = 16  # of a head, a program of project


@triton.jit
def absorb_kernel(
    q_ptr,
    weight_ptr,
    out_ptr,
    q_stride,
    q_head_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, N)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < NOPE)[:, None] & (c < RANK)[None, :]
    weight = tl.load(weight_ptr + head * head_stride + d[:, None] * RANK + c[None, :], mask=inside, other=0.0)
    wait_for_last(DEPENDENT)
    q = tl.load(q_ptr + row * q_stride + head * q_head_stride + d, mask=d < NOPE, other=0.0)
    total = tl.sum(weight.to(tl.float32) * q.to(tl.float32)[:, None], axis=0)
    out_ptr += (row * NUM_HEADS + head) * RANK
    tl.store(out_ptr + c, total.to(out_ptr.dtype.element_ty), mask=c < RANK)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["context_lens_ptr"])
def project_kernel(
    parts_ptr,
    logsums_ptr,
    context_lens_ptr,
    weight_ptr,
    out_ptr,
    num_splits,
    head_stride,
    NUM_HEADS: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    v = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, C)
    inside = (v < V)[:, None] & (c < RANK)[None, :]
    weight = tl.load(weight_ptr + head * head_stride + v[:, None] * RANK + c[None, :], mask=inside, other=0.0)
    context_len = tl.load(context_lens_ptr + row)
    wait_for_last(DEPENDENT)
    row_head = row * NUM_HEADS + head
    mixed = merge_parts(parts_ptr, logsums_ptr, row_head, context_len, num_splits, RANK, C, STEP, 0, TILE)
    mixed = mixed.to(weight.dtype).to(tl.float32)  # rounded as between the two kernels that this one replaces
    total = tl.sum(weight.to(tl.float32) * mixed[None, :], axis=1)
    tl.store(out_ptr + row_head * V + v, total.to(out_ptr.dtype.element_ty), mask=v < V)


def absorb(q_nope: torch.Tensor, to_k: torch.Tensor) -> torch.Tensor:
    """q_nope [rows, heads, nope_dim], W_UK [heads, nope_dim, kv_rank] -> [rows, heads, kv_rank]."""
    (rows, heads, nope), rank = q_nope.shape, to_k.shape[2]
    assert q_nope.stride(2) == 1
    assert to_k.stride()[1:] == (rank, 1)
    out = torch.empty((rows, heads, rank), dtype=q_nope.dtype, device=q_nope.device)
    facts = {"NUM_HEADS": heads, "NOPE": nope, "N": next_power_of_2(nope), "RANK": rank, "COLUMNS": COLUMNS}
    facts["DEPENDENT"] = facts["launch_pdl"] = dependent_launch(out.device)
    grid = (heads, triton.cdiv(rank, COLUMNS), rows)
    absorb_kernel[grid](q_nope, to_k, out, *q_nope.stride()[:2], to_k.stride(0), **facts, num_warps=4)
    return out


def project(
    parts: DecodeWorkspace, context_lens: torch.Tensor, num_splits: int, to_v: torch.Tensor, facts: dict[str, Any]
) -> torch.Tensor:
    """The parts of a decode, merged, times W_UV [heads, v_dim, kv_rank] -> [rows, heads, v_dim]. `facts`: STEP, TILE
    and the kind of launch of that decode."""
    (heads, size, rank), rows = to_v.shape, len(context_lens)
    assert to_v.stride()[1:] == (rank, 1)
    out = torch.empty((rows, heads, size), dtype=to_v.dtype, device=to_v.device)
    facts |= {"NUM_HEADS": heads, "V": size, "RANK": rank, "C": next_power_of_2(rank), "OUTPUTS": OUTPUTS}
    tensors = (parts.parts, parts.logsums, context_lens, to_v, out)
    grid = (heads, triton.cdiv(size, OUTPUTS), rows)
    project_kernel[grid](*tensors, num_splits, to_v.stride(0), **facts, num_warps=4)
    return out

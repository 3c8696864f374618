"""`expert_pairs` on a GPU (twin and contract: `ops/moe.py`): the kernels put together as the number of tokens asks.

    a token or two       gemv      every pair by itself: gate + up + SiLU, down + router weight
    decode, small steps  tiles     align, gate + up + SiLU, down + router weight
    large prefill        grouped   align, gather, PyTorch's product, SiLU, product, scatter (Hopper, bf16)

Shapes of all buffers and grids follow from T, k and S, nothing waits for the host: every path can be captured. The rows
of an expert are computed alike whatever other pairs are in the call, since T and not the pairs choose the plan.
"""
import torch

from nanovllm.ops.triton.moe_align import align
from nanovllm.ops.triton.moe_gemm import down_gemm, gate_up_gemm
from nanovllm.ops.triton.moe_gemv import down_gemv, gate_up_gemv
from nanovllm.ops.triton.moe_grouped import grouped_pairs
from nanovllm.ops.triton.moe_tiles import Plan, Shape, choose_plan


def expert_pairs(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x [T, H], gate_up [S, 2I, H], down [S, H, I], slots int32 [T, k], weights float32 [T, k] -> out [T, k, H]."""
    (num_tokens, hidden), (num_slots, top_k), size = x.shape, (gate_up.shape[0], slots.shape[1]), down.shape[2]
    out = torch.empty((num_tokens, top_k, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1
    assert gate_up.stride()[1:] == (hidden, 1)
    assert down.stride()[1:] == (size, 1)
    assert all(tensor.is_contiguous() for tensor in (slots, weights, out))
    plan = plan or choose_plan(num_tokens, Shape(hidden, size, top_k, x.dtype), x.device)
    if plan.kind == "gemv":
        active = gate_up_gemv(x, gate_up, slots, (plan.gate_up.block_n, plan.gate_up.block_k))
        down_gemv(active, down, slots, weights, out, (plan.down.block_n, plan.down.block_k))
        return out
    rows = align(slots, num_slots, plan.block_m)
    if plan.kind == "grouped":
        grouped_pairs(x, gate_up, down, rows, weights, out)
        return out
    active = gate_up_gemm(x, gate_up, rows, top_k, plan.block_m, plan.gate_up)
    down_gemm(active, down, rows, weights, out, plan.block_m, plan.down)
    return out

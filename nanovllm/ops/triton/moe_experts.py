"""`expert_pairs` on a GPU (twin and contract: `ops/moe.py`): the kernels, put together by the number of tokens.

    a token or two       gemv      every pair by itself: gate + up + SiLU, down + router weight
    decode, small steps  tiles     align, gate + up + SiLU, down + router weight
    large prefill        grouped   align, gather, PyTorch's product, SiLU, product, scatter (Hopper, bf16)

Low-rank experts (a split x, a product `between`) take the first two only, and so do experts in 8-bit floats. Experts in
integers have kernels of their own for the first two (`moe_integers.py`).

Shapes of all buffers and grids follow from T, k and S, nothing waits for the host: every path can be captured. The rows
of an expert are computed alike whatever other pairs are in the call, since tiles are chosen by T and not by the pairs.
"""

import torch

from nanovllm.ops.fp8 import ScaledStack
from nanovllm.ops.integers import IntegerStack
from nanovllm.ops.triton.gemv import choose_block
from nanovllm.ops.triton.moe_align import align
from nanovllm.ops.triton.moe_gemm import between_gemm, down_gemm, gate_up_gemm
from nanovllm.ops.triton.moe_gemv import between_gemv, down_gemv, gate_up_gemv
from nanovllm.ops.triton.moe_grouped import grouped_pairs
from nanovllm.ops.triton.moe_integers import integer_pairs
from nanovllm.ops.triton.moe_tiles import MoeShape, TileChoice, choose_tiles
from nanovllm.ops.triton.moe_weights import stored_form


def expert_pairs(
    x: torch.Tensor,
    gate_up: torch.Tensor | ScaledStack | IntegerStack,
    down: torch.Tensor | ScaledStack | IntegerStack,
    buffers: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
    choice: TileChoice | None = None,
    *,
    between: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H], gate_up [S, 2I, H], down [S, H, I], buffers int32 [T, k], weights float32 [T, k] -> out [T, k, H]; for
    low-rank experts as in `ops/moe.py`."""
    (num_buffers, twice, columns), (num_tokens, top_k), size = gate_up.shape, buffers.shape, down.shape[2]
    is_split = x.shape[1] != columns
    out = torch.empty((num_tokens, top_k, down.shape[1]), dtype=x.dtype, device=x.device) if out is None else out
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1
    assert x.shape[1] == columns * (1 + is_split)
    if isinstance(gate_up, IntegerStack) and isinstance(down, IntegerStack):
        assert all(tensor.is_contiguous() for tensor in (buffers, weights, out))
        return integer_pairs(x, gate_up, down, buffers, weights, out)
    assert not isinstance(gate_up, IntegerStack)
    assert not isinstance(down, IntegerStack)
    for stack in (gate_up, down):
        numbers, scale, _, _ = stored_form(stack)
        assert numbers[0].is_contiguous()
        assert scale[0].is_contiguous()
    assert between is None or (between.is_contiguous() and between.shape == (size, twice // 2))
    assert all(tensor.is_contiguous() for tensor in (buffers, weights, out))
    if choice is None:
        is_low_rank = is_split or between is not None
        sizes = (down.shape[1], size) if is_low_rank else None
        shape = MoeShape(columns, twice // 2, top_k, x.dtype, sizes, isinstance(gate_up, ScaledStack))
        choice = choose_tiles(num_tokens, shape, x.device)
    if choice.kind == "gemv":
        active = gate_up_gemv(x, gate_up, buffers, (choice.gate_up.block_n, choice.gate_up.block_k))
        if between is not None:
            active = between_gemv(active, between, buffers, choose_block(1, twice // 2, size, False))
        down_gemv(active, down, buffers, weights, out, (choice.down.block_n, choice.down.block_k))
        return out
    rows = align(buffers, num_buffers, choice.block_m)
    if choice.kind == "grouped":
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        grouped_pairs(x, gate_up, down, rows, weights, out)
        return out
    active = gate_up_gemm(x, gate_up, rows, top_k, choice.block_m, choice.gate_up)
    if between is not None:
        active = between_gemm(active, between, rows, choice.block_m, choice.down)
    down_gemm(active, down, rows, weights, out, choice.block_m, choice.down)
    return out

"""The two ends of a mixture of experts: choosing a token's experts and adding up their results (twins: `ops/moe.py`).

`route`: one warp per token holds all its logits (E of 8 to 256 fit the registers of a warp) and takes the largest that
is left, k times; equal logits go by lower id. Every weight is exp(l - max) / sum exp(l - max), so only the sum needs
all experts, and renormalising divides by the sum of the k chosen. A NaN counts as the lowest logit for the choice,
which therefore always names k different experts, and makes the weights NaN.

`sum_pairs`: the k results of a token lie next to each other; one program adds a tile of them in fp32, j = 0, 1, ..., so
the sum does not depend on timing, as atomic adds of the experts' kernels would.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["logits_ptr"])
def route_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    NUM_EXPERTS: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    left = e < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * stride + e, mask=left, other=float("-inf")).to(tl.float32)
    keys = tl.where(logits == logits, logits, float("-inf"))
    highest = tl.max(keys, axis=0)
    total = tl.sum(tl.exp(logits - highest), axis=0)
    j = tl.arange(0, K)
    ids = tl.zeros([K], tl.int32)
    weights = tl.zeros([K], tl.float32)
    for i in tl.static_range(TOP_K):
        peak = tl.max(tl.where(left, keys, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (keys == peak), e, E), axis=0)
        left = left & (e != chosen)
        ids = tl.where(j == i, chosen, ids)
        weights = tl.where(j == i, tl.exp(peak - highest) / total, weights)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(ids_ptr + token * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(weights_ptr + token * TOP_K + j, weights, mask=j < TOP_K)


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert top_k <= num_experts
    assert logits.stride(1) == 1
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        facts = {"NUM_EXPERTS": num_experts, "E": next_power_of_2(num_experts), "TOP_K": top_k}
        facts |= {"K": next_power_of_2(top_k), "RENORMALISE": renormalise, "num_warps": 1}
        route_kernel[(num_tokens,)](logits, ids, weights, logits.stride(0), **facts)
    return ids, weights


@triton.jit
def sum_pairs_kernel(pairs_ptr, out_ptr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(pairs_ptr + (token * TOP_K + j) * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + i, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)


def sum_pairs(pairs: torch.Tensor) -> torch.Tensor:
    num_tokens, top_k, size = pairs.shape
    assert pairs.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    tile = min(next_power_of_2(size), 1024)
    if num_tokens:
        sum_pairs_kernel[(num_tokens, triton.cdiv(size, tile))](
            pairs, out, SIZE=size, TOP_K=top_k, TILE=tile, num_warps=4
        )
    return out

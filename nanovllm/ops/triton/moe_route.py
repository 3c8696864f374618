"""The two ends of a mixture of experts: choosing a token's experts and adding up their results (twins: `ops/moe.py`).

`route`: one warp per token holds all its logits (E of 8 to 256 fit the registers of a warp) and takes the largest that
is left, k times; equal logits go by lower id. They are a tile of one row, or of a row for each group of experts, where
rows other than the best are taken away first (DeepSeek). A NaN counts as the lowest for the choice, which therefore
always names k different experts; with softmax it makes all weights NaN.

`sum_pairs`: the k results of a token lie next to each other; one program adds a tile of them in fp32, j = 0, 1, ..., so
the sum does not depend on timing, as atomic adds of the experts' kernels would.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import dependent_launch, next_power_of_2, start_next, wait_for_last


@triton.jit
def best_groups(keys, left, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, BEST_TWO: tl.constexpr):
    """`left` without the experts of all but the best groups, which are the rows of the tile."""
    i = tl.arange(0, SIZE)[None, :]
    g = tl.arange(0, GROUPS)
    masked = tl.where(left, keys, float("-inf"))
    quality = tl.max(masked, axis=1)
    if BEST_TWO:
        first = tl.min(tl.where(masked == quality[:, None], i, SIZE), axis=1)
        quality += tl.max(tl.where(i == first[:, None], float("-inf"), masked), axis=1)
    open_groups = tl.max(left.to(tl.int32), axis=1) > 0
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        peak = tl.max(tl.where(open_groups, quality, float("-inf")), axis=0)
        chosen = tl.min(tl.where(open_groups & (quality == peak), g, GROUPS), axis=0)
        open_groups = open_groups & (g != chosen)
        kept = tl.where(g == chosen, 1, kept)
    return left & (kept[:, None] > 0)


@triton.jit(do_not_specialize_on_alignment=["logits_ptr"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    g, i = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    e = g * group_size + i
    left = (g < NUM_GROUPS) & (i < group_size)
    logits = tl.load(logits_ptr + token * stride + e, mask=left, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
        keys = scores + tl.load(bias_ptr + e, mask=left, other=0.0)
    else:
        highest = tl.max(tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1), axis=0)
        total = tl.sum(tl.sum(tl.exp(logits - highest), axis=1), axis=0)
        keys = logits
    keys = tl.where(keys == keys, keys, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        left = best_groups(keys, left, TOP_GROUPS, GROUPS, SIZE, SIGMOID)
    # A logit and its expert as one integer, so that each choice is one reduction: the bits of a float as an integer
    # that orders alike, above the id counted from the other end. With three reductions a choice it took 3.4 us.
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)  # 0.0 and -0.0 are equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    gone: tl.constexpr = -(1 << 63)
    packed = tl.where(left, (ordered << 32) | (NUM_EXPERTS - 1 - e).to(tl.int64), gone)
    j = tl.arange(0, K)
    ids = tl.zeros([K], tl.int32)
    weights = tl.zeros([K], tl.float32)
    for n in tl.static_range(TOP_K):
        best = tl.max(tl.max(packed, axis=1), axis=0)
        if SIGMOID:
            weight = tl.sum(tl.sum(tl.where(packed == best, scores, 0.0), axis=1), axis=0)
        else:
            high = (best >> 32).to(tl.int32)
            weight = tl.exp((high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - highest) / total
        packed = tl.where(packed == best, gone, packed)
        ids = tl.where(j == n, (NUM_EXPERTS - 1 - (best & 0x7FFFFFFF)).to(tl.int32), ids)
        weights = tl.where(j == n, weight, weights)
    if RENORMALISE:
        norm = tl.sum(weights, axis=0)
        weights = weights / tl.where(norm < 1e-20, 1e-20, norm)  # not maximum, which may lose a NaN
    tl.store(ids_ptr + token * TOP_K + j, ids, mask=j < TOP_K)
    tl.store(weights_ptr + token * TOP_K + j, weights * scale, mask=j < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert top_k <= num_experts // num_groups * top_groups
    assert num_experts % num_groups == 0
    assert logits.stride(1) == 1
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        facts = {"NUM_EXPERTS": num_experts, "NUM_GROUPS": num_groups, "TOP_GROUPS": top_groups}
        facts |= {"GROUPS": next_power_of_2(num_groups), "SIZE": next_power_of_2(num_experts // num_groups)}
        facts |= {"TOP_K": top_k, "K": next_power_of_2(top_k), "RENORMALISE": renormalise, "num_warps": 1}
        facts["DEPENDENT"] = facts["launch_pdl"] = dependent_launch(logits.device)
        tensors = (logits, logits if bias is None else bias, ids, weights)
        route_kernel[(num_tokens,)](*tensors, logits.stride(0), scale, SIGMOID=bias is not None, **facts)
    return ids, weights


@triton.jit
def sum_pairs_kernel(
    pairs_ptr,
    more_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    wait_for_last(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(pairs_ptr + (token * TOP_K + j) * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HAS_MORE:
        more = tl.load(more_ptr + token * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + more  # rounded as if it were added afterwards
    tl.store(out_ptr + token * SIZE + i, total.to(dtype), mask=i < SIZE)


def sum_pairs(pairs: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
    num_tokens, top_k, size = pairs.shape
    assert pairs.is_contiguous()
    assert more is None or more.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    tile, dependent = min(next_power_of_2(size), 1024), dependent_launch(out.device)
    facts = {"SIZE": size, "TOP_K": top_k, "TILE": tile, "HAS_MORE": more is not None}
    facts["DEPENDENT"] = facts["launch_pdl"] = dependent
    if num_tokens:
        tensors = (pairs, pairs if more is None else more, out)
        sum_pairs_kernel[(num_tokens, triton.cdiv(size, tile))](*tensors, **facts, num_warps=4)
    return out

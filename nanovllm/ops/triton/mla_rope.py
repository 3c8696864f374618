"""All between the projections of latent attention and attention, in one launch (twin: `latent_rope` of `ops/mla.py`).

A token's first program norms c, rotates k_pe, and writes both to the cache and to `latent`, which a prompt expands. The
others rotate q_pe, HEADS heads each. Arithmetic is fp32; c is rounded before the product with the norm's weight, as
in `norm.py`. A negative slot is padding: nothing is cached.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import dependent_launch, next_power_of_2, start_next, wait_for_last


@triton.jit
def _turn(ptr, to_ptr, i, inside, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads pairs, turns them and stores them as halves; (first, second) halves too."""
    if INTERLEAVED:
        a = tl.load(ptr + 2 * i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(ptr + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        a = tl.load(ptr + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
    first = (a * cos - b * sin).to(to_ptr.dtype.element_ty)
    second = (b * cos + a * sin).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + i, first, mask=inside)
    tl.store(to_ptr + HALF + i, second, mask=inside)
    return first, second


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def latent_rope_kernel(
    q_ptr,
    kv_ptr,
    weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    latent_ptr,
    cache_ptr,
    q_stride,
    q_head_stride,
    kv_stride,
    block_stride,
    slot_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, H)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + i
    cos = tl.load(angles, mask=i < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=i < HALF, other=0.0)
    slot = tl.load(slots_ptr + token)
    wait_for_last(DEPENDENT)
    if tl.program_id(1) > 0:
        head = ((tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        q = q_ptr + token * q_stride + head * q_head_stride
        to_q = q_out_ptr + (token * NUM_HEADS + head) * (2 * HALF)
        _turn(q, to_q, i, (head < NUM_HEADS) & (i < HALF), cos, sin, HALF, INTERLEAVED)
    else:
        c = tl.arange(0, C)
        kv_ptr += token * kv_stride
        latent_ptr += token * (RANK + 2 * HALF)
        x = tl.load(kv_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)
        dtype = latent_ptr.dtype.element_ty
        normed = (x * tl.rsqrt(tl.sum(x * x) / RANK + eps)).to(dtype).to(tl.float32)
        normed = (normed * tl.load(weight_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)).to(dtype)
        tl.store(latent_ptr + c, normed, mask=c < RANK)
        first, second = _turn(kv_ptr + RANK, latent_ptr + RANK, i, i < HALF, cos, sin, HALF, INTERLEAVED)
        cache_ptr += (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
        tl.store(cache_ptr + c, normed.to(cache_ptr.dtype.element_ty), mask=(c < RANK) & (slot >= 0))
        stored = (i < HALF) & (slot >= 0)
        tl.store(cache_ptr + RANK + i, first.to(cache_ptr.dtype.element_ty), mask=stored)
        tl.store(cache_ptr + RANK + HALF + i, second.to(cache_ptr.dtype.element_ty), mask=stored)


def latent_rope(
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q_pe [tokens, heads, rope_dim] and kv with any strides but the last. Returns new tensors."""
    num_tokens, num_heads, rope = q_pe.shape
    rank = len(norm_weight)
    assert q_pe.stride(2) == kv.stride(1) == cache.stride(2) == 1
    assert cos_sin.is_contiguous()
    assert cos_sin.shape[1] == rope
    q_out = torch.empty((num_tokens, num_heads, rope), dtype=q_pe.dtype, device=q_pe.device)
    latent = torch.empty((num_tokens, rank + rope), dtype=kv.dtype, device=kv.device)
    if num_tokens:
        heads = min(16, next_power_of_2(num_heads))
        tensors = (q_pe, kv, norm_weight, cos_sin, positions, slots, q_out, latent, cache)
        strides = (*q_pe.stride()[:2], kv.stride(0), *cache.stride()[:2])
        sizes = {"NUM_HEADS": num_heads, "RANK": rank, "C": next_power_of_2(rank), "HALF": rope // 2}
        sizes |= {"H": next_power_of_2(rope // 2), "BLOCK_SIZE": cache.shape[1], "HEADS": heads}
        sizes["DEPENDENT"] = sizes["launch_pdl"] = dependent_launch(kv.device)
        grid = (num_tokens, 1 + triton.cdiv(num_heads, heads))
        latent_rope_kernel[grid](*tensors, *strides, eps, **sizes, INTERLEAVED=interleaved, num_warps=4)
    return q_out, latent

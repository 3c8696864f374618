"""Scatter of new keys and values into the paged cache (twin of `ops/kv_cache.py`).

One program owns one token: it reads the token's slot once and copies its num_kv_heads * head_dim keys and values there.
A negative slot is padding and stores nothing. The fused kernel in `qk_norm_rope.py` writes the cache on its own; this
one serves models whose keys need other treatment first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    block_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    CACHE_HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        i = tl.arange(0, TILE)
        inside = i < SIZE
        head, d = i // HEAD_DIM, i % HEAD_DIM
        to = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + head * CACHE_HEAD_STRIDE + d
        k = tl.load(k_ptr + token * k_stride + head * HEAD_STRIDE + d, mask=inside)
        tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
        v = tl.load(v_ptr + token * v_stride + head * HEAD_STRIDE + d, mask=inside)
        tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [tokens, num_kv_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim], slots int64."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    assert k_cache.stride() == v_cache.stride()
    assert k.stride(1) == v.stride(1)
    assert k.stride(2) == 1
    assert v.stride(2) == 1
    assert k_cache.stride(3) == 1
    size = num_heads * head_dim
    store_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        HEAD_DIM=head_dim, HEAD_STRIDE=k.stride(1), CACHE_HEAD_STRIDE=k_cache.stride(2),
        BLOCK_SIZE=k_cache.shape[1], SIZE=size, TILE=next_power_of_2(size), num_warps=4 if size > 512 else 1,
    )  # fmt: skip

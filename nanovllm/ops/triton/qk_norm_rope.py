"""Everything between the qkv projection and attention in one kernel: q/k norm, RoPE, and the write into the KV cache.

Input is the packed output of the projection, [tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]: q heads, then k,
then v; or parts of it, which are added up here (`matmul.py`). Output: q [tokens, num_q_heads, head_dim], and k and v in
the paged caches at `slots` (int64 [tokens]; a negative one is padding and writes nothing to the cache). Apart these are
four memory-bound operators of a few microseconds each; together they read qkv once and write it once.

One program owns HEADS heads of one token, as a 2-D tile with the two halves of a head in two tiles, because
RoPE pairs element i with i + rot_dim / 2:

    (a, b) -> (a cos t - b sin t, b cos t + a sin t)

A head's kind decides what happens to its row, by masks, not by branches: q and k rows are normed and rotated, v rows
pass through with scale 1, cos 1 and sin 0. Arithmetic is fp32 and each element is rounded once. The norm is a
constexpr: Llama, which has none, runs the same kernel without it.

Into a cache of 8-bit floats (E4M3) k and v go divided by their scales, a number each for the whole layer: the fp32
result is rounded to 8 bits here, with nothing written in between.
"""

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton.common import (
    dependent_launch,
    load_sum,
    next_power_of_2,
    parts_of,
    start_next,
    wait_for_last,
)
from nanovllm.ops.triton.e4m3 import to_e4m3


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    scales_ptr, qkv_stride, part_stride, block_stride, slot_stride, head_stride, eps,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HAS_NORM: tl.constexpr,
    PARTS: tl.constexpr, E4M3: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q = head < NUM_Q_HEADS
    is_v = head >= NUM_Q_HEADS + NUM_KV_HEADS
    is_k = (head >= NUM_Q_HEADS) & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    exists = head < NUM_Q_HEADS + 2 * NUM_KV_HEADS

    half: tl.constexpr = ROT_DIM // 2
    i = tl.arange(0, HALF)[None, :]
    inside = exists & (i < half)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * ROT_DIM + i
    cos = tl.where(is_v, 1.0, tl.load(angles, mask=i < half, other=0.0).to(tl.float32))
    sin = tl.where(is_v, 0.0, tl.load(angles + half, mask=i < half, other=0.0).to(tl.float32))
    slot = tl.load(slots_ptr + token)
    wait_for_last(DEPENDENT)
    base = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    a = load_sum(base + i, inside, part_stride, PARTS)
    b = load_sum(base + half + i, inside, part_stride, PARTS)
    if REST > 0:  # the part of a head that is normed but not rotated
        j = ROT_DIM + tl.arange(0, REST)[None, :]
        rest_inside = exists & (j < HEAD_DIM)
        c = load_sum(base + j, rest_inside, part_stride, PARTS)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST > 0:
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        scale = tl.where(is_v, 1.0, scale)
        a *= scale * _norm_weight(q_weight_ptr, k_weight_ptr, i, i < half, is_q, is_k)
        b *= scale * _norm_weight(q_weight_ptr, k_weight_ptr, half + i, i < half, is_q, is_k)
        if REST > 0:
            c *= scale * _norm_weight(q_weight_ptr, k_weight_ptr, j, j < HEAD_DIM, is_q, is_k)

    first, second = a * cos - b * sin, b * cos + a * sin

    cached = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    to_q = q_ptr + (token * NUM_Q_HEADS + head) * HEAD_DIM
    to_k = k_cache_ptr + cached + (head - NUM_Q_HEADS) * head_stride
    to_v = v_cache_ptr + cached + (head - NUM_Q_HEADS - NUM_KV_HEADS) * head_stride
    stores = slot >= 0
    for part in tl.static_range(3 if REST > 0 else 2):
        if part == 0:
            value, offset, ok = first, i, inside
        elif part == 1:
            value, offset, ok = second, half + i, inside
        else:
            value, offset, ok = c, j, rest_inside
        tl.store(to_q + offset, value.to(q_ptr.dtype.element_ty), mask=ok & is_q)
        cached_value = _rounded(value, k_cache_ptr, scales_ptr, is_v, E4M3)
        tl.store(to_k + offset, cached_value, mask=ok & is_k & stores)
        tl.store(to_v + offset, cached_value, mask=ok & is_v & exists & stores)


@triton.jit
def _rounded(value, cache_ptr, scales_ptr, is_v, E4M3: tl.constexpr):
    if E4M3:
        scale = tl.where(is_v, tl.load(scales_ptr + 1), tl.load(scales_ptr))
        return to_e4m3(tl.div_rn(value, tl.broadcast_to(scale, value.shape)))
    else:
        return value.to(cache_ptr.dtype.element_ty)


@triton.jit
def _norm_weight(q_weight_ptr, k_weight_ptr, offset, inside, is_q, is_k):
    q_weight = tl.load(q_weight_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight, tl.where(is_k, k_weight, 1.0))


def qk_norm_rope(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_q_heads: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns q; stores k and v. qkv [tokens, width] or, with a cache of the model's dtype, [parts, tokens, width].
    norm_weights = (q weight, k weight), each [head_dim], or None for a model without.

    cos_sin [max_position, rot_dim] as in `ops/rotary.py`; caches [num_blocks, block_size, num_kv_heads, head_dim] with
    equal strides. `scales`: of caches in 8-bit floats (`ops/kv_cache.py`).
    """
    num_tokens, (parts, part_stride) = qkv.shape[-2], parts_of(qkv)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    dtype = qkv.dtype if parts == 1 else k_cache.dtype
    out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    rot_dim = cos_sin.shape[1]
    assert qkv.shape[-1] == (num_q_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(-1) == 1
    assert parts == 1 or scales is None
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert cos_sin.is_contiguous()
    total_heads = num_q_heads + 2 * num_kv_heads
    # Few tokens: many small programs fill the card. More tokens: more work for each (H200, 16,384 tokens of 32 heads: 8
    # heads 93.7 us, 16 heads 83.8, 32 heads with 8 warps 86.1; 62 is what the bytes take).
    heads = 2 if num_tokens <= 64 else 16
    q_weight, k_weight = norm_weights or (cos_sin, cos_sin)
    dependent = dependent_launch(qkv.device)
    qk_norm_rope_kernel[(num_tokens, triton.cdiv(total_heads, heads))](
        qkv, q_weight, k_weight, cos_sin, positions, slots, out, k_cache, v_cache, scales,
        qkv.stride(-2), part_stride, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps,
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROT_DIM=rot_dim, BLOCK_SIZE=block_size,
        HEADS=heads, HALF=next_power_of_2(rot_dim // 2),
        REST=next_power_of_2(head_dim - rot_dim) if rot_dim < head_dim else 0,
        HAS_NORM=norm_weights is not None, PARTS=parts, E4M3=scales is not None,
        DEPENDENT=dependent, launch_pdl=dependent, num_warps=1 if heads == 2 else 4,
    )  # fmt: skip
    return out

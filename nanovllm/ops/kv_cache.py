"""Writing new keys and values into the paged cache, and reading what it holds as numbers.

`store_kv(k, v, k_cache, v_cache, slots)`: k and v are [tokens, num_kv_heads, head_dim] (any strides), the caches
[num_blocks, block_size, num_kv_heads, head_dim], contiguous in their first two dimensions, slots int64 [tokens].
A slot is block_id * block_size + offset, a row of the cache seen as [num_blocks * block_size, num_kv_heads, head_dim].
Slot -1 marks a padded token. Only captured graphs pad, and only kernels run in them: here a -1 is an index error, not a
write to the last slot.

A cache may have fewer bits than the numbers computed with it: `round_kv` is how they are rounded, `expand_kv` what
attention reads. In an int8 cache a head is a row of head_dim integers and SCALE_BYTES more: a float16, by which the
integers are multiplied.

A cache of 8-bit floats (e4m3) is a tensor of bytes, uint8, because Triton has no such type before sm_89. Its numbers
are multiplied by `scales`, fp32 [2]: one for the keys of a layer and one for its values.
"""

import torch

from nanovllm.ops.fp8 import E4M3, E4M3_MAX

SCALE_BYTES = 2
FLOAT16_MAX = 65504.0
# e4m3 has the same relative precision from 2^-6 to 448, so headroom costs nothing but the smallest numbers. The first
# prompt may have a single token, with values far below those of others: hence a lower bound, with which 112 still fits.
HEADROOM, MIN_SCALE = 4.0, 0.25


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    if scales is not None:
        k, v = k.float() / scales[0], v.float() / scales[1]
    # index_copy_ (4 us a call for one row) refuses negative indices; cache[slots] = k (5 us) would wrap them.
    k_cache.flatten(0, 1).index_copy_(0, slots, round_kv(k, k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slots, round_kv(v, v_cache.dtype))


def round_kv(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., head_dim] -> a row of the cache for each head. What float16 cannot hold becomes its largest number: an
    infinity would make all scores of a query NaN. Likewise e4m3, which is given divided by its scale."""
    if dtype == torch.uint8:
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(dtype)
    if dtype == torch.float16 and x.dtype != dtype:
        x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    if dtype != torch.int8:
        return x.to(dtype)
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(max=FLOAT16_MAX).half()
    numbers = torch.where(scale > 0, (x / scale.float()).round().clamp(-127, 127), 0.0).to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def expand_kv(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the cache -> [..., head_dim] of dtype; e4m3 without its scale."""
    if stored.dtype == torch.uint8:
        return stored.view(E4M3).to(dtype)
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float16)
    return stored[..., :-SCALE_BYTES].to(dtype) * scale.to(dtype)


def measure_scales(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The `scales` of a cache of 8-bit floats that is to hold these keys, these values and larger ones."""
    largest = torch.stack((k.abs().amax(), v.abs().amax())).float()
    return (largest * (HEADROOM / E4M3_MAX)).clamp(min=MIN_SCALE)

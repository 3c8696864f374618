"""Writing new keys and values into the paged cache.

`store_kv(k, v, k_cache, v_cache, slots)`: k and v are [tokens, num_kv_heads, head_dim] (any strides), the caches
[num_blocks, block_size, num_kv_heads, head_dim], contiguous in their first two dimensions, slots int64 [tokens].
A slot is block_id * block_size + offset, a row of the cache seen as [num_blocks * block_size, num_kv_heads, head_dim].
Slot -1 marks a padded token. Only captured graphs pad, and only kernels run in them: here a -1 is an index error, not a
write to the last slot.
"""

import torch


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    # index_copy_ (4 us a call for one row) refuses negative indices; cache[slots] = k (5 us) would wrap them.
    k_cache.flatten(0, 1).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slots, v.to(v_cache.dtype))

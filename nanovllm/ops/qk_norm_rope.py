"""From the packed projection to attention: norm q and k (where the model does), turn them, store k and v, return q.

The plain composition of rms_norm, apply_rotary and store_kv; `ops/triton/qk_norm_rope.py` does all of it in one kernel.
"""

import torch

from nanovllm.ops.kv_cache import store_kv
from nanovllm.ops.norm import rms_norm
from nanovllm.ops.rotary import apply_rotary


def qk_norm_rope(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_q_heads: int,
) -> torch.Tensor:
    """qkv [tokens, (heads + 2 kv_heads) * head_dim] -> q [tokens, heads, head_dim]."""
    _, _, num_kv_heads, head_dim = k_cache.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm_weights is not None:
        q, k = rms_norm(q, norm_weights[0], eps), rms_norm(k, norm_weights[1], eps)
    q, k = apply_rotary(q, k, cos_sin, positions)
    store_kv(k, v, k_cache, v_cache, slots)
    return q

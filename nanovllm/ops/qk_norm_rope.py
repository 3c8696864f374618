"""From the packed projection to attention: norm q and k (where the model does), rotate them, store k and v, return q.

The plain composition of rms_norm, rotate and store_kv; `ops/triton/qk_norm_rope.py` does all of it in one kernel.
"""

import torch

from nanovllm.ops.kv_cache import store_kv
from nanovllm.ops.norm import rms_norm
from nanovllm.ops.rotary import Angles, rotate


def qk_norm_rope(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: Angles,
    positions: None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_q_heads: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv [tokens, (heads + 2 kv_heads) * head_dim] -> q [tokens, heads, head_dim]. `positions` is an
    argument of the kernel, which gathers its angles itself; here they are gathered already. `scales`: see
    `kv_cache.py`."""
    num_kv_heads = k_cache.shape[2]
    heads = qkv.unflatten(1, (num_q_heads + 2 * num_kv_heads, -1))
    num_turned = num_q_heads + num_kv_heads
    turned, v = heads[:, :num_turned], heads[:, num_turned:]
    if norm_weights is not None:
        q, k = turned[:, :num_q_heads], turned[:, num_q_heads:]
        turned = torch.cat((rms_norm(q, norm_weights[0], eps), rms_norm(k, norm_weights[1], eps)), dim=1)
    turned = rotate(turned, angles)
    store_kv(turned[:, num_q_heads:], v, k_cache, v_cache, slots, scales)
    return turned[:, :num_q_heads]

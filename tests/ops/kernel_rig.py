"""Inputs and expected outputs for kernels, under the interpreter and on a GPU."""

from __future__ import annotations

import torch

from nanovllm.ops import qk_norm_rope, rotary

Paged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SPARE = 3  # blocks that no sequence has


def paged_cache(
    lens: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    by_head: bool = False,
    device: str = "cpu",
) -> Paged:
    """(k, v, context_lens, tables) with shuffled blocks. Slots without a key are NaN in both caches; on the CPU, unused
    entries of the tables point far outside of them.

    by_head: a block is stored [heads, slots, head_dim]; the caches are transposed views of that.
    """
    context_lens = torch.tensor(lens)
    blocks = -(-context_lens // block_size)
    total = int(blocks.sum()) + SPARE
    place = torch.arange(max(int(blocks.max()), 1)) < blocks[:, None]
    order = torch.randperm(total)[: total - SPARE]
    tables = torch.full(place.shape, 10**6 if device == "cpu" else 0)
    tables[place] = order
    held = torch.zeros(total, dtype=torch.int64)  # keys in a block
    held[order] = (context_lens[:, None] - torch.arange(place.shape[1]) * block_size).clamp(0, block_size)[place]
    hole = (torch.arange(block_size) >= held[:, None])[:, :, None, None].to(device)
    k, v = (
        c.masked_fill_(hole, float("nan"))
        for c in caches(total, block_size, num_kv_heads, head_dim, dtype, by_head, device)
    )
    return k, v, context_lens.int().to(device), tables.int().to(device)


def caches(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, by_head: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of random numbers, [num_blocks, block_size, num_kv_heads, head_dim]."""
    middle = (num_kv_heads, block_size) if by_head else (block_size, num_kv_heads)
    k, v = torch.randn(2, num_blocks, *middle, head_dim, device=device).to(dtype)
    return (k.transpose(1, 2), v.transpose(1, 2)) if by_head else (k, v)


def rope_twin(
    qkv: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    before: torch.Tensor,
    slots: torch.Tensor,
    num_q_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k and v caches) of the plain twin in fp32. `before`: both caches, [2, blocks, ...]. Slot -1 is stored in a
    block of its own, which is then dropped."""
    k, v = torch.cat((before, before[:, :1]), dim=1).float()
    weights = None if norm_weights is None else (norm_weights[0].float(), norm_weights[1].float())
    angles = rotary.gather_angles(cos_sin, positions)
    slots = slots.where(slots >= 0, before.shape[1] * before.shape[2])
    q = qk_norm_rope.qk_norm_rope(qkv.float(), weights, 1e-6, angles, None, k, v, slots, num_q_heads)
    return q, torch.stack((k[:-1], v[:-1]))

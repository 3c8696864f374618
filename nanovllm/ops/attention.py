"""The definition of paged attention: the slow fp32 reference that every backend and kernel is compared with.

`paged_attention_reference(q, k_cache, v_cache, query_starts, context_lens, block_tables, scale, window)`:
q [tokens, num_q_heads, head_dim] is flattened over sequences, sequence s owning rows query_starts[s] to
query_starts[s + 1]. Its keys are the context_lens[s] entries found through its row of block_tables (block i of the
sequence is block_tables[s, i] of the caches [num_blocks, block_size, num_kv_heads, head_dim]), the new tokens' own keys
included, already stored. Query i of n sits at position context_lens[s] - n + i and sees keys at positions up to its
own; with `window` w only the last w of those, itself included. A decode is n = 1, a chunk after a cached prefix is any
n < context_lens[s]. Rows of a sequence with no context (graph padding) are zero.
"""

import torch


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    out = torch.zeros((*q.shape[:-1], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    for seq, context_len in enumerate(lens):
        start, stop = starts[seq], starts[seq + 1]
        if start == stop or context_len == 0:
            continue
        block_ids = block_tables[seq, : -(-context_len // block_size)].long()
        keys = k_cache[block_ids].flatten(0, 1)[:context_len].float().repeat_interleave(group, dim=1)
        values = v_cache[block_ids].flatten(0, 1)[:context_len].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        query_positions = torch.arange(context_len - (stop - start), context_len, device=q.device)[:, None]
        key_positions = torch.arange(context_len, device=q.device)[None, :]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        probs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)
    return out

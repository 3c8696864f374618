"""Latent attention (MLA), the plain twins of `ops/triton/mla_*.py`. What they compute is derived in layers/mla.py.

For a token, `latent` is [c | k_pe]: the normed vector c (kv_rank numbers) that keys and values of all heads are
computed from, and the rotated part of the keys (rope_dim numbers), the same for all heads. The cache is
[num_blocks, block_size, kv_rank + rope_dim].

`latent_rope(q_pe, kv, norm_weight, eps, angles, positions, cache, slots, interleaved)` -> (q_pe, latent): norms c and
rotates k_pe of kv [tokens, kv_rank + rope_dim], stores both at `slots`, rotates q_pe [tokens, heads, rope_dim].
Interleaved pairs (0, 1), (2, 3), ... come out as halves, (0, n/2), (1, n/2 + 1), ...: q and k alike, so their products
are the same, and one rotation serves both orders.

`latent_decode(q_latent [n, heads, kv_rank], q_pe [n, heads, rope_dim], cache, context_lens, block_tables, scale)` ->
[n, heads, kv_rank]: one query a sequence over the cached latents themselves. Key = [c | k_pe], value = c. Rows
without context (graph padding) are zero.

`latent_piece(q_nope, q_pe, kv [keys, heads, nope_dim + v_dim], k_pe [keys, rope_dim], query_starts, key_starts, scale,
causal)` -> (out [tokens, heads, v_dim], logsum fp32 [tokens, heads]): queries of several sequences over some of their
keys, which are expanded. Sequence s owns rows query_starts[s] to query_starts[s + 1] of q, and of the keys likewise.
Causal: its last query is its last key. Otherwise all keys are seen; a sequence without keys gives zeros and -inf.

`merge_pieces(out, logsum, more, more_logsum)`: attention over the union of two sets of keys. Softmax over a union is
the mean of the softmaxes over its parts, weighted by exp(logsum). `logsum` is finite: every token sees itself.
"""

from __future__ import annotations

import torch

from nanovllm.ops.norm import rms_norm
from nanovllm.ops.rotary import Angles, gather_angles, rotate

QUERY_ROWS = 256  # scores are made for so many queries at a time: [heads, 256, keys] in fp32


def latent_rope(
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    angles: Angles | torch.Tensor,
    positions: torch.Tensor | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`angles`: gathered, or the whole table if positions are given."""
    q_pe, latent = rotate_latent(
        q_pe, kv, rms_norm(kv[:, : len(norm_weight)], norm_weight, eps), angles, positions, interleaved
    )
    cache.flatten(0, 1).index_copy_(0, slots, latent.to(cache.dtype))
    return q_pe, latent


def rotate_latent(
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    normed: torch.Tensor,
    angles: Angles | torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """latent_rope without the cache: (q_pe, latent)."""
    if not isinstance(angles, Angles):
        assert positions is not None
        angles = gather_angles(angles, positions)
    k_pe = kv[:, None, normed.shape[1] :]
    if interleaved:
        q_pe, k_pe = (part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in (q_pe, k_pe))
    return rotate(q_pe, angles), torch.cat((normed, rotate(k_pe, angles)[:, 0]), dim=1)


def latent_decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    rank, block_size = q_latent.shape[2], cache.shape[1]
    q = torch.cat((q_latent, q_pe), dim=2).float()
    out = torch.zeros_like(q_latent)
    for i, context_len in enumerate(context_lens.tolist()):
        if context_len:
            blocks = block_tables[i, : -(-context_len // block_size)].long()
            keys = cache[blocks].flatten(0, 1)[:context_len].float()
            probs = (q[i] @ keys.T * scale).softmax(-1)  # [heads, keys]
            out[i] = (probs @ keys[:, :rank]).to(out.dtype)
    return out


def latent_piece(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, heads, nope = q_nope.shape
    out = q_nope.new_zeros(num_tokens, heads, kv.shape[2] - nope)
    logsum = torch.full((num_tokens, heads), float("-inf"), device=out.device)
    starts, ends = query_starts.tolist(), key_starts.tolist()
    for first, stop, first_key, last_key in zip(starts, starts[1:], ends, ends[1:]):
        if last_key == first_key:
            continue
        keys, values = kv[first_key:last_key].float().transpose(0, 1).split((nope, kv.shape[2] - nope), dim=2)
        shared = k_pe[first_key:last_key].float().T  # [rope_dim, keys]
        for begin in range(first, stop, QUERY_ROWS):
            rows = slice(begin, min(begin + QUERY_ROWS, stop))
            scores = q_nope[rows].float().transpose(0, 1) @ keys.transpose(1, 2)  # [heads, rows, keys]
            scores = (scores + q_pe[rows].float().transpose(0, 1) @ shared) * scale
            if causal:
                seen = torch.arange(rows.start, rows.stop, device=out.device)[:, None] - stop + last_key - first_key
                hidden = torch.arange(last_key - first_key, device=out.device) > seen
                scores = scores.masked_fill(hidden, float("-inf"))
            logsum[rows] = scores.logsumexp(-1).T
            out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    return out, logsum


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, in], weight [heads, in, out] -> [rows, heads, out]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def merge_pieces(
    out: torch.Tensor, logsum: torch.Tensor, more: torch.Tensor, more_logsum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.logaddexp(logsum, more_logsum)
    shares = ((part - total).exp()[..., None] for part in (logsum, more_logsum))
    merged = sum(share * part.float() for share, part in zip(shares, (out, more)))
    assert isinstance(merged, torch.Tensor)
    return merged.to(out.dtype), total

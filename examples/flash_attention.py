"""Flash attention, step by step, on a CPU: from softmax(q k^T) v to a paged cache and split keys.

    python examples/flash_attention.py

Each function below changes one thing in the one before it; every result is compared with torch's own
scaled_dot_product_attention. One head, float64, so that a mistake stands out from rounding. docs/attention.md tells the
story; nanovllm/ops/triton/prefill_attention.py and decode_attention.py are the same steps as GPU kernels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

NUM_TOKENS, HEAD_DIM = 150, 32  # 150 is no multiple of any tile: the last one is always cut
BLOCK_Q, BLOCK_N, BLOCK_SIZE = 32, 16, 16  # queries of a tile, keys of a tile, slots of a block of the paged cache

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # acc [rows, head_dim], peak [rows], total [rows]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The formula. Needs all n x n scores at once, and exp of a score above 709 overflows (88 in float32)."""
    weights = torch.exp(q @ k.T)
    return weights / weights.sum(1, keepdim=True) @ v


def safe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Subtract each row's largest score: it cancels between numerator and denominator, and no exp exceeds 1."""
    scores = q @ k.T
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    return weights / weights.sum(1, keepdim=True) @ v


def new_state(rows: int) -> State:
    """Nothing seen yet. The peak is finite, because -inf - -inf is NaN."""
    zeros = torch.zeros(rows, dtype=torch.float64)
    return torch.zeros(rows, HEAD_DIM, dtype=torch.float64), zeros - 1e30, zeros


def add_tile(state: State, scores: torch.Tensor, v: torch.Tensor) -> State:
    """The online softmax: all that flash attention is built on. Old sums were scaled by exp(-peak): rescale them."""
    acc, peak, total = state
    new_peak = torch.maximum(peak, scores.amax(1))
    weights = torch.exp(scores - new_peak[:, None])
    shrink = torch.exp(peak - new_peak)
    return acc * shrink[:, None] + weights @ v, new_peak, total * shrink + weights.sum(1)


def online(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys in tiles: n x BLOCK_N scores at a time, and one division at the very end."""
    state = new_state(len(q))
    for n in range(0, len(k), BLOCK_N):
        state = add_tile(state, q @ k[n : n + BLOCK_N].T, v[n : n + BLOCK_N])
    return state[0] / state[2][:, None]


def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries in tiles too. They share nothing, so on a GPU each is a program of its own (flash attention 2)."""
    return torch.cat([online(q[m : m + BLOCK_Q], k, v) for m in range(0, len(q), BLOCK_Q)])


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Query i sees keys 0..i. Tiles beyond the last query are skipped, and only tiles cut by the diagonal are masked.
    Also returns how many tiles were computed."""
    outputs, num_tiles = [], 0
    for m in range(0, len(q), BLOCK_Q):
        rows = torch.arange(m, min(m + BLOCK_Q, len(q)))
        state = new_state(len(rows))
        for n in range(0, int(rows[-1]) + 1, BLOCK_N):
            scores = q[rows] @ k[n : n + BLOCK_N].T
            if n + BLOCK_N - 1 > m:  # some row does not see some key
                keys = torch.arange(n, n + scores.shape[1])
                scores = scores.masked_fill(keys > rows[:, None], -math.inf)
            state = add_tile(state, scores, v[n : n + BLOCK_N])
            num_tiles += 1
        outputs.append(state[0] / state[2][:, None])
    return torch.cat(outputs), num_tiles


def to_pages(x: torch.Tensor, table: list[int], num_blocks: int) -> torch.Tensor:
    """The cache [blocks, slots, head_dim] with x in the blocks of its table; NaN elsewhere, which nobody may read."""
    cache = torch.full((num_blocks, BLOCK_SIZE, HEAD_DIM), math.nan, dtype=x.dtype)
    for i, row in enumerate(x):
        cache[table[i // BLOCK_SIZE], i % BLOCK_SIZE] = row
    return cache


def paged(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: list[int], lo: int, hi: int) -> State:
    """One query over keys lo..hi of a paged cache. Only the address of a tile changed: one look in the block table.
    Slots past hi are not loaded: masking their scores is not enough, since 0 * NaN is NaN."""
    state = new_state(1)
    for n in range(lo, hi, BLOCK_SIZE):
        block, count = table[n // BLOCK_SIZE], min(BLOCK_SIZE, hi - n)
        state = add_tile(state, q @ k_cache[block, :count].T, v_cache[block, :count])
    return state


def split(q: torch.Tensor, caches: tuple, table: list[int], length: int, num_splits: int) -> torch.Tensor:
    """The keys cut into ranges that programs compute side by side, each giving its own answer and its log-sum-exp; then
    the mean of the answers, weighted by exp(log-sum-exp)."""
    per_split = math.ceil(length / num_splits / BLOCK_SIZE) * BLOCK_SIZE
    parts, logsums = [], []
    for lo in range(0, length, per_split):
        acc, peak, total = paged(q, *caches, table, lo, min(lo + per_split, length))
        parts.append(acc / total[:, None])
        logsums.append(peak + torch.log(total))
    weights = torch.softmax(torch.cat(logsums), dim=0)
    return (weights[:, None] * torch.cat(parts)).sum(0, keepdim=True)


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (out - expected).abs().max().item()
    print(f"{name:<44} largest difference to torch {difference:.1e}")
    assert difference < 1e-12, name


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, NUM_TOKENS, HEAD_DIM, dtype=torch.float64)
    whole = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    lower = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    q = q / math.sqrt(HEAD_DIM)  # torch scales the scores; here q carries the factor

    check("1 naive: softmax(q k^T) v", naive(q, k, v), whole)
    big = naive(q * 1000, k, v)
    print(f"{'  the same, scores 1000 times as large':<44} {int(big.isnan().any(1).sum())} of {len(q)} rows are NaN")
    assert big.isnan().any()
    assert not safe(q * 1000, k, v).isnan().any()
    check("2 safe: largest score subtracted", safe(q, k, v), whole)
    check("3 online: keys in tiles", online(q, k, v), whole)
    check("4 tiled: queries in tiles too", tiled(q, k, v), whole)
    out, num_tiles = causal(q, k, v)
    all_tiles = -(-NUM_TOKENS // BLOCK_Q) * -(-NUM_TOKENS // BLOCK_N)
    check(f"5 causal: {num_tiles} of {all_tiles} tiles computed", out, lower)
    assert num_tiles < all_tiles

    num_blocks = 24
    table = torch.randperm(num_blocks)[: -(-NUM_TOKENS // BLOCK_SIZE)].tolist()
    caches = to_pages(k, table, num_blocks), to_pages(v, table, num_blocks)
    acc, _, total = paged(q[-1:], *caches, table, 0, NUM_TOKENS)
    check("6 paged: a decode through a block table", acc / total[:, None], lower[-1:])
    for num_splits in (2, 4):
        check(f"7 split: {num_splits} ranges, merged", split(q[-1:], caches, table, NUM_TOKENS, num_splits), lower[-1:])


if __name__ == "__main__":
    main()

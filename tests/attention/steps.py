"""Steps to compute attention for, with their tensors and the reference's answer."""

from __future__ import annotations

import torch

from nanovllm.attention.base import AttentionBatch, AttentionSpec, HostLens
from nanovllm.ops.attention import paged_attention_reference

BLOCK = 16
# (new, context): decodes, whole prompts and chunks after a prefix, on both sides of a block
STEPS = {
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33)],
    "prompts": [(15, 15), (16, 16), (17, 17)],
    "chunks": [(2, 17), (16, 32), (15, 48), (31, 33)],
    "mixed": [(1, 40), (1, 16), (5, 21), (18, 18), (2, 2), (3, 50)],
    "one": [(7, 7)],
}


def make_batch(lens: list[tuple[int, int]]) -> AttentionBatch:
    """Blocks in a random order; every other sequence has adjoining ones, which come as a slice."""
    counts = [-(-context // BLOCK) for _, context in lens]
    num_blocks = sum(counts) + 1
    tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    spans: list[slice | torch.Tensor] = []
    free = list(range(1, num_blocks))
    for i, ((_, context), count) in enumerate(zip(lens, counts)):
        mine, free = free[:count], free[count:]
        if not mine:
            spans.append(slice(0, 0))
        elif i % 2:
            mine.reverse()
            spans.append(torch.tensor(mine))
        else:
            spans.append(slice(mine[0] * BLOCK, mine[0] * BLOCK + context))
        tables[i, :count] = torch.tensor(mine, dtype=torch.int32)
    query_lens, context_lens = (list(some) for some in zip(*lens))
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return AttentionBatch(
        starts,
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        slots=torch.zeros(sum(query_lens), dtype=torch.int64),
        max_context_len=max(context_lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens)),
        host=HostLens(query_lens, context_lens, spans),
    )


def tensors(batch: AttentionBatch, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    num_blocks = int(batch.block_tables.max()) + 1
    k_cache, v_cache = torch.randn(2, num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
    return torch.randn(sum(batch.on_host.query_lens), spec.num_heads, spec.head_dim), k_cache, v_cache


def spoil_unused(batch: AttentionBatch, *caches: torch.Tensor, window: int | None = None) -> None:
    """Every slot that holds no key of the step becomes NaN."""
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    for table, context_len in zip(batch.block_tables, batch.on_host.context_lens):
        for position in range(max(0, context_len - (window or context_len)), context_len):
            used[table[position // BLOCK], position % BLOCK] = True
    for cache in caches:
        cache[~used] = float("nan")


def expected(batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
    return paged_attention_reference(
        *tensors(batch, spec),
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        spec.scale,
        spec.window,
    )

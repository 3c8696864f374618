"""Latent attention: the absorbed form equals the expanded one, whatever the blocks, lengths and pieces."""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention import latent
from nanovllm.attention.base import AttentionBatch, HostLens, LatentSpec
from nanovllm.attention.latent import LatentBackend
from nanovllm.ops import mla

BLOCK = 16
SPEC = LatentSpec(num_heads=3, kv_rank=40, nope_dim=10, rope_dim=6, v_dim=14, dtype=torch.float32, scale=0.23)
# On both sides of one and two blocks.
LENS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]


def paged(lens: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(cache, block tables, each sequence's latents): blocks in no order, and numbers that poison a wrong read."""
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-n // BLOCK) for n in lens]
    order = torch.randperm(sum(counts) + 3, generator=draw).int()
    cache = torch.full((len(order), BLOCK, SPEC.kv_rank + SPEC.rope_dim), float("nan"))
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    found, at = [], 0
    for i, (length, count) in enumerate(zip(lens, counts)):
        tables[i, :count] = order[at : at + count]
        rows = torch.randn(length, cache.shape[2], generator=draw)
        slots = tables[i, torch.arange(length) // BLOCK].long() * BLOCK + torch.arange(length) % BLOCK
        cache.flatten(0, 1)[slots] = rows
        found.append(rows)
        at += count
    return cache, tables, found


def batch_of(new: list[int], lens: list[int], tables: torch.Tensor, num_decodes: int) -> AttentionBatch:
    starts = torch.tensor([0, *new]).cumsum(0).int()
    host = HostLens(new, lens, [slice(0, 0)] * len(lens))
    slots = torch.zeros(sum(new), dtype=torch.int64)
    return AttentionBatch(starts, torch.tensor(lens, dtype=torch.int32), tables, slots, num_decodes, max(lens), host)


def expanded(q_nope: torch.Tensor, q_pe: torch.Tensor, rows: torch.Tensor, kv_up: torch.Tensor) -> torch.Tensor:
    """In float64, straight from the definition: the last queries of a sequence over all of its latents."""
    c, k_pe = rows.double().split((SPEC.kv_rank, SPEC.rope_dim), dim=1)
    k_nope, values = torch.einsum("nr,hdr->hnd", c, kv_up.double().unflatten(0, (3, -1))).split((10, 14), dim=2)
    keys = torch.cat((k_nope, k_pe.expand(3, -1, -1)), dim=2)
    q = torch.cat((q_nope, q_pe), dim=2).double().transpose(0, 1)
    hidden = torch.ones(q.shape[1], len(rows), dtype=torch.bool).triu(len(rows) - q.shape[1] + 1)
    probs = (q @ keys.transpose(1, 2) * SPEC.scale).masked_fill(hidden, float("-inf")).softmax(-1)
    return (probs @ values).transpose(0, 1)


def queries(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = ((count, 3, 10), (count, 3, 6), (3 * 24, 40))
    q_nope, q_pe, kv_up = (torch.randn(shape, generator=draw) for shape in shapes)
    return q_nope, q_pe, kv_up * 40**-0.5


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_absorbed_equals_expanded() -> None:
    cache, tables, rows = paged(LENS)
    q_nope, q_pe, kv_up = queries(len(LENS))
    batch = batch_of([1] * len(LENS), LENS, tables, len(LENS))
    new = torch.stack([r[-1] for r in rows])
    out = LatentBackend().attend(q_nope, q_pe, new, cache, batch, SPEC, kv_up)
    for i, seq in enumerate(rows):
        close(out[i : i + 1], expanded(q_nope[i : i + 1], q_pe[i : i + 1], seq, kv_up))


@pytest.mark.parametrize("workspace", [1, 5, BLOCK, 1000])
def test_prompts_behind_cached_prefixes_in_pieces_of_any_size(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decodes before them; whole prompts, prompts with a prefix of some blocks, one token and the last ones."""
    monkeypatch.setattr(latent, "WORKSPACE_BYTES", workspace * SPEC.expanded_bytes)
    lens = [BLOCK, BLOCK + 1, *LENS[1:]]
    new = [1, 1, BLOCK - 1, 1, 2, BLOCK - 1, BLOCK, 17]
    cache, tables, rows = paged(lens)
    q_nope, q_pe, kv_up = queries(sum(new))
    latents = torch.cat([seq[-n:] for seq, n in zip(rows, new)])
    out = LatentBackend().attend(q_nope, q_pe, latents, cache, batch_of(new, lens, tables, 2), SPEC, kv_up)
    start = 0
    for seq, n in zip(rows, new):
        mine = slice(start, start + n)
        close(out[mine], expanded(q_nope[mine], q_pe[mine], seq, kv_up))
        start += n


def test_a_row_without_context_is_zero() -> None:
    cache, tables, _ = paged([BLOCK])
    lens = torch.tensor([0], dtype=torch.int32)
    assert not mla.latent_decode(torch.ones(1, 3, 40), torch.ones(1, 3, 6), cache, lens, tables, 1.0).any()


def test_interleaved_pairs_turn_like_halves() -> None:
    """Pair (2i, 2i + 1) turns by angle i; out comes (i, i + n / 2)."""
    table = torch.cat([torch.tensor([[1.0, 2.0, 3.0]]).cos(), torch.tensor([[1.0, 2.0, 3.0]]).sin()], dim=1)
    kv, q_pe = torch.randn(1, 40 + 6), torch.randn(1, 3, 6)
    cache, at = torch.zeros(1, 4, 46), torch.tensor([2])
    place = (table, torch.tensor([0]), cache, at)
    turned, found = mla.latent_rope(q_pe, kv, torch.full((40,), 2.0), 1e-6, *place, True)
    as_complex = torch.view_as_complex(q_pe.unflatten(2, (3, 2))) * torch.polar(
        torch.ones(3), torch.tensor([1.0, 2, 3])
    )
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), dim=2))
    torch.testing.assert_close(found[0, :40], 2 * kv[0, :40] * (kv[0, :40].square().mean() + 1e-6).rsqrt())
    halves = torch.cat((kv[:, 40::2], kv[:, 41::2]), dim=1)
    again, same = mla.latent_rope(q_pe, torch.cat((kv[:, :40], halves), 1), torch.full((40,), 2.0), 1e-6, *place, False)
    assert torch.equal(same, found)
    assert not torch.equal(again, turned)
    assert torch.equal(cache[0, 2], found[0])
    assert not cache[0, [0, 1, 3]].any()

"""The libraries behind the optional backends, as slow CPU stand-ins with the real signatures.

They compute with `paged_attention_reference` from their arguments, and assert what the real ones assert, so a wrong
length, table, alignment or window gives an error or another result.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.attention.flash_backend import find_kernels
from nanovllm.ops.attention import paged_attention_reference

LIBRARIES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn_interface",
    "flashinfer",
    "torch.nn.attention.varlen",
)


def gpu(capability: tuple[int, int] = (9, 0)) -> Any:
    """The attributes of a Device that selection reads."""
    return SimpleNamespace(
        is_gpu=True,
        capability=capability,
        name="Fake GPU",
        architecture="Hopper",
        resolve_dtype=lambda wanted, checkpoint: torch.bfloat16,
    )


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    find_kernels.cache_clear()


def uninstall_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)  # importing None is a ModuleNotFoundError
    find_kernels.cache_clear()


def _reference(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    lens: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    window: tuple[int, int],
) -> torch.Tensor:
    for tensor in (starts, lens, tables):
        assert tensor.dtype == torch.int32
    assert caches[0].ndim == caches[1].ndim == 4
    left, right = window
    assert right in (-1, 0)
    return paged_attention_reference(q, *caches, starts, lens, tables, scale, None if left < 0 else left + 1)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
):
    """flash-attn 2.5 and newer."""
    assert causal
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    return _reference(q, (k, v), cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale, window_size)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    page_table=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    """flash-attn 3."""
    assert causal
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return _reference(q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
):
    """torch 2.12 and 2.13."""
    assert window_size[1] == 0, "not causal"
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert (max_q, max_k) == (cu_seq_q.diff().max(), seqused_k.max())
    return _reference(query, (key, value), cu_seq_q, seqused_k, block_table, scale, window_size)


def _dense(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window):
    """Keys side by side, as torch 2.10 and 2.11 take them: the same as one block for each key."""
    assert key.ndim == value.ndim == 3
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert (len(query), len(key)) == (cu_seq_q[-1], cu_seq_k[-1])
    lens = cu_seq_k.diff()
    assert (max_q, max_k) == (cu_seq_q.diff().max(), lens.max())
    columns = torch.arange(max_k, dtype=torch.int32)
    tables = torch.where(columns < lens[:, None], cu_seq_k[:-1, None] + columns, -1)
    return _reference(query, (key[:, None], value[:, None]), cu_seq_q, lens, tables, scale, window)


def varlen_attn_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """No scale, no window: 1 / sqrt(head_dim), and every key or all before."""
    assert is_causal
    return _dense(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, query.shape[-1] ** -0.5, (-1, 0))


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size[1] == 0, "not causal"
    return _dense(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def flash_attn_unpadded_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale=None, causal=False
):
    """flash-attn 1.x: dense, as many KV heads as heads, a causal mask from the top left corner."""
    assert q.shape[1:] == k.shape[1:] == v.shape[1:]
    assert (len(q), len(k)) == (cu_seqlens_q[-1], cu_seqlens_k[-1])
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        keys, values = (t[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(out)


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer."""

    num_plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, q_data_type=None, kv_data_type=None,
    ):  # fmt: skip
        assert causal
        assert paged_kv_indices.ndim == 1
        assert paged_kv_indices.dtype == paged_kv_last_page_len.dtype == torch.int32
        type(self).num_plans += 1
        counts = paged_kv_indptr.diff().tolist()
        pages = paged_kv_indices.split(counts)
        assert len(paged_kv_last_page_len) == len(counts)
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        self.starts = qo_indptr
        self.lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self.tables = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
        self.scale, self.window = sm_scale, (window_left, 0)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)

    def run(self, q, caches):
        assert self.shape == (q.shape[1], caches[0].shape[2], q.shape[2], caches[0].shape[1])
        return _reference(q, caches, self.starts, self.lens, self.tables, self.scale, self.window)

"""flash, flashinfer and flash1 hand over the right lengths, tables, alignment and window (fakes.py says to whom)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import flash1_backend
from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.flash1_backend import Flash1Backend, pieces
from nanovllm.attention.flash_backend import FlashBackend, Kernels, find_kernels
from nanovllm.attention.flashinfer_backend import FlashInferBackend
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.ops.attention import paged_attention_reference
from tests.attention import fakes
from tests.tiny_models import TinyModel

BLOCK = 16
# (new, context): decodes, whole prompts and chunks after a prefix, on both sides of a block
STEPS = {
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33)],
    "prompts": [(15, 15), (16, 16), (17, 17)],
    "chunks": [(2, 17), (16, 32), (15, 48), (31, 33)],
    "mixed": [(1, 40), (1, 16), (5, 21), (18, 18), (2, 2), (3, 50)],
    "one": [(7, 7)],
}


def use_flash3(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=fakes.flash_attn_with_kvcache)
    kernels = find_kernels(True)
    assert isinstance(kernels, Kernels)
    assert kernels.library == "flash-attn 3"
    monkeypatch.setattr("nanovllm.attention.flash_backend.find_kernels", lambda hopper: kernels)  # a CPU is no Hopper


def use_flash2(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "flash_attn", __version__="2.8.3", flash_attn_varlen_func=fakes.flash_attn_varlen_func)


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=fakes.varlen_attn)


def use_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = type("Wrapper", (fakes.BatchPrefillWithPagedKVCacheWrapper,), {"num_plans": 0})
    fakes.install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=wrapper)
    monkeypatch.setattr("nanovllm.attention.flashinfer_backend.WORKSPACE_BYTES", 1)


def use_flash1(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "flash_attn", __version__="1.0.9", __path__=[])
    fakes.install(
        monkeypatch, "flash_attn.flash_attn_interface", flash_attn_unpadded_func=fakes.flash_attn_unpadded_func
    )


CASES = {
    "flash3": (FlashBackend, use_flash3),
    "flash2": (FlashBackend, use_flash2),
    "torch": (FlashBackend, use_torch),
    "flashinfer": (FlashInferBackend, use_flashinfer),
    "flash1": (Flash1Backend, use_flash1),
}
each_library = pytest.mark.parametrize("library", CASES)


def make_batch(lens: list[tuple[int, int]]) -> AttentionBatch:
    """Blocks in a random order; every other sequence has adjoining ones, which come as a slice."""
    counts = [-(-context // BLOCK) for _, context in lens]
    num_blocks = sum(counts) + 1
    tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    spans: list[slice | torch.Tensor] = []
    free = list(range(1, num_blocks))
    for i, ((_, context), count) in enumerate(zip(lens, counts)):
        mine, free = free[:count], free[count:]
        if i % 2:
            mine.reverse()
            spans.append(torch.tensor(mine))
        else:
            spans.append(slice(mine[0] * BLOCK, mine[0] * BLOCK + context))
        tables[i, :count] = torch.tensor(mine)
    query_lens, context_lens = (list(some) for some in zip(*lens))
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return AttentionBatch(
        query_lens, context_lens, spans, starts, torch.tensor(context_lens, dtype=torch.int32), tables,
        slots=torch.zeros(sum(query_lens), dtype=torch.int64), max_context_len=max(context_lens),
        num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens)),
    )  # fmt: skip


def tensors(batch: AttentionBatch, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    num_blocks = int(batch.device_block_tables.max()) + 1
    k_cache, v_cache = torch.randn(2, num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
    return torch.randn(sum(batch.query_lens), spec.num_heads, spec.head_dim), k_cache, v_cache


def expected(batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
    return paged_attention_reference(
        *tensors(batch, spec), batch.device_query_starts, batch.device_context_lens, batch.device_block_tables,
        spec.scale, spec.window,
    )  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("library", "window"),
    [(name, window) for name in CASES for window in (None, 1, 16, 17) if window is None or name != "flash1"],
)
def test_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, library: str, step: str, kv_heads: int, window: int | None
) -> None:
    backend, use = CASES[library]
    use(monkeypatch)
    spec = AttentionSpec(4, kv_heads, 8, torch.float32, window)
    batch = make_batch(STEPS[step])
    got = backend().attend(*tensors(batch, spec), batch, spec)
    torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)


def test_one_plan_serves_the_layers_that_ask_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flashinfer(monkeypatch)
    backend, wrapper = FlashInferBackend(), sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    full, windowed = (AttentionSpec(4, 2, 8, torch.float32, window) for window in (None, 5))
    first, second = make_batch(STEPS["mixed"]), make_batch(STEPS["chunks"])
    for batch, spec, num_plans in ((first, full, 1), (first, windowed, 2), (first, full, 2), (second, full, 3)):
        got = backend.attend(*tensors(batch, spec), batch, spec)
        assert wrapper.num_plans == num_plans
        torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)


def test_what_is_kept_for_a_step_is_not_kept_for_a_part_of_it() -> None:
    batch = make_batch(STEPS["mixed"])
    batch.memo["x"] = 1
    assert batch.without_decodes().memo == {}


@pytest.mark.parametrize("most", [1, 33, 34, 1000])
def test_flash1_gathers_in_pieces(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    use_flash1(monkeypatch)
    monkeypatch.setattr(flash1_backend, "MAX_GATHERED", most)
    lens = [17, 17, 16, 50]
    found = list(pieces([0, 1, 2, 3], lens))
    assert [i for piece in found for i in piece] == [0, 1, 2, 3]
    assert found == {
        1: [[0], [1], [2], [3]], 33: [[0], [1, 2], [3]], 34: [[0, 1], [2], [3]], 1000: [[0, 1, 2, 3]],
    }[most]  # fmt: skip
    spec = AttentionSpec(4, 2, 8, torch.float32)
    batch = make_batch([(1, n) for n in lens] + [(n, n) for n in lens])
    got = Flash1Backend().attend(*tensors(batch, spec), batch, spec)
    torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)


@each_library
def test_the_runner_gives_them_all_they_need(
    monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM], llama: TinyModel, library: str
) -> None:
    """A whole engine: chunks, prefixes and mixed steps, as ModelRunner makes them."""
    backend, use = CASES[library]
    use(monkeypatch)
    monkeypatch.setattr(backend, "rejects", lambda *_: None)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "dtype": "float32"}

    def tokens(name: str) -> list[list[int]]:
        llm = make_llm(attn_backend=name, **options)
        assert llm.engine.describe()["runs_on"]["attn_backend"] == name
        return [out.outputs[0].token_ids for out in llm.generate(llama.prompts, params, use_tqdm=False)]

    assert tokens(backend.name) == tokens(SdpaBackend.name)

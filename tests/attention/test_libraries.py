"""flash, flashinfer and flash1 hand over the right lengths, tables, alignment and window (to the fakes of fakes.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import flash1_backend, flash_backend
from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.flash1_backend import Flash1Backend
from nanovllm.attention.flash_backend import FlashBackend, Kernels, find_kernels
from nanovllm.attention.flashinfer_backend import FlashInferBackend
from nanovllm.attention.sdpa import SdpaBackend, runs
from tests.attention import fakes
from tests.attention.steps import BLOCK, STEPS, expected, make_batch, spoil_unused, tensors
from tests.tiny_models import TinyModel


def use_flash3(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=fakes.flash_attn_with_kvcache)
    kernels = find_kernels(True)
    assert isinstance(kernels, Kernels)
    assert kernels.library == "flash-attn 3"
    monkeypatch.setattr("nanovllm.attention.flash_backend.find_kernels", lambda hopper: kernels)  # a CPU is no Hopper


def use_flash2(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "flash_attn", __version__="2.8.3", flash_attn_varlen_func=fakes.flash_attn_varlen_func)


def use_torch(monkeypatch: pytest.MonkeyPatch, varlen_attn: Any = fakes.varlen_attn) -> None:
    fakes.install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)


use_torch_2_10 = partial(use_torch, varlen_attn=fakes.varlen_attn_2_10)
use_torch_2_11 = partial(use_torch, varlen_attn=fakes.varlen_attn_2_11)


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
    "torch 2.10": (FlashBackend, use_torch_2_10),
    "torch 2.11": (FlashBackend, use_torch_2_11),
    "flashinfer": (FlashInferBackend, use_flashinfer),
    "flash1": (Flash1Backend, use_flash1),
}
NO_WINDOW = ("flash1", "torch 2.10")
each_library = pytest.mark.parametrize("library", CASES)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("library", "window"),
    [(name, window) for name in CASES for window in (None, 1, 16, 17) if window is None or name not in NO_WINDOW],
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


@pytest.mark.parametrize("most", [1, 36, 37, 1000])
@pytest.mark.parametrize("step", ["mixed", "chunks"])
def test_gathered_keys_come_in_pieces_no_larger_than_allowed(
    monkeypatch: pytest.MonkeyPatch, step: str, most: int
) -> None:
    """A sequence longer than all that is allowed is a piece of its own. Two layers of a step share the indices."""
    use_torch_2_11(monkeypatch)
    spec, batch = AttentionSpec(4, 2, 8, torch.float32, window=20), make_batch(STEPS[step])
    monkeypatch.setattr(flash_backend, "GATHER_BYTES", most * 2 * 2 * 8 * 4)
    found = flash_backend.gathered_keys(batch, spec, BLOCK)
    assert [len(piece.slots) for piece in found] == {
        ("mixed", 1): [40, 16, 21, 18, 2, 50],
        ("mixed", 36): [40, 16, 21, 20, 50],
        ("mixed", 37): [40, 37, 20, 50],
        ("mixed", 1000): [147],
        ("chunks", 1): [17, 32, 48, 33],
        ("chunks", 36): [17, 32, 48, 33],
        ("chunks", 37): [17, 32, 48, 33],
        ("chunks", 1000): [130],
    }[step, most]
    for _ in range(2):
        got = FlashBackend().attend(*tensors(batch, spec), batch, spec)
        torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)
    assert len(batch.memo["gathered", spec]) == len(found)


def test_gathering_reads_no_slot_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence does not use of its blocks, and all other blocks, may hold anything."""
    use_torch_2_11(monkeypatch)
    spec, batch = AttentionSpec(4, 2, 8, torch.float32), make_batch(STEPS["mixed"])
    q, k_cache, v_cache = tensors(batch, spec)
    clean = FlashBackend().attend(q, k_cache, v_cache, batch, spec)
    spoil_unused(batch, k_cache, v_cache)
    batch = make_batch(STEPS["mixed"])
    assert torch.equal(FlashBackend().attend(q, k_cache, v_cache, batch, spec), clean)


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
    lasts = {1: [1, 2, 3, 4], 33: [1, 3, 4], 34: [2, 3, 4], 1000: [4]}[most]
    assert list(runs(lens, most)) == [slice(*pair) for pair in zip([0, *lasts], lasts)]
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

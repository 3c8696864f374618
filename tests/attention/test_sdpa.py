"""sdpa as it runs on a GPU: the decodes of a step in one padded call, prompts with shared KV heads. Computed on the CPU
by calling those parts directly; which parts a device takes is seen on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.attention import flash_backend, sdpa
from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.attention.sdpa import SdpaBackend, SdpaMathBackend, padded_decodes
from tests.attention.steps import BLOCK, STEPS, expected, make_batch, spoil_unused, tensors

both = pytest.mark.parametrize("backend", [SdpaBackend(), SdpaMathBackend()], ids=["sdpa", "sdpa.math"])
each_window = pytest.mark.parametrize("window", [None, 1, 15, 16, 17])
# On both sides of a block, of two, and of the multiple that masks are rounded to; 0 is a row of padding.
LENS = [1, 15, 16, 17, 31, 32, 33, 0, 48, 2]
SPEC = AttentionSpec(6, 2, 8, torch.float32)
TOKEN_BYTES = 2 * 2 * 8 * 4  # of SPEC


def decodes(lens: list[int]) -> AttentionBatch:
    return make_batch([(1, n) for n in lens])


def decode_padded(backend: SdpaBackend, batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
    q, k_cache, v_cache = tensors(batch, spec)
    return backend._decode_padded(q[: batch.num_decodes], k_cache, v_cache, batch, spec)


@both
@each_window
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("lens", [LENS, LENS[::-1], [5], [0, 0]], ids=str)
def test_padded_decodes_equal_the_reference(
    backend: SdpaBackend, lens: list[int], kv_heads: int, window: int | None
) -> None:
    """A row without context is zero, not NaN and no assert."""
    spec, batch = replace(SPEC, num_kv_heads=kv_heads, window=window), decodes(lens)
    got = decode_padded(backend, batch, spec)
    torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)
    assert all((row == 0).all() == (n == 0) for row, n in zip(got, lens))


@pytest.mark.parametrize("most", [1, 32, 64, 95, 96, 10**6])
@each_window
def test_no_gathered_buffer_exceeds_its_budget(monkeypatch: pytest.MonkeyPatch, most: int, window: int | None) -> None:
    """So that a dense buffer cannot run out of memory. A sequence that alone needs more is a call of its own."""
    monkeypatch.setattr(sdpa, "GATHER_BYTES", most * TOKEN_BYTES)
    spec, batch = replace(SPEC, window=window), decodes(LENS)
    pieces = padded_decodes(batch, spec, BLOCK)
    assert [i for piece in pieces for i in range(len(LENS))[piece.rows]] == list(range(len(LENS)))
    for piece in pieces:
        num_seqs, num_keys = piece.mask.shape[0], piece.mask.shape[-1]
        assert len(piece.slots) == num_seqs * num_keys
        assert num_seqs == 1 or len(piece.slots) <= most
    assert (len(pieces) == 1) == (most == 10**6)
    if window is None and most in (95, 96):  # keys are 16, 16, 16, 32, 32, 32, 48, ...: three of 32 are 96
        assert [piece.rows.stop for piece in pieces][:2] == ([3, 5] if most == 95 else [3, 6])
    got = decode_padded(SdpaBackend(), batch, spec)
    torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)


@each_window
def test_a_padded_decode_reads_no_slot_of_others(window: int | None) -> None:
    """A NaN in a slot beyond a sequence's end, which another sequence uses or has used, must not pass the mask."""
    spec, batch = replace(SPEC, window=window), decodes([n for n in LENS if n])
    q, k_cache, v_cache = tensors(batch, spec)
    clean = SdpaBackend()._decode_padded(q, k_cache, v_cache, batch, spec)
    spoil_unused(batch, k_cache, v_cache, window=window)
    assert torch.equal(SdpaBackend()._decode_padded(q, k_cache, v_cache, batch, spec), clean)


class NoHostSync(TorchDispatchMode):
    """Raises for operators that make the host wait for the device: a value read, or a size that depends on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in self.FORBIDDEN), f"{func} waits for the device"
        by_mask = "index.Tensor" in str(func) and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert not by_mask, "the size of what a mask selects is known to the device alone"
        assert "repeat_interleave" not in str(func) or (kwargs or {}).get("output_size") is not None
        return func(*args, **(kwargs or {}))


def refuse_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, raises)


@both
def test_padded_decodes_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch, backend: SdpaBackend) -> None:
    """`.item()` or `.tolist()` would wait for the device in every layer."""
    spec, batch = replace(SPEC, window=17), decodes(LENS)
    q, k_cache, v_cache = tensors(batch, spec)
    with monkeypatch.context() as patch, NoHostSync():
        refuse_to_wait(patch)
        got = backend._decode_padded(q, k_cache, v_cache, batch, spec)
        again = backend._decode_padded(q, k_cache, v_cache, batch, spec)
    assert torch.equal(got, again)
    torch.testing.assert_close(got, expected(batch, spec), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [30, 10**6])
def test_indices_of_gathered_keys_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The same for flash where torch takes no block table."""
    monkeypatch.setattr(flash_backend, "GATHER_BYTES", most * TOKEN_BYTES)
    batch = make_batch(STEPS["mixed"])
    with monkeypatch.context() as patch, NoHostSync():
        refuse_to_wait(patch)
        pieces = flash_backend.gathered_keys(batch, SPEC, BLOCK)
    assert sum(len(piece.slots) for piece in pieces) == sum(batch.on_host.context_lens)


def test_waiting_for_the_device_is_detected() -> None:
    with NoHostSync():
        for waits in (
            lambda: torch.ones(1).item(),
            lambda: torch.ones(3).nonzero(),
            lambda: torch.ones(3)[torch.ones(3) > 0],
            lambda: torch.arange(2).repeat_interleave(torch.tensor([1, 2])),
            lambda: bool(torch.ones(1)),
        ):
            with pytest.raises(AssertionError):
                waits()
        torch.arange(2).repeat_interleave(torch.tensor([1, 2]), output_size=3)


def test_layers_of_a_step_share_mask_and_slots() -> None:
    batch, windowed = decodes(LENS), replace(SPEC, window=16)
    for spec in (SPEC, SPEC, windowed):
        decode_padded(SdpaBackend(), batch, spec)
    assert set(batch.memo) == {("padded", SPEC), ("padded", windowed)}
    first = batch.memo["padded", SPEC]
    decode_padded(SdpaBackend(), batch, SPEC)
    assert batch.memo["padded", SPEC] is first


@both
@each_window
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("num_new", "context_len"), [(2, 2), (17, 17), (2, 17), (16, 32), (31, 33)])
def test_prompts_with_a_kv_head_as_the_batch(
    backend: SdpaBackend, num_new: int, context_len: int, kv_heads: int, window: int | None
) -> None:
    spec, batch = replace(SPEC, num_kv_heads=kv_heads, window=window), make_batch([(num_new, context_len)])
    q, k_cache, v_cache = tensors(batch, spec)
    keys, values = (sdpa.gather(cache, batch.on_host.spans[0], context_len) for cache in (k_cache, v_cache))
    position = torch.arange(context_len)
    distance = position[context_len - num_new :, None] - position
    mask = (distance >= 0) & (distance < (window or context_len))
    got = [backend._prefill_by_kv_head(q, keys, values, spec, mask)]
    if num_new == context_len and window is None:
        got.append(backend._prefill_by_kv_head(q, keys, values, spec, None))
    for one in got:
        torch.testing.assert_close(one, expected(batch, spec), rtol=1e-5, atol=1e-5)


Call = tuple[int, int, int, bool]  # sequences, heads, query rows, are heads shared


def calls_on(device: str, lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    batch = make_batch(lens)
    moved = {name: getattr(batch, name).to(device) for name in ("query_starts", "context_lens", "block_tables")}
    spans = [span if isinstance(span, slice) else span.to(device) for span in batch.on_host.spans]
    batch = replace(batch, host=replace(batch.on_host, spans=spans), **moved)
    calls, original = [], SdpaBackend._sdpa

    def counted(self: Any, q: torch.Tensor, keys: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((len(q), q.shape[1], q.shape[2], q.shape[1] != keys.shape[1]))
        return original(self, q, keys, *args, **kwargs)

    q = torch.empty(sum(batch.on_host.query_lens), 6, 8, device=device)
    caches = [torch.empty(64, BLOCK, 2, 8, device=device) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(SdpaBackend, "_sdpa", counted)
        assert SdpaBackend().attend(q, *caches, batch, SPEC).shape == q.shape
    return calls


def test_a_gpu_gets_one_call_for_all_decodes_and_a_cpu_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, decode = [(1, 40), (1, 16), (1, 7), (5, 21), (18, 18)], (1, 2, 3, False)
    assert calls_on("meta", mixed, monkeypatch) == [(3, 2, 3, False), (2, 3, 5, False), (2, 3, 18, False)]
    assert calls_on("meta", [(1, 40)], monkeypatch) == [decode], "one decode alone is not padded"
    assert calls_on("cpu", mixed, monkeypatch) == [decode, decode, decode, (1, 6, 5, True), (1, 6, 18, True)]

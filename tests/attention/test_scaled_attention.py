"""The scales of a KV cache in 8-bit floats: set by a step that measures, by no other, and before it is stored."""

from typing import Any

import pytest
import torch

from nanovllm.attention.base import AttentionBatch, AttentionSpec
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers import scaled_attention
from nanovllm.layers.attention import Attention, Rope, Step
from nanovllm.layers.build import Build
from nanovllm.layers.scaled_attention import ScaledAttention, attention_of
from nanovllm.ops import qk_norm_rope, rotary
from nanovllm.ops.kv_cache import E4M3, E4M3_MAX, HEADROOM, MIN_SCALE, expand_kv
from nanovllm.ops.opset import PLAIN

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 16, 12
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, torch.float32, kv_dtype=E4M3)


class NoBackend:
    def attend(self, q: torch.Tensor, *others: Any, scales: torch.Tensor) -> torch.Tensor:
        return q


def step(measures: bool) -> Step:
    at = torch.arange(TOKENS)
    batch = AttentionBatch(at, at, at, at, 0, TOKENS, None, measures)
    return Step(at, at, None, batch)


@pytest.mark.parametrize("piece", [5, TOKENS - 1, TOKENS, TOKENS + 1])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_scales(monkeypatch: pytest.MonkeyPatch, piece: int, eps: float | None) -> None:
    monkeypatch.setattr(scaled_attention, "PIECE", piece)
    torch.manual_seed(0)
    build = Build(torch.float32, torch.device("cpu"), PLAIN, Parallel())
    layer = ScaledAttention(8, SPEC, KV_HEADS, NoBackend(), build, False, False, eps)
    norms = None
    if eps is not None:
        norms = (layer.q_norm.weight.data.normal_(), layer.k_norm.weight.data.normal_())
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM) * 500
    table = torch.randn(TOKENS, DIM)
    angles = rotary.gather_angles(table, torch.arange(TOKENS))
    rope = Rope(angles, None)  # as the plain operators take them
    k, v = torch.zeros(2, 1, TOKENS, KV_HEADS, DIM)
    qk_norm_rope.qk_norm_rope(qkv, norms, eps or 0.0, angles, None, k, v, torch.arange(TOKENS), HEADS)
    cache = tuple(torch.zeros(1, TOKENS, KV_HEADS, DIM, dtype=torch.uint8) for _ in range(2))
    layer.mix(qkv, rope, step(False), cache)
    assert layer.scales.tolist() == [1.0, 1.0]
    assert (cache[1] & 0x7F).max() == 0x7E  # cut off at 448
    layer.mix(qkv, rope, step(True), cache)
    wanted = torch.tensor([k.abs().max(), v.abs().max()]) * HEADROOM / E4M3_MAX
    torch.testing.assert_close(layer.scales, wanted.clamp(min=MIN_SCALE))
    for numbers, stored, scale in zip((k, v), cache, layer.scales.tolist()):
        torch.testing.assert_close(expand_kv(stored, torch.float32) * scale, numbers, rtol=2**-4, atol=scale * 2**-9)
    measured = layer.scales.clone()
    layer._measure(qkv, Rope(table, torch.arange(TOKENS)))  # as kernels take them
    assert torch.equal(layer.scales, measured)
    layer.mix(qkv * 3, rope, step(False), cache)
    assert torch.equal(layer.scales, measured)


def test_only_for_8_bit_floats() -> None:
    assert attention_of(SPEC) is ScaledAttention
    for kind in (None, torch.int8, torch.float16):
        assert attention_of(AttentionSpec(HEADS, KV_HEADS, DIM, torch.float32, kv_dtype=kind)) is Attention

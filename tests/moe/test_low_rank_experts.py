"""Low-rank experts: the formula, forms and their bytes, and buffers that layers of different sizes share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.lowrank.format import SvdMetadata
from nanovllm.memory.budget import GIB, Memory, Wants, fit_host, size_tiers, spread
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.moe.offload.offload import Offload, OffloadOptions
from nanovllm.moe.offload.report import ExpertCall
from nanovllm.moe.resident import resident_experts
from nanovllm.ops.opset import PLAIN
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.expert_form import ExpertForm
from tests.moe.offload_rig import CPU, FixedIdle, LazyStream, checked_ops

HIDDEN, SIZE, EXPERTS, TOP_K = 24, 32, 6, 2
BUILD = Build(torch.float32, torch.device("cpu"), PLAIN, Parallel())
FORMS = (
    ExpertForm(HIDDEN, SIZE, 8, 16, "input"),
    ExpertForm(HIDDEN, SIZE, 16, 8, "output"),
    ExpertForm.dense(HIDDEN, SIZE),
    ExpertForm(HIDDEN, SIZE, 24, 32, "input"),
)
MOE = MoeConfig(EXPERTS, TOP_K, SIZE, True, (True,) * len(FORMS))


def resident_layer(number: int):
    made = resident_experts(dict(enumerate(FORMS)))(number, MOE, HIDDEN, BUILD)
    generator = torch.Generator().manual_seed(number)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return made


def random_call(num_tokens: int, generator: torch.Generator):
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int().contiguous()
    return x, ids, torch.rand(num_tokens, TOP_K, generator=generator)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_the_formula(number: int, num_tokens: int) -> None:
    layer, form = resident_layer(number), FORMS[number]
    assert layer.form.is_low_rank
    x, ids, weights = random_call(num_tokens, torch.Generator().manual_seed(1))
    u1, u3 = (u.T for u in layer.u13.weight.chunk(2))  # [H, r]
    gate_up, down = layer.gate_up.weight.view(layer.gate_up_shape), layer.down.weight.view(layer.down_shape)
    wanted = torch.zeros_like(x)
    for t, e, weight in zip(range(num_tokens), ids.tolist(), weights.tolist()):
        for expert, share in zip(e, weight):
            v1, v3 = (v.T for v in gate_up[expert].chunk(2))  # [r, I]
            a = F.silu(x[t] @ u1 @ v1) * (x[t] @ u3 @ v3)
            u2 = layer.u2.weight
            wanted[t] += share * (down[expert] @ (u2 @ a) if form.side == "input" else u2 @ (down[expert] @ a))
    torch.testing.assert_close(layer(x, ids, weights), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_cached", "num_streaming", "num_pieces"), [(0, 2, 0), (3, 2, 3), (8, 4, 2), (24, 4, 9)])
@pytest.mark.parametrize("halves", [False, True])
def test_layers_of_different_sizes_share_buffers(num_cached, num_streaming, num_pieces, halves) -> None:
    """Copies as late as they may be, every order checked: the bits of resident, and bytes counted by layer."""
    stream = LazyStream()
    build = dataclasses.replace(BUILD, ops=checked_ops(stream))
    options = OffloadOptions(num_cached, num_streaming, piece_bytes=500)
    offload = Offload(MOE, HIDDEN, build, CPU, options, stream=stream, forms=FORMS)
    stream.buffer_bytes = offload.shape.num_bytes
    offload.idle = FixedIdle(num_pieces)
    assert offload.shape.numel == max(form.numel for form in FORMS)
    assert offload.cache.num_pieces > 1
    resident = [resident_layer(number) for number in range(len(FORMS))]
    layers = [offload.experts(number, MOE, HIDDEN, build) for number in range(len(FORMS))]
    for number, (layer, known) in enumerate(zip(layers, resident)):
        for name in ("u13", "u2") if FORMS[number].is_low_rank else ():
            getattr(layer, name).weight.data.copy_(getattr(known, name).weight)
        for e in range(EXPERTS):
            block = offload.store.block(number, e)
            assert block.numel() == FORMS[number].numel
            views = offload.shape.views(block, number)
            views[0].copy_(known.gate_up.weight.view(known.gate_up_shape)[e])
            views[1].copy_(known.down.weight.view(known.down_shape)[e])
    gates = torch.Generator().manual_seed(9)
    offload.watch_gates([torch.randn(EXPERTS, HIDDEN, generator=gates) for _ in FORMS])
    generator = torch.Generator().manual_seed(4)
    for num_tokens in (7, 1, 1, 2, 1, 4, 1, 1, 1):
        for number, layer in enumerate(layers):
            x, ids, weights = random_call(num_tokens, generator)
            wanted = resident[number](x, ids, weights)
            if not halves:
                assert torch.equal(layer(x, ids, weights), wanted)
                continue
            pairs = torch.full((num_tokens, TOP_K, FORMS[number].out_size), float("nan"))
            call = ExpertCall(number, layer.enter(x), ids, weights, pairs)
            offload.compute_present(call)
            offload.compute_missing(call, stream.download(offload.report.pack(call, x)))
            assert torch.equal(layer.leave(PLAIN.sum_pairs(pairs)), wanted)
    stats = offload.stats()
    assert stats.bytes_copied == stream.bytes_copied
    if num_pieces == 0:
        assert stats.bytes_copied == sum(a * b for a, b in zip(stats.layer_misses, offload.shape.layer_bytes))
    offload.close()


def test_no_tokens_no_work() -> None:
    offload = Offload(MOE, HIDDEN, BUILD, CPU, OffloadOptions(0, 2), forms=FORMS)
    for number in range(len(FORMS)):
        layer = offload.experts(number, MOE, HIDDEN, BUILD)
        out = layer(torch.empty(0, HIDDEN), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
        assert out.shape == (0, HIDDEN)


def test_forms_round_svd_ranks_up() -> None:
    svd_ranks = {0: {"w1": 9, "w2": 8, "w3": 16}, 2: {"w1": 24, "w2": 1, "w3": 1}}
    metadata = SvdMetadata(
        method="pca",
        dtype="bfloat16",
        layer_ids=(0, 2),
        num_experts=4,
        hidden_size=24,
        intermediate_size=32,
        svd_ranks=svd_ranks,
        w2_modes={0: "input", 2: "output"},
        ridge=0.0,
        teacher_hash="",
        calibration_hash=None,
        kept=0.5,
    )
    first, second = metadata.forms()
    assert first.parts == {"gate": (32, 16), "up": (32, 16), "down": (24, 8)}
    assert first.shared == {"u13": (32, 24), "u2": (8, 32)}
    assert second.parts == {"gate": (32, 24), "up": (32, 24), "down": (8, 32)}
    assert second.shared == {"u13": (48, 24), "u2": (24, 8)}
    assert (first.numel, first.shared_numel, first.out_size) == (2 * 512 + 192, 768 + 256, 24)
    assert (second.out_size, ExpertForm.dense(24, 32).numel) == (8, 3 * 24 * 32)


def test_host_memory_is_counted_expert_by_expert() -> None:
    """One expert of each layer, from the last to the first, then another one of each: 10 + 1 + 5, three times."""
    sizes = (5, 1, 10)
    counts = [sum(fit_host(n, sizes, 3)) for n in (0, 9, 10, 11, 15, 16, 25, 26, 27, 32, 47, 48, 1000)]
    assert counts == [0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 8, 9, 9]
    assert [fit_host(n, sizes, 3) for n in (10, 11, 27, 1000)] == [(0, 0, 1), (0, 1, 1), (1, 2, 2), (3, 3, 3)]


@pytest.mark.parametrize("num_layers", [1, 3, 32])
def test_buffers_and_host_memory_hold_as_many_of_every_layer(num_layers: int) -> None:
    """So that room for all experts is room for all of every layer, whatever remains where."""
    total = 8 * num_layers
    for num_buffers in range(0, total + 1):
        blocks = fit_host(total - num_buffers, (1,) * num_layers, 8)
        assert [a + b for a, b in zip(spread(num_buffers, num_layers), blocks)] == [8] * num_layers


def test_tiers_of_low_rank_experts() -> None:
    folder = Path(__file__).parents[2] / "benchmarks/models/mixtral-8x7b"
    config = ModelConfig.from_hf(open_checkpoint(folder).config)
    forms = tuple(ExpertForm(4096, 14336, 1024 + 8 * i, 1024, "output") for i in range(32))
    dense, model = ModelFacts(config), ModelFacts(config, forms=forms)
    assert model.expert_bytes == 2 * 14336 * (2 * (1024 + 8 * 31) + 1024)
    assert model.all_experts_bytes == sum(8 * 2 * form.numel for form in forms)
    assert model.dense_bytes - dense.dense_bytes == sum(2 * 4096 * (2 * l.columns + 1024) for l in forms)  # noqa: E741
    wants = Wants(max_model_len=2048, max_num_batched_tokens=1024, max_num_seqs=16)
    resident = size_tiers(Memory(48 * GIB, 64 * GIB), model, wants)
    assert (resident.placement, resident.gpu_expert_bytes) == ("resident", model.all_experts_bytes)
    assert size_tiers(Memory(48 * GIB, 64 * GIB), dense, wants).placement == "offload"
    offload = size_tiers(Memory(16 * GIB, 20 * GIB), model, wants)
    assert offload.placement == "offload"
    assert offload.gpu_expert_bytes == offload.num_buffers * model.expert_bytes
    blocks = fit_host(16 * GIB, model.layer_bytes, 8)
    assert 0 < offload.host_experts == sum(blocks) < 256
    assert offload.host_bytes == sum(a * b for a, b in zip(blocks, model.layer_bytes)) <= 16 * GIB
    assert offload.held == tuple(min(a + b, 8) for a, b in zip(blocks, offload.quotas))
    assert offload.disk_bytes == sum((8 - a) * b for a, b in zip(offload.held, model.layer_bytes))
    assert offload.host_experts + offload.lone_experts + offload.disk_experts == 256

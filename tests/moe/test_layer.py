"""The sparse layer gives the sum of the formula, wherever experts live; every chosen expert is part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.moe.layer import MoeLayer
from nanovllm.moe.resident import ResidentExperts
from nanovllm.ops.opset import PLAIN
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.expert_form import ExpertForm
from nanovllm.weights.loader import load_weights

TRAINED = Path(__file__).parent.parent / "fixtures" / "tiny-mixtral"
BUILD = Build(torch.float32, torch.device("cpu"), PLAIN, Parallel())
HIDDEN, SIZE = 24, 20


def make(num_experts: int, top_k: int, renormalise: bool, build: Build = BUILD) -> MoeLayer:
    moe = MoeConfig(num_experts, top_k, SIZE, renormalise, (True,))
    layer = MoeLayer(moe, HIDDEN, ResidentExperts(moe, HIDDEN, build), build)
    generator = torch.Generator().manual_seed(num_experts)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    return layer


def formula(layer: MoeLayer, x: torch.Tensor, num_experts: int) -> torch.Tensor:
    """One token and one expert after another."""
    gate_up = layer.experts.gate_up.weight.view(num_experts, 2, SIZE, HIDDEN)
    down = layer.experts.down.weight.view(num_experts, HIDDEN, SIZE)
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        probabilities = (layer.gate.weight @ token).softmax(0)
        chosen = probabilities.topk(layer.top_k).indices.tolist()
        total = probabilities[chosen].sum() if layer.renormalise else 1.0
        for e in chosen:
            gate, up = gate_up[e, 0] @ token, gate_up[e, 1] @ token
            out[t] += probabilities[e] / total * (down[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (8, 2), (8, 8), (33, 4)])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_the_sum_of_the_chosen_experts(num_experts: int, top_k: int, renormalise: bool, num_tokens: int) -> None:
    layer = make(num_experts, top_k, renormalise)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), formula(layer, x, num_experts), rtol=1e-4, atol=1e-5)
    if not renormalise and top_k < num_experts:
        layer.renormalise = True
        assert not torch.allclose(layer(x), formula(make(num_experts, top_k, False), x, num_experts), atol=1e-3)


def test_parts_say_where_every_expert_is() -> None:
    experts = make(3, 2, True).experts
    assert experts.gate_up.parts == {f"{e}.{which}": SIZE for e in range(3) for which in ("gate", "up")}
    assert experts.down.parts == {"0": HIDDEN, "1": HIDDEN, "2": HIDDEN}
    assert list(experts.gate_up.parts) == ["0.gate", "0.up", "1.gate", "1.up", "2.gate", "2.up"]


@dataclass(frozen=True)
class CountingRanks(Parallel):
    """Keeps the size of the rows that are summed, and sums nothing."""

    reduced: list[int] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            self.reduced.append(x.shape[1])
        return x


FORMS = {
    "dense": ExpertForm.dense(HIDDEN, SIZE),
    "input": ExpertForm(HIDDEN, SIZE, 8, 6, "input"),
    "output": ExpertForm(HIDDEN, SIZE, 8, 6, "output"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared_size", [0, 2 * SIZE])
def test_ranks_add_up_once_a_layer(form: str, shared_size: int) -> None:
    """With a shared MLP too. The parts of two ranks, added, are the layer of one rank."""
    moe = MoeConfig(8, 2, SIZE, True, (True,), shared_size=shared_size)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))

    def layer_of(ranks: Parallel) -> MoeLayer:
        build = replace(BUILD, parallel=ranks)
        return MoeLayer(moe, HIDDEN, ResidentExperts(moe, HIDDEN, build, FORMS[form]), build)

    ranks = [CountingRanks(rank, 2) for rank in (0, 1)]
    whole, parts = layer_of(Parallel()), [layer_of(rank) for rank in ranks]
    generator = torch.Generator().manual_seed(7)
    for name, parameter in whole.named_parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
        for rank, part in enumerate(parts):
            fill_share(part.get_parameter(name).data, parameter.data, part, name, rank)
    found = sum(part(x) for part in parts)
    assert [rank.reduced for rank in ranks] == [[6 if form == "output" and not shared_size else HIDDEN]] * 2
    torch.testing.assert_close(found, whole(x), rtol=1e-4, atol=1e-4)


def fill_share(mine: torch.Tensor, all_of_it: torch.Tensor, layer: MoeLayer, name: str, rank: int) -> None:
    """As the loader does: each named part of a stack is cut in one dimension, or whole."""
    owner: Any = layer.get_submodule(name.rpartition(".")[0])
    start = whole_start = 0
    for part, rows in owner.parts.items():
        shard = owner.shards.get(part)
        whole_rows = shard.total if shard is not None and shard.dim == 0 else rows
        piece = all_of_it[whole_start : whole_start + whole_rows]
        if shard is not None:
            piece = piece.narrow(shard.dim, shard.start, shard.length)
        mine[start : start + rows] = piece
        start, whole_start = start + rows, whole_start + whole_rows


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_every_expert_and_keep_the_whole_router(size: int) -> None:
    """Several ranks hold the same architecture, each a slice of it."""
    layer = make(8, 2, True, replace(BUILD, parallel=Parallel(size=size)))
    assert isinstance(layer.experts, ResidentExperts)
    assert layer.gate.weight.shape == (8, HIDDEN)
    assert layer.experts.gate_up.weight.shape == (8 * 2 * SIZE // size, HIDDEN)
    assert layer.experts.down.weight.shape == (8 * HIDDEN, SIZE // size)


def test_an_expert_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3: intermediate size of an expert=20"):
        make(8, 2, True, replace(BUILD, parallel=Parallel(size=3)))


# ---- experts that live elsewhere -------------------------------------------------------------------------------------


def build_trained(experts: Callable[..., Any] | None = None, **changes: Any) -> Transformer:
    config = ModelConfig.from_hf({**open_checkpoint(TRAINED).config, **changes})
    return find_family(config)(config, Parts(BUILD, backend=None, max_model_len=64, experts=experts))  # type: ignore[arg-type]


class Elsewhere:
    graph_safe = False

    def __init__(self, *asked: Any) -> None:
        self.asked = asked

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert ids.shape == weights.shape == (len(x), 2)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        return x + ids.sum()


class SideInOrder:
    """A side stream without a GPU: notes what is started and joined, and computes at the join."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.seen.append("start")

        def join() -> torch.Tensor:
            self.seen.append("join")
            return function(x)

        return join


def test_the_shared_mlp_runs_beside_the_experts_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    side: Any = SideInOrder()
    moe = MoeConfig(8, 2, SIZE, True, (True,), shared_size=12)
    layers = []
    for build in (BUILD, replace(BUILD, side=side)):
        layers.append(MoeLayer(moe, HIDDEN, ResidentExperts(moe, HIDDEN, build), build))
        generator = torch.Generator().manual_seed(3)
        for parameter in layers[-1].parameters():
            parameter.data.normal_(0, 0.5, generator=generator)
    monkeypatch.setattr("nanovllm.moe.layer.OVERLAP_TOKENS", 5)
    for num_tokens, seen in ((5, ["start", "join"]), (6, [])):
        x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
        assert torch.equal(layers[0](x), layers[1](x))
        assert side.seen == seen
        side.seen.clear()


def test_experts_can_live_elsewhere() -> None:
    model = build_trained(Elsewhere)
    assert not model.graph_safe
    assert build_trained().graph_safe
    assert [layer.mlp.experts.asked[0] for layer in model.layers] == [0, 1, 2, 3]
    _, moe, hidden, build = model.layers[0].mlp.experts.asked
    assert (moe.num_experts, moe.top_k, moe.intermediate_size, hidden, build) == (8, 2, 256, 128, BUILD)
    names = {name for name, _ in model.named_parameters()}
    assert "layers.0.mlp.gate.weight" in names
    assert not any("experts" in name for name in names)
    layer, x = model.layers[0].mlp, torch.ones(5, 128)
    layer.gate.weight.data.zero_()  # a tie: experts 0 and 1
    torch.testing.assert_close(layer(x), x + 5)


def test_by_default_experts_are_resident_and_every_one_counts() -> None:
    model = build_trained()
    load_weights(model, open_checkpoint(TRAINED), model.rules)
    for layer in model.layers:
        assert isinstance(layer.mlp.experts, ResidentExperts)
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
        before = layer.mlp(x)
        assert (before.abs().amax(1) > 0).all()
        for e in range(8):
            down = layer.mlp.experts.down.weight.view(8, 128, 256)
            kept = down[e].clone()
            down[e].zero_()
            changed = (layer.mlp(x) != before).any(1)
            assert 0 < changed.sum() < 256, e
            down[e].copy_(kept)


def test_a_model_with_experts_is_never_built_dense() -> None:
    assert not any(layer.fuses for layer in build_trained().layers)
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 64, "mlp_only_layers": [0, 1, 3]}
    layers = build_trained(**qwen).layers
    assert [isinstance(layer.mlp, MoeLayer) for layer in layers] == [False, False, True, False]
    assert layers[2].mlp.experts.gate_up.weight.shape == (8 * 2 * 64, 128)
    assert layers[0].mlp.gate_up.weight.shape == (2 * 256, 128)

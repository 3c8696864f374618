"""When a Balancer begins an exchange, and when it waits for it. What is exchanged: tests/ranks/test_experts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import MoeConfig
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.rebalance import BESIDE, Balancer, add_places
from nanovllm.moe.resident import ResidentExperts
from nanovllm.ops.opset import PLAIN


@dataclass(frozen=True)
class WaitingRanks(Parallel):
    """The other rank never answers: what was begun, and how often it was waited for."""

    begun: list[tuple[list[int], list[int]]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def begin_exchange(
        self, rows: torch.Tensor, found: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], object]:
        assert (len(rows), len(found)) == (sum(sent), sum(received))
        assert rows.is_contiguous()
        assert found.is_contiguous()
        found.fill_(7)
        number = len(self.begun)
        self.begun.append((sent, received))
        return lambda: self.waited.append(number)


@torch.inference_mode()
def test_an_exchange_is_waited_for_before_a_later_launch() -> None:
    ranks = WaitingRanks(0, 2, expert_size=2)
    build, moe = Build(torch.float32, torch.device("cpu"), PLAIN, ranks), MoeConfig(4, 1, 8, True, (True,))
    layers = [ResidentExperts(moe, 16, build) for _ in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.zero_()
        add_places(layer, 4, 0)
    load = ExpertLoad(2, 4, torch.device("cpu"), window_size=1)
    load.add([torch.tensor([0, 0, 0, 1, 1, 1, 2], dtype=torch.int32)[:, None]] * 2, 7)
    balancer = Balancer(layers, load, ranks, step_interval=1)
    tables = [layer.spread.arrangement for layer in layers if layer.spread is not None]
    balancer.before_launch(1)  # the loads
    for number, layer in enumerate(layers):
        assert layer.spread is not None
        balancer.before_launch(1)
        begun = len(ranks.begun)
        assert begun == 4 * (number + 1), "one expert leaves and one comes: gate and up, down"
        for _ in range(BESIDE - 1):
            balancer.before_launch(1)
        assert len(ranks.begun) == begun
        assert len(ranks.waited) == 4 * number, "no launch has waited for what was begun"
        assert layer.spread.arrangement == tables[number]
        assert not any(parameter.any() for parameter in layer.parameters()), "a step reads the old weights"
    balancer.before_launch(1)
    assert ranks.waited == list(range(8))
    for layer, old in zip(layers, tables):
        assert layer.spread is not None
        assert layer.spread.arrangement != old
        changed = (layer.gate_up.weight.view(2, -1).view(torch.uint8) == 7).all(1)
        assert changed.tolist() in ([True, False], [False, True])

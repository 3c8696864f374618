"""What balancing experts over ranks gains: a skewed trace is replayed without it and with it.

The trace: in every layer the experts' popularity follows Zipf's law (the r-th gets 1 / r**skew), other experts are
popular in each layer, and each token draws top_k distinct ones. The first half of the steps is what the load window has
seen; the arrangement is made from it, and the second half is replayed: no token is used to plan for itself. Each token
goes to the copy that the engine would choose (`choose_copy`), so counts are whole tokens, not shares.

balancedness = mean / max tokens of a rank, of each layer by itself, then the mean over layers: ranks meet after every
layer, so layers whose busiest ranks differ do not balance each other. It is also what a step of this size sees by
itself: few tokens cannot be divided evenly by any arrangement.

numpy is imported by the functions that compute: SkewedTrace is read for `nanovllm bench --help`, which must be instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.bench.report import Columns, Series, print_rows
from nanovllm.errors import ConfigError
from nanovllm.moe.balance import Arrangement, balancedness, check_sizes, choose_copy, in_order, rebalance

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SkewedTrace:
    """Which experts are chosen, and over how many ranks they are spread."""

    num_experts: int = 64
    top_k: int = 6
    num_layers: int = 8
    skew: float = 1.0
    num_steps: int = 32
    step_tokens: int = 512
    num_ranks: int = 8
    num_redundant_experts: int = 16
    num_nodes: int = 1
    num_groups: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuses what cannot be, before anything is drawn."""
        sizes = (self.num_experts, self.num_places, self.num_ranks, self.num_groups, self.num_nodes)
        check_sizes(*sizes)
        in_order(self.num_experts, self.num_places, self.num_ranks)
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"--top-k {self.top_k}: must be 1 to {self.num_experts}, the number of experts")
        if self.num_steps < 2 or self.step_tokens < 1 or self.num_layers < 1:
            raise ConfigError(
                f"--num-steps {self.num_steps} --step-tokens {self.step_tokens} --num-layers {self.num_layers}: at "
                f"least 2 steps (the arrangement is made from the first half), 1 token and 1 layer"
            )
        if not 0 <= self.skew <= 10:
            raise ConfigError(f"--skew {self.skew}: must be 0 (all experts alike) to 10")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: must not be negative")

    @property
    def num_places(self) -> int:
        return self.num_experts + self.num_redundant_experts

    def draw(self) -> np.ndarray:
        """[layers, steps, tokens, top_k] experts. Of exponential draws, divided by the probabilities, the k smallest
        are k distinct choices by those probabilities."""
        import numpy as np

        rng = np.random.default_rng(self.seed)
        found = np.empty((self.num_layers, self.num_steps, self.step_tokens, self.top_k), dtype=np.int64)
        for layer in found:
            chances = (1 + rng.permutation(self.num_experts)) ** -self.skew
            for step in layer:
                keys = rng.exponential(size=(self.step_tokens, self.num_experts)) / chances
                step[:] = np.argsort(keys, axis=1)[:, : self.top_k]
        return found


def tokens_of_ranks(chosen: np.ndarray, arrangement: Arrangement, num_ranks: int) -> np.ndarray:
    """[steps, ranks]: rows that each rank computes of one layer's choices [steps, tokens, top_k]."""
    import numpy as np

    num_tokens, counts = chosen.shape[1], arrangement.counts
    places = np.empty((num_tokens, arrangement.num_experts), dtype=np.int64)
    for token in range(num_tokens):
        for expert, copies in enumerate(arrangement.copies):
            places[token, expert] = copies[choose_copy(token, counts[expert])]
    ranks = places[np.arange(num_tokens)[None, :, None], chosen] // (len(arrangement.experts) // num_ranks)
    return np.stack([np.bincount(step.ravel(), minlength=num_ranks) for step in ranks])


def replay(trace: SkewedTrace) -> dict[str, Any]:
    import numpy as np

    trace.check()
    chosen = trace.draw()
    seen, later = np.split(chosen, [trace.num_steps // 2], axis=1)
    loads = [np.bincount(layer.ravel(), minlength=trace.num_experts).tolist() for layer in seen]
    plain = in_order(trace.num_experts, trace.num_places, trace.num_ranks)
    arrangements = {
        "before": [plain] * trace.num_layers,
        "after": rebalance(loads, trace.num_places, trace.num_groups, trace.num_nodes, trace.num_ranks),
    }
    found: dict[str, Any] = {}
    for name, layers in arrangements.items():
        tokens = [tokens_of_ranks(layer, where, trace.num_ranks) for layer, where in zip(later, layers)]
        each = [balancedness(layer.sum(0).tolist()) for layer in tokens]
        steps = [balancedness(step.tolist()) for layer in tokens for step in layer]
        ranks = [sorted((layer.sum(0) / layer.sum(0).mean()).tolist(), reverse=True) for layer in tokens]
        found[name] = {
            "balancedness": sum(each) / len(each),
            "by_layer": each,
            "of_a_step": sum(steps) / len(steps),
            "rank_loads": np.mean(ranks, axis=0).tolist(),  # busiest first, 1 = the mean
        }
    return found


def print_replay(found: dict[str, Any], trace: SkewedTrace) -> None:
    before, after = found["before"], found["after"]
    rows = [
        {"name": f"layer {i}", "before": b, "after": a}
        for i, (b, a) in enumerate(zip(before["by_layer"], after["by_layer"]))
    ]
    rows.append({"name": "mean over layers", "before": before["balancedness"], "after": after["balancedness"]})
    of_step = f"the same, steps of {trace.step_tokens} tokens"
    rows.append({"name": of_step, "before": before["of_a_step"], "after": after["of_a_step"]})
    columns: Columns = [("mean / max tokens of a rank", "name")]
    columns += [("in order", "before", "{:.3f}"), ("balanced", "after", "{:.3f}")]
    print_rows(
        f"{trace.num_experts} experts on {trace.num_ranks} ranks, {trace.num_redundant_experts} redundant, "
        f"Zipf {trace.skew:g}",
        rows,
        columns,
    )


def lines_of(found: dict[str, Any]) -> dict[str, dict[str, Series]]:
    """For `report.plot_lines`: how much more than the mean the ranks have, and the balancedness of every layer."""
    names = {"before": "in order", "after": "balanced"}

    def series(key: str) -> Series:
        return {title: list(enumerate(found[name][key], start=1)) for name, title in names.items()}

    return {
        "tokens / mean": {"busiest rank first": series("rank_loads")},
        "mean / max": {"by layer": series("by_layer")},
    }

"""Made-up choices of experts, and the hit rates that the real cache reaches with them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nanovllm.moe.offload.cache import DECAY, ExpertCache


@dataclass(frozen=True)
class Routing:
    """Made-up choices of experts, with what is known of real ones: some experts are popular in a layer (Zipf), which
    ones drifts with the text, and a token likes an expert of the token before it."""

    num_experts: int = 8
    top_k: int = 2
    skew: float = 0.7  # popularity of the r-th most popular expert ~ r^-skew
    drift: float = 0.01  # chance per token and layer that two experts change places in popularity
    repeat: float = 0.05  # chance that a choice is one of the last token's

    def tokens(self, num_layers: int, seed: int = 0) -> Iterator[list[list[int]]]:
        """For each token, without end: for each layer the top_k distinct experts."""
        draw = random.Random(seed)
        weights = [(place + 1) ** -self.skew for place in range(self.num_experts)]
        places = [draw.sample(range(self.num_experts), self.num_experts) for _ in range(num_layers)]
        last: list[list[int]] = [[] for _ in range(num_layers)]
        while True:
            for layer in range(num_layers):
                if draw.random() < self.drift:
                    a, b = draw.sample(range(self.num_experts), 2)
                    places[layer][a], places[layer][b] = places[layer][b], places[layer][a]
                last[layer] = self._choose(draw, [weights[place] for place in places[layer]], last[layer])
            yield [list(chosen) for chosen in last]

    def _choose(self, draw: random.Random, weights: Sequence[float], last: list[int]) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < self.top_k:
            again = [expert for expert in last if expert not in chosen]
            if again and draw.random() < self.repeat:
                chosen.append(draw.choice(again))
            else:
                rest = [0.0 if e in chosen else weight for e, weight in enumerate(weights)]
                chosen += draw.choices(range(self.num_experts), rest)
        return chosen


def simulate_hit_rates(
    cached: Sequence[int],
    policy: str = "lfu",
    routing: Routing | None = None,
    num_layers: int = 8,
    num_tokens: int = 800,
    decay: float = DECAY,
    seed: int = 0,
) -> list[float]:
    """Hit rate of one sequence's decode for each number of experts cached per layer. With few layers the ring, which is
    not of the layer but holds what it held, adds some points."""
    routing = routing or Routing()
    rates = []
    for per_layer in cached:
        cache = ExpertCache(
            num_layers, routing.num_experts, routing.top_k, per_layer * num_layers, 2 * routing.top_k, policy, decay
        )
        for number, choices in zip(range(num_tokens), routing.tokens(num_layers, seed)):
            if number == num_tokens // 10:
                cache.layer_hits, cache.layer_misses = [0] * num_layers, [0] * num_layers  # the start is cold
            for layer, experts in enumerate(choices):
                for wave in cache.select(layer, dict.fromkeys(experts, 1)).waves:
                    for expert, buffer in wave:
                        cache.begin(layer, expert, buffer)
                        cache.copied(buffer, cache.num_pieces)
                cache.adopt(layer)
        hits, misses = sum(cache.layer_hits), sum(cache.layer_misses)
        rates.append(hits / (hits + misses))
    return rates

"""What the host must know of a layer's routing: packed on the device, downloaded once, unpacked on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.ops.opset import Ops

GUESS_LAYERS = 2  # when the next layer's likely experts are all here, idle time goes to the one after it
GUESS_TOKENS = 64  # longer calls want nearly all experts and fill the ring with them: nothing to guess, no room for it
CPU_ROWS = 64  # cpu_misses: x is downloaded too, for calls of at most so many tokens


@dataclass
class ExpertCall:
    """The tensors of one call of a layer's experts, T tokens with top_k choices each. A captured segment makes them
    anew until it is captured; from then on their addresses stay."""

    layer: int  # among the sparse ones
    z: torch.Tensor  # [T, in_size], what the experts read: x itself, or projected (low-rank)
    ids: torch.Tensor  # int32 [T, top_k]
    weights: torch.Tensor  # float32 [T, top_k]
    pairs: torch.Tensor  # [T, top_k, out_size], written: what each expert gives, weighted


@dataclass(frozen=True)
class HostRouting:
    ids: np.ndarray  # int32 [T, top_k]
    guesses: list[list[int]]  # experts of the next layer, likeliest first, and of those after it
    rows: tuple[torch.Tensor, torch.Tensor] | None  # cpu_misses: z and weights on the host

    def token_counts(self) -> dict[int, int]:
        """Expert -> pairs that name it."""
        counts = np.bincount(self.ids.ravel())
        experts = np.flatnonzero(counts)
        return dict(zip(experts.tolist(), counts[experts].tolist()))


class RoutingReport:
    """One int32 tensor: chosen ids; ids that the next layers' routers would choose for this layer's input; with
    `cpu_misses` the router's weights and z. Its length depends on the layer and the number of tokens alone."""

    def __init__(self, ops: Ops, num_experts: int, top_k: int, guesses: bool, cpu_misses: bool) -> None:
        self._ops, self._num_experts, self._top_k = ops, num_experts, top_k
        self._guesses, self._cpu_misses = guesses, cpu_misses
        self._gates_after: list[torch.Tensor] = []  # routers of the layers after each, stacked: one product for all

    def watch_gates(self, gates: list[torch.Tensor]) -> None:
        stacked = [torch.cat(gates[i + 1 : i + 1 + GUESS_LAYERS]) for i in range(len(gates) - 1)]
        for old, new in zip(self._gates_after, stacked):
            old.copy_(new)  # captured segments read this address
        self._gates_after = self._gates_after or stacked

    def pack(self, call: ExpertCall, x: torch.Tensor) -> torch.Tensor:
        """On the device; may be captured. Routers read x."""
        parts = [call.ids]
        if self._num_guessed(call):
            logits = self._ops.linear(x, self._gates_after[call.layer])  # [tokens, layers * experts]
            parts.append(self._ops.route(logits.view(-1, self._num_experts), self._top_k, False)[0])
        if self._has_rows(call):
            parts += [call.weights.view(torch.int32), call.z.contiguous().view(torch.int32)]
        return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else call.ids.reshape(-1)

    def unpack(self, call: ExpertCall, report: np.ndarray) -> HostRouting:
        size, num_guessed = call.ids.numel(), self._num_guessed(call)
        guesses = []
        if num_guessed:
            flat = report[size : size * (1 + num_guessed)].reshape(len(call.z), num_guessed, -1)
            guesses = [_most_wanted(flat[:, later].ravel().tolist()) for later in range(num_guessed)]
        rows = None
        if self._has_rows(call):
            rest = torch.from_numpy(report[size * (1 + num_guessed) :])
            weights = rest[:size].view(torch.float32).view(call.ids.shape)
            rows = rest[size:].view(call.z.dtype).view(call.z.shape), weights
        return HostRouting(report[:size].reshape(call.ids.shape), guesses, rows)

    def _num_guessed(self, call: ExpertCall) -> int:
        """Later layers whose experts are guessed."""
        if not self._guesses or call.layer >= len(self._gates_after) or len(call.z) > GUESS_TOKENS:
            return 0
        return len(self._gates_after[call.layer]) // self._num_experts

    def _has_rows(self, call: ExpertCall) -> bool:
        return self._cpu_misses and len(call.z) <= CPU_ROWS


def _most_wanted(experts: list[int]) -> list[int]:
    """Distinct, by how often they are named; the router's order among equals."""
    counts = Counter(experts)
    return sorted(counts, key=lambda expert: -counts[expert])

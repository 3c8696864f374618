"""How fast a model can write at most, from bytes and bandwidths. No torch here.

A step reads its weights once, whatever the batch. With B sequences, each token choosing top_k of E experts evenly, a
layer touches on average

    D(B) = E x (1 - (1 - top_k / E)^B)

of them (2.0, 5.5, 7.9 of 8 for B = 1, 4, 16). A touched expert is in a buffer with probability h, else it is copied:

    bytes copied = sum over layers of D(B) x (1 - h(quota)) x bytes of an expert

and comes from disk with probability 1 - h(held), where held are the experts of the layer that cached buffers and host
memory hold together: different ones, the hottest of all (moe/offload/cache.py).

Routing decides h. Even routing: h = quota / E, the worst case. Real routers are skewed; simulated with skewed
popularity, a layer's cache of a quarter, half and three quarters of its experts hit 0.49, 0.70 and 0.87 of the time at
best (`SKEWED`). A large batch touches everything, and then no cache is better than its size: the skew's gain shrinks
with D(B). Predictions are limits: copies at the full bandwidth of the link, and (upper end) hidden behind computing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.memory.budget import Tiers
from nanovllm.memory.facts import ModelFacts

DISK_BANDWIDTH = 3e9  # bytes a second, assumed
LINK_BANDWIDTH = 25e9  # from host to device, where it is not measured
SKEWED = ((0.0, 0.0), (0.25, 0.49), (0.5, 0.70), (0.75, 0.87), (1.0, 1.0))  # (share of experts cached, hit rate)


@dataclass(frozen=True)
class Links:
    """Bytes per second."""

    host_to_gpu: float
    disk: float
    gpu_read: float


@dataclass(frozen=True)
class SpeedEstimate:
    """One step of a batch."""

    tokens_per_second: float
    copied_bytes: float  # of experts, from host or disk
    disk_bytes: float  # of them
    read_bytes: float  # of weights, from the GPU's own memory


def distinct_experts(num_experts: int, top_k: int, batch: int) -> float:
    """D(B)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def hit_rate(share: float, skewed: bool) -> float:
    """For one sequence, with this share of a layer's experts cached."""
    if not skewed:
        return share
    for (x0, y0), (x1, y1) in itertools.pairwise(SKEWED):
        if share <= x1:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def missed_experts(model: ModelFacts, quotas: Sequence[int], batch: int, skewed: bool) -> float:
    """Chosen in one step, over all layers, and not among the `quotas` of each layer that are kept."""
    moe = model.config.moe
    if moe is None:
        return 0.0
    touched = distinct_experts(moe.num_experts, moe.top_k, batch)
    others = moe.num_experts - moe.top_k
    gain = 1 - (touched - moe.top_k) / others if others else 0.0  # 1 for one sequence, 0 when all are touched
    missed = 0.0
    for quota in quotas:
        even = quota / moe.num_experts
        missed += touched * (1 - even - gain * (hit_rate(even, skewed) - even))
    return missed


def predict(model: ModelFacts, tiers: Tiers, links: Links, batch: int, skewed: bool, overlap: bool) -> SpeedEstimate:
    """`overlap`: copying hides behind reading, or the other way round; else they take turns."""
    moe = model.config.moe
    touched = distinct_experts(moe.num_experts, moe.top_k, batch) * model.num_sparse_layers if moe else 0.0
    read = model.dense_bytes - model.embedding_bytes + touched * model.mean_expert_bytes
    missed = (missed_experts(model, kept, batch, skewed) for kept in (tiers.quotas, tiers.held))
    copied, disk = (number * model.mean_expert_bytes for number in missed)
    seconds = (copied - disk) / links.host_to_gpu + disk / min(links.disk / model.disk_factor, links.host_to_gpu)
    reading = read / links.gpu_read
    step = max(seconds, reading) if overlap else seconds + reading
    return SpeedEstimate(batch / step, copied, disk, read)

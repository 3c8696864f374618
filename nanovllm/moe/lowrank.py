"""Low-rank experts in the memory of the device.

V is stacked as dense experts are, so kernels, slots, copies and captured pieces are those of dense experts with other
sizes (weights/expert_layout.py). What differs is how a token comes and goes: factors.py.
"""

from __future__ import annotations

from nanovllm.layers.build import Build
from nanovllm.model_config import MoeConfig
from nanovllm.moe.layer import MakeExperts, ResidentExperts
from nanovllm.weights.expert_layout import ExpertLayout


class LowRankExperts(ResidentExperts):
    """All V of a layer."""


def resident_experts(layouts: dict[int, ExpertLayout]) -> MakeExperts:
    """`Parts.experts` for a model with these layouts by layer; experts that were multiplied out are dense ones."""

    def make(layer: int, moe: MoeConfig, hidden: int, build: Build) -> ResidentExperts:
        kind = LowRankExperts if layouts[layer].is_low_rank else ResidentExperts
        return kind(moe, hidden, build, layouts[layer])

    return make

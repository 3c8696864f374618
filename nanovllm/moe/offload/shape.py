"""ExpertShape: how many numbers, or bytes, an expert of each sparse layer takes, and where its matrices are in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nanovllm.hardware.parallel import Shard
from nanovllm.moe.scaled import expert_views
from nanovllm.weights.expert_form import ExpertForm


@dataclass(frozen=True)
class ExpertShape:
    """`numel` and `num_bytes` are those of the largest expert, of which every buffer has room for one. `dtype`: of a
    block; bytes (uint8) if experts are in fewer bits."""

    layers: tuple[int, ...]  # numbers of the sparse layers in the model
    num_experts: int  # in one layer
    forms: tuple[ExpertForm, ...]  # of the sparse layers; of this rank's share of an expert
    dtype: torch.dtype
    shards: tuple[dict[str, Shard], ...] = ()  # by layer: part -> which piece of the checkpoint's tensor that share is

    @cached_property
    def numel(self) -> int:
        return max(form.length for form in self.forms)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Of one expert, by layer."""
        return tuple(form.length * self.dtype.itemsize for form in self.forms)

    def num_pieces(self, piece_bytes: int) -> int:
        """Of an expert: whole pieces in every layer, so that bytes are counted exactly; 84 for Mixtral 8x7B."""
        common = math.gcd(*(form.length for form in self.forms))
        num_pieces = min(-(-self.num_bytes // piece_bytes), common)
        while common % num_pieces:
            num_pieces += 1
        return num_pieces

    def shard(self, layer: int, part: str) -> Shard | None:
        """None: the part is whole."""
        found = self.shards[layer].get(part) if self.shards else None
        return None if found is None or found.length == found.total else found

    def views(self, block: torch.Tensor, layer: int = 0) -> tuple[Any, Any]:
        """gate_up [..., 2I, K] and down [..., rows, columns] of blocks [..., at least as many numbers as there are]."""
        return expert_views(self.forms[layer], block)

    @property
    def is_scaled(self) -> bool:
        return self.forms[0].is_bytes

    @property
    def numbers(self) -> str:
        """In which numbers experts are, for reports."""
        if self.forms[0].integers is not None:
            return self.forms[0].integers.name
        return "float8_e4m3fn" if self.is_scaled else str(self.dtype).removeprefix("torch.")

    @property
    def is_integers(self) -> bool:
        return self.forms[0].integers is not None

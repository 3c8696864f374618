"""Token embedding and output head: two views of one table when the model ties them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.layers.build import Build, Layer


class VocabEmbedding(Layer):
    def __init__(self, vocab_size: int, size: int, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(vocab_size, size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(Layer):
    def __init__(self, vocab_size: int, size: int, build: Build, tied: VocabEmbedding | None) -> None:
        super().__init__()
        self.weight = tied.weight if tied else build.parameter(vocab_size, size)
        self.ops = build.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)

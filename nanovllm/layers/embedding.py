"""Token embedding and output head: two views of one table when the model ties them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.ops.linear import linear


class VocabEmbedding(nn.Module):
    def __init__(self, vocab_size: int, size: int, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(vocab_size, size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(nn.Module):
    def __init__(self, vocab_size: int, size: int, like: torch.Tensor, tied: VocabEmbedding | None) -> None:
        super().__init__()
        self.weight = tied.weight if tied else nn.Parameter(like.new_empty(vocab_size, size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)

"""Token embedding and output head: one table if the model ties them. Each rank has a part of it."""

from __future__ import annotations

import torch

from nanovllm.layers.build import Build, Layer


class VocabEmbedding(Layer):
    """The rows of the vocabulary are split over the ranks, padded to equal parts. A rank looks up its own tokens and
    has zeros for the others; an all-reduce adds these up."""

    def __init__(self, vocab_size: int, size: int, build: Build) -> None:
        super().__init__()
        self.parallel = build.parallel
        shard = build.parallel.shard_vocab(vocab_size)
        self.first, self.num_padded = shard.start, -(-vocab_size // build.parallel.size)
        self.weight = build.matrix({"": self.num_padded}, size, True)
        self.shards = {"": shard}
        self.ops = build.ops

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return self.ops.embed(token_ids, self.weight)
        local = token_ids - self.first
        inside = (local >= 0) & (local < self.num_padded)
        rows = self.ops.embed(torch.where(inside, local, 0), self.weight) * inside[:, None]
        return self.parallel.all_reduce(rows)


class LMHead(Layer):
    def __init__(self, vocab_size: int, size: int, build: Build, tied: VocabEmbedding | None) -> None:
        super().__init__()
        self.parallel, self.vocab_size = build.parallel, vocab_size
        rows = -(-vocab_size // build.parallel.size)
        self.weight = tied.weight if tied else build.matrix({"": rows}, size, True)
        self.shards = {"": build.parallel.shard_vocab(vocab_size)}
        self.ops = build.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, vocab], the same on every rank: each samples the same tokens, so they need not be sent."""
        logits = self.parallel.all_gather(self.ops.linear(x, self.weight))
        return logits if self.parallel.size == 1 else logits[:, : self.vocab_size]

"""One rank of several, as a script: builds its shards of a model, computes logits of a prompt, prints what it saw.

    python rank.py MODEL RANK SIZE PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.base import AttentionBatch
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.executor.kv_cache import CacheLayout, allocate
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel, connect, open_store
from nanovllm.layers.attention import Step
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.ops.opset import PLAIN
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import load_weights

CPU = Device(torch.device("cpu"))
PROMPT = [5, 9, 2, 7, 1, 3, 8, 4, 6, 11, 12]
BLOCK = 4


class CountingCheckpoint:
    """Passes everything on, and counts the numbers that were read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, name: str) -> torch.Tensor:
        found = self._inner.read(name)
        self.num_read += found.numel()
        return found

    def read_piece(self, *args: Any) -> torch.Tensor:
        found = self._inner.read_piece(*args)
        self.num_read += found.numel()
        return found


def build(path: Path, parallel: Parallel) -> tuple[Transformer, int]:
    checkpoint = CountingCheckpoint(open_checkpoint(path))
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    parts = Parts(Build(torch.float32, CPU.torch_device, PLAIN, parallel), SdpaBackend(), 64)
    model = find_family(config)(config, parts)
    load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]
    return model, checkpoint.num_read


@torch.inference_mode()
def logits_of(model: Transformer) -> torch.Tensor:
    """[tokens, vocab] of the prompt, through a paged cache."""
    num, num_blocks = len(PROMPT), -(-len(PROMPT) // BLOCK)
    caches = allocate(CacheLayout(BLOCK, num_blocks, 0), model.specs, CPU)
    batch = AttentionBatch(
        query_lens=[num],
        context_lens=[num],
        spans=[slice(0, num)],
        device_query_starts=torch.tensor([0, num], dtype=torch.int32),
        device_context_lens=torch.tensor([num], dtype=torch.int32),
        device_block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        slots=torch.arange(num),
        max_context_len=num,
    )
    step = Step(torch.tensor(PROMPT), torch.arange(num), None, batch)
    return model.logits(model(step, caches))


def main() -> None:
    path, rank, size, port = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    store = open_store(port, size, is_master=False, timeout=60)
    parallel = connect(store, rank, size, CPU.torch_device, timeout=60)
    model, num_read = build(path, parallel)
    found = {"logits": logits_of(model).tolist(), "num_read": num_read, "numbers": parallel.gather_numbers(rank * 10)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

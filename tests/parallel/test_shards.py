"""Several ranks over gloo on one machine compute what one rank computes, and each reads only its own share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import Parallel, Shard, open_store
from tests.parallel.rank import build, logits_of
from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("rank.py")


def run_ranks(model: Path, size: int) -> list[dict]:
    store = open_store(0, size, is_master=True, timeout=60)  # port 0: any free one
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), str(rank), str(size), str(store.port)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        found = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(line) for line in found]


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-mqa-bias", 4), ("llama-sharded", 2), ("qwen2", 2), ("qwen3-bias-tied", 2), ("mixtral", 2),
     ("qwen3-moe-renormalised", 4)],
)  # fmt: skip
def test_logits_of_several_ranks_are_those_of_one(tiny: Callable[[str], TinyModel], name: str, size: int) -> None:
    path = tiny(name).path
    model, num_whole = build(path, Parallel())
    alone = logits_of(model)
    found = run_ranks(path, size)
    for rank in found:
        several = torch.tensor(rank["logits"])
        assert several.shape == alone.shape
        torch.testing.assert_close(several, alone, rtol=1e-4, atol=1e-4)
        assert torch.equal(several.argmax(1), alone.argmax(1))
        assert rank["logits"] == found[0]["logits"], "all ranks must sample from the same numbers"
        assert rank["numbers"] == [10 * i for i in range(size)]
        assert rank["num_read"] < 0.75 * num_whole, "a rank reads its own share of the checkpoint"


def test_shares() -> None:
    last = Parallel(rank=3, size=4)
    assert last.shard(0, 12, "x") == Shard(0, 9, 3, 12)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: num_attention_heads=6 .* \[1, 2, 3, 6\]"):
        last.share(6, "num_attention_heads")


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    assert [Parallel(rank, 4).share_kv_heads(2) for rank in range(4)] == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert [Parallel(rank, 2).share_kv_heads(4) for rank in range(2)] == [(2, 0), (2, 2)]
    with pytest.raises(ConfigError, match="num_key_value_heads=3"):
        Parallel(0, 4).share_kv_heads(3)


def test_odd_vocabularies_are_padded() -> None:
    assert [Parallel(rank, 4).shard_vocab(10) for rank in range(4)] == [
        Shard(0, 0, 3, 10), Shard(0, 3, 3, 10), Shard(0, 6, 3, 10), Shard(0, 9, 1, 10)
    ]  # fmt: skip
    assert [Parallel(rank, 4).shard_vocab(5).length for rank in range(4)] == [2, 2, 1, 0]

"""Several ranks over gloo on one machine compute what one rank computes, and each reads only its own share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import Parallel, Shard
from tests.ranks.group import RankGroup
from tests.ranks.rank import build, logits_of
from tests.tiny_models import TinyModel


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-mqa-bias", 4),
        ("llama-sharded", 2),
        ("qwen2", 2),
        ("qwen3-bias-tied", 2),
        ("mixtral", 2),
        ("qwen3-moe-renormalised", 4),
        ("deepseek-v2-lite", 2),
        ("deepseek-v3", 4),
    ],
)
def test_logits_of_several_ranks_are_those_of_one(
    tiny: Callable[[str], TinyModel], ranks: Callable[[int], RankGroup], name: str, size: int
) -> None:
    path = tiny(name).path
    model, num_whole = build(path, Parallel())
    alone = logits_of(model)
    found = ranks(size).do(do="logits", path=str(path))
    for rank in found:
        several = torch.tensor(rank["logits"])
        assert several.shape == alone.shape
        torch.testing.assert_close(several, alone, rtol=1e-4, atol=1e-4)
        assert torch.equal(several.argmax(1), alone.argmax(1))
        assert rank["logits"] == found[0]["logits"], "all ranks must sample from the same numbers"
        assert rank["numbers"] == [10 * i for i in range(size)]
        assert rank["num_read"] < 0.75 * num_whole, "a rank reads its own share of the checkpoint"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_compares_its_rows_of_a_tied_head(
    tiny: Callable[[str], TinyModel], tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    shutil.copytree(tiny("qwen3-bias-tied").path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file)
    build(tmp_path, Parallel(rank=rank, size=2))
    assert not caplog.records
    head[-1] += 1  # of the second rank
    save_file(weights, file)
    build(tmp_path, Parallel(rank=rank, size=2))
    assert len(caplog.records) == rank


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


def test_experts_are_cut_by_all_ranks_or_spread_over_groups_of_them() -> None:
    """Ranks of a group are neighbours; each has the same share of all of the group's experts."""
    assert [Parallel(rank, 4).experts_here(8) for rank in range(4)] == [range(8)] * 4
    assert Parallel(3, 4).shard_expert(40) == Shard(0, 30, 10, 40)
    spread = [Parallel(rank, 4, expert_size=2) for rank in range(4)]
    assert [ranks.experts_here(8) for ranks in spread] == [range(4), range(4), range(4, 8), range(4, 8)]
    assert [ranks.shard_expert(40) for ranks in spread] == [Shard(0, 0, 20, 40), Shard(0, 20, 20, 40)] * 2
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: intermediate size of an expert=42 .*\[1, 2, 3, 6"):
        Parallel(0, 4).shard_expert(42)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=2 of 8 ranks cuts each expert in 4: .*42 .*\[4, 8\]"):
        Parallel(0, 8, expert_size=2).shard_expert(42)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=4: 6 experts .*tensor_parallel_size=4 .*\[1, 2\]"):
        Parallel(0, 4, expert_size=4).experts_here(6)


def test_odd_vocabularies_are_padded() -> None:
    assert [Parallel(rank, 4).shard_vocab(10) for rank in range(4)] == [
        Shard(0, 0, 3, 10),
        Shard(0, 3, 3, 10),
        Shard(0, 6, 3, 10),
        Shard(0, 9, 1, 10),
    ]
    assert [Parallel(rank, 4).shard_vocab(5).length for rank in range(4)] == [2, 2, 1, 0]

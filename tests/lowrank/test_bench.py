"""`nanovllm bench moe --num-layers`: fewer layers of a model with low-rank experts are low-rank layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanovllm.bench.moe import offload_config, read_model, with_layers
from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.lowrank.folder import low_rank_forms
from tests.lowrank.rig import TRAINED
from tests.lowrank.svd_folders import Choice, copy_model, write_svd

CHOICES = [Choice(16, 24, 8, "input"), Choice(32, 32, 32), Choice(40, 40, 40), Choice(48, 48, 48)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_model(TRAINED, tmp_path_factory.mktemp("bench") / "model")
    write_svd(folder, CHOICES)
    return folder


@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_fewer_layers_keep_their_low_rank_experts(model: Path, num_layers: int) -> None:
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu", max_model_len=64)
    whole = low_rank_forms(model, read_model(config))
    assert whole is not None
    with with_layers(config, num_layers) as smaller:
        facts = read_model(smaller)
        assert low_rank_forms(Path(smaller.model), facts) == whole[:num_layers]
        with LLMEngine(offload_config(smaller, facts, 2, "lru")) as engine:
            experts = engine.executor.describe()["experts"]
        assert (experts["format"], len(experts["ranks"])) == ("low-rank", num_layers)


def test_without_them_there_are_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(model), load_format="dummy", device="cpu")
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "1")
    with with_layers(config, 2) as smaller:
        assert [path.name for path in Path(smaller.model).iterdir()] == ["config.json"]
    monkeypatch.delenv("NANOVLLM_DISABLE_SVD")
    plain = EngineConfig(model=str(TRAINED), load_format="dummy", device="cpu")
    with with_layers(plain, 2) as smaller:
        assert json.loads((Path(smaller.model) / "config.json").read_text())["num_hidden_layers"] == 2
        assert len(list(Path(smaller.model).iterdir())) == 1

"""Engines whose experts are in integers: resident ones hold the numbers of the file, offloaded ones give the same bits,
from host memory and from disk. The decision is that of a GPU and the plain twins compute
(tests/runner/experts4_cases.py: the kernels)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.cli.plan import read_facts
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, ModelError
from nanovllm.memory.budget import GIB
from nanovllm.moe.offload import store
from nanovllm.moe.scaled import ScaledExperts
from nanovllm.ops import integers
from nanovllm.runner import build
from nanovllm.weights.checkpoint import open_checkpoint
from tests.engine.test_experts8 import OPTIONS, expert_bytes, open_engine, run, scores
from tests.moe.experts8 import FILES4, MODELS4, as_on_a_gpu, twin_ops
from tests.tiny_models import Variant, hf_model
from tests.weights.quantised_samples import Sample, compressed, gptq, write_folders
from tests.weights.test_gguf_experts import SMALL, write_experts

Folders = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(model: str, form: str) -> tuple[Path, Path]:
        """(in integers, the same numbers in float32)"""
        if (model, form) not in made:
            made[model, form] = write_folders(tmp_path_factory.mktemp("m"), *MODELS4[model], FILES4[form])
        return made[model, form]

    return get


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(build, "choose_packing", lambda *_: None)
    monkeypatch.setattr(build, "choose_ops", lambda *_: twin_ops())


@pytest.mark.parametrize(
    ("model", "form"), [("mixtral", "awq"), ("mixtral", "compressed"), ("qwen3-moe", "gptq"), ("deepseek-v3", "awq")]
)
def test_a_file_gives_what_its_expanded_numbers_give(
    model: str, form: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = folders(model, form)
    expected, _, _ = run(plain)
    pretend(monkeypatch)
    resident, _, _ = run(small)
    assert scores(resident) == pytest.approx(scores(expected), abs=2e-2)  # offsets are rounded to float16
    num_experts = 12 if model == "mixtral" else 16
    for host in (num_experts, 5, 0):  # all in host memory, some, none
        with monkeypatch.context() as patch:
            patch.setattr(store, "CHUNK_BYTES", 5000)  # chunks reach over the borders of matrices and factors
            patch.setattr(store.logger, "level", logging.ERROR)
            size = expert_bytes(small)
            room = {"expert_cache_gb": 6.5 * size / GIB, "expert_host_gb": (host + 0.5) * size / GIB}
            offloaded, experts, stats = run(small, expert_placement="offload", **room)
        assert (experts["in_host_memory"], experts["expert_bytes"]) == (host, size)
        assert experts["expert_dtype"].startswith("int4-")
        assert offloaded == resident, host
        assert stats.misses > 20
        assert (stats.bytes_from_disk > 0) == (host < num_experts)


@pytest.mark.parametrize("wanted", ["int4", "int8"])
def test_quantised_while_it_is_loaded(
    wanted: str, folders: Folders, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ops/integers.py` rounds, from host memory and from disk alike; dummy weights too."""
    _, plain = folders("mixtral", "awq")
    resident, _, _ = run(plain, quantization=wanted)
    offloaded, experts, _ = run(plain, quantization=wanted, expert_placement="offload")
    assert experts["expert_dtype"] == f"{wanted}-32"
    assert offloaded == resident
    with monkeypatch.context() as patch:
        patch.setattr(store.logger, "level", logging.ERROR)
        room = {"expert_cache_gb": 6.5 * experts["expert_bytes"] / GIB, "expert_host_gb": 0}
        from_disk, _, stats = run(plain, quantization=wanted, expert_placement="offload", **room)
    assert from_disk == resident
    assert stats.bytes_from_disk > 0
    with open_engine(plain, quantization=wanted) as llm:
        layer = next(m for m in llm.engine.executor.runner.model.modules() if isinstance(m, ScaledExperts))
        checkpoint = open_checkpoint(plain)
        name = next(name for name in checkpoint.names() if name.endswith("experts.1.w2.weight"))
        bits = int(wanted[3:])
        q, scale, offset = integers.quantise(checkpoint.read(name), bits)
        zero = torch.zeros_like(scale) if offset is None else offset
        expected = (q.float() - 2 ** (bits - 1)).unflatten(1, (-1, 32)) * scale[..., None] + zero[..., None]
        torch.testing.assert_close(layer.views[1].expanded(1, torch.float32), expected.flatten(1), rtol=1e-3, atol=1e-3)
    options = {"load_format": "dummy", "quantization": wanted}
    assert run(plain, **options, expert_placement="offload")[0] == run(plain, **options)[0]
    with open_engine(plain, **options, expert_placement="offload") as llm:  # as `nanovllm bench moe` draws routers
        qkv = llm.engine.executor.runner.model.layers[0].attention.qkv.weight
        llm.engine.executor.probe().spread_routing(0)
        numbers = integers.expand(qkv, torch.float32)
        assert numbers[:-32].abs().max() < 2e-3 < numbers[-32:].abs().max()


@pytest.mark.parametrize(("types", "form"), [(["Q4_0"], "int4-32"), (["Q4_1", "Q8_0"], "int8-32")])
def test_experts_of_a_gguf_file(types: list[str], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types all get the widest."""
    hf_model(Variant("Mixtral", {**SMALL["Mixtral"], "num_attention_heads": 4}), 1).save_pretrained(tmp_path / "m")
    path = write_experts(tmp_path / "m.gguf", tmp_path / "m", types)
    options = {**OPTIONS, "skip_tokenizer_init": False}
    expected, _, _ = run(path, quantization="none", **options)
    pretend(monkeypatch)
    resident, _, _ = run(path, **options)
    assert scores(resident) == pytest.approx(scores(expected), abs=2e-2)
    offloaded, experts, _ = run(path, expert_placement="offload", **options)
    assert offloaded == resident
    assert experts["expert_dtype"] == form
    with monkeypatch.context() as patch:
        patch.setattr(store.logger, "level", logging.ERROR)
        room = {"expert_cache_gb": 3.5 * experts["expert_bytes"] / GIB, "expert_host_gb": 0}
        from_disk, _, stats = run(path, expert_placement="offload", **room, **options)
    assert from_disk == resident
    assert stats.bytes_from_disk > 0


def test_what_cannot_be_is_refused(folders: Folders, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    small, plain = folders("mixtral", "awq")
    with pytest.raises(ConfigError, match=r"expert_cpu_misses=True: an expert in int4-32 .*or set quantization='none'"):
        run(small, expert_placement="offload", expert_cpu_misses=True)
    monkeypatch.setattr(build, "choose_scales", lambda *args: as_on_a_gpu(*args[:4], True))
    with pytest.raises(ConfigError, match=r"quantization='int4': low-rank experts are kept in 16 bits.*leave"):
        run(plain, quantization="int4")


@pytest.mark.parametrize("write", [gptq, compressed])
def test_experts_whose_inputs_are_in_another_order_are_expanded(
    tmp_path: Path, on_gpu: None, caplog: pytest.LogCaptureFixture, write: Callable[..., Sample]
) -> None:
    """As `nanovllm plan` counts them."""
    small, plain = write_folders(tmp_path, *MODELS4["mixtral"], write(32, True, act_order=True))
    assert read_facts(EngineConfig(model=str(small))).expert_numbers == ""
    with caplog.at_level(logging.INFO, logger="nanovllm"), open_engine(small) as llm:
        assert not [m for m in llm.engine.executor.runner.model.modules() if isinstance(m, ScaledExperts)]
    assert "experts are expanded: the file does not have all of them in integers" in caplog.text
    assert scores(run(small)[0]) == pytest.approx(scores(run(plain)[0]), abs=2e-2)


def test_an_expert_whose_scales_float16_cannot_hold_is_refused_by_name(
    folders: Folders, on_gpu: None, tmp_path: Path
) -> None:
    small, _ = folders("mixtral", "compressed")
    tensors = load_file(small / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.2.w1.weight_scale"))
    tensors[name] = torch.full_like(tensors[name], 1e6)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((small / "config.json").read_text())))
    with pytest.raises(ModelError, match=r"experts\.2\.w1.*too large for float16.*set quantization='none'"):
        run(tmp_path)

"""The loader's proof over experts: none missing, none twice, none too many, wherever they are to live."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, ModelError
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.ops.opset import PLAIN
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import OnDisk, load_dummy, load_weights
from nanovllm.weights.rules import Rule, find_destination
from tests.tiny_models import edit_config

TRAINED = Path(__file__).parent.parent / "fixtures" / "tiny-mixtral"
EXPERTS = "model.layers.2.block_sparse_moe.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TRAINED, tmp_path / "model"))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(folder / "model.safetensors"), **changes}
    weights = {name: tensor.contiguous() for name, tensor in weights.items() if tensor is not None}
    save_file(weights, folder / "model.safetensors")


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        LLM(str(folder), device="cpu", max_model_len=64, num_kvcache_blocks=8, **options)
    return str(error.value)


# ---- all resident ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["8", "07", "99999"])
def test_an_expert_too_many_is_named(folder: Path, number: str) -> None:
    extra = {f"{EXPERTS}.{number}.{w}.weight": torch.zeros(256, 128) for w in ("w1", "w3")}
    change(folder, **extra)
    message = refused(folder)
    assert "2 in the checkpoint but not in the model" in message
    assert all(name in message for name in extra)


@pytest.mark.parametrize("number", [7, 9])
def test_another_number_of_experts_than_the_config_says(folder: Path, number: int) -> None:
    edit_config(folder, num_local_experts=number)
    message = refused(folder)
    assert "block_sparse_moe.gate.weight' has shape (8, 128)" in message
    assert f"({number}, 128)" in message
    rows = {f"model.layers.{i}.block_sparse_moe.gate.weight": torch.zeros(number, 128) for i in range(4)}
    change(folder, **rows)  # even if the routers agree with the config, the experts do not
    what = "in the checkpoint but not in the model" if number == 7 else "not found in the checkpoint"
    assert f"12 {what}" in refused(folder)


def test_an_expert_of_another_shape_is_named(folder: Path) -> None:
    change(folder, **{f"{EXPERTS}.3.w2.weight": torch.zeros(256, 128)})  # as a transposed w2 would have it
    assert f"'{EXPERTS}.3.w2.weight' has shape (256, 128), config.json implies (128, 256)" in refused(folder)


def test_the_other_familys_names_are_refused(folder: Path) -> None:
    change(folder, **{"model.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(256, 128)})
    assert "not in the model: model.layers.0.mlp.experts.0.gate_proj.weight" in refused(folder)


def test_nothing_is_read_before_all_is_proved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 GB would be read for minutes, only to be refused."""
    change(folder, **{"model.norm.weight": None})
    model, checkpoint = build(folder), open_checkpoint(folder)
    monkeypatch.setattr(checkpoint, "read", lambda name: pytest.fail(f"read {name}"))
    with pytest.raises(ModelError, match=r"norm\.weight"):
        load_weights(model, checkpoint, model.rules)


# ---- experts that are no parameters ----------------------------------------------------------------------------------


class Elsewhere:
    graph_safe = False


def build(folder: Path, resident: bool = True) -> Transformer:
    config = ModelConfig.from_hf(open_checkpoint(folder).config)
    parts = Build(torch.float32, torch.device("cpu"), PLAIN, Parallel())
    experts = None if resident else lambda *_: Elsewhere()
    return find_family(config)(config, Parts(parts, backend=None, max_model_len=64, experts=experts))  # type: ignore[arg-type]


def host_places(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict[str, dict[str, Any]]]:
    """One block an expert, gate, up and down after one another; all NaN."""
    blocks = torch.full((4, 8, 3 * 256 * 128), float("nan"), dtype=dtype)
    places: dict[str, dict[str, Any]] = {}
    for layer in range(4):
        name = f"layers.{layer}.mlp.experts"
        gate_up, down = places.setdefault(f"{name}.gate_up.weight", {}), places.setdefault(f"{name}.down.weight", {})
        for e in range(8):
            gate, up, rest = blocks[layer, e].split(256 * 128)
            gate_up |= {f"{e}.gate": gate.view(256, 128), f"{e}.up": up.view(256, 128)}
            down[f"{e}"] = rest.view(128, 256)
    return blocks, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_get_what_parameters_would(dtype: torch.dtype) -> None:
    checkpoint, resident, model = open_checkpoint(TRAINED), build(TRAINED), build(TRAINED, resident=False)
    blocks, places = host_places(dtype)
    load_weights(resident, checkpoint, resident.rules)
    load_weights(model, checkpoint, model.rules, places)
    assert not blocks.isnan().any()
    stacked = dict(resident.named_parameters())
    for layer in range(4):
        gate_up, down = (stacked[f"layers.{layer}.mlp.experts.{w}.weight"].to(dtype) for w in ("gate_up", "down"))
        assert torch.equal(blocks[layer, :, : 2 * 256 * 128].reshape(8 * 512, 128), gate_up)
        assert torch.equal(blocks[layer, :, 2 * 256 * 128 :].reshape(8 * 128, 256), down)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stacked[name])


def test_a_tensor_that_stays_on_disk_is_located_and_not_read() -> None:
    checkpoint, model = open_checkpoint(TRAINED), build(TRAINED, resident=False)
    _, places = host_places()
    located: list[str] = []
    places["layers.2.mlp.experts.gate_up.weight"]["6.up"] = OnDisk((256, 128), located.append)
    places["layers.2.mlp.experts.down.weight"]["6"] = OnDisk((128, 256), located.append)
    read: list[str] = []
    original = checkpoint.read
    checkpoint.read = lambda name: (read.append(name), original(name))[1]  # type: ignore[method-assign]
    load_weights(model, checkpoint, model.rules, places)
    assert located == [f"{EXPERTS}.6.w2.weight", f"{EXPERTS}.6.w3.weight"]
    assert not set(read) & set(located)
    assert len(read) == len(checkpoint.names()) - 2


def test_the_proof_covers_places(folder: Path) -> None:
    def load(places: dict[str, dict[str, Any]]) -> str:
        model = build(folder, resident=False)
        with pytest.raises(ModelError) as error:
            load_weights(model, open_checkpoint(folder), model.rules, places)
        return str(error.value)

    def unreachable(name: str) -> None:
        pytest.fail(f"located {name}")

    _, places = host_places()
    places["layers.0.mlp.experts.down.weight"]["1"] = OnDisk((256, 128), unreachable)
    assert "has shape (128, 256), config.json implies (256, 128)" in load(places)
    places["layers.0.mlp.experts.down.weight"]["1"] = OnDisk((128, 256), unreachable)
    del places["layers.1.mlp.experts.down.weight"]["7"]  # without a place a tensor is one too many
    assert "1 in the checkpoint but not in the model: model.layers.1.block_sparse_moe.experts.7.w2" in load(places)
    assert "96 in the checkpoint but not in the model" in load({})
    _, places = host_places()
    places["layers.0.mlp.experts.down.weight"]["1"] = OnDisk((128, 256), unreachable)
    change(folder, **{"model.layers.0.block_sparse_moe.experts.1.w2.weight": None})
    assert "1 not found in the checkpoint: layers.0.mlp.experts.down.weight[1]" in load(places)


def test_dummy_weights_do_not_depend_on_where_they_live() -> None:
    resident, model = build(TRAINED), build(TRAINED, resident=False)
    blocks, places = host_places()
    load_dummy(resident, 5)
    load_dummy(model, 5, places)
    assert not blocks.isnan().any()
    assert blocks.abs().max() <= 1e-3
    stacked = dict(resident.named_parameters())
    gate_up, down = (stacked[f"layers.3.mlp.experts.{which}.weight"] for which in ("gate_up", "down"))
    assert torch.equal(blocks[3, 2, : 256 * 128].view(256, 128), gate_up[1024:1280])
    assert torch.equal(blocks[3, 7, 2 * 256 * 128 :].view(128, 256), down[-128:])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stacked[name]), name
    assert len({block.sum().item() for block in blocks.view(32, -1)}) == 32, "every expert is another"
    load_dummy(model, 6, places)
    assert not torch.equal(blocks[3, 2, : 256 * 128].view(256, 128), gate_up[1024:1280])


def test_dummy_weights_cannot_stay_on_disk() -> None:
    _, places = host_places()
    places["layers.0.mlp.experts.down.weight"]["1"] = OnDisk((128, 256), print)
    with pytest.raises(ModelError, match=r"dummy.*expert_host_gb"):
        load_dummy(build(TRAINED, resident=False), 0, places)


def test_a_part_may_be_a_template_over_fields() -> None:
    rules = (Rule("x.{i}.e.{e}.{p:gate|up}.w", "y.{i}.w", "{e}.{p}"), Rule("x.{i}.e.{e}.down.w", "z.{i}.w", "{e}"))
    found = [find_destination(rules, name) for name in ("x.3.e.12.up.w", "x.3.e.12.down.w")]
    assert [(d.parameter, d.part) for d in found if d] == [("y.3.w", "12.up"), ("z.3.w", "12")]
    assert find_destination(rules, "x.3.e.-1.up.w") is None

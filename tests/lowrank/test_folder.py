"""The folder of low-rank experts: what is written is read back, and what does not belong here is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import ModelError
from nanovllm.lowrank.compress.distill import compress, stored_factors
from nanovllm.lowrank.compress.options import Options
from nanovllm.lowrank.folder import open_svd_folder, teacher_hash
from nanovllm.lowrank.format import METADATA, U_FILE, V_FOLDER, SvdMetadata, v_file
from nanovllm.weights.checkpoint import open_checkpoint
from tests.lowrank.rig import CPU, TRAINED


def hash_of(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    try:
        return teacher_hash(checkpoint)
    finally:
        checkpoint.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "svd"
    compress(TRAINED, None, folder, Options("pca", rank=8), "cpu")
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "svd"))


def test_the_documented_layout(made: Path) -> None:
    facts = json.loads((made / METADATA).read_text())
    wanted = {"format": "nanovllm-svd-experts", "version": 1, "method": "pca", "mode": "shared", "dtype": "bfloat16",
              "num_layers": 4, "layer_ids": [0, 1, 2, 3], "num_experts": 8, "hidden_size": 128, "rank": 8,
              "intermediate_size": 256, "calibration_hash": None, "kept": 8 / 128 * 17 / 16}  # fmt: skip
    assert {name: facts[name] for name in wanted} == wanted
    assert facts["ranks"]["3"] == {"w1": 8, "w2": 8, "w3": 8}
    u = load_file(made / U_FILE)
    assert set(u) == {f"layer_{layer}_{w}_U" for layer in range(4) for w in ("w1", "w2", "w3")}
    assert {tuple(t.shape) for t in u.values()} == {(128, 8)}
    assert len(list((made / V_FOLDER).iterdir())) == 32
    v = load_file(v_file(made, 3, 7))
    assert {name: tuple(t.shape) for name, t in v.items()} == dict.fromkeys(("w1_V", "w2_V", "w3_V"), (8, 256))
    assert {t.dtype for t in (*u.values(), *v.values())} == {torch.bfloat16}
    assert sorted(p.name for p in made.iterdir()) == sorted([METADATA, U_FILE, V_FOLDER])


def test_it_opens_with_its_own_teacher_only(made: Path) -> None:
    metadata = open_svd_folder(made, hash_of(TRAINED))
    assert SvdMetadata.from_json(json.loads(json.dumps(metadata.to_json()))) == metadata
    assert stored_factors(made, metadata, CPU.torch_device, 2).svd_ranks == {"w1": 8, "w2": 8, "w3": 8}
    with pytest.raises(ModelError, match="other weights"):
        open_svd_folder(made, "0" * 32)


def test_the_hash_sees_weights_and_nothing_else(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TRAINED, tmp_path / "model"))
    same = hash_of(folder)
    assert same == hash_of(TRAINED)
    tensors = load_file(folder / "model.safetensors")

    def changed(name: str) -> str:
        altered = {**tensors, name: tensors[name].clone()}
        altered[name][0, 0] += 1
        save_file(altered, folder / "model.safetensors")
        return hash_of(folder)

    assert changed("model.embed_tokens.weight") == same
    expert = next(name for name in tensors if ".experts.3.w2" in name)
    router = next(name for name in tensors if name.endswith("gate.weight"))
    assert len({same, changed(expert), changed(router)}) == 3


def edit(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps({k: v for k, v in {**facts, **changes}.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": ...}, "format None"),
        ({"mode": "private"}, "mode='private' must be 'shared'; 'private', a U for every expert, saved no memory"),
        ({"num_experts": -1}, "num_experts=-1"),
        ({"ranks": {"0": {"w1": 129, "w2": 8, "w3": 8}}}, r"ranks\[0\]\[w1\]=129 must be an integer in \[1, 128\]"),
        ({"ranks": {}}, r"ranks\[0\]\[w1\]=None"),
        ({"ranks": 3}, "damaged"),
        ({"w2_modes": {}}, r"w2_modes\[0\]=None"),
        ({"layer_ids": [1, 0]}, "ascending"),
        ({"teacher_hash": ...}, "has no 'teacher_hash'"),
        ({"num_experts": 9}, r"layer_0_expert_8\.safetensors: missing"),
        ({"hidden_size": 64, "kept": 1}, "layer_0_w1_U is"),
    ],
)
def test_damaged_metadata_is_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit(copy, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        open_svd_folder(copy, None)
    assert "NANOVLLM_DISABLE_SVD=1" in str(caught.value)


@pytest.mark.parametrize("name", [U_FILE, f"{V_FOLDER}/layer_2_expert_5.safetensors", METADATA])
def test_what_is_missing_or_cut_off_is_refused(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:4], b""):
        (copy / name).write_bytes(content)
        with pytest.raises(ModelError, match="svd"):
            open_svd_folder(copy, None)
    (copy / name).unlink()
    with pytest.raises(ModelError, match="svd"):
        open_svd_folder(copy, None)

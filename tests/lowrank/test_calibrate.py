"""Calibration: only the text is recorded, no prompt comes twice, and calibrations that must not be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import ConfigError, ModelError
from nanovllm.lowrank.compress import text as texts
from nanovllm.lowrank.compress.calibrate import FACTS, WINDOWS, Calibration, collect, load_calibration
from nanovllm.lowrank.compress.stream import Stream, run_model
from nanovllm.lowrank.compress.text import Source, cut_prompts, held_out, made_up_prompts
from tests.lowrank.rig import TRAINED, content, opened, small_text


def test_only_the_text_is_recorded(calibration: Calibration) -> None:
    """Neither warm-up rows nor padding: each token of a window that is not held out was seen by two experts a layer."""
    windows = calibration.windows
    assert int(windows.lens.min()) < windows.ids.shape[1]  # there is padding
    assert held_out(len(windows)).any()
    tokens = int(windows.lens[~held_out(len(windows))].sum())
    for counts in calibration.facts["counts"].values():
        assert sum(counts) == 2 * tokens


def test_gram_matrices_are_those_of_the_rows(calibration: Calibration) -> None:
    """Computed anew from a plain run of the whole model, one window at a time, without padding. Other shapes round
    otherwise, so where a router is all but undecided a row may go to another expert: that may be seen in two experts of
    the 32, and hardly in a sum over all."""
    windows = calibration.windows
    grams, outs = torch.zeros(4, 8, 128, 128, dtype=torch.float64), torch.zeros(4, 128, 128, dtype=torch.float64)
    with opened() as model, torch.no_grad():

        def spy(layer: int) -> Any:
            dense = model.dense_experts(layer)

            def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                for place in range(2):
                    for e in range(8):
                        rows = x[ids[:, place] == e].double() * weights[ids[:, place] == e, place, None]
                        grams[layer, e] += rows.T @ rows
                y = dense(x, ids, weights)
                outs[layer] += y.double().T @ y.double()
                return y

            return run

        experts = {layer: spy(layer) for layer in range(4)}
        for ids, length, held in zip(windows.ids, windows.lens.tolist(), held_out(len(windows)).tolist()):
            if not held:
                run_model(model, ids[None, :length], experts.__getitem__)

    def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return float((found - wanted).abs().max()) <= 1e-3 * float(wanted.max())

    different = []
    for layer in range(4):
        found = calibration.layer(layer)
        assert same(found["out_gram"], outs[layer])
        assert same(found["gram"].sum(0), grams[layer].sum(0))
        different += [(layer, e) for e in range(8) if not same(found["gram"][e], grams[layer, e])]
    assert len(different) <= 2, different


def test_reservoirs_hold_held_out_rows_only(calibration: Calibration) -> None:
    with opened() as model:
        stream = Stream(model, calibration.windows, 16)  # as `collect` does: the same shapes, the same roundings
        _, rows = next(stream.sparse_layers("test"))
        found = calibration.layer(0)
        for e in range(8):
            number = int((found["row_weights"][e] > 0).sum())
            available = len(rows.of(e, held=True)[0])
            assert number == min(available, 64)
            held = rows.x[rows.of(e, held=True)[0]].double()
            assert float(torch.cdist(found["rows"][e, :number].double(), held).min(1).values.max()) < 1e-4


def test_no_prompt_comes_twice() -> None:
    prompts = made_up_prompts(texts.MAX_PROMPTS)
    assert len(set(prompts)) == len(prompts) == texts.MAX_PROMPTS >= 200
    with pytest.raises(ConfigError, match=f"there are {texts.MAX_PROMPTS} different ones"):
        made_up_prompts(texts.MAX_PROMPTS + 1)
    pieces = cut_prompts(list(range(300)), 200)
    assert len({tuple(p) for p in pieces}) == 200
    with pytest.raises(ConfigError, match="only 1 different beginnings"):
        cut_prompts([5] * 300, 2)
    with pytest.raises(ConfigError, match="repeat"):
        Source().generate(TRAINED, ["one", "two", "one"], "cpu")


def test_the_model_writes_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_DISABLE_SVD", "")
    found = collect(TRAINED, tmp_path / "own", Source(None, 12, 24, window=64), 8, "cpu")
    assert len(found.windows) >= 12
    assert found.facts["num_tokens"] > 12 * 24
    both = collect(TRAINED, tmp_path / "both", Source(small_text(tmp_path, 3000), 5, 8, window=64), 8, "cpu")
    assert len(both.windows) > 5
    assert int(both.windows.lens[-1]) <= texts.PROMPT_TOKENS + 8


@pytest.mark.parametrize(("characters", "enough"), [(200, False), (2000, True)])
def test_too_few_rows_are_refused(tmp_path: Path, characters: int, enough: bool) -> None:
    source = Source(small_text(tmp_path, characters), window=64)
    if enough:
        collect(TRAINED, tmp_path / "calib", source, device="cpu")
        return
    with pytest.raises(ConfigError, match=r"\d+ tokens are too few for a hidden size of 128"):
        collect(TRAINED, tmp_path / "calib", source, device="cpu")
    assert not (tmp_path / "calib").exists()


def test_calibrations_that_do_not_fit_are_refused(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="another model"):
        load_calibration(calibration.path, "0" * 32)
    with pytest.raises(ModelError, match="nanovllm compress calibrate"):
        load_calibration(tmp_path / "none", None)
    folder = Path(shutil.copytree(calibration.path, tmp_path / "calib"))
    tensors = load_file(folder / WINDOWS)
    tensors["ids"][0, 0] += 1
    save_file(tensors, folder / WINDOWS)
    with pytest.raises(ModelError, match="changed after it was collected"):
        load_calibration(folder, None)
    (folder / WINDOWS).write_bytes((calibration.path / WINDOWS).read_bytes()[:100])
    with pytest.raises(ModelError, match="not whole"):
        load_calibration(folder, None)
    facts = json.loads((folder / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps({**facts, "version": 9}))
    with pytest.raises(ModelError, match="version 1"):
        load_calibration(folder, None)


def test_the_same_text_gives_the_same_calibration(calibration: Calibration, tmp_path: Path) -> None:
    again = collect(TRAINED, tmp_path / "calib", Source(small_text(tmp_path), window=256), 64, "cpu", chunk=3)
    assert again.hash == calibration.hash
    found, wanted = (of.layer(3)["gram"].sum(0) for of in (again, calibration))  # a row between two experts is in both
    assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.max())
    before = content(tmp_path / "calib")
    with pytest.raises(ConfigError, match="cannot be read"):
        collect(TRAINED, tmp_path / "calib", Source(tmp_path / "no.txt"), 64, "cpu")
    assert content(tmp_path / "calib") == before

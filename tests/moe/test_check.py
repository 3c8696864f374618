"""The check of experts in fewer bits at the start: kernels that are right pass, others are named, and an engine whose
experts would be computed wrongly does not start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.errors import ConfigError
from nanovllm.moe.check import check_experts
from nanovllm.moe.projections import SharedProjections
from nanovllm.ops.moe import expert_pairs
from nanovllm.runner import build
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers
from tests.moe.experts8 import FILES4, MODELS4, as_on_a_gpu, twin_ops
from tests.weights.quantised_samples import write_folders

FORMS = {
    "FP8": ExpertForm.dense(144, 136, 0),
    "FP8 in blocks": ExpertForm.dense(144, 136, 128),
    "int4-128": ExpertForm.dense(160, 96, integers=ExpertIntegers((4, 128), (4, 32))),
    "int4-32": ExpertForm.dense(
        1088, 1056, integers=ExpertIntegers((4, 32), (8, 16))
    ),  # more than are expanded at once
}


class WithExperts(nn.Module):
    def __init__(self, form: ExpertForm) -> None:
        super().__init__()
        self.experts = SharedProjections.__new__(SharedProjections)
        nn.Module.__init__(self.experts)
        self.experts.form = form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_right_products_pass(name: str, dtype: torch.dtype) -> None:
    assert check_experts(WithExperts(FORMS[name]), 2, dtype, torch.device("cpu"), expert_pairs) == ""


def test_experts_of_16_bits_are_not_tried() -> None:
    assert check_experts(WithExperts(ExpertForm.dense(64, 64)), 2, torch.float32, torch.device("cpu"), print) == ""


def faulty(fault: str, num_rows: int) -> Any:
    def pairs(x: torch.Tensor, gate_up: Any, down: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if fault == "does not run" and len(x) == num_rows:
            raise RuntimeError("no kernel image is available")
        if fault == "no memory":
            raise torch.OutOfMemoryError("tried to allocate")
        out = expert_pairs(x, gate_up, down, ids, weights)
        if len(x) == num_rows:
            if fault == "another expert":
                return expert_pairs(x, gate_up, down, 1 - ids, weights)
            if fault == "a few outputs":
                out[..., -8:] = 0
            if fault == "not a number":
                out[-1, -1, -1] = torch.nan
        return out

    return pairs


@pytest.mark.parametrize("num_rows", [1, 24, 301])
@pytest.mark.parametrize("fault", ["does not run", "another expert", "a few outputs", "not a number"])
@pytest.mark.parametrize("name", ["FP8 in blocks", "int4-128"])
def test_wrong_products_are_named(name: str, fault: str, num_rows: int) -> None:
    form = WithExperts(FORMS[name])
    why = check_experts(form, 2, torch.float32, torch.device("cpu"), faulty(fault, num_rows))
    assert why.startswith(f"a product of {num_rows} rows ")
    assert why.endswith(f" with experts in {name.removesuffix(' in blocks')}")
    said = {"does not run": "does not run (no kernel image is available)", "not a number": "wrong by nan %"}
    assert said.get(fault, "is wrong by ") in why


def test_without_memory_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        form = WithExperts(FORMS["FP8"])
        assert check_experts(form, 2, torch.float32, torch.device("cpu"), faulty("no memory", 1)) == ""
    assert "no memory is left to check" in caplog.text


@pytest.mark.parametrize("placement", ["resident", "offload"])
def test_an_engine_with_wrong_experts_does_not_start(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_folders(tmp_path, *MODELS4["mixtral"], FILES4["awq"])[0])
    options = {"num_kvcache_blocks": 8, "expert_placement": placement, "skip_tokenizer_init": True, "dtype": "float32"}
    monkeypatch.setattr(build, "choose_scales", as_on_a_gpu)
    monkeypatch.setattr(build, "choose_packing", lambda *_: None)
    monkeypatch.setattr(build, "choose_ops", lambda *_: twin_ops())
    LLM(path, device="cpu", **options).close()
    wrong = replace(twin_ops(), expert_pairs=faulty("a few outputs", 41))
    monkeypatch.setattr(build, "choose_ops", lambda *_: wrong)
    with pytest.raises(ConfigError, match=r"'auto': on this device a product of 41 rows is wrong by .* %") as raised:
        LLM(path, device="cpu", **options)
    assert "with experts in int4-32; set quantization='none'" in str(raised.value)

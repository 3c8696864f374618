"""Which attention backend is chosen, and the reasons given for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.attention.base import AttentionSpec, LatentSpec
from nanovllm.attention.flash_backend import Kernels, find_kernels
from nanovllm.attention.optional import load, major_version
from nanovllm.attention.select import BACKENDS, attention_backend_info, select_backend
from nanovllm.config import ATTN_BACKENDS
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import print_attention_backend_info
from nanovllm.ops.native.build import load_library
from tests.attention import fakes

CPU = Device(torch.device("cpu"))
SPEC = AttentionSpec(16, 8, 128, torch.bfloat16)
FLOAT = replace(SPEC, dtype=torch.float32)
ON_GPU = ("triton", "flash", "flashinfer", "flash1")


def install_all(monkeypatch: pytest.MonkeyPatch, flash_version: str = "2.8.3") -> None:
    flash: dict[str, Any] = {"__version__": flash_version, "__path__": []}
    if flash_version.startswith("2"):
        flash["flash_attn_varlen_func"] = fakes.flash_attn_varlen_func
    fakes.install(monkeypatch, "flash_attn", **flash)
    fakes.install(monkeypatch, "flash_attn.flash_attn_interface")
    fakes.install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=object)


def refusal(name: str, spec: AttentionSpec = SPEC, device: Any = None, block_size: int = 256) -> str | None:
    backend = next(backend for backend in BACKENDS if backend.name == name)
    return backend.rejects(spec, device or fakes.gpu(), block_size)


def test_order() -> None:
    assert tuple(backend.name for backend in BACKENDS) == ATTN_BACKENDS[1:]
    assert ("auto", *ON_GPU, "native", "sdpa", "sdpa.math", "triton.mla", "torch.mla") == ATTN_BACKENDS


def test_auto_on_a_cpu() -> None:
    selection = select_backend("auto", [FLOAT], CPU, 16)
    assert selection.backend.name == ("sdpa" if isinstance(load_library(), str) else "native")
    assert selection.reasons[selection.backend.name] == "chosen"
    for name in ON_GPU:
        assert selection.reasons[name] == "refused: needs a GPU"
    assert select_backend("auto", [replace(FLOAT, dtype=torch.bfloat16)], CPU, 16).backend.name == "sdpa"


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is first, and the order of the others decides where it cannot serve."""
    install_all(monkeypatch)
    monkeypatch.setattr("nanovllm.attention.triton_backend.importlib.util.find_spec", lambda name: name)
    selection = select_backend("auto", [SPEC], fakes.gpu(), 256)
    assert selection.backend.name == "triton"
    assert selection.backend.graph_safe
    assert {name: selection.reasons[name] for name in ("flash", "flashinfer", "sdpa")} == dict.fromkeys(
        ("flash", "flashinfer", "sdpa"), "available"
    )
    monkeypatch.setattr(type(BACKENDS[0]), "rejects", lambda *_: "not today")
    assert select_backend("auto", [SPEC], fakes.gpu(), 256).backend.name == "flash"
    assert select_backend("auto", [SPEC], fakes.gpu(), 64).backend.name == "flashinfer"
    assert select_backend("auto", [SPEC, replace(SPEC, head_dim=96)], fakes.gpu(), 64).backend.name == "sdpa"


@pytest.mark.parametrize("name", ON_GPU)
def test_a_choice_that_cannot_run_is_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attn_backend='{name}' cannot be used here: refused: needs a GPU"):
        select_backend(name, [FLOAT], CPU, 16)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flash", r"flash_attn is not installed, and torch \S+ has no varlen_attn"),
        ("flashinfer", "flashinfer is not installed"),
        ("flash1", "flash_attn is not installed"),
    ],
)
def test_what_is_not_installed_is_named(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"attn_backend='{name}' cannot be used here: refused: {reason}"):
        select_backend(name, [replace(SPEC, dtype=torch.float16)], fakes.gpu(), 256)


def test_latent_attention_has_backends_of_its_own() -> None:
    latent = LatentSpec(16, 512, 128, 64, 128, torch.bfloat16, 0.1)
    assert select_backend("auto", [latent], CPU, 16).backend.name == "torch.mla"
    assert select_backend("auto", [latent], fakes.gpu(), 64).backend.name == "triton.mla"
    assert select_backend("auto", [latent], fakes.gpu((7, 5)), 64).backend.name == "torch.mla"
    with pytest.raises(ConfigError, match="'sdpa' cannot be used here: refused: computes no latent attention"):
        select_backend("sdpa", [latent], CPU, 16)
    with pytest.raises(ConfigError, match=r"'torch\.mla' cannot be used here: refused: computes only latent attention"):
        select_backend("torch.mla", [SPEC], CPU, 16)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"attn_backend='flashy': must be auto or one of triton, flash, .*sdpa.math"):
        select_backend("flashy", [SPEC], CPU, 16)


@pytest.mark.parametrize(
    ("name", "changed", "capability", "words"),
    [
        ("flash", {}, (7, 5), "compute capability 8.0"),
        ("flash", {"dtype": torch.float32}, (9, 0), "not float32"),
        ("flash", {"head_dim": 264}, (9, 0), "head_dim=264"),
        ("flash", {"head_dim": 100}, (9, 0), "head_dim=100"),
        ("flash", {"head_dim": 256}, (8, 0), None),
        ("flash", {"head_dim": 40, "window": 64}, (12, 0), None),
        ("flashinfer", {}, (7, 5), "compute capability 8.0"),
        ("flashinfer", {"dtype": torch.float32}, (9, 0), "not float32"),
        ("flashinfer", {"head_dim": 96}, (9, 0), "head_dim=96"),
        ("flashinfer", {"head_dim": 64}, (8, 0), None),
        ("flash1", {"dtype": torch.float16}, (7, 5), None),
        ("flash1", {}, (8, 0), None),
        ("flash1", {}, (7, 5), "no bfloat16"),
        ("flash1", {"dtype": torch.float32}, (8, 0), "no float32"),
        ("flash1", {"dtype": torch.float16}, (7, 0), "7.0"),
        ("flash1", {}, (10, 0), "10.0"),
        ("flash1", {"head_dim": 136}, (8, 0), "head_dim=136"),
        ("flash1", {"window": 16}, (8, 0), "sliding window"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, name: str, changed: dict[str, Any], capability: tuple[int, int], words: str | None
) -> None:
    install_all(monkeypatch, "1.0.9" if name == "flash1" else "2.8.3")
    reason = refusal(name, replace(SPEC, **changed), fakes.gpu(capability))
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_flash1_and_flash_want_different_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    install_all(monkeypatch, "2.8.3")
    assert refusal("flash1") == "needs flash_attn 1.x, 2.8.3 is installed"
    assert refusal("flash") is None
    install_all(monkeypatch, "1.0.9")
    assert refusal("flash1") is None
    assert "flash_attn 1.0.9 has no block tables" in str(refusal("flash"))


def test_block_sizes_of_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3, where it can be used, reads any block; the others only such of 256."""
    install_all(monkeypatch)
    assert "set kvcache_block_size=256" in str(refusal("flash", block_size=128))
    fakes.install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=fakes.flash_attn_with_kvcache)
    assert refusal("flash", block_size=64) is None
    assert "flash-attn 2 reads blocks of 256" in str(refusal("flash", device=fakes.gpu((8, 9)), block_size=64))


def test_torch_is_used_where_it_takes_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=fakes.varlen_attn)
    assert refusal("flash") is None
    assert f"torch {torch.__version__} reads blocks of 256" in str(refusal("flash", block_size=16))


@pytest.mark.parametrize(("varlen_attn", "window"), [(fakes.varlen_attn_2_10, False), (fakes.varlen_attn_2_11, True)])
def test_torch_without_block_tables_gathers(monkeypatch: pytest.MonkeyPatch, varlen_attn: Any, window: bool) -> None:
    """The last way, with blocks of any size; "gathered" is part of its name."""
    fakes.install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)
    name = f"torch {torch.__version__} varlen_attn, gathered"
    kernels = find_kernels(False)
    assert isinstance(kernels, Kernels)
    assert kernels.library == name
    assert [refusal("flash", block_size=size) for size in (1, 16, 64, 256)] == [None] * 4
    reason = refusal("flash", replace(SPEC, window=16))
    assert reason == (None if window else f"{name}, has no sliding window (torch 2.11 has, and flash-attn)")
    monkeypatch.setattr("nanovllm.attention.triton_backend.importlib.util.find_spec", lambda name: name)
    assert select_backend("auto", [SPEC], fakes.gpu(), 64).backend.name == "triton"
    assert not select_backend("flash", [SPEC], fakes.gpu(), 64).backend.graph_safe
    fakes.install(monkeypatch, "flash_attn", __version__="2.8.3", flash_attn_varlen_func=fakes.flash_attn_varlen_func)
    assert "flash-attn 2 reads blocks of 256" in str(refusal("flash", block_size=64))


def test_a_varlen_attn_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=lambda query, key, value, mask: query)
    assert "has no causal mask in varlen_attn" in str(refusal("flash"))


def test_a_broken_package_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "half_there.py").write_text("import a_part_that_is_missing")
    (tmp_path / "wrong_torch.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("half_there") == (
        "half_there is installed but cannot be imported: No module named 'a_part_that_is_missing'"
    )
    assert "undefined symbol" in str(load("wrong_torch"))
    assert load("never_heard_of.it") == "never_heard_of is not installed"


@pytest.mark.parametrize(("version", "major"), [("1.0.9", 1), ("2.8.3.post1", 2), ("10", 10), ("x", 0), (None, 0)])
def test_versions(version: str | None, major: int) -> None:
    module = type(torch)("some")
    if version is not None:
        module.__version__ = version
    assert major_version(module) == major


def test_info_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    info = attention_backend_info(fakes.gpu((9, 0)))
    assert (info["gpu"], info["compute_capability"], info["architecture"]) == ("Fake GPU", "9.0", "Hopper")
    assert list(info["backends"]) == list(ATTN_BACKENDS[1:])
    print_attention_backend_info(fakes.gpu((9, 0)))
    printed = capsys.readouterr().out
    for words in ("Fake GPU", "9.0", "Hopper", "bfloat16", "flashinfer  refused: flashinfer is not installed"):
        assert words in printed
    assert [line.split()[0] for line in printed.splitlines()[-9:]] == list(ATTN_BACKENDS[1:])


def test_info_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention_backend_info(CPU)["compute_capability"] is None
    print_attention_backend_info(CPU)
    printed = capsys.readouterr().out
    for words in ("GPU:                 none; ", "triton      refused: needs a GPU", "chosen"):
        assert words in printed


def test_the_log_says_why_others_were_refused(make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm"):
        make_llm(attn_backend="sdpa")
    line = next(record.getMessage() for record in caplog.records if "attention backend" in record.getMessage())
    assert line.startswith("attention backend sdpa on ")
    assert "'triton': 'refused: needs a GPU'" in line

"""`bench quality`: what a format stores, and what it changes in the answers of a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from nanovllm.bench.quality import RoundedModel, measure, opened
from nanovllm.bench.quality_formats import FORMATS, NAMES, NONE, find_formats
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.lowrank.compress.text import Windows
from nanovllm.weights.checkpoint import open_checkpoint
from tests.cli.runner import Run
from tests.tiny_models import TinyModel

ROOT = Path(__file__).parent.parent.parent
FIXTURE = ROOT / "tests/fixtures/tiny-mixtral"
TEXT = FIXTURE / "heldout.txt"
CPU = Device.choose("cpu")
WEIGHTS = [name for name, form in FORMATS.items() if form.weight]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rounded(name: str, w: torch.Tensor) -> tuple[torch.Tensor, float]:
    round_weight = FORMATS[name].weight
    assert round_weight is not None
    found, bits = round_weight(w)
    return found, bits / w.numel()


@pytest.mark.parametrize(
    ("name", "bits", "error"),
    [
        ("fp8-row", 8 + 32 / 512, 0.027),
        ("fp8-block", 8 + 32 / 128**2, 0.027),
        ("int4-32", 4 + 20 / 32, 0.085),
        ("int4-128", 4 + 20 / 128, 0.11),
        ("int4-128-sym", 4 + 16 / 128, 0.12),
        ("Q8_0", 8.5, 0.006),
        ("Q6_K", 6.5625, 0.019),
        ("Q5_0", 5.5, 0.046),
        ("Q4_1", 5.0, 0.08),
        ("Q4_K", 4.5, 0.08),
        ("Q4_0", 4.5, 0.095),
    ],
)
def test_bits_and_error_of_normal_weights(name: str, bits: float, error: float) -> None:
    """The error of round-to-nearest, by the root of squares; half of it would be a format with one bit more."""
    w = normal(256, 512)
    found, stored = rounded(name, w)
    assert stored == pytest.approx(bits)
    assert 0.6 * error < float((found - w).norm() / w.norm()) < error


def test_every_format_of_weights_has_its_figures_above() -> None:
    [mark] = test_bits_and_error_of_normal_weights.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(WEIGHTS)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_0", "Q4_0"])
def test_types_without_a_search_are_those_of_the_gguf_package(name: str) -> None:
    w, kind = normal(9, 64), getattr(gguf.GGMLQuantizationType, name)
    wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind))
    differ = rounded(name, w)[0] != wanted
    assert float(differ.float().mean()) < 0.02  # ties, and a scale that is rounded to float16 before or after dividing


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("columns", [31, 32, 33, 127, 128, 129, 255, 256, 257])
def test_any_shape_is_rounded(name: str, columns: int) -> None:
    """Sizes around every block; a row of zeros and one of a single number, which most scales must keep."""
    w = normal(9, columns)
    w[3], w[4] = 0, 1.0
    found, _ = rounded(name, w)
    assert found.shape == w.shape
    assert found[3].count_nonzero() == 0
    assert float((found - w).norm() / w.norm()) < 0.15
    torch.testing.assert_close(found[4], w[4], rtol=0.07, atol=0)


def test_rows_that_do_not_divide_take_another_type() -> None:
    w = normal(8, 288)  # 9 blocks, no super-block
    assert rounded("Q4_K", w)[1] == rounded("Q5_0", w)[1]
    assert torch.equal(rounded("Q6_K", w)[0], rounded("Q8_0", w)[0])
    w = normal(8, 40)
    assert torch.equal(rounded("Q4_1", w)[0], w)
    assert rounded("Q4_1", w)[1] == 32


@pytest.mark.parametrize("name", ["fp8-row", "fp8-block"])
@pytest.mark.parametrize("columns", [96, 128, 160])
def test_inputs(name: str, columns: int) -> None:
    x, round_inputs = normal(5, columns), FORMATS[name].inputs
    assert round_inputs is not None
    error = float((round_inputs(x) - x).norm() / x.norm())
    assert 0.002 < error < 0.04


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    with opened(str(FIXTURE), TEXT, 128, 512, CPU) as (model, windows):
        found = measure(model, windows, find_formats(None))
    return {row["format"]: row for row in found}


def test_the_unquantised_model_is_itself(rows: dict[str, dict[str, Any]]) -> None:
    assert rows[NONE] | {"perplexity": 0} == {
        "format": NONE,
        "bits_per_weight": None,
        "perplexity": 0,
        "perplexity_ratio": 1.0,
        "mean_kl": 0.0,
        "max_kl": 0.0,
        "top1": 1.0,
    }
    assert 20 < rows[NONE]["perplexity"] < 50


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("Q8_0", "fp8-row"),
        ("Q8_0", "fp8-block"),
        ("Q6_K", "Q5_0"),
        ("Q5_0", "Q4_0"),
        ("fp8-row", "int4-32"),
        ("fp8-block", "int4-128"),
        ("Q8_0", "Q4_1"),
        ("fp8-row", "Q4_K"),
        ("kv-float16", "kv-int8"),
        ("kv-int8", "int4-32"),
        ("kv-int8", "kv-fp8"),
        ("kv-fp8", "int4-32"),
    ],
)
def test_more_bits_change_less(rows: dict[str, dict[str, Any]], better: str, worse: str) -> None:
    assert rows[better]["mean_kl"] < rows[worse]["mean_kl"] / 2
    assert rows[better]["top1"] > rows[worse]["top1"]


def test_inputs_add_to_what_weights_change(rows: dict[str, dict[str, Any]]) -> None:
    for name in ("fp8-row", "fp8-block"):
        assert rows[f"{name}+inputs"]["mean_kl"] > 1.2 * rows[name]["mean_kl"]
        assert rows[f"{name}+inputs"]["bits_per_weight"] == rows[name]["bits_per_weight"]


def test_figures_are_in_range(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        assert row["mean_kl"] <= row["max_kl"]
        assert 0 < row["top1"] <= 1
        assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / rows[NONE]["perplexity"])
        assert 0.98 < row["perplexity_ratio"] < 1.2
        assert (row["bits_per_weight"] is None) == (name == NONE or name.startswith("kv-"))


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3-bias-tied", "mistral-window", "qwen3-moe", "deepseek-v3"])
def test_every_family_gives_its_own_logits(name: str, tiny: Callable[[str], TinyModel]) -> None:
    """Against transformers; then rounded, which must change them, and unrounded again."""
    model, answer = tiny(name), tiny(name).answers[-1]
    ids = torch.tensor([answer.prompt + answer.tokens])
    checkpoint = open_checkpoint(model.path)
    try:
        ours = RoundedModel(checkpoint, CPU, ids.shape[1])
    finally:
        checkpoint.close()
    with torch.no_grad():
        before = ours.log_probs(ours.states(ids))
        torch.testing.assert_close(before, answer.logprobs, rtol=0, atol=1e-3)
        ours.use(FORMATS["int4-32"])
        assert float((ours.log_probs(ours.states(ids)) - before).abs().max()) > 0.01
        ours.use(FORMATS[NONE])
        assert torch.equal(ours.log_probs(ours.states(ids)), before)
    windows = Windows.pack([ids[0].tolist()], ids.shape[1])
    if name.startswith("deepseek"):
        with pytest.raises(ConfigError, match="'kv-int8': this model caches no keys and values"):
            measure(ours, windows, find_formats("fp8-row,kv-int8"))
    else:
        assert measure(ours, windows, find_formats("kv-int8"))[1]["mean_kl"] > 0


def test_command(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("--formats", "Q8_0, int4-128-sym", "--max-tokens", 200, "--window", 64)
    picture = tmp_path / "kl.png"
    result = run("bench", "quality", "--model", FIXTURE, "--text", TEXT, *asked, "--save", "--plot", picture)
    assert result.code == 0
    report = result.last_json
    assert [row["format"] for row in report["results"]] == ["none", "Q8_0", "int4-128-sym"]
    assert (report["num_tokens"], report["window"], report["text"]) == (192, 64, "heldout.txt")
    assert "same token first" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    [saved] = (tmp_path / "benchmarks/results").iterdir()
    assert json.loads(saved.read_text()) == report


def test_a_model_without_keys_leaves_the_usual_formats_of_keys_out(
    run: Run, tiny: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the capital of the land is the town on the river " * 9)
    result = run("bench", "quality", "--model", tiny("deepseek-v2-lite").path, "--text", text, "--window", 8)
    assert result.code == 0
    found = [row["format"] for row in result.last_json["results"]]
    assert "fp8-block+inputs" in found
    assert not [name for name in found if name.startswith("kv-")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--formats", "fp8-row,Q3_K"), f"--formats 'Q3_K': must be of {', '.join(NAMES)}"),
        (("--formats", "int4-32+inputs"), "--formats 'int4-32+inputs': must be of none, fp8-row, fp8-row+inputs"),
        (
            ("--max-tokens", 100),
            "100 tokens, fewer than one window of 128; no more are read: take a shorter --window",
        ),
        (("--window", 4096, "--max-tokens", 8192), "--window 4096:"),
        (("--text", "nowhere.txt"), "--text nowhere.txt: cannot be read"),
        (("--device", "tpu"), "--device 'tpu': must be one of auto, cpu, cuda"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(run: Run, options: tuple, message: str) -> None:
    result = run("bench", "quality", "--model", FIXTURE, "--text", TEXT, *options)
    assert result.code != 0
    assert message in " ".join(result.err.split())


def table_row(row: dict[str, Any]) -> str:
    """A line of the tables in docs/quantization.md."""
    bits = "" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.2f}"
    shares = f"{row['perplexity']:.2f} | {row['perplexity_ratio']:.4f} | {row['mean_kl']:.5f} | {row['max_kl']:.3f}"
    return f"| {row['format']} | {bits} | {shares} | {100 * row['top1']:.1f} % |"


@pytest.mark.parametrize("name", ["tiny-mixtral", "smollm2"])
def test_the_tables_of_the_docs_are_those_of_the_files(name: str) -> None:
    file = ROOT / f"benchmarks/results/2026-11-19-cpu-quality-{name}.json"
    rows = [table_row(row) for row in json.loads(file.read_text())["results"]]
    assert "\n".join(rows) in (ROOT / "docs/quantization.md").read_text()

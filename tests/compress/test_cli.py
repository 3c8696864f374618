"""`nanovllm compress` and the scripts of the documented names, as a user types them."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.runner import Run, make_runner
from tests.compress.rig import TRAINED, content, small_text

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
MODEL = ("--model-path", TRAINED, "--device", "cpu")
DOCUMENTED = {
    "decompose_experts": "--model-path --rank --dtype --device --output-dir",
    "collect_moe_calib": "--model-path --out --cap-per-group --num-prompts --max-new-tokens --temperature --text",
    "distill_experts_activation_aware": "--model-path --calib-path --rank --dtype --ridge --device --chunk --chunk-w2 "
    "--pca-oversample --output-dir --mode --w2-mode --target-ratio --refine-steps",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return make_runner(monkeypatch, capsys)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_scripts_have_the_documented_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert not left.value.code
    shown = capsys.readouterr().out.split()
    assert not {flag for flag in DOCUMENTED[name].split() if flag not in shown}


def test_documented_defaults(run: Run) -> None:
    shown = " ".join(run("compress", "distill", "--help").out.replace("│", " ").split())
    for default in ("[default: 256]", "[default: 0.0001]", "[default: 64]", "[default: 16]", "[default: 32]"):
        assert default in shown
    assert "[default: 256]" in run("compress", "pca", "--help").out
    shown = " ".join(run("compress", "calibrate", "--help").out.replace("│", " ").split())
    for default in ("[default: 1024;", "[default: 64;", "[default: 0.7;", "default 200"):
        assert default in shown


def test_from_text_to_a_folder_in_the_model(run: Run, tmp_path: Path) -> None:
    """Both commands, the folder where the engine looks for it, and the sentence before it."""
    model = Path(shutil.copytree(TRAINED, tmp_path / "model"))
    calib = tmp_path / "calib"
    where = ("--model-path", model, "--device", "cpu")
    result = run("compress", "calibrate", *where, "--out", calib, "--text", small_text(tmp_path, 6000))
    assert result.code == 0, result.err
    assert "tokens in" in result.out
    result = run("compress", "distill", *where, "--calib-path", calib, "--rank", 32)
    assert result.code == 0, result.err
    assert "rank 32 keeps 25% of the experts' bytes; predicted error" in result.out
    assert "done: 25.0% of the experts' bytes kept" in result.out
    made = content(model / "svd_experts")
    assert len(made) == 34
    result = run("compress", "pca", *where, "--rank", 129)
    assert result.code == 2
    assert "--rank 129: must be in [1, 128]" in result.err
    assert content(model / "svd_experts") == made
    result = run("compress", "pca", *where, "--rank", 8)
    assert result.code == 0
    assert json.loads((model / "svd_experts" / "metadata.json").read_text())["method"] == "pca"


def test_a_report(run: Run, calib_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.json"
    result = run("compress", "report", *MODEL, "--calib-path", calib_path, "--text", small_heldout(tmp_path), "--ranks",
                 "8,64", "--w2-mode", "output", "--speed-tokens", 5, "--json", page)  # fmt: skip
    assert result.code == 0, result.err
    rows = result.last_json["results"]
    assert json.loads(page.read_text())["results"] == rows
    assert [(row["method"], row["rank"]) for row in rows] == [
        ("pca", 8), ("distilled", 8), ("pca", 64), ("distilled", 64),
    ]  # fmt: skip
    by = {(row["method"], row["rank"]): row for row in rows}
    assert by["distilled", 64]["kl"] < by["distilled", 8]["kl"]
    assert by["distilled", 64]["kl"] < by["pca", 64]["kl"]
    assert by["distilled", 64]["kept"] == 0.5
    measured = [by["distilled", 64]["heldout_errors"][str(layer)]["layer"] for layer in range(4)]
    assert sum(measured) / 4 == pytest.approx(by["distilled", 64]["predicted_error"], rel=0.5)
    assert by["pca", 64]["heldout_errors"]["3"]["layer"] > by["distilled", 64]["heldout_errors"]["3"]["layer"]
    assert len(by["pca", 8]["heldout_errors"]["0"]["experts"]) == 8
    assert "the model itself has perplexity" in result.out
    for word in ("held-out", "KL", "perplexity", "router", "tok/s here", "teacher", "predicted"):
        assert word in result.out
    speeds = [result.last_json["teacher"]["speed"], *(row["speed"] for row in rows)]
    for speed in speeds:
        assert speed["tokens_per_second"] > 1
        assert (speed["num_tokens"], speed["placement"], speed["device"]) == (5, "resident", speeds[0]["device"])
    assert f"one sequence of 5 tokens through the engine on {speeds[0]['device']}" in result.out
    assert not (TRAINED / "svd_experts").exists()


def test_a_report_without_speed_draws_what_it_has(run: Run, calib_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "curve.png"
    result = run("compress", "report", *MODEL, "--calib-path", calib_path, "--text", small_heldout(tmp_path), "--ranks",
                 "8", "--w2-mode", "output", "--speed-tokens", 0, "--plot", page)  # fmt: skip
    assert result.code == 0, result.err
    assert page.read_bytes().startswith(b"\x89PNG")
    assert result.last_json["teacher"]["speed"] is None
    assert [row["speed"] for row in result.last_json["results"]] == [None, None]
    assert "tok/s:" not in result.out


def small_heldout(folder: Path) -> Path:
    path = folder / "heldout.txt"
    path.write_text((TRAINED / "heldout.txt").read_text(encoding="utf-8")[:5000], encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("distill", "--calib-path", "nowhere"), "nowhere: no calibration"),
        (("distill", "--calib-path", "nowhere", "--w2-mode", "up"), "--w2-mode 'up'"),
        (("pca", "--device", "tpu"), "--device 'tpu': must be one of"),
        (("pca", "--rank", "256", "--output-dir", "x"), "--rank 256: must be in [1, 128]"),
        (("calibrate", "--out", "x", "--text", "no.txt"), "--text no.txt: cannot be read"),
        (("calibrate", "--out", "x", "--num-prompts", "0"), "no text; give --text FILE or --num-prompts"),
        (("report", "--calib-path", "x", "--text", "y", "--ranks", "a"), "--ranks 'a': write numbers with commas"),
        (("report", "--calib-path", "x", "--text", "y", "--ranks", "500"), "--rank 500"),
        (("report", "--calib-path", "x", "--text", "y", "--speed-tokens", "-1"), "--speed-tokens -1: must not be"),
    ],
)
def test_mistakes_are_one_line(
    run: Run, words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("compress", words[0], "--model-path", TRAINED, *(() if "tpu" in words else MODEL[2:]), *words[1:])
    assert result.code == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_plot_needs_matplotlib(run: Run, calib_path: Path) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib"):
        pytest.skip("matplotlib is installed")
    words = ("--calib-path", calib_path, "--text", TRAINED / "heldout.txt", "--plot", "x.png")
    result = run("compress", "report", *MODEL, *words)
    assert result.code == 2
    assert "needs matplotlib" in result.err

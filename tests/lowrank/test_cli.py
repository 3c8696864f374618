"""`nanovllm compress` and the scripts of the documented names, as a user types them."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from nanovllm.bench import report as page
from nanovllm.lowrank.compress.calibrate import collect
from nanovllm.lowrank.compress.distill import compress
from nanovllm.lowrank.compress.options import Options, Swept
from nanovllm.lowrank.compress.report import COLUMNS, sweep
from nanovllm.lowrank.compress.text import Source
from tests.cli.runner import Run
from tests.lowrank.rig import TRAINED, content, small_text

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
MODEL = ("--model-path", TRAINED, "--device", "cpu")
DOCUMENTED = {
    "decompose_experts": "--model-path --rank --dtype --device --output-dir",
    "collect_moe_calib": "--model-path --out --cap-per-group --num-prompts --max-new-tokens --temperature --text",
    "distill_experts_activation_aware": "--model-path --calib-path --rank --dtype --ridge --device --chunk --chunk-w2 "
    "--pca-oversample --output-dir --w2-mode --target-ratio --refine-steps",
}


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
    for default in ("by default 256", "[default: 0.0001]", "[default: 64]", "[default: 16]", "[default: 32]"):
        assert default in shown
    assert "[default: 256]" in run("compress", "pca", "--help").out
    shown = " ".join(run("compress", "calibrate", "--help").out.replace("│", " ").split())
    for default in ("[default: 1024;", "[default: 64;", "[default: 0.7;", "default 200"):
        assert default in shown


def test_from_text_to_a_folder_in_the_model(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both commands, the folder where the engine looks for it, and the sentence before it."""
    model = Path(shutil.copytree(TRAINED, tmp_path / "model"))
    calib = tmp_path / "calib"
    where = ("--model-path", model, "--device", "cpu")
    result = run("compress", "calibrate", *where, "--out", calib, "--text", small_text(tmp_path, 6000))
    assert result.code == 0, result.err
    assert "tokens in" in result.out
    result = run("compress", "distill", *where, "--calib-path", calib, "--rank", 32)
    assert result.code == 0, result.err
    assert "rank 32: at most 28% of the experts' bytes kept, U included; predicted error" in result.out
    assert re.search(r"done: 2[678]\.\d% of the experts' bytes kept, U included", result.out)
    assert "experts saw fewer rows than the hidden size of 128" in caplog.text
    assert "effective rank" not in caplog.text
    made = content(model / "svd_experts")
    assert len(made) == 34
    result = run("compress", "pca", *where, "--rank", 129)
    assert result.code == 2
    assert "--rank 129: must be in [1, 128]" in result.err
    assert content(model / "svd_experts") == made
    result = run("compress", "pca", *where, "--rank", 8)
    assert result.code == 0
    assert json.loads((model / "svd_experts" / "metadata.json").read_text())["method"] == "pca"


def test_a_report(run: Run, calib_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = tmp_path / "report.json"
    result = run("compress", "report", *MODEL, "--calib-path", calib_path, "--text", small_heldout(tmp_path), "--ranks",
                 "8,64", "--w2-mode", "output", "--speed-tokens", 5, "--json", page)  # fmt: skip
    assert result.code == 0, result.err
    rows = result.last_json["results"]
    assert json.loads(page.read_text())["results"] == rows
    by = {(row["method"], row["rank"]): row for row in rows}
    assert list(by) == [("pca", 8), ("distilled", 8), ("pca", 64), ("distilled", 64)]
    assert by["distilled", 64]["kl"] < by["distilled", 8]["kl"]
    assert by["distilled", 64]["kl"] < by["pca", 64]["kl"]
    assert by["distilled", 64]["kept"] == 0.53125
    assert by["distilled", 64]["predicted_perplexity_times"][0] < by["distilled", 64]["predicted_perplexity_times"][1]
    measured = [by["distilled", 64]["heldout_errors"][str(layer)]["layer"] for layer in range(4)]
    assert sum(measured) / 4 == pytest.approx(by["distilled", 64]["predicted_error"], rel=0.5)
    assert by["pca", 64]["heldout_errors"]["3"]["layer"] > by["distilled", 64]["heldout_errors"]["3"]["layer"]
    assert len(by["pca", 8]["heldout_errors"]["0"]["experts"]) == 8
    assert re.search(
        r"the model itself has perplexity [\d.]+; pca rank 8 \(7%\) [\d.]+ times that \(unreadable text\)", result.out
    )
    assert caplog.text.count("saw fewer rows") == 1  # and not once for each rank
    assert "is in the calibration's text too" not in caplog.text
    for word in ("held-out", "KL", "perplexity", "router", "tok/s here", "teacher", "predicted"):
        assert word in result.out
    speeds = [result.last_json["teacher"]["speed"], *(row["speed"] for row in rows)]
    for speed in speeds:
        assert speed["tokens_per_second"] > 0
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
        (("distill", "--calib-path", "x", "--rank", "8", "--target-ratio", "1"), "--rank 8 beside --target-ratio 1.0"),
        (("pca", "--device", "tpu"), "--device 'tpu': must be one of"),
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


def test_a_plot_needs_matplotlib(run: Run, calib_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    words = ("--calib-path", calib_path, "--text", TRAINED / "heldout.txt", "--plot", "x.png")
    result = run("compress", "report", *MODEL, *words)
    assert result.code == 2
    assert "needs matplotlib, which is not installed; pip install 'nano-vllm[plot]'" in result.err


def test_the_extra_that_is_named_installs_matplotlib() -> None:
    project = (SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^plot = \["matplotlib\b', project, re.MULTILINE)


@pytest.mark.parametrize(("option", "name"), [("--plot", "x.png"), ("--plot", "x.pdf"), ("--json", "x.json")])
def test_files_of_another_kind_are_not_overwritten(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: object())
    path, words = tmp_path / name, (*MODEL, "--calib-path", "none", "--text", "none", option)
    path.write_text('{"years": "of work"}')
    assert "is a file of another kind, and would be overwritten" in run("compress", "report", *words, path).err
    assert path.read_text() == '{"years": "of work"}'
    for bad in (tmp_path, tmp_path / "no" / name):
        result = run("compress", "report", *words, bad)
        assert result.code == 2
        assert "must end in one of .png" in result.err or "name a file in a folder that exists" in result.err
    path.write_text("")
    assert "none: cannot be read" in run("compress", "report", *words, path).err


# ---- what cannot be known --------------------------------------------------------------------------------------------


def test_a_text_that_says_nothing_predicts_nothing(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines of x: two directions. Every rank would seem enough; with 20,000 lines, perplexity was 46,250 times the
    model's."""
    text = tmp_path / "x.txt"
    text.write_text("x\n" * 5_000)
    calib = ("--calib-path", tmp_path / "calib")
    made = run("compress", "calibrate", *MODEL, "--out", calib[1], "--text", text)
    done = run(
        "compress", "distill", *MODEL, *calib, "--output-dir", tmp_path / "svd", "--rank", 16, "--w2-mode", "output"
    )
    assert (made.code, done.code) == (0, 0), made.err + done.err
    few = re.findall(r"1\d of 32 experts saw fewer rows than the hidden size of 128, 1\d of them none", caplog.text)
    narrow = re.findall(r"effective rank of \d of 128; the text is too uniform", caplog.text)
    assert (len(few), len(narrow)) == (2, 2), caplog.text
    assert "rank 16: 13% of the experts' bytes kept, U included; what becomes of the text cannot be" in done.out
    assert "nearly the same" not in done.out


def test_a_report_on_the_text_of_the_calibration(
    run: Run, calib_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of it too: half of this text is new."""
    mixed = tmp_path / "mixed.txt"
    halves = ((TRAINED / name).read_text(encoding="utf-8")[7:2500] for name in ("calib.txt", "heldout.txt"))
    mixed.write_text("".join(halves), encoding="utf-8")
    result = run("compress", "report", *MODEL, "--calib-path", calib_path, "--text", mixed, "--ranks", "4", "--w2-mode",
                 "output", "--speed-tokens", 0)  # fmt: skip
    assert result.code == 0, result.err
    found = re.search(r"mixed\.txt: (\d+) % of it is in the calibration's text too", caplog.text)
    assert found is not None
    assert 25 < int(found[1]) < 75


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_runs_show_progress_on_a_terminal_only(
    calib_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(stderr: io.StringIO, folder: Path) -> str:
        monkeypatch.setattr(sys, "stderr", stderr)
        text = small_heldout(tmp_path)
        collect(TRAINED, folder / "calib", Source(text, window=64), 8, "cpu")
        options = Options(rank=4, w2_mode="output", refine_steps=1)
        compress(TRAINED, calib_path, folder / "svd", options, "cpu")
        (folder / "scratch").mkdir()
        options = Options(w2_mode="output")
        rows = sweep(TRAINED, calib_path, text, Swept("4", 0), options, "cpu", folder / "scratch").rows()
        assert [len(row) for row in rows] == [len(COLUMNS)] * 3
        return stderr.getvalue()

    found = shown(Terminal(), tmp_path / "a")
    for name in ["calibrating", "predicting", "experts", "refining", "text", "rows", "report", "second"]:
        assert f"{name}:" in found, name
    assert "%|" not in shown(io.StringIO(), tmp_path / "b")

"""What guessing gains is measured by the same engine with and without guesses: equal tokens, and both are counted."""

from __future__ import annotations

from tests.cli.runner import Run
from tests.tiny_models import TinyModel


def test_command(run: Run, llama: TinyModel) -> None:
    options = ("--model", llama.path, "--cases", "1-random,8-random", "--output-len", 40, "--repeat", 2)
    result = run("bench", "speculation", *options, "--num-kvcache-blocks", 200, "--dtype", "float32")
    assert result.code == 0
    report = result.last_json
    assert [row["case"] for row in report["results"]] == ["1 random text", "8 random texts"]
    for row in report["results"]:
        assert row["same_tokens"] == "2 of 2"
        assert len(row["ratios"]) == 2
        assert min(row["ratios"]) <= row["ratio"] <= max(row["ratios"])
        assert 0 <= row["num_accepted"] <= row["num_drafted"]
        assert (row["acceptance"] is None) == (row["num_drafted"] == 0)
    assert "random texts" in result.out


def test_what_does_not_fit_is_said_before_anything_runs(run: Run, llama: TinyModel) -> None:
    options = ("--model", llama.path, "--cases", "1-random", "--output-len", 400)
    result = run("bench", "speculation", *options)
    assert result.code != 0
    assert "--output-len 400: 1 random text has prompts of 64 tokens" in result.err

"""`nanovllm chat` driven by piped lines, as a person would type them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.inputs import InputProcessor
from tests.cli.runner import SMALL, Run
from tests.tiny_models import EOS, TinyModel

LINES = ["the town", "rain"]


@pytest.fixture
def args(llama: TinyModel) -> tuple[str, ...]:
    return ("--model", str(llama.path), *SMALL, "--ignore-eos", "--max-tokens", "8")


@pytest.fixture(scope="module")
def replies(llama: TinyModel) -> list[str]:
    """To the first line; to the second with the first before it; to the second alone."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(llama.path), device="cpu", num_kvcache_blocks=64) as llm:

        def ask(*messages: tuple[str, str]) -> str:
            return llm.chat([{"role": r, "content": c} for r, c in messages], params, use_tqdm=False)[0]["text"]

        first = ask(("user", LINES[0]))
        second = ask(("user", LINES[0]), ("assistant", first), ("user", LINES[1]))
        found = [first, second, ask(("user", LINES[1]))]
    assert found[1] != found[2], "these lines cannot tell whether the conversation is kept"
    return found


def test_keeps_the_conversation(run: Run, args: Any, replies: list[str]) -> None:
    result = run("chat", *args, stdin="the town\n\nrain\n")
    assert result.code == 0
    assert result.out == f"{replies[0]}\n{replies[1]}\n"


@pytest.mark.parametrize("shown", [False, True])
def test_the_end_marker_stays_out_of_the_conversation(
    run: Run, args: Any, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    """The template writes the end of a turn itself."""
    conversations: list[list[dict[str, str]]] = []
    render = InputProcessor.render_chat

    def watch(inputs: InputProcessor, messages: Any, *more: Any, **options: Any) -> list[int]:
        conversations.append(messages)
        return render(inputs, messages, *more, **options)

    monkeypatch.setattr(InputProcessor, "render_chat", watch)
    options = ["--no-ignore-eos", "--logit-bias", f"{EOS}=100", "--no-skip-special-tokens"]
    result = run("chat", *args, *options, *["--include-stop-str-in-output"] * shown, stdin="the town\nrain\n")
    assert result.out == ("<|eos|>\n<|eos|>\n" if shown else "\n\n")
    assert conversations[1][1] == {"role": "assistant", "content": ""}


def test_reset_exit_and_unknown(run: Run, args: Any, replies: list[str]) -> None:
    result = run("chat", *args, stdin="the town\n/reset\nrain\n/what\n/help\n/exit\nrain\n")
    assert result.out == f"{replies[0]}\n{replies[2]}\n"  # nothing after /exit
    assert "unknown command /what" in result.err
    assert result.err.count("/stats ") == 2  # the help, for /what and for /help


def test_stats(run: Run, args: Any) -> None:
    line = "the men of the town sing in the rain all day long"  # more than one block of 16 tokens
    result = run("chat", *args, "--kvcache-block-size", "16", stdin=f"/stats\n{line}\nrain\n/stats\n")
    before, after = [line for line in result.err.splitlines() if line.startswith("answers:")]
    assert before.startswith("answers: 0 | prompt: 0 tokens | output: 0 tokens")
    assert after.startswith("answers: 2 |")
    assert "output: 16 tokens" in after
    assert "cached)" in after  # the second turn began with the first


def test_ctrl_c_stops_the_answer_and_not_the_program(
    run: Run, args: Any, replies: list[str], press: Callable[[int], None]
) -> None:
    press(4)
    result = run("chat", *args, stdin="the town\n/reset\nthe town\n")
    cut, full = result.out.splitlines()
    assert result.code == 0
    assert "(stopped)" in result.err
    assert full == replies[0]
    assert full.startswith(cut)
    assert len(cut) < len(full)


def test_too_long_is_refused_and_the_chat_goes_on(run: Run, args: Any, replies: list[str]) -> None:
    result = run("chat", *args, stdin=f"{'word ' * 300}\nthe town\n")
    assert "error: the prompt has" in result.err
    assert result.out == f"{replies[0]}\n"
    assert result.code == 0


def test_a_line_that_is_no_text(args: Any) -> None:
    command = [sys.executable, "-m", "nanovllm", "chat", *map(str, args)]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in a terminal of today
    done = subprocess.run(command, input=b"\xff\n", capture_output=True, check=False, env=strict)
    assert done.returncode == 2
    assert b"error: standard input" in done.stderr
    assert b"Traceback" not in done.stderr


def test_needs_a_chat_template(run: Run, args: Any, llama_copy: Path) -> None:
    (llama_copy / "chat_template.jinja").unlink(missing_ok=True)
    config = llama_copy / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'))
    result = run("chat", *args, "--model", llama_copy, stdin="the town\n")
    assert result.code == 2
    assert "no chat template" in result.err
    # and generate takes the prompt as it is
    assert run("generate", "the town", *args, "--model", llama_copy).code == 0

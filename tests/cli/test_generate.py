"""`nanovllm generate` on a tiny model: what is printed where, and in which order."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli import read_prompts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from tests.cli.runner import SMALL, Run
from tests.tiny_models import TinyModel

PROMPTS = ["the capital of the land", "rain", "the men of the town sing in the rain all day long"]


@pytest.fixture
def args(llama: TinyModel) -> tuple[str, ...]:
    return ("--model", str(llama.path), *SMALL, "--ignore-eos")


@pytest.fixture(scope="module")
def texts(llama: TinyModel) -> dict[str, list[str]]:
    """What the library answers: 12 tokens, plain and through the chat template."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(llama.path), device="cpu", num_kvcache_blocks=64) as llm:
        plain = [out["text"] for out in llm.generate(PROMPTS, params, use_tqdm=False)]
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return {"plain": plain, "chat": [out["text"] for out in llm.chat(conversations, params, use_tqdm=False)]}


def test_one_prompt_prints_the_answer_only(run: Run, args: Any, texts: dict[str, list[str]]) -> None:
    result = run("generate", PROMPTS[0], *args, "--max-tokens", 12)
    assert result.code == 0
    assert result.out == texts["chat"][0] + "\n"  # the model has a chat template: used by default
    assert "first token:" in result.err
    assert result.err.count("tok/s") == 2


def test_no_chat(run: Run, args: Any, texts: dict[str, list[str]]) -> None:
    assert run("generate", PROMPTS[0], *args, "--max-tokens", 12, "--no-chat").out == texts["plain"][0] + "\n"


def test_several_prompts_are_printed_in_order(run: Run, args: Any, texts: dict[str, list[str]]) -> None:
    """The second has the shortest prompt and two may run at once: it is the first to end, and still printed second."""
    result = run("generate", *PROMPTS, *args, "--max-tokens", 12, "--max-num-seqs", 2, "--scheduling-policy", "sjf")
    expected = "".join(f"[{i}/3] {prompt}\n{text}\n" for i, (prompt, text) in enumerate(zip(PROMPTS, texts["chat"]), 1))
    assert result.out == expected


def test_text_streams(run: Run, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something of the answer is out before the last step."""
    step, seen = LLMEngine.step, []

    def watch(engine: LLMEngine) -> Any:
        seen.append(writes[0])
        return step(engine)

    writes = [0]
    write = sys.stdout.write

    def count(text: str) -> int:
        writes[0] += len(text)
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", count)
    monkeypatch.setattr(LLMEngine, "step", watch)
    run("generate", PROMPTS[0], *args, "--max-tokens", 12)
    assert len(seen) >= 12
    assert seen[2] < seen[6] < writes[0]


def test_file_and_stdin(run: Run, args: Any, texts: dict[str, list[str]], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[1]}\n\n{PROMPTS[2]}\n")
    expected = "".join(f"[{i + 1}/3] {PROMPTS[i]}\n{texts['chat'][i]}\n" for i in range(3))
    assert run("generate", PROMPTS[0], "--file", file, *args, "--max-tokens", 12).out == expected
    assert run("generate", "--file", "-", *args, "--max-tokens", 12, stdin="\n".join(PROMPTS)).out == expected
    # a single - is one prompt, its newlines included; only the one that echo writes at the end is not
    for stdin in (PROMPTS[0], PROMPTS[0] + "\n"):
        assert run("generate", "-", *args, "--max-tokens", 12, stdin=stdin).out == texts["chat"][0] + "\n"


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [(b"x", "x"), (b"x\n", "x"), (b"x\r\n", "x"), (b"x\n\n", "x\n"), (b"\nx y\n z\n", "\nx y\n z"), (b"x\ry", "x\ny")],
)
def test_one_newline_at_the_end_of_standard_input_is_dropped(
    monkeypatch: pytest.MonkeyPatch, stdin: bytes, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert read_prompts(["a\n", "-"], None) == ["a\n", prompt]  # an argument is taken as it is


def test_standard_input_is_text_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    for given, file in ((["-"], None), ([], "-")):
        with pytest.raises(RequestError, match=r"standard input: cannot be read: .*0xff"):
            read_prompts(given, file)
        sys.stdin.seek(0)
    for given, file in ((["-", "-"], None), (["-"], "-")):
        with pytest.raises(RequestError, match="only once"):
            read_prompts(given, file)


def test_where_standard_input_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads it in pieces and counts from the beginning of each."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a" * 100_000 + b"\xff\n"), encoding="utf-8"))
    with pytest.raises(RequestError, match="0xff in position 100000"):
        read_prompts(["-"], None)


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_standard_input_is_a_mistake(monkeypatch: pytest.MonkeyPatch, stdin: bytes) -> None:
    for given, file in ((["-"], None), (["a", "-"], None), ([], "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(RequestError, match=r"empty|no prompt"):
            read_prompts(given, file)


def test_json(run: Run, args: Any, texts: dict[str, list[str]]) -> None:
    result = run("generate", *PROMPTS, *args, "--max-tokens", 12, "--json", "--n", 2, "--logprobs", 1)
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["prompt"] for record in records] == PROMPTS
    for record, text in zip(records, texts["chat"]):
        assert [output["text"] for output in record["outputs"]] == [text, text]
        assert len(record["outputs"][0]["logprobs"]) == 12
        assert record["outputs"][0]["finish_reason"] == "length"
        assert 0 < record["time_to_first_token"] <= record["latency"]


def test_seed_repeats(run: Run, args: Any) -> None:
    outputs = [
        run("generate", PROMPTS[0], *args, "--max-tokens", 12, "--temperature", 1, "--seed", seed).out
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_ctrl_c_stops_between_steps(
    run: Run, args: Any, texts: dict[str, list[str]], press: Callable[[int], None]
) -> None:
    press(5)
    result = run("generate", PROMPTS[0], *args, "--max-tokens", 12)
    assert result.code == 130
    answer = result.out.removesuffix("\n")
    assert texts["chat"][0].startswith(answer)
    assert 0 < len(answer) < len(texts["chat"][0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--logit-bias", "x"], "TOKEN_ID=NUMBER"),
        (["--max-model-len", "1"], "max_model_len=1"),
        (["--kvcache-block-size", "24"], "kvcache_block_size=24"),
        (["--attn-backend", "magic"], "attn_backend='magic'"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["--skip-tokenizer-init"], "tokenizer"),
        (["--no-chat", "--system", "be brief"], "--system"),
        (["word " * 300], "prompt 2 of 2"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_code_2(run: Run, args: Any, wrong: list[str], says: str) -> None:
    result = run("generate", "the town", *args, *wrong)
    assert result.code == 2
    assert result.out == ""
    *_, line = result.err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert "Traceback" not in result.err


def test_unknown_option_and_no_prompt(run: Run, args: Any) -> None:
    assert run("generate", "x", "--frobnicate").code == 2
    assert "no prompt" in run("generate", *args).err
    assert "only once" in run("generate", "-", "--file", "-", *args).err


def test_what_can_be_refused_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = ("--model", tmp_path / "no-model")
    for path in (tmp_path / "no" / "x", tmp_path, tmp_path / "notes.txt"):
        for command in (("generate", "x"), ("serve",)):
            assert f"error: --trace {path}: " in run(*command, *model, "--trace", path).err
    assert "n=2: a conversation has one answer" in run("chat", *model, "--n", 2).err


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm import RequestError

    monkeypatch.setenv("NANOVLLM_DEBUG", "1")
    with pytest.raises(RequestError):
        run("generate", "x", "--temperature", "nan")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_one_line(llama: TinyModel) -> None:
    command = [sys.executable, "-m", "nanovllm", "generate", "the", "--model", str(llama.path), *SMALL]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "error: [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_traceback(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m nanovllm --version {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ("standard output is closed: what is printed there is lost\n" if closed == ">&-" else "")

"""docs/learn: three engines give the same tokens, the checker can say yes and no, and no figure is invented."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_docs import ROOT, blocks, check_command, commands, problem_with, read, spans, table_rows

LEARN = ROOT / "docs/learn"
ENGINES = ("engine1_plain.py", "engine2_paged.py", "engine3_nanovllm.py")
MODULES = ("engine1_plain", "engine2_paged", "engine3_nanovllm", "exercises", "solutions", "check", "measure")
RESULTS = "benchmarks/results/2026-11-16-cpu-learn.json"
README = ("docs/learn/README.md", "docs/learn/README.zh-CN.md")
FAILURES = ("docs/learn/failures.md", "docs/learn/failures.zh-CN.md")
# Of these answers every token is at least 0.27 ahead of the next best in logprob.
ANSWERS = {
    2: "The months of the year are: January, February, March, April, May, June, July",
    4: "1, 2, 3, 4, 5, 6, 7,",
}


@pytest.fixture(scope="module")
def learn() -> Iterator[SimpleNamespace]:
    """The files of the course as modules; they import each other by bare names, as scripts do."""
    sys.path.insert(0, str(LEARN))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(LEARN))
    for name in MODULES:
        del sys.modules[name]


def run_script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(LEARN / name), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


# ---- the engines -----------------------------------------------------------------------------------------------------


def test_the_three_engines_print_the_same_tokens() -> None:
    printed = []
    for name in ENGINES:
        done = run_script(name, "--max-tokens", "2")
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r"^request \d+: .*$", done.stdout, re.M))
        assert re.search(r"14 new tokens in .* s: .* tokens/s, \d+ passes, \d+ tokens computed", done.stdout)
    assert blocks(read(README[0]), "text")[1].splitlines()[0] in done.stdout  # a step of engine 3 that is explained
    assert printed[0][0] == "request 0: [504, 3575] 'The capital'"
    assert len(printed[0]) == 7
    assert printed[0] == printed[1] == printed[2]


def test_engine_2_preempts_in_chunks_and_gives_the_same_answers(learn: SimpleNamespace) -> None:
    model = learn.engine1_plain.load()
    requests = [learn.engine1_plain.REQUESTS[number] for number in ANSWERS]
    requests = [learn.engine1_plain.Request(request.question, 20) for request in requests]
    scheduler = learn.engine2_paged.Scheduler(num_blocks=7, budget=24, max_num_seqs=2)
    done = learn.engine2_paged.run(model, requests, scheduler)
    assert scheduler.num_preemptions > 0
    assert len(scheduler.free) == 7
    assert [model.tokenizer.decode(token_ids) for token_ids in done.outputs] == list(ANSWERS.values())


def test_the_step_that_is_explained_is_the_one_printed(learn: SimpleNamespace) -> None:
    """The lengths of the prompts and of the answers decide the steps, so random weights will do."""
    lengths = zip((37, 85, 37, 45, 45, 38, 37), (8, 23, 32, 12, 32, 12, 8), learn.engine1_plain.REQUESTS)
    requests = [learn.engine1_plain.Request(str(p), n, request.arrives) for p, n, request in lengths]
    lines: list[str] = []
    scheduler = learn.engine2_paged.Scheduler(num_blocks=64, budget=64, max_num_seqs=8)
    done = learn.engine2_paged.run(learn.check.random_model(learn.check.SMALL), requests, scheduler, lines.append)
    results = json.loads(read(RESULTS))["results"]["2 paged, batched"]
    assert (done.num_passes, done.num_rows) == (results["passes"], results["tokens_computed"])
    assert blocks(read(README[0]), "text")[0].strip() in lines


def test_engine_2_refuses_what_never_fits(learn: SimpleNamespace) -> None:
    scheduler = learn.engine2_paged.Scheduler(num_blocks=2, budget=8, max_num_seqs=1)
    scheduler.add(learn.engine2_paged.Sequence(0, [1] * 30, 30, 3))  # 32 tokens are fed
    with pytest.raises(ValueError, match=r"request 1 may need 3 blocks: the pool has 2"):
        scheduler.add(learn.engine2_paged.Sequence(1, [1] * 30, 30, 4))
    with pytest.raises(ValueError, match=r"max_num_seqs=9: .* at most budget=8"):
        learn.engine2_paged.Scheduler(num_blocks=2, budget=8, max_num_seqs=9)


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_is_one_short_file(name: str) -> None:
    assert len(read(f"docs/learn/{name}").splitlines()) < 250


def test_every_place_in_the_code_exists(learn: SimpleNamespace) -> None:
    places = learn.engine3_nanovllm.PLACES
    named = [name for place in places for name in (place.idea, place.ours)]
    for name in ENGINES:
        named += re.findall(r"[\w/]+\.py:[\w.]*\w", read(f"docs/learn/{name}"))
    assert len(places) >= 15
    assert not {name: problem for name in named if (problem := problem_with(name))}


@pytest.mark.parametrize("page", README)
def test_every_name_option_and_command_of_the_text_exists(page: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in LEARN.glob("*.py")]
    options = {option for source in sources for option in re.findall(r'"(--[\w-]+)"', source)}
    named = [span for span in spans(read(page)) if span.split()[0] not in options]
    assert len(named) >= 20
    assert not {name: problem for name in named if (problem := problem_with(name))}
    for line in commands(read(page)):
        check_command(line)


@pytest.mark.parametrize("name", ["engine2_paged.py:nothing", "exercises.py:nothing", "--no-such-option 1"])
def test_a_wrong_name_is_found(name: str) -> None:
    assert problem_with(name)


# ---- the exercises ---------------------------------------------------------------------------------------------------


def test_our_solutions_are_right() -> None:
    done = run_script("check.py", "--answers", str(LEARN / "solutions.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("9 of 9 right\n")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["2", "3"], 1, "3.3 num_steps: not done yet\n0 of 6 right\n"),
        (["4"], 2, "chapter 4: there are chapters 1, 2 and 3"),
        (["--answers", "nothing.py"], 2, "--answers nothing.py: no such Python file"),
    ],
)
def test_what_the_checker_answers_otherwise(
    learn: SimpleNamespace, monkeypatch: Any, capsys: Any, options: list[str], code: int, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", *options])
    with pytest.raises(SystemExit) as left:
        learn.check.main()
    assert left.value.code == code
    assert message in "".join(capsys.readouterr())


def common(prompt: list[int], earlier: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(prompt, earlier)) if a != b), min(len(prompt), len(earlier)))


WRONG: list[tuple[str, Callable[..., Any]]] = [
    ("rows_computed", lambda p, n: p * n),  # the prompt alone is repeated
    ("rows_computed", lambda p, n: p + n - 1),  # with a cache
    ("flops", lambda n, s: 2 * n * s.layers * s.hidden * s.intermediate * 3),  # the MLP alone
    ("kv_bytes", lambda s: s.layers * s.kv_heads * s.head_dim * 4),  # keys without values
    ("kv_bytes", lambda s: 2 * s.layers * s.heads * s.head_dim * 4),  # query heads
    ("owner_of", lambda slot, tables, nums: next(((i, slot) for i, t in enumerate(tables) if slot // 16 in t), None)),
    ("empty_slots", lambda p, n: -(p + n) % 16),  # the last token is never fed
    ("num_passes", lambda p, n, budget: -(-p // budget) + n),  # the last chunk samples too
    ("findable_blocks", lambda p, n, size: (p + n) // size),  # the newest token is not computed
    ("findable_blocks", lambda p, n, size: p // size),  # blocks of the answer can be shared too
    ("cached_tokens", lambda prompt, earlier, size: common(prompt, earlier) // size * size),  # the last token
    ("cached_tokens", lambda prompt, earlier, size: common(prompt[:-1], earlier)),  # parts of blocks
    ("num_steps", lambda: 12),
]


@pytest.mark.parametrize(("name", "answer"), WRONG)
def test_a_wrong_answer_is_found(learn: SimpleNamespace, name: str, answer: Callable[..., Any]) -> None:
    right, text = learn.check.verdict(answer, getattr(learn.check, name)())
    assert not right
    assert re.match(r"wrong: \(.*\) gave .*, expected .*", text)


def test_solutions_that_forget_one_part_of_the_flops_are_found(learn: SimpleNamespace) -> None:
    right = learn.solutions.flops
    head = 2 * 12 * 30  # of check.SMALL, whose first case has one token
    for wrong in (lambda n, s: right(n, s) - head, lambda n, s: right(n, s) - 4 * n * n * s.layers * s.heads):
        assert not learn.check.verdict(wrong, learn.check.flops())[0]


def test_an_answer_that_raises_is_reported(learn: SimpleNamespace) -> None:
    _, text = learn.check.verdict(lambda p, n: p / 0, learn.check.rows_computed())
    assert text == "(1, 1) raised ZeroDivisionError: division by zero"


def test_an_answer_may_change_its_arguments(learn: SimpleNamespace) -> None:
    def pops(prompt: list[int], earlier: list[int], size: int) -> int:
        count = 0
        while prompt and earlier and prompt.pop(0) == earlier.pop(0):
            count += 1
        return count // size * size

    assert not learn.check.verdict(pops, learn.check.cached_tokens())[0]  # right only if a case emptied the next one's


def test_odd_answers_are_reported(learn: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    answers = SimpleNamespace(rows_computed=lambda *_: sys.exit(0), flops=lambda n, s: torch.zeros(2))
    assert not learn.check.check([1], answers)
    out = capsys.readouterr().out
    assert all(part in out for part in ("SystemExit", "RuntimeError", "kv_bytes: no function"))
    (tmp_path / "broken.py").write_text("def rows_computed(:\n")
    with pytest.raises(SystemExit, match=r"broken\.py cannot be read: SyntaxError"):
        learn.check.load_answers(tmp_path / "broken.py")


@pytest.mark.parametrize("page", README)
def test_every_exercise_is_asked_in_the_text(page: str, learn: SimpleNamespace) -> None:
    asked = re.findall(r"\*\*(\d)\.(\d)\*\* `exercises\.py:(\w+)`", read(page))
    expected = [
        (str(chapter), str(number), cases.__name__)
        for chapter, exercises in learn.check.CHAPTERS.items()
        for number, cases in enumerate(exercises, 1)
    ]
    assert asked == expected


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", README)
def test_the_table_is_that_of_the_result_file(page: str) -> None:
    results = json.loads(read(RESULTS))["results"]
    rows = [row for row in table_rows(read(page)) if len(row) == 5 and re.match(r"\d", row[1])]
    assert len(rows) == len(results)
    for (_, *said), found in zip(rows, results.values()):
        measured = found["cpu_time"]
        low, high = measured["ratio_spread"]
        ratio = f"{measured['ratio']:.1f} ({low:.1f} to {high:.1f})" if high > 1 else "1"
        speed = f"{measured['tokens_per_second']:.1f}"
        assert said == [str(found["passes"]), f"{found['tokens_computed']:,}", speed, ratio.replace(" to ", SPAN[page])]


SPAN = dict(zip(README, (" to ", " 到 ")))


def figures(text: str) -> Counter[str]:
    """Numbers that stand alone, without those of links and names such as H200 or w2."""
    text = re.sub(r"\[[^]]*\]\([^)]*\)", "", text)
    return Counter(
        number.rstrip(",") for number in re.findall(r"(?<![A-Za-z_\d.,-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?", text)
    )


def sections(page: str) -> list[str]:
    return read(page).split("\n## ")[1:]


def source_text(link: str) -> str:
    """What a link of failures.md points at: a whole page, or the section of its anchor."""
    path, _, anchor = link.partition("#")
    text = (LEARN / path).read_text(encoding="utf-8")
    if not anchor:
        return text
    found = [part for part in text.split("\n## ") if anchor == re.sub(r"[^\w\- ]", "", title(part)).replace(" ", "-")]
    assert len(found) == 1, link
    return found[0]


def title(section: str) -> str:
    return section.partition("\n")[0].lower()


@pytest.mark.parametrize("page", FAILURES)
def test_every_figure_of_a_failure_is_in_its_source(page: str) -> None:
    found = sections(page)
    assert 8 <= len(found) <= 12
    for section in found:
        heading, _, text = section.partition("\n")
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert links, heading
        known = set(figures(" ".join(map(source_text, links))))
        assert len(figures(text)) >= 4, heading
        assert not set(figures(text)) - known, heading


def test_an_invented_figure_would_be_found() -> None:
    assert figures("74.4 -> 66.2 us, H200 w2, 1,024 rows, 5e-5 [decision 6](6.md)") == Counter(
        ["74.4", "66.2", "1,024", "5e-5"]
    )
    assert "66.3" not in figures(source_text("../lab/LOG.md#2026-11-15-start-up-and-decode-without-splits"))

"""The docs are held against the code: names, options, commands, links, examples.

A name in backticks is looked up without importing anything: `path.py:Class.method` in that file, `Class.member` in
the class, any other expression identifier by identifier. So renaming a function fails here, with the page to mend.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import POLICIES, EngineConfig
from nanovllm.model_config import ROPE_TYPES
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
READMES = ("README.md", "README.zh-CN.md")
FEATURES = ("docs/features.md", "docs/features.zh-CN.md")
OPTIONS = ("docs/options.md", "docs/options.zh-CN.md")
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
NAMING = [
    "docs/tour.md",
    "docs/glossary.md",
    "docs/attention.md",
    "docs/moe.md",
    "docs/low-rank-experts.md",
    "docs/small-gpus.md",
]
NAMING += [str(path.relative_to(ROOT)) for path in DECISIONS]
HIDDEN = ("venv", "build", "dist", "node_modules")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pages() -> list[str]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(str(path) for path in found if not any(p.startswith(".") or p in HIDDEN for p in path.parts))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def commands(text: str) -> list[str]:
    return [line.strip() for block in blocks(text, "bash") for line in block.splitlines() if line.strip()]


def table_rows(text: str) -> list[list[str]]:
    rows = (line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in row] for row in rows]


# ---- names ---------------------------------------------------------------------------------------------------------


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def members(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a module or class defines, the attributes its methods give to self included."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        for target in getattr(child, "targets", [getattr(child, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, child
        if isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef):
            for inner in ast.walk(child):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr, inner


def find(node: ast.AST, dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    return any(name == first and (not rest or find(child, rest)) for name, child in members(node))


def find_file(name: str) -> Path | None:
    places = [PACKAGE / name, ROOT / name, ROOT / "docs/learn" / name]
    if "/" not in name:
        places += PACKAGE.rglob(name)
    return next((place for place in places if place.is_file()), None)


@functools.cache
def identifiers() -> frozenset[str]:
    """Everything that is a name in the package, or a string that could be one (policies, devices, ...)."""
    names = set(dir(builtins))
    for path in sources():
        for node in ast.walk(tree(path)):
            for field in ("id", "attr", "arg", "name"):
                if isinstance(value := getattr(node, field, None), str):
                    names.update(value.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return frozenset(names)


def problem_with(span: str) -> str | None:
    """Why a code span is wrong, or None."""
    if found := re.fullmatch(r"([\w/]+\.py)(?::([\w.]+))?", span):
        path = find_file(found[1])
        if path is None:
            return "no such file"
        return None if not found[2] or find(tree(path), found[2]) else f"{found[1]} does not define {found[2]}"
    if found := re.fullmatch(r"([A-Z]\w*[a-z]\w*)\.(\w+)", span):
        return None if any(find(tree(path), span) for path in sources()) else "no class has that member"
    if span.startswith("nanovllm "):
        parse_command(span)
        return None
    if (ROOT / span).exists() or span in NOT_PYTHON:
        return None
    try:
        names = {
            getattr(node, field)
            for node in ast.walk(ast.parse(span))
            for field in ("id", "attr", "arg")
            if isinstance(getattr(node, field, None), str)
        }
    except SyntaxError:
        return "neither a name, nor a path, nor a command"
    unknown = sorted(names - identifiers())
    return f"unknown names {unknown}" if unknown else None


NOT_PYTHON = {"<|im_end|>", "after=", "gguf"}


@pytest.mark.parametrize("page", NAMING)
def test_every_name_exists(page: str) -> None:
    found = spans(read(page))
    assert found, "a page that names nothing tests nothing"
    wrong = {span: problem for span in found if (problem := problem_with(span))}
    assert not wrong


def test_the_tour_names_places_in_the_code() -> None:
    places = [span for span in spans(read("docs/tour.md")) if re.fullmatch(r"[\w/]+\.py:[\w.]+", span)]
    assert len(set(places)) >= 30


@pytest.mark.parametrize(
    "span",
    [
        "scheduling/nothing.py",
        "llm.py:LLM.nothing",
        "scheduling/plan.py:Nothing",
        "Scheduler.nothing",
        "no_such_name",
        "Nothing.step",
        "LLM(no_such_option=1)",
        "some words",
    ],
)
def test_a_wrong_name_is_found(span: str) -> None:
    assert problem_with(span)


def test_glossary_rows_are_whole() -> None:
    seen: set[str] = set()
    for section in read("docs/glossary.md").split("\n## ")[1:]:
        rows = [row for row in table_rows(section) if row[0].startswith("**")]
        words = [row[0].strip("*").lower() for row in rows]
        assert all(len(row) == 3 and row[1].endswith(".") and spans(row[2]) for row in rows)
        assert not seen & set(words)
        seen.update(words)
    assert len(seen) >= 60


# ---- options -------------------------------------------------------------------------------------------------------


def documented(page: str, first_field: str) -> dict[str, Any]:
    """Name -> default of the table that begins with this field."""
    rows = [row for row in table_rows(read(page)) if row[0].startswith("`")]
    start = next(i for i, row in enumerate(rows) if row[0] == f"`{first_field}`")
    end = next((i for i, row in enumerate(rows) if i > start and row[0] in ("`n`", "`model`", "`host`")), len(rows))
    assert all(len(row) == 4 for row in rows[start:end])
    return {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows[start:end]}


@pytest.mark.parametrize("page", OPTIONS)
@pytest.mark.parametrize("options", [EngineConfig, SamplingParams, ServerOptions])
def test_option_tables_are_those_of_the_code(page: str, options: type) -> None:
    expected = {field.name: field.default for field in dataclasses.fields(options)}
    found = documented(page, next(iter(expected)))
    assert found == expected
    assert list(found) == list(expected)


@pytest.mark.parametrize("page", OPTIONS)
def test_defaults_by_device_and_on_the_command_line(page: str) -> None:
    from nanovllm.cli.options import SAMPLING
    from nanovllm.engine.defaults import DEFAULT_BATCHED_TOKENS, DEFAULT_BLOCK_SIZE

    rows = {row[0].strip("`"): " ".join(row[2:]) for row in table_rows(read(page))}
    by_device = {"max_num_batched_tokens": DEFAULT_BATCHED_TOKENS, "kvcache_block_size": DEFAULT_BLOCK_SIZE}
    for name, defaults in by_device.items():
        said = re.search(r"`None`[ =：]+(.*?)[.。]", rows[name])
        assert said
        assert [int(number) for number in re.findall(r"\d+", said[1])] == [defaults["cpu"], defaults["gpu"]]
    for name, default in SAMPLING.defaults.items():
        said = re.search(r"(?:command line|命令行).*?([\d.]+)[.。]", rows[name])
        assert said
        assert float(said[1]) == default


@pytest.mark.parametrize("page", OPTIONS)
def test_examples_of_options_are_accepted(page: str) -> None:
    examples = [ast.parse(block.strip(), mode="eval").body for block in blocks(read(page), "python")]
    assert len(examples) == 3
    for call in examples:
        assert isinstance(call, ast.Call)
        EngineConfig.from_options(**{str(option.arg): ast.literal_eval(option.value) for option in call.keywords})
    assert blocks(read(OPTIONS[0]), "python") == blocks(read(OPTIONS[1]), "python")


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_the_kernel_tables_are_those_of_the_result_file() -> None:
    results = json.loads(read("benchmarks/results/2026-11-15-h200-kernels.json"))["results"]
    rows = [row for row in table_rows(read("docs/attention.md")) if re.fullmatch(r"\d+ x \d+", row[0])]
    prefill, decode = ([row for row in rows if len(row) == size and row[-1].endswith("%")] for size in (5, 4))
    assert len(prefill) == 4
    assert len(decode) == 5
    for shape, ours, share, dense, dense_share in prefill:
        for name, said, part in (("", ours, share), (" SDPA dense", dense, dense_share)):
            result = results[f"prefill {shape.replace(' ', '')}{name}"]
            assert abs(result["us"] - float(said)) <= 0.051
            assert f"{result['share']:.1%}" == part.replace(" ", "")
    for shape, us, speed, share in decode:
        result = results[f"decode {shape.replace(' ', '')}"]
        assert abs(result["us"] - float(us)) <= 0.051
        assert abs(result["tbs"] - float(speed)) <= 0.0051
        assert f"{result['share']:.1%}" == share.replace(" ", "")


def test_the_tables_of_experts_are_those_of_the_result_files() -> None:
    def results(name: str) -> Any:
        return json.loads(read(f"benchmarks/results/2026-11-15-h200-{name}.json"))

    found = []
    cells = "{cached}|{variant}|{hit_rate:.1%}|{bound_us:,.0f}|{us_per_layer:,.0f}|{share:.1%}"
    for row in results("offload-layers")["results"]:
        found.append(cells.format(**row).split("|"))
    cells = "{cached}|{}, with{} prefetch|{hit_rate:.1%}|{bound_ms:.2f}|{ms_per_token:.2f}|{share:.1%}"
    for row in results("offload-relay")["fast"]:
        how = "kernel by kernel" if row.get("enforce_eager") else "captured segments"
        found.append(cells.format(how, "" if row.get("expert_prefetch", True) else "out", **row).split("|"))
    cells = "{cached} of 8|{variant}|{hit_rate:.1%}|{tokens_per_second:.2f}|{bound_tokens_per_second:.2f}"
    cells += "|{share_of_bound:.0%}"
    for row in results("moe-offload")["results"]["offload"]:
        found.append(cells.format(**row).split("|"))
    kernels = results("moe-kernels")["results"]
    models = [kernels[f"tables {name}"]["tables"] for name in ("Mixtral-8x7B", "Qwen3-30B-A3B")]
    for pair in zip(*([row for row in model["decode"] if row["routing"] == "uniform"] for model in models)):
        found.append([str(pair[0]["tokens"])])
        for row in pair:
            found[-1] += [f"{row['seconds'] * 1e6:.1f}", f"{row['bytes_per_second'] / 1e9:,.0f}"]
            found[-1] += [f"{row['share_of_limit']:.0%}"]
    for pair in zip(*(model["prefill"] for model in models)):
        flops = [row[f"{kind}_flops"] for row in pair for kind in ("tiles", "grouped")]
        found.append([str(pair[0]["tokens"]), *(f"{value / 1e12:.0f}" for value in flops)])
    assert len(found) == 12 + 9 + 12 + 7 + 6
    said = [[cell.replace(" %", "%") for cell in row] for row in table_rows(read("docs/moe.md"))]
    assert not [row for row in found if row not in said]


def test_the_table_of_low_rank_experts_is_that_of_the_result_file() -> None:
    found = []
    for point in json.loads(read("benchmarks/results/2026-11-15-cpu-compress-tiny-mixtral.json"))["results"]:
        errors = [of_layer["layer"] for of_layer in point["heldout_errors"].values()]
        point["measured"] = f"{sum(errors) / len(errors):.3f}"
        point["name"] = {"pca": "PCA", "distilled": "closed form", "refined": "refined"}[point["method"]]
        cells = "{name}|{rank}|{kept:.1%}|{kept_with_u:.1%}|{predicted_error:.3f}|{measured}|{kl:.3f}|{perplexity:,.1f}"
        found.append(f"{cells}|{{top1:.1%}}|{{router:.1%}}".format(**point).split("|"))
    said = [[cell.replace(" %", "%") for cell in row] for row in table_rows(read("docs/low-rank-experts.md"))]
    assert len(found) >= 8
    assert not [row for row in found if row not in said]


def test_the_memory_table_of_small_cards_is_right() -> None:
    rows = [row for row in table_rows(read("docs/small-gpus.md")) if len(row) == 8 and row[1][:1].isdigit()]
    assert len(rows) == 4
    for model, *cells in rows:
        parameters, kv_bytes = (int(cells[i].replace(",", "")) for i in (0, 2))
        assert f"{2 * parameters / 2**30:.2f}" == cells[1]
        for card, said in zip((8, 11, 16, 24), cells[3:]):
            left = 0.9 * card * 2**30 - 2 * parameters - 2**30
            fits = int(left // kv_bytes) // 64 * 64
            assert said == (f"{fits:,}" if left > 0 else "no"), (model, card)


def test_small_card_example_is_accepted() -> None:
    [block] = blocks(read("docs/small-gpus.md"), "python")
    [call] = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    EngineConfig.from_options(**{str(option.arg): ast.literal_eval(option.value) for option in call.keywords})


# ---- links ---------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_blocks(text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page: str) -> None:
    text = without_blocks(read(page))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {link}"


def test_every_decision_is_listed_and_whole() -> None:
    index = read("docs/decisions/README.md")
    assert len(DECISIONS) >= 7
    for path in DECISIONS:
        assert f"({path.name})" in index
        text = path.read_text(encoding="utf-8")
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Why", "Consequence")), path.name


# ---- READMEs -------------------------------------------------------------------------------------------------------


def parse_command(line: str) -> None:
    """Raises what the command line would print for a mistake."""
    import typer

    from nanovllm.cli import app

    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
        if not words:
            return
    command.make_context(line, words)


def check_command(line: str) -> None:
    words = shlex.split(line)
    program = words[1] if words[0] == "python" else words[0]
    if program == "nanovllm":
        parse_command(line)
    elif program.endswith(".py"):
        known = set(re.findall(r'"(--[\w-]+)"', read(program)))
        assert {word for word in words if word.startswith("--")} <= known, line
    else:
        assert os.access(ROOT / program, os.X_OK), f"{program}: missing, or may not be executed"
    for word in words:
        if word.startswith(("benchmarks/", "tests/")):
            assert (ROOT / word).exists(), line


WITH_COMMANDS = ["README.md", "CONTRIBUTING.md", "docs/benchmarks.md", "docs/features.md", "docs/low-rank-experts.md"]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_exist(page: str) -> None:
    lines = commands(read(page))
    assert lines
    for line in lines:
        check_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "nanovllm nothing",
        "nanovllm bench nothing",
        "nanovllm generate --nothing 1",
        "nanovllm info --n 2",
        "nanovllm generate --max-num-seqs x",
        "python bench.py --nothing",
        "scripts/nothing.sh",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r".") as found:
        check_command(line)
    assert found.type.__name__ in ("KeyError", "NoSuchOption", "BadParameter", "AssertionError")


def test_commands_for_small_gpus() -> None:
    lines = commands(read("docs/small-gpus.md"))
    assert any(re.search(r"\bpip install flash-attn==1\.0\.9 --no-build-isolation$", line) for line in lines)
    ours = [line for line in lines if line.startswith("nanovllm ")]
    assert len(ours) >= 3
    for line in ours:
        parse_command(line)


@pytest.mark.parametrize("page", pages())
def test_commands_in_the_text_exist(page: str) -> None:
    for span in spans(read(page)):
        if span.startswith("nanovllm "):
            parse_command(span)


@pytest.mark.parametrize("page", FEATURES)
def test_lists_of_what_is_supported(page: str) -> None:
    from nanovllm.models.registry import FAMILIES
    from nanovllm.weights.gguf_checkpoint import ARCHITECTURES
    from nanovllm.weights.gguf_quants import TENSOR_TYPES

    rows = {row[0]: set(spans(row[1])) for row in table_rows(read(page)) if len(row) == 2}
    assert rows["RoPE"] == set(ROPE_TYPES)
    assert rows["GGUF"] == set(ARCHITECTURES) | {kind.name for kind in TENSOR_TYPES.values()}
    known = {name for family in FAMILIES for name in family.ARCHITECTURES}
    assert rows["Architectures" if page == FEATURES[0] else "架构"] == known
    assert rows["Scheduling policies" if page == FEATURES[0] else "调度策略"] == set(POLICIES)


@pytest.mark.parametrize("page", READMES)
def test_line_counts_are_about_right(page: str) -> None:
    counts = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", read(page), re.M)
    counts += re.findall(r"`(ops/triton/\w+\.py)` ?[（(](\d+)", read(page))[:1]
    assert len(counts) == 10
    for name, said in counts:
        lines = len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
        assert abs(lines - int(said)) <= max(15, lines // 5), f"{name} has {lines} lines, {page} says {said}"


def test_the_license_is_whole() -> None:
    text = read("LICENSE")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in read("pyproject.toml")


@pytest.fixture
def default_model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """`LLM()` is the default model if it was fetched already, else a tiny one. True: it is the real one."""
    from nanovllm.weights.resolve import cache_folder
    from nanovllm.weights.wheel_model import SMOLLM2, find_cached

    if find_cached(SMOLLM2, cache_folder()):
        return True
    tiny = request.getfixturevalue("llama").path
    monkeypatch.setattr("nanovllm.engine.llm_engine.resolve_model", lambda *_, **__: tiny)
    return False


def run_block(code: str) -> None:
    exec(compile(textwrap.dedent(code), "README.md", "exec"), {"__name__": "example"})


def test_the_python_examples_run(default_model: bool, capsys: pytest.CaptureFixture[str]) -> None:
    [first], [second] = (blocks(read(page), "python") for page in ("README.md", "docs/features.md"))
    run_block(first)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4
    if default_model:
        said = re.search(r'print\(answer\["text"\]\)  # (.+)', first)
        assert said
        assert lines[:2] == [said[1], f"{said[1]} stop"]
    run_block(second)
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", pages())
def test_python_blocks_compile(page: str) -> None:
    for block in blocks(read(page), "python"):
        compile(block, page, "exec")


def test_the_commands_for_contributors_are_there() -> None:
    """One each for format, lint, types and tests; the programs come with the extra `test`."""
    said = dict(row for row in table_rows(read("CONTRIBUTING.md")) if len(row) == 2)
    programs = {name: spans(said[name])[0].split()[0] for name in ("Format", "Lint", "Types", "Tests")}
    assert programs == {"Format": "ruff", "Lint": "ruff", "Types": "mypy", "Tests": "pytest"}
    extra = re.search(r"^test = \[(.*?)^\]", read("pyproject.toml"), re.M | re.S)
    assert extra
    assert {"ruff", "mypy", "pytest"} <= set(re.findall(r'"([\w-]+)', extra[1]))


def test_every_folder_of_the_package_has_its_row() -> None:
    rows = [cell for row in table_rows(read("CONTRIBUTING.md")) for cell in spans(row[0])]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {f"{name}/" for name in folders} <= set(rows)

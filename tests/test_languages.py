"""Pages in English and Chinese show the same: headings, figures, code, links. The README is short, and its figures are
those of the pages with the measurements."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.test_docs import READMES, ROOT, read, table_rows, without_blocks

PAGES = ["README.md", "docs/features.md", "docs/benchmarks.md", "docs/learn/README.md", "docs/learn/failures.md"]
MAX_README_LINES = 150
NUMBER = r"\d+(?:[.,]\d+)*"


def twin(page: str) -> str:
    return page.replace(".md", ".zh-CN.md")


def sections(text: str) -> list[str]:
    """The parts between headings, each with its heading's level in front, code blocks left out."""
    return re.split(r"^(?=#+ )", without_blocks(text), flags=re.M)


def links(text: str) -> Counter[str]:
    """Where a text leads to: without pictures, anchors (which are translated) and the language."""
    targets = re.findall(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)", text)
    return Counter(target.replace(".zh-CN", "") for target in targets)


def without_comments(language: str, code: str) -> str:
    if language == "python":
        return ast.dump(ast.parse(code))
    return "\n".join(re.sub(r"(^|\s)#.*", "", line).rstrip() for line in code.splitlines())


def code(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [(language, without_comments(language, block)) for language, block in found]


def differences(english: str, chinese: str) -> list[str]:
    """What one language shows and the other does not."""
    levels = [re.findall(r"^#+(?= )", without_blocks(text), re.M) for text in (english, chinese)]
    if levels[0] != levels[1]:
        return [f"headings: {levels}"]
    found = [] if code(english) == code(chinese) else ["code"]
    for ours, theirs in zip(sections(english), sections(chinese)):
        title = ours.partition("\n")[0]
        figures = [[sorted(re.findall(NUMBER, " ".join(row))) for row in table_rows(text)] for text in (ours, theirs)]
        if figures[0] != figures[1]:
            found.append(f"{title}: figures in tables: {[pair for pair in zip(*figures) if pair[0] != pair[1]]}")
        numbers = [Counter(re.findall(NUMBER, text)) for text in (ours, theirs)]
        if numbers[0] != numbers[1]:
            found.append(f"{title}: numbers: {numbers[0] - numbers[1]} {numbers[1] - numbers[0]}")
        if links(ours) != links(theirs):
            found.append(f"{title}: links: {links(ours) - links(theirs)} {links(theirs) - links(ours)}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_show_the_same(page: str) -> None:
    assert not differences(read(page), read(twin(page)))


@pytest.mark.parametrize("page", PAGES)
def test_chinese_pages_lead_to_chinese_pages(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+\.md)", read(twin(page))):
        own = (folder / target).resolve() == (ROOT / page).resolve()  # the link to the other language
        assert own or target.endswith(".zh-CN.md") or not (folder / twin(target)).exists(), target


PAGE = """# Title

[other](page.zh-CN.md)

## Part

| a | 1,024 |
|---|---|
| b | 2.5 |

```bash
run --fast  # a comment
```

From 3 to 4, see [there](docs/there.md#part).
"""


def test_pages_that_show_the_same_may_have_other_words() -> None:
    chinese = PAGE.replace("# a comment", "# 注释").replace("there.md#part", "there.zh-CN.md#部分")
    assert differences(PAGE, chinese.replace("page.zh-CN.md", "page.md").replace("From 3 to 4", "4（从 3 起）")) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("## Part", "### Part", "headings"),
        ("## Part\n", "", "headings"),
        ("1,024", "1,025", "figures in tables"),
        ("| b | 2.5 |\n", "", "figures in tables"),
        ("From 3 to 4", "From 3 to 5", "numbers"),
        ("--fast", "--slow", "code"),
        ("docs/there.md", "docs/here.md", "links"),
    ],
)
def test_a_difference_is_found(old: str, new: str, found: str) -> None:
    assert found in differences(PAGE, PAGE.replace(old, new))[0]


@pytest.mark.parametrize("page", READMES)
def test_a_readme_is_short(page: str) -> None:
    assert len(read(page).splitlines()) <= MAX_README_LINES


def test_the_lengths_of_the_core_are_those_of_the_files() -> None:
    rows = [row for row in table_rows(read("README.md")) if len(row) == 3 and row[1].isdigit()]
    assert len(rows) == 9
    for name, lines, _ in rows:
        found = len(read(f"nanovllm/{name.strip('`')}").splitlines())
        assert abs(found - int(lines)) <= max(5, found // 20), name


def test_the_figures_of_the_readme_are_those_of_the_measurements() -> None:
    """The figures of a row are in one line of docs/benchmarks.md, or of the page that the row links to; in the latter
    case the numbers of its first cell are, too."""
    rows = [row for row in table_rows(read("README.md")) if len(row) == 3 and row[1].startswith("**")]
    assert len(rows) >= 8
    for what, ours, beside in rows:
        source = re.search(r"\]\(([^)#]+)", beside)
        figures = [ours.replace("*", ""), *(re.findall(NUMBER, what) if source else re.findall(rf"^{NUMBER}", beside))]
        lines = read(source[1] if source else "docs/benchmarks.md").splitlines()
        assert any(all(re.search(rf"(?<![\d.,]){figure}(?![\d])", line) for figure in figures) for line in lines), what


def test_the_count_of_workloads_ahead_is_right() -> None:
    rows = [row for row in table_rows(read("docs/benchmarks.md")) if len(row) == 5 and row[4].endswith("%") and row[2]]
    ratios = [float(row[1].strip("*").replace(",", "")) / float(row[2].replace(",", "")) for row in rows]
    assert [ratio >= 1 for ratio in ratios] == [row[1].startswith("**") for row in rows]  # bold: no other is ahead
    behind = " and ".join(f"{ratio:.0%}".replace("%", " %") for ratio in sorted(ratios) if ratio < 1)
    said = (
        f"Of {len(ratios)} workloads Nano-vLLM is ahead in {sum(ratio >= 1 for ratio in ratios)} and reaches {behind}"
    )
    assert said in " ".join(read("README.md").split())

"""The pictures of docs/img, taken of a real run:  python -m tests.browser.screenshots [FOLDER]

With the default model if it was fetched already (scripts/demo.sh does that), else with a tiny random one. A look at
them belongs to every change of the page.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from nanovllm.weights.resolve import cache_folder
from nanovllm.weights.wheel_model import SMOLLM2, find_cached
from tests.browser.conftest import find_chromium
from tests.server.rig import Running, running
from tests.tiny_models import build, save_tokenizer

ENGINE = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "num_kvcache_blocks": 72}
QUESTION = "Write a Python function that adds two numbers, with a short explanation of each line."
STORY = "Here is a list of towns and the rivers they lie on, with one sentence about the people who live there. "
TOPICS = ["Paris", "London", "Vienna", "Cairo", "Seoul", "Rome", "Prague", "Baghdad", "Porto", "Basel"]


def model(folder: Path) -> str:
    if find_cached(SMOLLM2, cache_folder()):
        return "smollm2"
    build("llama-gqa-tied", folder)
    save_tokenizer(folder)
    return str(folder)


def chat(page: Any) -> None:
    page.fill("[name=system]", "You are a helpful assistant.")
    page.evaluate("document.querySelector('[name=temperature]').value = 0.2")
    page.fill("[name=max_tokens]", "220")
    page.fill("textarea[name=message]", QUESTION)
    page.press("textarea[name=message]", "Enter")
    page.wait_for_selector("[data-role=log][aria-busy=false]", timeout=300_000)


def send(page: Any, prompts: list[str], max_tokens: int) -> None:
    page.evaluate(
        """(body) => { fetch("v1/completions", { method: "POST", headers: { "Content-Type": "application/json" },
           body: JSON.stringify(body) }).then((answer) => answer.text()); }""",
        {"prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "stream": True},
    )


def wait_for(page: Any, condition: str) -> None:
    for _ in range(900):
        page.wait_for_timeout(50)
        if page.evaluate(condition):
            return


def crowd(page: Any, is_small: bool) -> None:
    """Prompts with a common beginning, more of them later, a long one, until somebody has to give way; then a pause."""
    began = page.evaluate("nanovllm.engine.replay.lastStep")
    groups = [([STORY * 3 + f"{topic}:" for topic in TOPICS[:6]], 110), ([STORY * 3 + f"{t}:" for t in TOPICS[6:]], 60),
              ([STORY * 16 + "The longest river", "Once upon a time", "The sea"], 60)]  # fmt: skip
    for number, (prompts, max_tokens) in enumerate(groups if not is_small else groups[:1]):
        wait_for(page, f"nanovllm.engine.replay.lastStep >= {began + 22 * number}")
        send(page, prompts, max_tokens)
    if is_small:  # it knows only short texts, and is done in no time
        page.wait_for_timeout(150)
    else:
        wait_for(page, "nanovllm.engine.history.steps.slice(0, -4).some((step) => step.preempted)")
    page.click("[data-role=pause]")
    page.wait_for_selector("[data-role=feed][data-state=paused]")


def shoot(server: Running, browser: Any, folder: Path) -> None:
    def new(width: int, height: int, **options: Any) -> Any:
        page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
        page.goto(server.url)
        page.wait_for_selector("html[data-started]")
        return page

    desktop = new(1280, 860, locale="en-US")
    chat(desktop)
    desktop.screenshot(path=folder / "page-chat.png")
    dark = new(1280, 860, locale="zh-CN", color_scheme="dark")
    phone = new(390, 844, locale="en-US", device_scale_factor=1.5, has_touch=True, is_mobile=True)
    for page in (dark, phone, desktop):
        page.click("#tab-engine")
        page.wait_for_selector("[data-role=feed][data-state=live]")
    crowd(desktop, is_small=server.model != "smollm2")
    desktop.hover("[data-x=shared]")
    dark.hover("[data-role=grid]", position={"x": 20, "y": 20})
    phone.tap("[data-x=shared]")
    for page, name in ((desktop, "page-engine"), (dark, "page-engine-zh-dark"), (phone, "page-phone")):
        page.wait_for_timeout(1500)  # evictions fade
        page.screenshot(path=folder / f"{name}.png")
    server.post("/engine/control", {"action": "resume"})
    for page in (desktop, dark, phone):
        page.context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs/img")
    with (
        tempfile.TemporaryDirectory() as scratch,
        running(model(Path(scratch)), ENGINE, events=True) as server,
        sync_playwright() as playwright,
    ):
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags)
        shoot(server, browser, folder)
        browser.close()


if __name__ == "__main__":
    main()

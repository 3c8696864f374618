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

# As `nanovllm serve` has them: the picture is what a reader of the README gets
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "num_kvcache_blocks": None}
QUESTION = "Write a Python function that adds two numbers, with a short explanation of each line."
STEPS = 40  # of the work, before the picture is taken


def model(folder: Path) -> str:
    if find_cached(SMOLLM2, cache_folder()):
        return "smollm2"
    build("llama-gqa-tied", folder)
    save_tokenizer(folder)
    return str(folder)


def chat(page: Any) -> None:
    page.fill("[name=system]", "You are a helpful assistant.")
    page.locator("[name=temperature]").fill("0.2")
    page.fill("[name=seed]", "1")
    page.fill("textarea[name=message]", QUESTION)
    page.press("textarea[name=message]", "Enter")
    page.wait_for_selector("[data-role=log][aria-busy=false]", timeout=300_000)


def work(page: Any) -> None:
    """What the button sends, once it is well under way."""
    began = page.evaluate("nanovllm.engine.replay.lastStep")
    page.click("[data-role=work]")
    while page.evaluate("nanovllm.engine.replay.lastStep") < began + STEPS:
        page.wait_for_timeout(50)
    page.click("[data-queue=running] li:nth-child(2) button")


def shoot(server: Running, browser: Any, folder: Path) -> None:
    def new(width: int, height: int, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.add_init_script("""localStorage.setItem("nanovllm.tour", '"seen"')""")
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("html[data-started]")
        return page

    desktop = new(1280, 930, locale="en-US")
    chat(desktop)
    desktop.screenshot(path=folder / "page-chat.png")
    dark = new(1280, 930, locale="zh-CN", color_scheme="dark")
    phone = new(390, 844, locale="en-US", device_scale_factor=1.5, has_touch=True, is_mobile=True)
    for page in (dark, phone, desktop):
        page.click("#tab-engine")
        page.wait_for_selector("[data-role=feed][data-state=live]")
    work(desktop)
    desktop.hover("[data-x=shared]")
    dark.hover("[data-x=shared]")
    phone.tap(".legend [data-x=shared]")
    for page, name in ((desktop, "page-engine"), (dark, "page-engine-zh-dark"), (phone, "page-phone")):
        page.screenshot(path=folder / f"{name}.png")
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
        shown = ["--hide-scrollbars"]  # a flag that Playwright sets, and that the pictures do without
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags, ignore_default_args=shown)
        shoot(server, browser, folder)
        browser.close()


if __name__ == "__main__":
    main()

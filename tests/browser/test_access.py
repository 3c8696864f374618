"""Accessibility: axe finds nothing on either tab, and the keyboard alone reaches and works every control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.test_chat import MARKDOWN, is_idle, pretend
from tests.browser.watched import Watched, load, stopped_at_work
from tests.server.rig import Running, until

REACHED = """() => { const e = document.activeElement;
    return e.name || e.dataset.role || e.dataset.policy || e.dataset.act || e.id || e.dataset.x || e.tagName; }"""


@pytest.fixture(scope="module")
def violations() -> Callable[[Watched], list[Any]]:
    reason = "needs axe: pip install axe-playwright-python"
    checker = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason).Axe()

    def run(page: Watched) -> list[Any]:
        found = checker.run(page.page).response["violations"]
        return [(one["id"], node["html"][:120]) for one in found for node in one["nodes"]]

    return run


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_axe_finds_nothing(
    open_page: Callable[..., Watched],
    server: Running,
    violations: Callable[[Watched], list[Any]],
    scheme: str,
    locale: str,
) -> None:
    page = open_page(server.url, color_scheme=scheme, locale=locale, tour=True)
    assert violations(page) == []
    pretend(page, MARKDOWN)
    page.page.fill("textarea[name=message]", "what?")
    page.page.press("textarea[name=message]", "Enter")
    page.until(lambda: is_idle(page))
    page.page.locator(".message.assistant [data-act=redo]").click()  # and the line with "undo"
    page.until(lambda: is_idle(page))
    page.page.locator(".message.user [data-act=edit]").click()
    assert violations(page) == []
    with stopped_at_work(server, seed=6, count=12, steps=6):
        page.watch_engine()
        page.until(lambda: page.page.locator(".strip li").count() > 0)
        page.page.evaluate("nanovllm.engine.controls.bars.begin()")
        assert page.find("tour").is_visible()
        assert violations(page) == []


def tab_to(page: Watched, wanted: str, most: int = 80) -> None:
    for _ in range(most):
        page.page.keyboard.press("Tab")
        if page.page.evaluate(REACHED) == wanted:
            return
    raise AssertionError(f"Tab does not reach {wanted}")


def test_the_keyboard_alone(page: Watched, server: Running) -> None:
    """A question, a second version of it, then the engine: paused, stepped, a sequence chosen, resumed."""
    keys = page.page.keyboard
    pretend(page, "an answer with `code`")
    tab_to(page, "message")
    keys.type("what?")
    keys.press("Enter")
    page.until(lambda: is_idle(page))
    page.page.evaluate("document.activeElement.blur()")
    for act in ("clear", "copy", "edit"):
        tab_to(page, act)
    keys.press("Enter")
    keys.press("ControlOrMeta+a")
    keys.type("why?")
    keys.press("Enter")
    page.until(lambda: is_idle(page) and page.page.locator(".message.user .text").inner_text() == "why?")
    page.page.evaluate("document.activeElement.blur()")
    for name in ("redo", "undo-do", "undo-close", "temperature", "top_p", "top_k", "max_tokens", "seed", "system"):
        tab_to(page, name)
    page.page.focus("#tab-chat")
    keys.press("ArrowRight")
    page.page.wait_for_selector("[data-role=feed][data-state=live]")
    tab_to(page, "pause")
    keys.press("Enter")
    page.page.wait_for_selector("[data-role=step]:enabled")
    thread = load(server, seed=7, count=5)
    tab_to(page, "step")
    for count in range(4):
        before = page.state()["step"]
        keys.press("Enter")
        page.until(lambda before=before: page.state()["step"] == before + 1, seconds=10 + count)
    for name in ("fcfs", "sjf", "work", "prefix", "convoy", "tour-start", "zoom-out", "zoom-in", "grid"):
        tab_to(page, name)
    keys.press("ArrowRight")
    assert page.find("explain").inner_text().startswith("Block ")
    for name in ("owned", "evicted", "strip", "prefill", "timeline", "ms", "usage", "running", "BUTTON"):
        tab_to(page, name)
    label = page.page.evaluate("document.activeElement.getAttribute('aria-label')")
    keys.press("Enter")
    page.until(lambda: page.find("strip-name").inner_text() in label)
    tab_to(page, "waiting")
    page.page.evaluate("document.activeElement.blur()")
    tab_to(page, "pause")
    keys.press("Enter")
    page.page.wait_for_selector("[data-role=step]:disabled")
    thread.join(60)
    until(server.is_empty)

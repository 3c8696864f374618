"""Languages, themes, a phone's screen, names and contrasts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.browser.watched import Watched
from tests.server.rig import Running

LANGUAGES = "async () => (await import('/static/words.js')).WORDS"


def test_languages(open_page: Callable[..., Watched], server: Running) -> None:
    page = open_page(server.url)
    assert page.page.locator("#tab-engine").inner_text() == "Engine"
    assert page.page.get_attribute("html", "lang") == "en"
    page.watch_engine()
    page.page.click("#language")
    assert page.page.locator("#tab-engine").inner_text() == "引擎"
    assert page.find("pause").inner_text() == "暂停"
    assert page.page.get_attribute("html", "lang") == "zh-CN"
    page.reload()  # remembered, and so is the tab
    assert page.page.locator("#tab-chat").inner_text() == "对话"
    assert page.find("pause").is_visible()
    page.page.click("#language")
    assert page.page.locator("#tab-chat").inner_text() == "Chat"
    chinese = open_page(server.url, locale="zh-CN")
    assert chinese.page.locator("#tab-chat").inner_text() == "对话"


def test_no_language_lacks_a_word(page: Watched) -> None:
    words = page.page.evaluate(LANGUAGES)
    english, chinese = words["en"], words["zh"]
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", chinese[key])), key
    asked = page.page.evaluate(
        """() => [...document.querySelectorAll("*")].flatMap(({ dataset: d }) =>
            [d.t, d.tLabel, d.tHint, d.tTitle, d.x && `x.${d.x}`].filter(Boolean))"""
    )
    assert set(asked) <= english.keys()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(open_page: Callable[..., Watched], server: Running, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme)
    paper = "() => getComputedStyle(document.body).backgroundColor"
    first = page.page.evaluate(paper)
    assert (max(numbers(first)) < 100) == (scheme == "dark")
    assert_contrasts(page)
    page.page.click("#theme")
    second = page.page.evaluate(paper)
    assert (max(numbers(second)) < 100) != (scheme == "dark")
    assert_contrasts(page)
    page.reload()
    assert page.page.evaluate(paper) == second


def numbers(color: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", color)[:3]]


def luminance(color: str) -> float:
    channels = [value / 255 for value in numbers(color)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def assert_contrasts(page: Watched) -> None:
    """WCAG's 4.5 for text, 3 for marks and for neighbours in the grid against the empty cell."""
    colors = page.page.evaluate(
        """() => { const probe = document.body.appendChild(document.createElement("i")); const found = {};
           const names = "paper card ink soft accent on-accent warn cell".split(" ");
           for (const hue of [0, 1, 2, 3, 4, 5]) names.push(`seq-${hue}a`, `seq-${hue}b`);
           for (const name of names) {
               probe.style.color = `var(--${name})`;
               found[name] = getComputedStyle(probe).color;
           }
           probe.remove(); return found; }"""
    )
    for text in ("ink", "soft", "accent", "warn"):
        for ground in ("paper", "card"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert contrast(colors["on-accent"], colors["accent"]) >= 4.5
    assert contrast(colors["ink"], colors["cell"]) >= 4.5


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_scrolls_sideways(
    open_page: Callable[..., Watched], server: Running, width: int, language: str
) -> None:
    locale = "zh-CN" if language == "zh" else "en-US"
    page = open_page(server.url, viewport={"width": width, "height": 740}, locale=locale, has_touch=width < 700)
    page.page.evaluate("document.querySelector('details').open = true")
    assert page.scrolls_sideways() == []
    page.watch_engine()
    assert page.scrolls_sideways() == []
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.page.evaluate("document.querySelector('#engine [data-role=player]').hidden = false")
    assert page.scrolls_sideways() == []


def test_a_tap_explains(open_page: Callable[..., Watched], server: Running) -> None:
    page = open_page(server.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.page.tap("#tab-engine")
    page.page.wait_for_selector("[data-role=feed][data-state=live]")
    page.page.tap("[data-role=grid]", position={"x": 5, "y": 5})
    page.until(lambda: page.find("explain").inner_text().startswith("Block 0"))
    page.page.tap("[data-plot=hits]")
    page.until(lambda: page.find("explain").inner_text().startswith("Share of prompt tokens"))


def test_tabs_are_as_aria_wants_them(page: Watched) -> None:
    """Arrows move between them, one of them is in the order of Tab."""
    page.tab("engine")
    page.page.focus("#tab-engine")
    page.page.keyboard.press("ArrowLeft")
    assert page.page.evaluate("document.activeElement.id") == "tab-chat"
    assert page.page.locator("#chat").is_visible()
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.id") != "tab-engine"


def test_less_motion_if_asked(open_page: Callable[..., Watched], server: Running) -> None:
    page = open_page(server.url, reduced_motion="reduce")
    name = page.page.evaluate(
        """() => { const message = document.createElement("article"); message.className = "message";
           message.append(document.createElement("footer")); message.firstChild.className = "pending";
           document.querySelector("[data-role=log]").append(message);
           return getComputedStyle(message.firstChild, "::before").animationName; }"""
    )
    assert name == "none"
    assert page.page.evaluate("nanovllm.engine.grid.still.matches")

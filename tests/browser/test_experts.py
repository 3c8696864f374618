"""The heat map of the Engine tab: what it shows is what the routers chose."""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.watched import Watched
from tests.server.rig import Running, running
from tests.tiny_models import TinyModel

SHOWN = """() => [0, 1].map((row) =>
    [...Array(6).keys()].map((expert) => nanovllm.engine.experts.tokens(row, expert)))"""
CANVAS = "[data-role=experts] canvas"
WORK = {"prompt": list(range(10, 60)), "max_tokens": 8, "ignore_eos": True}


def test_the_load_of_experts(open_page: Callable[..., Watched], tiny: Callable[[str], TinyModel]) -> None:
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    with running(tiny("qwen3-moe-dense-layers").path, options, events=True) as server:
        page = open_page(server.url, color_scheme="dark")
        page.watch_engine()
        page.page.wait_for_selector(CANVAS)
        assert server.post("/v1/completions", WORK).status_code == 200
        page.until(lambda: "114" in page.find("experts-facts").inner_text())  # 57 tokens, two experts each
        with server.http() as http:
            counts = http.get("/engine/experts").json()["tokens"]
        assert page.page.evaluate(SHOWN) == counts
        assert page.num_colors(CANVAS) > 4
        page.page.focus(CANVAS)
        for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
            page.page.keyboard.press(key)
        text = page.find("explain").inner_text()
        assert text.startswith(f"Layer 2, expert 2: {counts[1][2]} tokens, {counts[1][2] / 19:.1f} times"), (
            "0 and 2 are sparse"
        )
        page.page.click("#language")
        assert page.find("experts").locator("h2").inner_text() == "专家"
        page.until(lambda: "次选择" in page.find("experts-facts").inner_text())
        page.page.click("#theme")
        page.until(lambda: page.num_colors(CANVAS) > 4)
        page.page.set_viewport_size({"width": 390, "height": 800})
        assert page.page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_dense_model_has_no_such_card(page: Watched, server: Running) -> None:
    page.watch_engine()
    page.until(lambda: page.page.evaluate("nanovllm.engine.experts.isNone"))
    assert not page.find("experts").is_visible()

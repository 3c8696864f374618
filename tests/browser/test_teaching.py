"""The Engine tab as a stranger meets it: readable in a large cache, still while nothing happens, explained in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.watched import Watched, control, stopped_at_work
from tests.server.rig import Running, until

# An engine with as many blocks as scripts/demo.sh --serve has on a laptop; tables: id -> blocks
MADE_UP = """({ numBlocks, tables }) => {
    const { engine } = nanovllm;
    engine.live.stop();
    engine.colors.forget();
    engine.begin({ num_blocks: numBlocks, block_size: 16 });
    const seqs = Object.entries(tables).map(([id, blocks]) => ({ id: Number(id), request: "r", status: "running",
        prompt: 16 * blocks.length, max_tokens: 9, tokens: 16 * blocks.length, computed: 16 * blocks.length - 3,
        preemptions: 0, cached: 0, blocks }));
    engine.apply({ type: "snapshot", step: 1, t: 0, policy: "fcfs", paused: false, hits: 0, queries: 0, preemptions: 0,
        num_waiting: 0, free: 0, seqs, cached: [], published: [], held: [], until: [], flights: [] });
    engine.draw(performance.now());
}"""
IN_SIGHT = """() => { const { grid, replay } = nanovllm.engine;
    return [...replay.owners.keys()].filter((block) => {
        const { y, side } = grid.place(block);
        return y >= 0 && y + side <= grid.height;
    }).length; }"""


def make_up(page: Watched, tables: dict[int, list[int]], num_blocks: int = 2912) -> None:
    page.page.evaluate(MADE_UP, {"numBlocks": num_blocks, "tables": {str(id): list(t) for id, t in tables.items()}})


def test_a_large_cache_opens_on_the_blocks_in_use(page: Watched) -> None:
    page.watch_engine()
    make_up(page, {1: [*range(1500, 1508)], 2: [*range(1500, 1504), *range(1520, 1524)]})
    assert page.page.evaluate("nanovllm.engine.grid.size") >= 24  # px: a reference count can be read
    assert page.page.evaluate(IN_SIGHT) == 12
    page.until(lambda: page.wrong_cells() == [])
    assert page.page.locator("[data-role=map]").is_visible()
    assert page.num_colors("[data-role=map]") > 2
    # Who scrolls is left alone, until the button brings the window back.
    page.page.evaluate("document.querySelector('.grid-box').scrollTop = 0")
    page.until(lambda: page.find("follow").get_attribute("aria-pressed") == "false")
    page.until(lambda: page.page.evaluate(IN_SIGHT) == 0)
    page.find("follow").click()
    page.until(lambda: page.page.evaluate(IN_SIGHT) == 12)
    # The bar goes anywhere; the smallest zoom shows everything.
    page.page.locator("[data-role=map]").click(position={"x": 2, "y": 5})
    page.until(lambda: page.page.evaluate("nanovllm.engine.grid.top") == 0)
    for _ in range(8):
        page.find("zoom-out").click()
    page.until(lambda: not page.page.locator("[data-role=map]").is_visible())
    assert page.page.evaluate(IN_SIGHT) == 12
    make_up(page, {1: [0, 1]}, num_blocks=72)  # a small one is shown whole from the start
    page.until(lambda: page.page.evaluate("nanovllm.engine.grid.isWhole"))


def test_living_sequences_have_colours_of_their_own(page: Watched) -> None:
    """Also if their ids are a multiple of the number of colours apart, and if there are more of them than hues."""
    page.watch_engine()
    ids = [*range(1, 400, 12), 5, 6]
    make_up(page, {id: [place] for place, id in enumerate(ids)})
    colors = page.page.evaluate("(ids) => ids.map((id) => nanovllm.engine.colors.of(id))", ids)
    assert len(set(colors)) == len(ids)
    rows = page.page.locator("[data-queue=running] li button")
    page.until(lambda: rows.count() == len(ids))
    assert len(set(rows.evaluate_all("all => all.map(e => e.style.getPropertyValue('--seq'))"))) == len(ids)
    # More than fit: the list says so and scrolls.
    running = page.page.locator("[data-queue=running] ul")
    page.until(lambda: "more" in running.get_attribute("class"))
    assert "gradient" in running.evaluate("e => getComputedStyle(e).backgroundImage")
    assert running.evaluate("e => e.scrollHeight - e.clientHeight") > 100
    rows.last.focus()
    assert running.evaluate("e => e.scrollTop") > 100


def test_the_legend_is_painted_like_the_cells(page: Watched) -> None:
    page.watch_engine()
    for _ in range(2):
        wrong = page.page.evaluate(
            """async () => {
                const { paintCell, paintRing } = await import("/static/cells.js");
                const { colors } = nanovllm.engine;
                const cells = { owned: { state: "owned", level: 0.6 }, shared: { state: "owned", count: 2 },
                    cached: { state: "cached" }, held: { state: "held" }, free: { state: "free" }, evicted: {} };
                return Object.entries(cells).filter(([name, cell]) => {
                    const key = document.querySelector(`[data-x=${name}] canvas.key`);
                    const own = document.createElement("canvas");
                    own.width = own.height = key.width;
                    const place = { x: 0, y: 0, side: key.width };
                    paintCell(own.getContext("2d"), colors, place, { hues: colors.hues, ...cell });
                    if (name === "evicted") paintRing(own.getContext("2d"), place, colors.warn, 1);
                    return key.width < 16 || own.toDataURL() !== key.toDataURL();
                }).map(([name]) => name);
            }"""
        )
        assert wrong == []
        page.page.click("#theme")


def test_an_idle_engine_makes_no_tokens(page: Watched, server: Running) -> None:
    page.watch_engine()
    rate = page.page.locator("[data-plot=rate] output")
    page.until(lambda: rate.inner_text() == "0")
    with stopped_at_work(server, seed=5, count=4, steps=3):
        page.until(lambda: page.page.evaluate("nanovllm.engine.history.series.rate.at(-1) ?? 0") > 0)
        page.until(lambda: rate.inner_text() == "0")  # paused
    page.until(lambda: page.page.evaluate("nanovllm.engine.history.series.rate.at(-1) ?? 0") > 0)
    page.until(lambda: rate.inner_text() == "0")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_jumps_when_the_lines_change(open_page: Callable[..., Watched], server: Running, width: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 800})
    page.watch_engine()
    places = page.page.evaluate(
        """async () => {
            const { FILES } = await import("/static/explain.js"), { explain, controls } = nanovllm.engine;
            const rows = ["#engine .board", ".card.cache", ".card.steps", ".explain", ".plots"];
            const seen = new Set(), box = (row) => JSON.stringify(document.querySelector(row).getBoundingClientRect());
            for (const language of ["en", "zh"]) {
                if (language === "zh") document.getElementById("language").click();
                const places = new Set();
                for (const about of Object.keys(FILES)) {
                    explain.say(about, about === "seq" ? "" : "Block 7: sequence #1 keeps its tokens 0–15 here.");
                    for (const text of ["", "a line"]) {
                        controls.say(text);
                        places.add(rows.map(box).join());
                    }
                }
                seen.add(places.size);
            }
            return [...seen];
        }"""
    )
    assert places == [1]


def test_the_strip_is_the_block_table_of_the_engine(page: Watched, server: Running) -> None:
    page.watch_engine()
    assert page.find("strip-none").is_visible()
    with stopped_at_work(server, seed=1):
        shared = partial = 0
        for _ in range(6):
            step = page.state()["step"]
            for _ in range(3):
                control(server, "step")
            page.until(lambda step=step: page.state()["step"] == step + 3)
            owners: dict[int, int] = {}
            for seq in server.engine.scheduler.running:
                for block in seq.block_table:
                    owners[block] = owners.get(block, 0) + 1
            for seq in server.engine.scheduler.running:
                name = page.page.get_by_text(f"#{seq.seq_id}", exact=True)
                row = page.page.locator("[data-queue=running] button", has=name)
                row.click()
                page.until(lambda seq=seq: page.find("strip-name").inner_text() == f"#{seq.seq_id}")
                wanted = [
                    [index, block, owners[block], max(0, min(16, seq.num_computed - 16 * index))]
                    for index, block in enumerate(seq.block_table)
                ]
                page.until(lambda wanted=wanted: strip(page) == wanted)
                shared += sum(count > 1 for _, _, count, _ in wanted)
                partial += page.page.locator(".strip li.last").count()
                page.until(lambda row=row: row.get_attribute("aria-pressed") == "true")
        assert shared
        assert partial
        # A block of the grid chooses its owner.
        seq = next(seq for seq in server.engine.scheduler.running if owners[seq.block_table[-1]] == 1)
        place = page.page.evaluate("(block) => nanovllm.engine.grid.place(block)", seq.block_table[-1])
        page.find("grid").click(position={"x": place["x"] + 8, "y": place["y"] + 8})
        page.until(lambda: page.find("strip-name").inner_text() == f"#{seq.seq_id}")
    page.until(page.find("strip-none").is_visible)


def strip(page: Watched) -> list[Any]:
    return page.page.evaluate(
        """() => [...document.querySelectorAll(".strip li")].map(({ dataset: d }) =>
            [d.logical, d.physical, d.owners, d.used].map(Number))"""
    )


def test_the_first_visit_has_a_tour_of_three_steps(open_page: Callable[..., Watched], server: Running) -> None:
    page = open_page(server.url, tour=True)
    page.watch_engine()
    titles = []
    for step in (1, 2, 3):
        assert f"{step} of 3" in page.find("tour").inner_text()
        titles.append(page.find("tour-title").inner_text())
        assert page.page.locator(".toured").count() == 1
        box, target = page.find("tour").bounding_box(), page.page.locator(".toured").bounding_box()
        assert box["x"] >= target["x"] + target["width"]  # beside what it explains, not over it
        page.find("tour-next").click()
    assert len(set(titles)) == 3
    assert not page.find("tour").is_visible()
    page.page.reload()
    page.page.wait_for_selector("[data-role=feed][data-state=live]")
    assert not page.find("tour").is_visible()  # once is enough
    page.find("tour-start").click()
    page.page.keyboard.press("Escape")
    assert not page.find("tour").is_visible()
    assert page.page.evaluate("document.activeElement.dataset.role") == "tour-start"


def test_some_work_can_be_sent_and_stopped(page: Watched, server: Running) -> None:
    page.watch_engine()
    control(server, "pause")
    page.find("work").click()
    page.until(lambda: len(server.engine.scheduler.waiting) == 8)
    for _ in range(6):
        control(server, "step")
    page.until(lambda: page.page.locator(".strip li.shared").count() > 0)
    assert page.find("work").inner_text() == "Stop the work"
    page.find("work").click()
    control(server, "resume")
    until(server.is_empty)
    page.until(lambda: page.find("work").inner_text() == "Send some work")


def test_a_paused_engine_is_announced_on_both_tabs(page: Watched, server: Running) -> None:
    banner = page.page.locator("#paused")
    assert not banner.is_visible()
    control(server, "pause")
    page.until(banner.is_visible)  # on the chat tab, before the engine's was ever opened
    page.watch_engine()
    assert banner.is_visible()
    before = page.find("step").bounding_box()
    banner.locator("button").click()
    page.until(lambda: not banner.is_visible())
    assert not server.service.engine.paused
    assert page.find("step").bounding_box()["y"] == before["y"]
    page.find("pause").click()
    page.until(banner.is_visible)
    page.tab("chat")
    assert banner.is_visible()
    control(server, "resume")
    page.until(lambda: not banner.is_visible())


def test_policies_and_the_convoy_are_explained_in_place(page: Watched, server: Running) -> None:
    page.watch_engine()
    for policy, words, order in (("sjf", "shortest first", "shortest prompt"), ("fcfs", "first come", "arrival")):
        button = page.page.locator(f"[data-policy={policy}]")
        assert words in button.inner_text()
        button.click()
        page.until(lambda order=order: order in page.find("order").inner_text())
    page.find("convoy").click()
    figures = page.page.locator("[data-role=bars] output")
    page.until(lambda: all("ms" in text for text in figures.all_inner_texts()), 60)
    waits = [int(text.replace(",", "").removesuffix(" ms")) for text in figures.all_inner_texts()]
    widths = page.page.locator("[data-role=bars] i").evaluate_all("all => all.map(e => parseFloat(e.style.width))")
    for wait, width in zip(waits, widths):  # figures are whole milliseconds, of which a fast machine needs few
        assert width == pytest.approx(100 * wait / max(waits), abs=1 + 100 / max(waits))
    assert page.find("verdict").inner_text()
    page.find("convoy-close").click()
    assert not page.find("bars").is_visible()
    until(server.is_empty)

"""The Engine tab: what the page rebuilds from events is what the engine holds, and its controls control it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.server.options import ServerOptions
from nanovllm.server.run import DrainingServer
from nanovllm.server.trace_app import make_trace_app
from nanovllm.telemetry.trace import Replay, read_trace
from tests.browser.watched import Watched, canonical, control, load, snapshot_of, stopped_at_work
from tests.server.rig import Running, in_thread, running, until
from tests.tiny_models import TinyModel

CANVASES = ["[data-role=grid]", "[data-role=timeline]", *(f"[data-plot={name}] canvas" for name in ("ms", "rate"))]
PIXELS = "() => document.querySelector('[data-role=grid]').toDataURL()"


def agrees(page: Watched, server: Running) -> bool:
    """Of a paused engine: what the page shows is what the server would tell a newcomer."""
    return canonical(page.state()) == canonical(snapshot_of(server))


def test_the_grid_shows_what_the_engine_holds(page: Watched, server: Running) -> None:
    page.watch_engine()
    before = page.page.evaluate(PIXELS)
    control(server, "pause")
    thread = load(server, seed=1)
    page.until(lambda: page.page.locator("[data-queue=waiting] li").count() == 16)
    assert page.page.locator("[data-queue=running] li").count() == 0
    page.until(lambda: page.find("feed").inner_text() == "paused")
    preempted = evicted = flagged = most_owners = 0
    for number in range(60):
        step = page.state()["step"]
        page.find("step").click()
        page.until(lambda step=step: page.state()["step"] == step + 1)
        if number % 6 == 0:
            page.until(lambda: agrees(page, server), seconds=5)
            page.until(lambda: page.wrong_cells() == [], seconds=5)
        shown = page.page.evaluate("nanovllm.engine.history.steps.at(-1)")
        preempted, evicted = preempted + shown["preempted"], evicted + shown["evicted"]
        flagged += page.page.locator(".seq-flag:not(:empty)").count()  # those that were preempted and run again
        owners = page.page.evaluate("[...nanovllm.engine.replay.owners.values()].map((ids) => ids.length)")
        most_owners = max(most_owners, *owners, 0)
    assert page.page.evaluate(PIXELS) != before
    assert preempted == server.engine.scheduler.num_preemptions > 0, "the cache of this server is too small for all"
    assert evicted > 0
    assert flagged > 0
    assert most_owners > 1
    rows = page.page.locator("[data-queue=running] li")
    page.until(lambda: rows.count() == len(server.engine.scheduler.running))
    page.find("pause").click()  # resume
    thread.join(60)
    until(server.is_empty)
    page.until(lambda: agrees(page, server))
    assert page.state()["seqs"] == []
    assert page.state()["cached"]
    page.until(lambda: page.find("feed").inner_text() == "live")  # drawn with the next frame
    assert page.page.evaluate("nanovllm.engine.replay.resets") == 1, (
        "all of it was replayed, and no snapshot came again"
    )


def test_the_picture_is_drawn_again_whenever_it_must_be(page: Watched, server: Running) -> None:
    """After another tab, another size, another theme, another language and a reload; the engine stands still."""

    def check() -> None:
        page.until(lambda: agrees(page, server))
        assert {seq["status"] for seq in page.state()["seqs"]} >= {"running", "waiting"}
        page.until(lambda: page.wrong_cells() == [])

    page.watch_engine()
    page.tab("chat")
    with stopped_at_work(server, seed=4, steps=12):
        page.watch_engine()
        check()
        for canvas in CANVASES:
            page.until(lambda canvas=canvas: page.num_colors(canvas) > 1)
        for width, height in ((700, 740), (360, 900), (1500, 500)):
            page.page.set_viewport_size({"width": width, "height": height})
            check()
        for button in ("#theme", "#language", "#language"):
            page.page.click(button)
            check()
        page.find("zoom-in").click()
        check()
        page.page.reload()  # with the engine's tab open, as it was
        page.page.wait_for_selector("[data-role=feed][data-state=paused]")
        check()


def test_free_running_it_agrees_too(page: Watched, server: Running) -> None:
    page.watch_engine()
    thread = load(server, seed=2, count=24)
    page.until(lambda: page.state()["step"] > 20)
    page.find("pause").click()
    page.until(lambda: page.find("feed").inner_text() == "paused")
    page.until(lambda: agrees(page, server), seconds=5)
    page.find("pause").click()
    thread.join(60)
    figures = [card.inner_text() for card in page.page.locator(".plot:not([hidden]) output").all()]
    assert all(figure and figure != "–" for figure in figures), figures
    until(server.is_empty)
    page.until(lambda: agrees(page, server))


def test_controls_reach_the_engine(page: Watched, server: Running) -> None:
    page.watch_engine()
    page.page.click("[data-policy=sjf]")
    page.page.wait_for_selector("[data-policy=sjf][aria-pressed=true]")
    assert server.engine.scheduler.policy.name == "sjf"
    page.page.click("[data-policy=fcfs]")
    page.page.wait_for_selector("[data-policy=fcfs][aria-pressed=true]")
    assert server.engine.scheduler.policy.name == "fcfs"
    assert page.find("step").is_disabled()
    page.find("pause").click()
    page.page.wait_for_selector("[data-role=step]:enabled")
    assert server.service.engine.paused
    page.find("pause").click()
    page.page.wait_for_selector("[data-role=step]:disabled")
    assert not server.service.engine.paused


def test_the_convoy_effect_is_seen(page: Watched, server: Running) -> None:
    """Under fcfs the long prompt has the first step to itself, under sjf the short ones have it."""
    page.watch_engine()
    began = page.state()["step"]
    page.find("convoy").click()
    page.until(lambda: "with sjf" in page.find("message").inner_text(), 60)
    page.page.wait_for_selector("[data-role=convoy]:enabled")
    steps = page.page.evaluate("nanovllm.engine.history.steps")
    steps = [step for step in steps if step["id"] > began]
    long_first = [[tokens for _, tokens, _ in step["parts"]] for step in steps if step["prefill"] > 12]
    assert long_first[0] == [64]  # fcfs: the whole budget
    assert any(sizes[:5] == [12] * 5 for sizes in long_first), "sjf: five short ones, then what is left"
    assert server.engine.scheduler.policy.name == "fcfs"
    assert not server.service.engine.paused
    until(server.is_empty)


def test_a_shared_prefix_is_seen(page: Watched, server: Running) -> None:
    page.watch_engine()
    page.find("prefix").click()

    def numbers() -> list[int]:
        text = page.find("message").inner_text()
        return [int(word) for word in text.replace(".", "").split() if word.isdecimal()]

    # Not by the button, which is disabled meanwhile: that may be too short to be seen.
    page.until(lambda: len(numbers()) == 2)
    found, total = numbers()
    assert 0 < found < total
    until(server.is_empty)


def test_everything_is_explained_with_a_file_that_exists(page: Watched, server: Running) -> None:
    page.watch_engine()
    server.post("/v1/completions", {"prompt": [30] * 20, "max_tokens": 4})  # a few steps to look at
    page.until(lambda: page.page.evaluate("nanovllm.engine.timeline.visible.length") > 2)
    root = Path(__file__).parent.parent.parent
    files = page.page.evaluate("async () => (await import('/static/explain.js')).FILES")
    assert [name for name in files.values() if not (root / name).is_file()] == []
    said = set()
    for element in page.page.locator("#engine [data-x]:visible").all():
        about = element.get_attribute("data-x")
        element.hover(force=True)
        page.until(lambda: page.find("explain").locator("a").inner_text() == files[about])  # noqa: B023
        said.add(page.find("explain").locator("[data-role=text]").inner_text())
    assert len(said) > 15
    # The canvases by keyboard: a block, then the one beside it, then one below
    page.page.focus("[data-role=grid]")
    first = page.find("explain").inner_text()
    assert first.startswith("Block 0")
    page.page.keyboard.press("ArrowRight")
    assert page.find("explain").inner_text().startswith("Block 1")
    page.page.keyboard.press("ArrowDown")
    assert not page.find("explain").inner_text().startswith("Block 1:")
    page.page.focus("[data-role=timeline]")
    assert page.find("explain").inner_text().startswith("Step ")


def test_the_link_opens_the_file(page: Watched) -> None:
    page.watch_engine()
    page.page.hover("[data-queue=running] h2")
    with page.page.context.expect_page() as opened:
        page.find("explain").locator("a").click()
    opened.value.wait_for_load_state()
    assert opened.value.url.endswith("/source/nanovllm/scheduling/scheduler.py")
    assert "class Scheduler" in opened.value.locator("body").inner_text()


def test_without_events_the_tab_says_how(open_page: Callable[..., Watched], llama: TinyModel, trace: Path) -> None:
    with running(llama.path) as quiet:
        page = open_page(quiet.url)
        page.tab("engine")
        assert "nanovllm serve --events" in page.find("off").inner_text()
        assert not page.find("on").is_visible()
        page.find("off").locator("input[type=file]").set_input_files(trace)
        page.page.wait_for_selector("[data-role=feed][data-state=replay]")
        assert not page.find("live").is_visible()
        check_recording(page)


# ---- recordings ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(chromium: Any, llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it: shared prefixes, evictions, preemptions, clients that leave."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    with running(llama.path, {"num_kvcache_blocks": 24}, events=True, trace=str(path)) as made:
        load(made, seed=3, count=30).join(120)
        until(made.is_empty)
    return path


def replayed(path: Path) -> Iterator[dict[str, Any]]:
    """The Python twin's state after each event."""
    recorded = read_trace(path)
    replay = Replay(recorded.header["num_blocks"])
    for event in recorded.events:
        replay.apply(event)
        yield {
            "tables": {str(seq.id): [*seq.blocks] for seq in replay.seqs.values() if seq.blocks},
            "tokens": {str(seq.id): [seq.tokens, seq.computed, seq.preemptions] for seq in replay.seqs.values()},
            "held": sorted(replay.held),
            "cached": sorted(replay.cached()),
            "free": replay.num_free(),
        }


SHOWN = """() => { const r = nanovllm.engine.replay, seqs = [...r.seqs.values()], number = (a, b) => a - b; return {
    tables: Object.fromEntries(seqs.filter(s => s.blocks.length).map(s => [s.id, [...s.blocks]])),
    tokens: Object.fromEntries(seqs.map(s => [s.id, [s.tokens, s.computed, s.preemptions]])),
    held: [...r.held.keys()].sort(number), cached: r.toSnapshot().cached.sort(number), free: r.numFree }; }"""


def test_a_trace_from_disk_is_stepped_through(page: Watched, trace: Path) -> None:
    page.watch_engine()
    expected = list(replayed(trace))
    page.page.set_input_files("[data-role=on] input[type=file]", trace)
    page.page.wait_for_selector("[data-role=feed][data-state=replay]")
    assert page.find("message").inner_text() == "run.jsonl"
    assert page.page.locator("[data-role=seek]").get_attribute("max") == str(len(expected))

    def place() -> int:
        return page.page.evaluate("nanovllm.engine.recording.place")

    places = [place()]
    for _ in range(25):
        page.find("next").click()
        assert page.page.evaluate(SHOWN) == expected[place() - 1]
        places.append(place())
    assert places == sorted(set(places))
    for _ in range(10):
        page.find("back").click()
        assert page.page.evaluate(SHOWN) == expected[place() - 1]
    assert place() == places[-11]
    for wanted in (len(expected), 1, len(expected) // 2, len(expected) // 2 - 1):
        page.page.evaluate("(n) => nanovllm.engine.recording.seek(n)", wanted)
        assert page.page.evaluate(SHOWN) == expected[wanted - 1]
    page.page.locator("[data-role=seek]").fill("7")  # the slider itself
    assert place() == 7
    page.page.select_option("[data-role=speed]", "4")
    page.find("play").click()
    page.until(lambda: place() == len(expected))
    page.until(lambda: page.find("play").inner_text() == "Play")
    assert page.page.evaluate(SHOWN) == expected[-1]
    assert max(step["preempted"] for step in page.page.evaluate("nanovllm.engine.history.steps")) > 0
    page.find("live").click()
    page.page.wait_for_selector("[data-role=feed][data-state=live]")


def check_recording(page: Watched) -> None:
    """On the screen, not only in the state: as it opens, in the middle and at its end, with no window resized."""
    page.until(lambda: page.wrong_cells() == [])
    length = page.page.evaluate("nanovllm.engine.recording.length")
    for place in (length // 2, length, 1):
        page.page.evaluate("(n) => nanovllm.engine.recording.seek(n)", place)
        page.until(lambda: page.wrong_cells() == [])
        for canvas in CANVASES if place > 1 else ():
            page.until(lambda canvas=canvas: page.num_colors(canvas) > 1)


def test_every_event_of_a_trace_gives_the_twin_s_state(page: Watched, trace: Path) -> None:
    """And from a checkpoint in the middle as from the beginning: a jump back uses those."""
    expected = list(replayed(trace))
    page.watch_engine()
    found = page.page.evaluate(
        f"""async (text) => {{
            const {{ parseTrace }} = await import("/static/feed.js");
            const {{ Replay }} = await import("/static/replay.js");
            const {{ header, events }} = parseTrace(text);
            const shown = (r) => {{ const nanovllm = {{ engine: {{ replay: r }} }}; return ({SHOWN})(); }};
            const replay = new Replay(header), states = [];
            let copy = replay;
            for (const [index, event] of events.entries()) {{
                replay.apply(event);
                if (copy !== replay) copy.apply(event);
                if (index % 7 === 3) {{
                    const snapshot = copy.toSnapshot();
                    copy = new Replay(header);
                    copy.apply(snapshot);
                }}
                states.push([shown(replay), shown(copy)]);
            }}
            return states;
        }}""",
        trace.read_text(),
    )
    assert len(found) == len(expected) > 100
    for number, (states, wanted) in enumerate(zip(found, expected)):
        assert states == [wanted, wanted], number


def test_a_broken_trace_is_refused_in_words(page: Watched, trace: Path, tmp_path: Path) -> None:
    page.watch_engine()
    lines = trace.read_text().splitlines(keepends=True)
    gap = [line for line in lines if '"type":"step"' not in line]
    for name, text in {"empty": "", "words": "hello", "head": lines[0], "gap": "".join(gap)}.items():
        (tmp_path / name).write_text(text)
        page.page.set_input_files("[data-role=on] input[type=file]", tmp_path / name)
        page.until(lambda: f"{name} is not a trace" in page.find("message").inner_text())  # noqa: B023
        assert page.find("feed").inner_text() == "live"
    (tmp_path / "half").write_text("".join(lines)[:-9])  # the engine was killed while it wrote its last line
    page.page.set_input_files("[data-role=on] input[type=file]", tmp_path / "half")
    page.page.wait_for_selector("[data-role=feed][data-state=replay]")


def test_trace_view_shows_the_recording_at_once(open_page: Callable[..., Watched], trace: Path) -> None:
    options = ServerOptions(port=0)
    with in_thread(DrainingServer(make_trace_app(read_trace(trace)), options), options) as url:
        page = open_page(url)
        page.page.wait_for_selector("[data-role=feed][data-state=replay]")
        assert page.page.locator("#tab-chat").is_disabled()
        assert not page.find("live-controls").is_visible()
        assert not page.find("demos").is_visible()
        check_recording(page)
        page.find("next").click()
        page.find("next").click()
        place = page.page.evaluate("nanovllm.engine.recording.place")
        assert page.page.evaluate(SHOWN) == list(replayed(trace))[place - 1]


def test_a_large_cache_stays_smooth(page: Watched) -> None:
    """20,000 blocks: all of them are painted within a few frames, and then only what changed."""
    page.watch_engine()
    everything, one_step = page.page.evaluate(LARGE)
    assert everything < 400
    assert one_step < 150  # ms, the median: 3 on an idle machine, 35 on one with six processes a core


LARGE = """async () => {
    const engine = nanovllm.engine;
    engine.live.stop();
    engine.begin({ num_blocks: 20000, block_size: 16 });
    const blocks = (from, to) => Array.from({ length: to - from }, (_, index) => from + index);
    const seqs = blocks(0, 64).map((id) => ({ id, request: "r", status: "running", prompt: 1600, max_tokens: 1600,
        tokens: 1600, computed: 1600, preemptions: 0, cached: 0, blocks: blocks(id * 100, id * 100 + 100) }));
    const same = { t: 0, policy: "fcfs", paused: false, hits: 0, queries: 0, preemptions: 0, num_waiting: 0, free: 0 };
    engine.apply({ type: "snapshot", step: 1, ...same, seqs, cached: blocks(8000, 16000), published: [], held: [],
        until: [], flights: [] });
    const timed = (work) => { const began = performance.now(); work(); return performance.now() - began; };
    engine.draw(performance.now());
    const everything = timed(() => { engine.grid.repaint(); engine.draw(performance.now()); });
    const steps = [];
    for (let n = 0; n < 30; n += 1) {
        const entries = seqs.map(({ id }) => [id, 1600 + n, 1, n ? 101 : 100, n ? [] : [16000 + id], 1]);
        engine.apply({ type: "step", ...same, step: 2 + n, k: 1, entries, decodes: [], arrivals: [], left: [],
            published: [], evicted: [], waiting: [] });
        steps.push(timed(() => engine.draw(performance.now())));
        engine.apply({ type: "done", t: n, step: 2 + n, ms: 1, tokens: 64, left: [], published: [], free: 0 });
    }
    return [everything, steps.sort((one, other) => one - other)[15]];
}"""

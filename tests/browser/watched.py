"""A page under watch, and the few things that tests do with it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.server.rig import Running, raw_stream, until

PIXELS = """async (shot) => {
    const bytes = Uint8Array.from(atob(shot), (c) => c.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, image.width, image.height);
}"""
# Three pixels in from the edges: beyond round corners, the ring of an eviction and that of the cursor
WRONG_CELLS = """({ data, width, height }) => {
    const { grid, replay } = nanovllm.engine, wrong = [];
    const probe = new OffscreenCanvas(1, 1).getContext("2d");
    probe.fillStyle = grid.colors.cell;
    probe.fillRect(0, 0, 1, 1);
    const empty = probe.getImageData(0, 0, 1, 1).data;
    for (let block = 0; block < replay.numBlocks; block += 1) {
        const { x, y, side } = grid.size ? grid.place(block) : { x: 0, y: 0, side: 1e9 };
        if (x + side > width || (y + side > height && grid.isWhole)) return ["the canvas is too small"];
        if (y < 0 || y + side > height) continue;  // not in the window
        let plain = true;
        for (let row = Math.ceil(y + 3); row < y + side - 3; row += 1)
            for (let column = Math.ceil(x + 3); column < x + side - 3; column += 1) {
                const at = 4 * (row * width + column);
                plain &&= [0, 1, 2].every((channel) => Math.abs(data[at + channel] - empty[channel]) <= 4);
            }
        const state = replay.state(block);
        if (plain !== (state === "free")) wrong.push(`block ${block} is ${state}`);
    }
    return wrong;
}"""
STATE = "() => window.nanovllm.engine.replay?.toSnapshot()"


class Watched:
    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.faults: list[str] = []
        self.expected: tuple[str, ...] = ()  # what a fault may contain: a test that provokes a 401 says so
        page.on("console", lambda message: self._see(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self._place(request.url, origin))

    def _see(self, text: str) -> None:
        if not any(part in text for part in self.expected):
            self.faults.append(text)

    def _place(self, url: str, origin: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != origin:
            self.faults.append(f"a request to another place: {url}")

    def check(self) -> None:
        assert not self.faults, self.faults

    def open(self, url: str, started: bool = True) -> None:
        self.page.goto(url)
        if started:
            self.page.wait_for_selector("html[data-started]")

    def reload(self) -> None:
        self.page.reload()
        self.page.wait_for_selector("html[data-started]")

    def find(self, role: str) -> Any:
        return self.page.locator(f"[role=tabpanel]:not([hidden]) [data-role={role}]")

    def tab(self, name: str) -> None:
        self.page.click(f"#tab-{name}")

    def watch_engine(self) -> None:
        self.tab("engine")
        self.page.wait_for_selector("[data-role=feed][data-state=live], [data-role=feed][data-state=paused]")

    def state(self) -> Any:
        return self.page.evaluate(STATE)

    # The page's policy forbids what wait_for_function does (evaluating text), and that is as it should be.
    def until(self, condition: Callable[[], Any], seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, "waited too long"
            self.page.wait_for_timeout(20)
        return found

    # ---- what is on the screen, whatever the page believes ----

    def picture(self, selector: str, script: str) -> Any:
        """`script` is a function of the pixels {data, width, height} of a screenshot of this element."""
        shot = base64.b64encode(self.page.locator(selector).screenshot(scale="css")).decode()
        return self.page.evaluate(f"async (shot) => ({script})(await ({PIXELS})(shot))", shot)

    def wrong_cells(self) -> list[str]:
        """Of the grid: a free block is a plain square, any other is not. None of them: the picture is right."""
        self.page.wait_for_selector("[data-role=grid]")
        return self.picture("[data-role=grid]", WRONG_CELLS)

    def num_colors(self, selector: str) -> int:
        """1: nothing is drawn there."""
        return self.picture(selector, "({ data }) => new Set(new Uint32Array(data.buffer)).size")

    def scrolls_sideways(self) -> list[str]:
        """Elements that are wider than what shows them, other than those made to scroll."""
        return self.page.evaluate("""() => [...document.querySelectorAll("body, main, main *")]
            .filter(e => e.getClientRects().length)
            .filter(e => !e.closest("pre, .grid-box, .strip ol, select, textarea, .seq-bar, canvas, label.button"))
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
            .map(e => e.outerHTML.slice(0, 80))""")


def snapshot_of(server: Running) -> dict[str, Any]:
    """What the server tells a reader that comes now."""
    with server.http() as client, client.stream("GET", "/engine/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                return json.loads(line.removeprefix("data:"))
    raise AssertionError("no snapshot came")


def canonical(snapshot: dict[str, Any]) -> dict[str, Any]:
    """What must agree: everything but the time, the order of sets, and the order among those who run."""
    kept = {name: value for name, value in snapshot.items() if name not in ("type", "t")}
    kept["held"] = sorted(zip(kept["held"], kept.pop("until")))
    kept["seqs"] = sorted(kept["seqs"], key=lambda seq: seq["id"])
    return {**kept, "cached": sorted(kept["cached"]), "published": sorted(kept["published"])}


# ---- an engine at work ----


def control(server: Running, action: str) -> None:
    server.post("/engine/control", {"action": action})


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Some begin alike (whole blocks of it, and part of one), some do not."""
    draw = random.Random(seed)
    common = [draw.randrange(20, 200) for _ in range(40)]
    return [
        common[: draw.choice((0, 16, 33, 40))] + [draw.randrange(20, 200) for _ in range(draw.randrange(1, 70))]
        for _ in range(count)
    ]


def load(server: Running, seed: int, count: int = 16, leave: bool = True) -> threading.Thread:
    """Requests from another thread, since Playwright's loop lives in this one; every fifth client leaves early, if any
    may. Of a paused engine: until all of them wait."""

    async def work() -> None:
        bodies = ({"prompt": prompt, "max_tokens": 40, "ignore_eos": True} for prompt in prompts_of(seed, count))
        streams = (raw_stream(server.url, body, 1 if leave and at % 5 == 0 else None) for at, body in enumerate(bodies))
        await asyncio.gather(*streams)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    if server.service.engine.paused:
        until(lambda: len(server.engine.scheduler.waiting) == count)
    return thread


@contextlib.contextmanager
def stopped_at_work(server: Running, seed: int, count: int = 16, steps: int = 0) -> Iterator[None]:
    """Paused with these requests, after so many steps; at the end they run to theirs. Nobody leaves: the engine would
    take a client's leaving also while it is paused, at whatever moment, and what a test has just read would be gone."""
    control(server, "pause")
    thread = load(server, seed, count, leave=False)
    for _ in range(steps):
        control(server, "step")
    yield
    control(server, "resume")
    thread.join(60)
    until(server.is_empty)

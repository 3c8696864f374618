"""A real Chromium, driven by Playwright, in front of a real server. Without either, only the tests of this folder skip.

Every page is watched: a message on its console, an exception, or a request to any other place fails the test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.watched import Watched
from tests.server.rig import Running, running
from tests.tiny_models import TinyModel

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


# For this folder: while Playwright's loop lives, asyncio.run() of other tests in this thread would refuse to start.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: apt install chromium")
    with api.sync_playwright() as playwright:
        # Its sandbox needs what root in a container lacks.
        flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        try:
            browser = playwright.chromium.launch(executable_path=path, args=flags)
        except api.Error as error:
            pytest.skip(f"{path} does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(chromium: Any, llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """After the browser: without one nothing is built. So small that sequences are preempted and blocks evicted."""
    trace = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with running(llama.path, {"num_kvcache_blocks": 24}, events=True, trace=str(trace)) as made:
        yield made


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """open_page(url, **options of a browser context) -> the page, started. Each has a browser profile of its own."""
    opened: list[Watched] = []

    def get(url: str, started: bool = True, tour: bool = False, **options: Any) -> Watched:
        context = chromium.new_context(**{"locale": "en-US", "viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(20_000)
        if not tour:  # it would lie over what other tests click
            context.add_init_script("""localStorage.setItem("nanovllm.tour", '"seen"')""")
        opened.append(Watched(context.new_page(), urlsplit(url).netloc))
        opened[-1].open(url, started)
        return opened[-1]

    yield get
    for watched in opened:
        watched.page.context.close()
        watched.check()


@pytest.fixture
def page(open_page: Callable[..., Watched], server: Running) -> Iterator[Watched]:
    watched = open_page(server.url)
    yield watched
    # Whatever a test did to the engine, the next one finds it running.
    server.post("/engine/control", {"action": "resume"})
    server.post("/engine/policy", {"policy": "fcfs"})

"""Guessed tokens on the Engine tab: the share of right ones, and block tables that follow sequences that jump ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.browser.watched import Watched, control
from tests.drafting import always
from tests.server.rig import Running, running, until
from tests.tiny_models import TinyModel

LOOKUP = {"speculative_method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WORK = {"prompt": [31, 32, 33] * 8, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [31, 32, 33], "seed": 1}
PLACES = "() => nanovllm.engine.replay.running.map((seq) => [seq.id, seq.computed, seq.tokens, seq.blocks])"


def known(server: Running) -> list[list[object]]:
    return [
        [seq.seq_id, seq.num_computed, len(seq.token_ids), seq.block_table] for seq in server.engine.scheduler.running
    ]


def test_right_guesses_are_shown(open_page: Callable[..., Watched], llama: TinyModel) -> None:
    with running(llama.path, LOOKUP, events=True) as server:
        page = open_page(server.url)
        page.watch_engine()
        plot = page.page.locator("[data-plot=drafts]")
        assert not plot.is_visible()
        always(server, 4, 2, 0)
        assert server.post("/v1/completions", WORK).status_code == 200
        page.until(plot.is_visible)
        stats = server.engine.stats
        assert 0 < stats.num_accepted < stats.num_drafted
        wanted = f"{round(100 * stats.num_accepted / stats.num_drafted)} %"
        page.until(lambda: plot.locator("output").inner_text() == wanted)
        plot.hover()
        page.until(lambda: "guess" in page.find("explain").inner_text())


def test_block_tables_follow(open_page: Callable[..., Watched], llama: TinyModel) -> None:
    with running(llama.path, LOOKUP, events=True) as server:
        page = open_page(server.url)
        page.watch_engine()
        control(server, "pause")
        always(server, 4, 2, 0)
        bodies = [{**WORK, "seed": seed} for seed in range(2)]
        threads = [threading.Thread(target=server.post, args=("/v1/completions", body)) for body in bodies]
        for thread in threads:
            thread.start()
        until(lambda: len(server.engine.scheduler.waiting) == 2)
        for _ in range(12):
            control(server, "step")
            page.until(lambda: page.page.evaluate(PLACES) == known(server))
        control(server, "resume")
        for thread in threads:
            thread.join()
        assert server.engine.stats.num_accepted > 0

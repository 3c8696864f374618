"""Web pages of other sites in a real browser: what they can do with a server on the loopback of its user."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.rig import Running, running
from tests.tiny_models import TinyModel

ASK = """async ([url, body]) => {
    try {
        const headers = { "Content-Type": "application/json", Authorization: "Bearer none" };
        const answer = await fetch(url, body ? { method: "POST", headers, body: JSON.stringify(body) } : {});
        return [answer.status, await answer.text()];
    } catch (error) {
        return ["refused", String(error)];
    }
}"""


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>another site</title>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port(chromium: Any) -> Iterator[int]:
    """Of another web site. By its address it is an allowed one, by its name it is another origin, which is not. On the
    loopback as well: browsers refuse requests from elsewhere to the loopback by themselves."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_port
        site.shutdown()


@pytest.fixture(scope="module")
def server(port: int, llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, events=True, allowed_origins=(f"http://127.0.0.1:{port}",)) as made:
        yield made


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    with contextlib.closing(chromium.new_context()) as context:

        def get(url: str) -> Any:
            page = context.new_page()
            page.goto(url)
            return page

        yield get


def test_a_page_of_another_site(visit: Any, port: int, server: Running) -> None:
    page, url = visit(f"http://localhost:{port}"), server.url
    before = server.engine.stats.generated_tokens
    asked: list[tuple[str, Any]] = [
        ("/engine/info", None),
        ("/metrics", None),
        ("/v1/completions", {"prompt": "the", "max_tokens": 1}),
        ("/engine/control", {"action": "pause"}),
    ]
    for path, body in asked:
        assert page.evaluate(ASK, [url + path, body])[0] == "refused", path
    assert not server.service.engine.paused
    assert server.engine.stats.generated_tokens == before


def test_a_page_that_was_allowed(visit: Any, port: int, server: Running) -> None:
    page, url = visit(f"http://127.0.0.1:{port}"), server.url
    assert page.evaluate(ASK, [f"{url}/engine/info", None])[0] == 200
    body = {"prompt": "the", "max_tokens": 2, "ignore_eos": True, "stream": True}
    status, text = page.evaluate(ASK, [f"{url}/v1/completions", body])
    assert status == 200
    assert text.rstrip().endswith("data: [DONE]")
    status, text = page.evaluate(ASK, [f"{url}/v1/completions", {"prompt": 1}])
    assert status == 400
    assert '"param": "prompt"' in text

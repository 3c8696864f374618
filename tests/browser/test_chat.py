"""The Chat tab: answers stream in, can be stopped, stay after a reload; nothing a model writes becomes HTML."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.browser.watched import Watched, control
from tests.server.rig import Running, running, until
from tests.tiny_models import TinyModel

PROMPT = "the town on the river"


def ask(page: Watched, text: str = PROMPT) -> None:
    page.page.fill("textarea[name=message]", text)
    page.page.press("textarea[name=message]", "Enter")


def answer(page: Watched) -> Any:
    return page.page.locator(".message.assistant").last


def is_idle(page: Watched) -> bool:
    return page.find("log").get_attribute("aria-busy") == "false"


def set_number(page: Watched, name: str, value: str) -> None:
    page.page.evaluate(
        """([name, value]) => { const field = document.querySelector(`[data-role=settings] [name=${name}]`);
           field.value = value; field.dispatchEvent(new Event("input", { bubbles: true })); }""",
        [name, value],
    )


def test_an_answer_streams_in_and_survives_a_reload(page: Watched, server: Running) -> None:
    set_number(page, "temperature", "0")
    set_number(page, "max_tokens", "24")
    control(server, "pause")
    ask(page)
    page.until(lambda: len(server.engine.scheduler.waiting) == 1)
    seen = [""]
    for _ in range(14):  # a step at a time: what is there after each can only have been streamed
        control(server, "step")
        for _ in range(50 if len(set(seen)) <= 3 else 1):  # a busy machine may take a while; a step may bring no text
            page.page.wait_for_timeout(40)
            if (text := answer(page).locator(".text").inner_text()) != seen[-1]:
                break
        seen.append(text)
    assert len(set(seen)) > 2, seen
    assert not is_idle(page)
    control(server, "resume")
    page.until(lambda: is_idle(page))
    whole = answer(page).locator(".text").inner_text()
    assert len(whole) > len(seen[-1])
    figures = answer(page).locator("footer").inner_text()
    assert "24 tokens" in figures
    assert "tokens/s" in figures
    assert "first after" in figures

    page.reload()
    assert answer(page).locator(".text").inner_text() == whole
    assert page.page.locator(".message.user .text").inner_text() == PROMPT
    assert page.page.input_value("[name=max_tokens]") == "24"
    page.find("clear").click()
    page.reload()
    assert page.page.locator(".message").count() == 0
    assert page.find("empty").is_visible()


def test_stop_ends_the_request_and_frees_its_blocks(page: Watched, server: Running) -> None:
    until(server.is_empty)
    control(server, "pause")
    ask(page)
    page.until(lambda: len(server.engine.scheduler.waiting) == 1)
    for _ in range(4):
        control(server, "step")
    assert server.engine.scheduler.blocks.num_used > 0
    assert page.find("send").inner_text() == "Stop"
    page.find("send").click()
    page.until(lambda: is_idle(page))
    until(server.is_empty)
    assert "stopped" in answer(page).locator("footer").inner_text()
    assert page.find("send").inner_text() == "Send"


def test_what_is_set_is_what_is_sent(page: Watched) -> None:
    for name, value in {"temperature": "0.25", "top_p": "0.5", "top_k": "7", "max_tokens": "5", "seed": "11"}.items():
        set_number(page, name, value)
    set_number(page, "system", "the rain")
    with page.page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    body = sent.value.post_data_json
    wanted = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_tokens": 5, "seed": 11, "stream": True}
    assert wanted.items() <= body.items()
    assert body["messages"] == [{"role": "system", "content": "the rain"}, {"role": "user", "content": PROMPT}]
    page.until(lambda: is_idle(page))
    set_number(page, "seed", "")  # empty: not sent
    with page.page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "and then")
    assert "seed" not in sent.value.post_data_json
    assert [m["role"] for m in sent.value.post_data_json["messages"]] == ["system", "user", "assistant", "user"]
    page.until(lambda: is_idle(page))


def pretend(page: Watched, text: str) -> None:
    """The server's next answers say this."""
    deltas = [{"content": text[at : at + 7]} for at in range(0, len(text), 7)]
    stream(page, *({"choices": [{"index": 0, "delta": delta}]} for delta in deltas))


def stream(page: Watched, *chunks: dict[str, Any]) -> None:
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


MARKDOWN = """# Title
Some **bold *both*** and `x < y & z` and *slanted*, 2 * 3 * 4, snake_case_name and ~~gone~~.

- one
- two
  - inner

    a second paragraph
1. first
2. second

> said
>
> - in a list

| left | right |
|:-----|------:|
| a | **1** |
| `b` | 2 |

```python
if a < b: print("<b>")  # why
```
[good](https://example.org/a?b=1 "t") [post](mailto:a@example.org) [bad](javascript:alert(1)) [worse](data:text/html,x)
<https://example.org/auto> and https://example.org/bare but not main.py
![a picture](https://example.org/p.png)
<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>
[![x](javascript:alert(1))](vbscript:msgbox(1)) <a href="javascript:alert(1)">here</a> <javascript:alert(1)>
"""


def test_markdown_is_shown_and_html_is_not(page: Watched) -> None:
    pretend(page, MARKDOWN)
    ask(page)
    page.until(lambda: is_idle(page))
    text = answer(page).locator(".text")
    assert text.locator("h4").inner_text() == "Title"
    assert text.locator("strong").first.inner_text() == "bold both"
    assert text.locator("p code").first.inner_text() == "x < y & z"
    assert text.locator("p > em").all_inner_texts() == ["slanted"]
    assert text.locator("s").inner_text() == "gone"
    assert "2 * 3 * 4, snake_case_name" in text.inner_text()
    assert text.locator("ul").first.locator("> li").count() == 2
    assert text.locator("ul ul li p").all_inner_texts() == ["inner", "a second paragraph"]
    assert text.locator("ol > li").all_inner_texts() == ["first", "second"]
    assert text.locator("blockquote li").inner_text() == "in a list"
    assert text.locator("table th").all_inner_texts() == ["left", "right"]
    assert text.locator("table td strong").inner_text() == "1"
    assert text.locator("td").nth(1).evaluate("e => getComputedStyle(e).textAlign") == "right"
    assert text.locator("pre code").inner_text() == 'if a < b: print("<b>")  # why'
    parts = text.locator("pre code span")
    colors = parts.evaluate_all("all => all.map(e => [e.textContent, getComputedStyle(e).color])")
    assert {"if", '"<b>"', "# why"} <= {word for word, _ in colors}
    assert len({color for _, color in colors}) > 2
    links = {link.get_attribute("href"): link for link in text.locator("a").all()}
    pages = [f"https://example.org/{name}" for name in ("a?b=1", "auto", "bare", "p.png")]
    assert links.keys() == {*pages, "mailto:a@example.org"}
    assert all("noopener" in link.get_attribute("rel") for link in links.values())
    assert "[bad](javascript:alert(1)) [worse](data:text/html,x)" in text.inner_text()
    assert '<img src=x onerror="window.hurt = 1"><script>' in text.inner_text()
    assert text.locator("img, script").count() == 0
    assert (
        text.evaluate(
            "e => [...e.querySelectorAll('*')].flatMap(n => n.getAttributeNames())"
            ".filter(name => name.startsWith('on'))"
        )
        == []
    )
    assert page.page.evaluate("window.hurt") is None


def test_half_written_markdown_is_shown_too(page: Watched) -> None:
    """While an answer streams in, every prefix of it is rendered; one that repeats itself must not hang the page."""
    endless = ["*" * 3000, "- " * 3000, "[" * 3000, "`" * 3000, "> " * 3000, "**a*" * 1000, "[a](http://b" * 500]
    texts = [MARKDOWN[:end] for end in range(len(MARKDOWN))] + endless
    shown, slowest = page.page.evaluate(
        """async (texts) => {
            const { render } = await import("/static/markdown.js");
            let slowest = 0;
            const shown = texts.map((text) => {
                const began = performance.now(), into = document.createElement("div");
                into.append(render(text));
                slowest = Math.max(slowest, performance.now() - began);
                return into.textContent;
            });
            return [shown, slowest];
        }""",
        texts,
    )
    assert slowest < 1000
    for text, found in zip(texts, shown):  # letters are never lost, whatever the marks around them become
        assert [c for c in found if c in "Tzw"] == [c for c in text if c in "Tzw"], text


def test_errors_in_words(page: Watched) -> None:
    page.expected = ("Failed to load resource",)
    where = "**/v1/chat/completions"

    def refuse(status: int, message: str, **headers: str) -> Callable[[Any], None]:
        body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}})
        return lambda route: route.fulfill(status=status, body=body, headers={"Retry-After": "7", **headers})

    page.page.route(where, refuse(429, "full"))
    ask(page)
    assert "full. Try again in 7 s" in page.until(lambda: answer(page).locator("footer.bad").inner_text())
    page.page.unroute(where)
    page.page.route(where, refuse(503, "dead"))
    page.page.route("**/health", lambda route: route.fulfill(status=503, json={"reason": "a rank was lost"}))
    page.page.click("text=Retry")
    page.until(lambda: "cannot serve: a rank was lost" in answer(page).inner_text())
    page.page.unroute(where)
    page.page.route(where, refuse(400, "max_tokens=-1: must be positive"))
    page.page.click("text=Retry")
    page.until(lambda: "max_tokens=-1: must be positive" in answer(page).inner_text())
    page.page.unroute(where)
    page.page.route(where, lambda route: route.abort())
    page.page.click("text=Retry")
    page.until(lambda: "does not answer" in answer(page).inner_text())
    page.page.unroute(where)
    page.page.click("text=Retry")
    page.until(lambda: is_idle(page) and "tokens/s" in answer(page).inner_text())
    assert page.page.locator(".message").count() == 2


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page: Callable[..., Watched], llama: TinyModel) -> None:
    with running(llama.path, events=True, api_key="open sesame") as guarded:
        page = open_page(guarded.url, started=False)
        page.expected = ("401",)
        for key, wrong in (("guess", False), ("open sesame", True)):
            page.page.wait_for_selector("dialog[open]")
            assert page.page.locator("dialog [data-role=wrong]").is_visible() == wrong
            page.page.fill("dialog input", key)
            page.page.press("dialog input", "Enter")
            page.page.wait_for_timeout(50)
        page.page.wait_for_selector("html[data-started]")
        ask(page)
        page.until(lambda: is_idle(page) and "tokens/s" in answer(page).inner_text())
        page.watch_engine()
        page.reload()  # the same tab: not asked again
        assert "open sesame" not in page.page.evaluate("JSON.stringify(localStorage)")
        page.page.evaluate("sessionStorage.clear()")
        page.page.reload()
        page.page.fill("dialog[open] input", "guess")
        page.page.press("dialog input", "Enter")
        page.page.wait_for_selector("dialog[open] [data-role=wrong]:visible")
        page.page.press("dialog input", "Escape")
        page.page.wait_for_selector("html[data-started]")
        assert page.page.locator("[data-role=off-error]").inner_text() == "The server asks for a key."
        page.tab("chat")
        ask(page, "again")
        page.page.press("dialog[open] input", "Escape")
        page.until(lambda: "asks for a key" in answer(page).inner_text())

"""What can be done with a conversation: copy, regenerate, edit, undo, two tabs, a reload, a context that is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser.test_chat import answer, ask, is_idle, pretend, set_number, stream
from tests.browser.watched import Watched, control
from tests.server.rig import Running, until


def texts(page: Watched) -> list[str]:
    return page.page.locator(".message .text").all_inner_texts()


def act(page: Watched, name: str, role: str = "assistant") -> Any:
    return page.page.locator(f".message.{role} [data-act={name}]").last


def talk(page: Watched, *pairs: tuple[str, str]) -> None:
    for question, reply in pairs:
        pretend(page, reply)
        ask(page, question)
        page.until(lambda reply=reply: is_idle(page) and texts(page)[-1] == reply)


def sent(page: Watched, click: Callable[[], Any]) -> dict[str, Any]:
    with page.page.expect_request("**/v1/chat/completions") as request:
        click()
    page.until(lambda: is_idle(page))
    return request.value.post_data_json


def test_copy(page: Watched, server: Running) -> None:
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    pretend(page, "so *be* it:\n\n```python\nx = 1\n```\n")
    ask(page)
    page.until(lambda: is_idle(page))
    for button, wanted in (
        (page.page.locator(".code [data-act=copy]"), "x = 1\n"),
        (page.page.locator(".acts [data-act=copy]").last, "so *be* it:\n\n```python\nx = 1\n```\n"),
        (act(page, "copy", "user"), "the town on the river"),
    ):
        button.click()
        page.until(lambda button=button: button.inner_text() == "Copied")
        assert page.page.evaluate("navigator.clipboard.readText()") == wanted
        page.until(lambda button=button: button.inner_text() == "Copy")
    # Without TLS browsers have no clipboard object: the old way.
    page.page.evaluate("navigator.clipboard.writeText('') && delete Navigator.prototype.clipboard")
    act(page, "copy", "user").click()
    page.until(lambda: act(page, "copy", "user").inner_text() == "Copied")


def test_regenerate_edit_and_undo(page: Watched) -> None:
    talk(page, ("one", "first"), ("two", "second"))
    pretend(page, "another")
    body = sent(page, act(page, "redo").click)
    assert [m["content"] for m in body["messages"]] == ["one", "first", "two"]
    assert texts(page) == ["one", "first", "two", "another"]
    page.find("undo-do").click()
    assert texts(page) == ["one", "first", "two", "second"]
    # The first question, put differently: what came after it goes, and comes back if it was a mistake.
    page.page.locator(".message.user [data-act=edit]").first.click()
    page.page.keyboard.press("Escape")
    assert texts(page) == ["one", "first", "two", "second"]
    page.page.keyboard.press("Enter")  # the focus is back on the button
    field = page.page.locator(".editor textarea")
    assert field.input_value() == "one"
    field.fill("uno")
    body = sent(page, lambda: page.page.keyboard.press("Enter"))
    assert [m["content"] for m in body["messages"]] == ["uno"]
    page.until(lambda: texts(page) == ["uno", "another"])
    page.find("undo-do").click()
    assert texts(page) == ["one", "first", "two", "second"]


def test_clear_is_away_from_send_and_can_be_undone(page: Watched) -> None:
    assert not page.find("clear").is_visible()
    talk(page, ("one", "first"))
    clear, send = page.find("clear").bounding_box(), page.find("send").bounding_box()
    assert send["y"] - clear["y"] > 300
    page.find("clear").click()
    assert texts(page) == []
    page.find("undo-do").click()
    assert texts(page) == ["one", "first"]
    assert not page.find("undo").is_visible()
    page.find("clear").click()
    talk(page, ("two", "second"))  # who goes on has nothing to undo
    assert not page.find("undo").is_visible()
    page.reload()
    assert texts(page) == ["two", "second"]


def test_two_tabs_do_not_overwrite_each_other(page: Watched, server: Running) -> None:
    def tab(url: str) -> Watched:
        made = Watched(page.page.context.new_page(), server.url.removeprefix("http://"))
        made.open(url)
        return made

    talk(page, ("one", "first"))
    other = tab(server.url)
    assert texts(other) == ["one", "first"]  # a new tab begins where the last one was
    talk(other, ("two", "second"))
    talk(page, ("three", "third"))
    other.find("clear").click()
    talk(other, ("four", "fourth"))
    for one, wanted in ((page, ["one", "first", "three", "third"]), (other, ["four", "fourth"])):
        assert texts(one) == wanted
        one.reload()
        assert texts(one) == wanted
    # A duplicated tab has a copy of the session's storage, too.
    copied = tab(server.url)
    copied.page.evaluate(
        "(id) => sessionStorage.setItem('nanovllm.conversation', id)",
        page.page.evaluate("nanovllm.chat.conversation.id"),
    )
    copied.reload()
    talk(copied, ("five", "fifth"))
    talk(page, ("six", "sixth"))
    for one, last in ((page, "sixth"), (copied, "fifth")):
        one.reload()
        assert texts(one) == ["one", "first", "three", "third", {"sixth": "six", "fifth": "five"}[last], last]
        one.check()


def test_a_reload_in_the_middle_of_an_answer(page: Watched, server: Running) -> None:
    control(server, "pause")
    ask(page)
    until(lambda: len(server.engine.scheduler.waiting) == 1)
    for _ in range(6):
        control(server, "step")
    page.until(lambda: texts(page)[-1])
    begun = texts(page)[-1]
    page.reload()
    control(server, "resume")
    until(server.is_empty)  # it does not go on
    assert texts(page)[-1].startswith(begun)
    assert "not complete when this page was loaded" in answer(page).locator("footer").inner_text()
    page.page.click("#language")
    assert "载入本页时回答尚未写完" in answer(page).locator("footer").inner_text()
    set_number(page, "max_tokens", "8")
    act(page, "redo").click()
    page.until(lambda: is_idle(page) and "8 个词元" in answer(page).locator("footer").inner_text())
    assert page.page.locator(".message").count() == 2


def test_a_full_context_has_a_way_out(page: Watched, server: Running) -> None:
    page.expected = ("Failed to load resource",)
    limit = server.engine.max_model_len
    set_number(page, "max_tokens", "4")
    # One message that is too long: no older ones to leave out
    ask(page, "the town " * limit)
    page.until(lambda: is_idle(page))
    assert f"This message alone does not fit into the model's context of {limit:,} tokens" in answer(page).inner_text()
    assert answer(page).locator("[data-act=leave]").count() == 0
    page.find("clear").click()
    # Several that are too long together
    with server.http() as client:
        count = client.post("/tokenize", json={"prompt": "the town " * 20}).json()["count"] // 20
    turn = "the town " * (limit // 2 // count - 8)
    for number in range(3):
        ask(page, f"{number} {turn}")
        page.until(lambda: is_idle(page))
    assert "no longer fits into the model's context" in answer(page).inner_text()
    page.page.click("#language")
    assert "超出模型" in answer(page).inner_text()
    body = sent(page, answer(page).locator("[data-act=leave]").click)
    assert [m["content"][0] for m in body["messages"]] == ["2"]
    page.until(lambda: "4 个词元" in answer(page).inner_text())
    assert page.page.locator(".message.left").count() > 0  # still to be read
    # An answer that fills the context says so.
    page.find("clear").click()
    page.page.click("#language")
    end = {"index": 0, "delta": {"content": "and"}, "finish_reason": "length"}
    for total, wanted in ((limit - 1, "reached max tokens"), (limit, f"context of {limit:,} tokens is full")):
        page.page.unroute("**/v1/chat/completions")
        stream(page, {"choices": [end], "usage": {"completion_tokens": 1, "total_tokens": total}})
        ask(page, "more")
        page.until(lambda: is_idle(page))
        assert wanted in answer(page).locator("footer").inner_text()


BREAKS = """() => {
    const { fetch } = window, chunk = { choices: [{ index: 0, delta: { content: "half an" } }] };
    window.fetch = (path, options) => path !== "v1/chat/completions" ? fetch(path, options)
        : Promise.resolve(new Response(new ReadableStream({ async pull(body) {
            const frame = () => new Promise(requestAnimationFrame);
            while (this.sent && !document.querySelector(".message.assistant .text").textContent) await frame();
            if (this.sent) return body.error(new TypeError("network error"));
            this.sent = true;
            body.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
        } })));
}"""


def test_a_connection_that_breaks_says_so(page: Watched) -> None:
    page.page.evaluate(BREAKS)
    ask(page)
    page.until(lambda: is_idle(page))
    assert texts(page)[-1] == "half an"
    assert "The connection to the server broke" in answer(page).locator("footer").inner_text()
    assert answer(page).locator("[data-act=again]").is_visible()


def test_thoughts_stand_apart_and_are_not_sent_back(page: Watched) -> None:
    deltas = [{"reasoning_content": "hm, <b>bold</b>"}, {"reasoning_content": " or not"}, {"content": "No."}]
    stream(page, *({"choices": [{"index": 0, "delta": delta}]} for delta in deltas))
    ask(page)
    page.until(lambda: is_idle(page) and texts(page)[-1] == "No.")
    thoughts = page.page.locator(".message.assistant details")
    assert thoughts.get_attribute("open") is None
    thoughts.locator("summary").click()
    assert thoughts.locator("p").inner_text() == "hm, <b>bold</b> or not"
    assert not page.page.locator(".message.user details").first.is_visible()
    body = sent(page, lambda: ask(page, "why?"))
    assert [message["content"] for message in body["messages"]] == ["the town on the river", "No.", "why?"]


def test_a_model_without_defaults_gets_those_of_the_page(open_page: Callable[..., Watched], server: Running) -> None:
    page = open_page(server.url)
    assert page.page.locator("[data-of=temperature]").inner_text() == "0.7 (default)"
    pretend(page, "well")
    body = sent(page, lambda: ask(page))
    assert (body["temperature"], body["top_p"]) == (0.7, 0.95)
    assert not {"top_k", "max_tokens"} & body.keys()


def test_the_server_s_defaults_hold_until_they_are_changed(open_page: Callable[..., Watched], server: Running) -> None:
    def with_defaults(route: Any) -> None:
        facts = route.fetch().json()
        route.fulfill(json={**facts, "sampling_defaults": {"temperature": 0.6, "top_k": 20, "max_tokens": 77}})

    page = open_page(server.url)
    page.page.route("**/engine/info", with_defaults)
    page.reload()
    assert page.page.locator("[data-of=temperature]").inner_text() == "0.6 (default)"
    assert page.page.locator("[data-of=top_p]").inner_text() == "1 (default)"
    assert page.page.get_attribute("[name=top_k]", "placeholder") == "20"
    assert page.page.get_attribute("[name=max_tokens]", "placeholder") == "77"
    pretend(page, "well")
    assert sent(page, lambda: ask(page)).keys() == {"messages", "stream", "stream_options"}
    page.page.focus("[name=temperature]")
    page.page.keyboard.press("ArrowRight")
    page.page.fill("[name=top_k]", "0")
    body = sent(page, lambda: ask(page))
    assert (body["temperature"], body["top_k"]) == (0.61, 0)
    assert not {"top_p", "max_tokens", "seed"} & body.keys()
    page.reload()
    assert page.page.locator("[data-of=temperature]").inner_text() == "0.61"
    page.page.focus("[name=temperature]")
    page.page.keyboard.press("ArrowLeft")  # back where it was: unchanged
    page.page.fill("[name=top_k]", "")
    pretend(page, "well")
    assert sent(page, lambda: ask(page)).keys() == {"messages", "stream", "stream_options"}

"""All requests share the event loop: what takes long for one of them is done elsewhere, and nothing is quadratic.

Which thread does the work is checked rather than how long it takes, which depends on the load of the machine. A C
function of Python that runs for long stops all threads, wherever it is called, so for those the amount of work is
checked.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from nanovllm.outputs import Logprob
from nanovllm.server import answers
from nanovllm.server.errors import ApiError
from nanovllm.server.pieces import TextPlace, completion_logprobs
from nanovllm.server.protocol import ChatBody, CompletionBody
from tests.server.rig import Running

LONG = [3 + number % 290 for number in range(100)]  # a model of few positions


@pytest.fixture
def loop_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> int:
    found = []
    plain = server.service.check_alive

    def seen() -> None:
        found.append(threading.get_ident())
        plain()

    monkeypatch.setattr(server.service, "check_alive", seen)
    assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200
    return found[0]


class Counted(str):
    lengths = 0

    def __len__(self) -> int:
        Counted.lengths += 1
        return super().__len__()


def test_offsets_are_summed_once() -> None:
    for count in (100, 400):
        Counted.lengths = 0
        positions = [{number: Logprob(-1.0, 1, Counted("ab"))} for number in range(count)]
        found = completion_logprobs(positions, 0, TextPlace(7))
        assert found is not None
        assert found["text_offset"] == list(range(7, 7 + 2 * count, 2))
        assert Counted.lengths <= 4 * count


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The threads that call a function of answers.py."""
    plain, threads = getattr(answers, name), []

    def seen(*args: Any, **more: Any) -> Any:
        threads.append(threading.get_ident())
        return plain(*args, **more)

    monkeypatch.setattr(answers, name, seen)
    return threads


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_built_elsewhere(
    server: Running, loop_thread: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SMALL_ANSWER", 64)
    built, written = spy(monkeypatch, "completion_logprobs"), spy(monkeypatch, "dump_slowly")
    body = {"prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": stream}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200
    assert built
    assert written
    assert loop_thread not in {built[0], written[0]}
    text = answer.text.split("data: ")[1] if stream else answer.text
    found = json.loads(text)["choices"][0]["logprobs"]
    assert len(found["tokens"]) >= len(LONG)
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]


def test_short_answers_are_built_at_once(server: Running, loop_thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built, written = spy(monkeypatch, "completion_logprobs"), spy(monkeypatch, "dump_slowly")
    assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 4, "logprobs": 2}).status_code == 200
    assert built == [loop_thread]
    assert not written


def test_dump_slowly_writes_the_same() -> None:
    data = {"a": [1, 2.5, None, True, 'ü\n"', {"b": []}], "text": "…" * 3}
    plain = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    assert answers.dump_slowly(data) == plain.encode()
    assert json.loads(plain) == data


@pytest.mark.parametrize("path", ["/openapi.json", "/tokenize", "/detokenize"])
def test_large_json_is_written_elsewhere(
    server: Running, loop_thread: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    plain = json.dumps

    def seen(*args: Any, **more: Any) -> str:
        threads.append(threading.get_ident())
        return plain(*args, **more)

    monkeypatch.setattr(json, "dumps", seen)
    with server.http() as http:
        bodies: dict[str, Any] = {"/tokenize": {"prompt": "the"}, "/detokenize": {"tokens": [5]}}
        content = plain(bodies.get(path, {})).encode()
        method = "POST" if path in bodies else "GET"
        asked = http.request(method, path, content=content, headers={"content-type": "application/json"})
        assert asked.status_code == 200
    assert threads or path == "/openapi.json"  # which is kept: a test before this one may have read it
    assert loop_thread not in threads


FAULTY = {
    "floats": (CompletionBody, b'{"prompt":[' + b"1.5," * 200_000 + b"1.5]}"),
    "lists": (CompletionBody, b'{"prompt":[' + b"[1]," * 200_000 + b"1.5]}"),
    "texts": (CompletionBody, b'{"prompt":[' + b'"a",' * 200_000 + b"1.5]}"),
    "inner lists": (CompletionBody, b'{"prompt":[[' + b"1.5," * 200_000 + b"1.5]]}"),
    "unknown fields": (ChatBody, b"{" + b",".join(b'"%d":1' % number for number in range(50_000)) + b"}"),
    "messages": (ChatBody, b'{"messages":[' + b"{}," * 200_000 + b"{}]}"),
    "parts": (
        ChatBody,
        b'{"messages":[{"role":"user","content":[' + b",".join([b'{"type":"text"}'] * 50_000) + b"]}]}",
    ),
    "unknown in a message": (
        ChatBody,
        b'{"messages":[{"role":"user",' + b",".join(b'"%d":1' % number for number in range(50_000)) + b"}]}",
    ),
    "tools": (ChatBody, b'{"messages":[{"role":"user","content":"a"}],"tools":[' + b"{}," * 50_000 + b"{}]}"),
    "calls": (ChatBody, b'{"messages":[{"role":"assistant","tool_calls":[' + b"{}," * 50_000 + b"{}]}]}"),
    "ids": (ChatBody, b'{"messages":[{"role":"user","content":"a"}],"stop_token_ids":[' + b'"",' * 50_000 + b'""]}'),
}


@pytest.mark.parametrize("name", FAULTY)
def test_one_fault_is_enough(name: str) -> None:
    """pydantic collects all faults while it holds the interpreter's lock: 43 s for 4 MB of wrong numbers."""
    kind, raw = FAULTY[name]
    with pytest.raises((ValidationError, ApiError)) as found:
        kind.model_validate_json(raw)
    if isinstance(found.value, ValidationError):
        assert found.value.error_count() < 100

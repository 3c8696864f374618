"""What a stream sends: events from a frame are the events that json would write, and a client that does not read gets
one larger event for all that it has missed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import CompletionDelta, EngineConfig, RequestDelta
from nanovllm.engine.async_engine import AsyncLLMEngine
from nanovllm.engine.token_bytes import TokenBytes
from nanovllm.outputs import Logprob, RequestMetrics
from nanovllm.server import run as server_run
from nanovllm.server.answers import ChatAnswer, CompletionAnswer
from nanovllm.server.options import ServerOptions
from nanovllm.server.protocol import ChatBody, CompletionBody
from tests.server.rig import answers_of_a_stalled_client
from tests.server.rig import events_of as stream_events
from tests.tiny_models import TinyModel

ODD = ['say "hi"', "a\\b", "line\nfeed\r\ttab", "\x00\x1f\x7f", "\u2028\u2029", "é☃😀", "\ud800 alone", '"text"',
       "text", "</script>", "data: [DONE]\n\n", " "]  # fmt: skip
MODEL = 'a "text" model'
COMPLETION = {"prompt": "x", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}


def make_answer(body: dict[str, Any]) -> Any:
    kind = (ChatAnswer, ChatBody) if "messages" in body else (CompletionAnswer, CompletionBody)
    service = SimpleNamespace(model_name=MODEL, options=ServerOptions(), to_bytes=TokenBytes(None))
    return kind[0](service, kind[1](**body), "text")  # type: ignore[arg-type]


def delta_of(*outputs: CompletionDelta) -> RequestDelta:
    return RequestDelta("x", "x", [5, 6], list(outputs), False, None, 1, RequestMetrics())


def events_of(answer: Any, deltas: list[RequestDelta], prompt: int = 0) -> list[bytes]:
    """One item for each visit of the reader."""

    async def given() -> AsyncIterator[tuple[int, RequestDelta]]:
        for delta in deltas:
            yield prompt, delta

    async def work() -> list[bytes]:
        return [data async for data in answer._events(given())]

    return asyncio.run(work())


def written(record: Any) -> bytes:
    data = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode(errors="replace") + b"\n\n"


def expected(answer: Any, text: str, finish: str | None = None, **more: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0}
    choice |= {"delta": {"content": text}} if isinstance(answer, ChatAnswer) else {"text": text}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    head = {"id": f"{answer.prefix}-text", "object": answer.chunk_object, "created": answer.created, "model": MODEL}
    return written({**head, "choices": [choice], **more})


@pytest.mark.parametrize("body", [COMPLETION, CHAT])
@pytest.mark.parametrize("with_usage", [False, True])
def test_events_from_a_frame_are_what_json_writes(
    body: dict[str, Any], with_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = make_answer({**body, **({"stream_options": {"include_usage": True}} if with_usage else {})})
    more = {"usage": None} if with_usage else {}
    deltas = [delta_of(CompletionDelta(0, number, [5], [text])) for number, text in enumerate(["first", *ODD])]
    deltas.append(delta_of(CompletionDelta(0, len(ODD) + 1, [6], [])))  # half a character
    deltas.append(delta_of(CompletionDelta(0, len(ODD) + 2, [7], ["end"], None, None, "length")))
    records: list[Any] = []
    record = type(answer).record
    monkeypatch.setattr(type(answer), "record", lambda *given: records.append(given) or record(*given))
    sent = events_of(answer, deltas)
    assert sent[0].endswith(expected(answer, "first", **more))
    assert sent[1 : len(ODD) + 1] == [expected(answer, text, **more) for text in ODD]
    assert sent[len(ODD) + 1] == expected(answer, "end", "length", **more)
    assert len(sent) == len(ODD) + 2 + with_usage
    assert len(records) == 3  # the first, the frame and the last: nothing was built for those between


def test_frames_of_several_choices_are_told_apart() -> None:
    answer = make_answer({**COMPLETION, "n": 2})
    deltas = [
        delta_of(*(CompletionDelta(index, step, [5], [f"{index}{step}"]) for index in (0, 1))) for step in range(3)
    ]
    for data, step in zip(events_of(answer, deltas, prompt=3), range(3)):
        choices = [json.loads(line[6:])["choices"][0] for line in data.decode().splitlines() if line]
        assert [(choice["index"], choice["text"]) for choice in choices] == [(6, f"0{step}"), (7, f"1{step}")]


@pytest.mark.parametrize(
    "more", [{"logprobs": 1}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
)
def test_events_that_differ_in_more_than_their_text_have_no_frame(more: dict[str, Any]) -> None:
    answer = make_answer({**COMPLETION, **more})
    deltas = [
        delta_of(CompletionDelta(0, number, [5], ["ab"], [{5: Logprob(-1.0 - number, 1, "ab")}])) for number in range(3)
    ]
    events = [json.loads(data[6:]) for data in events_of(answer, deltas)]
    if "logprobs" in more:
        assert [event["choices"][0]["logprobs"]["token_logprobs"] for event in events] == [[-1.0], [-2.0], [-3.0]]
        assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [2], [4]]
    else:
        assert [event["usage"]["completion_tokens"] for event in events[:3]] == [1, 2, 3]


LONG = {"ignore_eos": True, "max_tokens": 140, "seed": 1}
MESSAGES = [{"role": "user", "content": "the rain"}]


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_client_that_stalls_gets_one_event_for_all_it_has_missed(llama: TinyModel, prompts: int) -> None:
    """Its connection takes no more after the first event: the server waits in `send`, and the engine goes on."""
    body = {"prompt": [[5, 6], [7, 8]][:prompts], "n": 2, **LONG}
    answer, sent = answers_of_a_stalled_client(llama.path, "/v1/completions", body)
    events = stream_events(b"".join(sent).decode())
    texts = [""] * 2 * prompts
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in json.loads(answer)["choices"]]
    # A first one of each, perhaps one that was on its way to each, and the rest, which ends it.
    assert len(events) <= 3 * 2 * prompts
    assert len(sent) <= 3 * prompts + 1


def test_so_does_one_of_another_dialect(llama: TinyModel) -> None:
    answer, sent = answers_of_a_stalled_client(llama.path, "/v1/messages", {"messages": MESSAGES, **LONG})
    events = stream_events(b"".join(sent).decode())
    assert len(sent) <= 4  # the first, perhaps one that was on its way, the rest, and an empty end
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == json.loads(answer)["content"][0]["text"]


def test_an_answer_in_one_go_is_reported_once(llama: TinyModel) -> None:
    engine = AsyncLLMEngine(EngineConfig.from_options(model=str(llama.path), device="cpu", max_num_seqs=4))
    step, reported = engine.engine.step, []
    engine.engine.step = lambda: reported.append(step()) or reported[-1]  # type: ignore[method-assign]

    async def work() -> list[RequestDelta]:
        return [delta async for delta in engine.stream([5, 6], None, final_only=True)]

    try:
        (delta,) = asyncio.run(work())
    finally:
        engine.close()
    assert delta.finished
    assert len(delta.outputs[0].token_ids) == len(reported) > 1
    assert [len(deltas) for deltas in reported] == [0] * (len(reported) - 1) + [1]


def test_serve_freezes_what_it_has_built(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector does not look again at the model, the routes and the modules. Importing the library freezes
    nothing."""
    found: list[int] = []
    monkeypatch.setattr(server_run.DrainingServer, "run", lambda *_, **__: found.append(gc.get_freeze_count()))
    before = gc.get_freeze_count()
    config = EngineConfig.from_options(model=str(llama.path), device="cpu", max_num_seqs=4)
    try:
        server_run.serve(config, ServerOptions(port=0), lambda _: None)
    finally:
        gc.unfreeze()
    assert found[0] > before + 10_000


def test_the_event_loop_is_uvloop_where_it_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")
    factory = server_run.DrainingServer(lambda *_: None, ServerOptions()).config.get_loop_factory()  # type: ignore[arg-type]
    assert factory is uvloop.new_event_loop

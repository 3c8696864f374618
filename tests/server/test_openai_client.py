"""Every endpoint through the real openai client, against what the engine says offline and transformers says."""

from __future__ import annotations

import asyncio
import codecs
import math
from typing import Any

import openai
import pytest

import nanovllm
from nanovllm import SamplingParams
from tests.server.rig import Running
from tests.tiny_models import NEW_TOKENS, TinyModel

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPT = "the town on the river"


def test_models(server: Running, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == server.model == "llama-gqa-tied"
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody/knows")


def test_completion_of_token_ids(server: Running, client: openai.OpenAI, llama: TinyModel) -> None:
    """Tokens are transformers' own, on both sides of a block."""
    for prompt, tokens in zip(llama.prompts, llama.tokens):
        answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, **GREEDY)
        [choice] = answer.choices
        expected = offline(server, prompt, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        assert (choice.text, expected.token_ids) == (expected.text, tokens)
        assert choice.finish_reason == "length"
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == NEW_TOKENS
        assert answer.usage.total_tokens == len(prompt) + NEW_TOKENS


def test_several_prompts_and_n(server: Running, client: openai.OpenAI) -> None:
    prompts = ["the", "the men of the town", "rain"]
    single = [client.completions.create(model=server.model, prompt=p, max_tokens=6, **GREEDY) for p in prompts]
    answer = client.completions.create(model=server.model, prompt=prompts, n=2, max_tokens=6, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [s.choices[0].text for s in single for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(s.usage.prompt_tokens for s in single)
    assert answer.usage.completion_tokens == 36
    ids = [server.engine.tokenizer.encode(p) for p in prompts]
    again = client.completions.create(model=server.model, prompt=ids, max_tokens=6, **GREEDY)
    assert [choice.text for choice in again.choices] == [s.choices[0].text for s in single]


def test_streamed_completions_are_the_whole_in_pieces(server: Running, client: openai.OpenAI) -> None:
    settings = {"model": server.model, "prompt": ["the", "rain all day"], "n": 2, "max_tokens": 12, "seed": 5}
    whole = client.completions.create(**settings, temperature=1)
    chunks = list(
        client.completions.create(**settings, temperature=1, stream=True, stream_options={"include_usage": True})
    )
    texts = [""] * 4
    reasons: list[Any] = [None] * 4
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        assert reasons[choice.index] is None, "nothing comes after the end"
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert len(chunks) > 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage(server: Running, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=server.model,
        prompt="the",
        max_tokens=48,
        stream=True,
        **GREEDY,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 48


def test_stop_strings(server: Running, client: openai.OpenAI) -> None:
    settings = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, **GREEDY}
    free = client.completions.create(**settings).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 2]
    for stops in (stop, ["no such text", stop]):
        choice = client.completions.create(**settings, stop=stops).choices[0]
        assert choice.text == free[: free.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.model_extra["stop_reason"] == stop
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**settings, stop=stop, stream=True))
    assert streamed == free[: free.index(stop)]


def test_logprobs_of_completions(server: Running, client: openai.OpenAI, llama: TinyModel) -> None:
    answer = llama.answers[4]
    settings = {"model": server.model, "prompt": answer.prompt, "max_tokens": NEW_TOKENS, "logprobs": 3, **GREEDY}
    found = client.completions.create(**settings).choices[0].logprobs
    start = len(answer.prompt) - 1
    expected = [float(answer.logprobs[start + i, token]) for i, token in enumerate(answer.tokens)]
    assert found.token_logprobs == pytest.approx(expected, abs=2e-3)
    assert all(1 <= len(best) <= 4 for best in found.top_logprobs)  # half characters look alike: one key
    banned = client.completions.create(**{**settings, "logprobs": 20, "max_tokens": 4}, logit_bias={"70": -100})
    assert all(math.isfinite(x) for best in banned.choices[0].logprobs.top_logprobs for x in best.values())
    data = [server.service.to_bytes(token, "") for token in answer.tokens]
    decoder = codecs.getincrementaldecoder("utf-8")
    assert found.text_offset == [len(decoder("replace").decode(b"".join(data[:i]))) for i in range(NEW_TOKENS)]
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**settings, stream=True)]
    assert [x for piece in pieces for x in piece.token_logprobs] == pytest.approx(found.token_logprobs)
    assert [x for piece in pieces for x in piece.text_offset] == found.text_offset


def test_echo(server: Running, client: openai.OpenAI, llama: TinyModel) -> None:
    settings = {"model": server.model, "prompt": PROMPT, **GREEDY}
    plain = client.completions.create(**settings, max_tokens=5).choices[0].text
    assert client.completions.create(**settings, max_tokens=5, echo=True).choices[0].text == PROMPT + plain
    chunks = list(client.completions.create(**settings, max_tokens=5, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain

    answer = llama.answers[5]
    scored = client.completions.create(
        model=server.model, prompt=answer.prompt, max_tokens=0, echo=True, logprobs=0, **GREEDY
    )
    found = scored.choices[0].logprobs
    expected = [float(answer.logprobs[i, token]) for i, token in enumerate(answer.prompt[1:])]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=2e-3)
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].text == server.engine.tokenizer.decode(answer.prompt)


def test_chat(server: Running, client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "sing"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    settings: dict[str, Any] = {"model": server.model, "messages": messages, "max_completion_tokens": 16, **GREEDY}
    answer = client.chat.completions.create(**settings)
    plain = [{"role": "system", "content": "sing"}, {"role": "user", "content": "a"}]
    rendered = server.engine.inputs.render_chat(plain)
    text = client.completions.create(model=server.model, prompt=rendered, max_tokens=16, **GREEDY).choices[0].text
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert answer.usage.prompt_tokens == len(rendered)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 16
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_without_max_tokens_ends_at_the_limit(server: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "the rain"}], **GREEDY
    )
    assert answer.usage.total_tokens == server.engine.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_chat_logprobs(server: Running, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": server.model, "messages": [{"role": "user", "content": "rain"}], "n": 2}
    settings |= {"max_tokens": 6, "logprobs": True, "top_logprobs": 2, "seed": 1}
    answer = client.chat.completions.create(**settings)
    for choice in answer.choices:
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
            assert bytes(entry.bytes).decode(errors="replace") == entry.token
            assert entry.logprob <= entry.top_logprobs[0].logprob
    chunks = list(client.chat.completions.create(**settings, stream=True))
    streamed: list[list[float]] = [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else [])]
    assert streamed == [[entry.logprob for entry in choice.logprobs.content] for choice in answer.choices]
    bare = client.chat.completions.create(**{**settings, "top_logprobs": 0}).choices[0].logprobs
    assert [entry.top_logprobs for entry in bare.content] == [[]] * 6


SAMPLING = [
    {"seed": 7},
    {"seed": 7, "top_p": 0.5},
    {"seed": 7, "extra_body": {"top_k": 3}},
    {"seed": 7, "extra_body": {"min_p": 0.2}},
    {"temperature": 0, "logit_bias": {"70": 100}},
    {"temperature": 0, "frequency_penalty": 2.0},
    {"temperature": 0, "presence_penalty": 2.0},
    {"temperature": 0, "extra_body": {"repetition_penalty": 9.0}},
    {"temperature": 0, "extra_body": {"allowed_token_ids": [70, 71]}},
    {"temperature": 0, "extra_body": {"bad_words": ["e"]}},
    {"temperature": 0, "extra_body": {"min_tokens": 10, "stop_token_ids": list(range(150))}},
    {"temperature": 0, "extra_body": {"stop_token_ids": list(range(150))}},
    {"seed": 3, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}},
]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_sampling_fields_reach_the_sampler(server: Running, client: openai.OpenAI, options: dict[str, Any]) -> None:
    """The same text as the engine gives offline with the same parameters, and another than without them."""
    own = {**options, **options.get("extra_body", {})}
    own.pop("extra_body", None)
    params = SamplingParams(**{"max_tokens": 16, **own})
    expected = offline(server, PROMPT, params)
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=16, **options)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    without = SamplingParams(max_tokens=16, temperature=own.get("temperature", 1.0), seed=own.get("seed"))
    if set(own) - {"seed"}:
        assert offline(server, PROMPT, without).text != expected.text or expected.finish_reason == "stop"


def offline(server: Running, prompt: Any, params: SamplingParams) -> Any:
    async def work() -> Any:
        return [output async for output in server.service.engine.generate(prompt, params)][-1]

    return asyncio.run(work()).outputs[0]


def test_cache_salt_and_cached_tokens(server: Running, client: openai.OpenAI) -> None:
    prompt = [11 + i for i in range(40)]

    def cached(salt: str | None) -> int:
        answer = client.completions.create(
            model=server.model, prompt=prompt, max_tokens=1, extra_body={} if salt is None else {"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached(None)] == [0, 32, 0, 0, 32]


def test_tokenize_and_back(server: Running) -> None:
    text = "the rain, 雨"
    found = server.post("/tokenize", {"prompt": text}).json()
    assert found["tokens"] == server.engine.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), server.engine.max_model_len)
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert bare["tokens"] == found["tokens"][1:]
    assert len(bare["token_strs"]) == bare["count"]
    assert server.post("/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "a"}]
    for generate in (True, False):
        body = {"messages": messages, "add_generation_prompt": generate}
        assert server.post("/tokenize", body).json()["tokens"] == server.engine.inputs.render_chat(messages, generate)


def test_request_ids(server: Running) -> None:
    body = {"prompt": "the", "max_tokens": 1}
    named = server.post("/v1/completions", body, headers={"X-Request-Id": "abc.1"})
    assert (named.headers["x-request-id"], named.json()["id"]) == ("abc.1", "cmpl-abc.1")
    one, two = (server.post("/v1/completions", body).headers["x-request-id"] for _ in range(2))
    assert one != two
    bad = server.post("/v1/completions", body, headers={"X-Request-Id": "a b"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Request-Id")


def test_small_endpoints(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json() == {"version": nanovllm.__version__}
        paths = http.get("/openapi.json").json()["paths"]
        assert set(paths) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health"}
        missing, wrong = http.get("/nothing"), http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert set(missing.json()["error"]) == set(wrong.json()["error"]) == {"message", "type", "param", "code"}


MANY_BYTES = "né 日本😀é"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_half_characters(server: Running, client: openai.OpenAI, stream: bool) -> None:
    """Each byte of these characters is a token of its own here."""
    options: dict[str, Any] = {"model": server.model, "max_tokens": 60, "stream": stream}
    options["extra_body"] = {"guided_choice": [MANY_BYTES]}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2, **options
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == MANY_BYTES + "<|eos|>"
    assert any(len(entry.bytes) == 1 and entry.bytes[0] > 127 for entry in entries)
    for entry in entries:
        tops = {top.token: top for top in entry.top_logprobs}
        if "\ufffd" not in entry.token and entry.token in tops:
            assert tops[entry.token].bytes == entry.bytes

    found = client.completions.create(prompt="a", logprobs=0, **options)
    choices = [chunk.choices[0] for chunk in found] if stream else found.choices
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "".join(choice.text for choice in choices) == MANY_BYTES
    lengths = [len(entry.bytes) for entry in entries]
    begun = [MANY_BYTES.encode()[: sum(lengths[:i])].decode(errors="ignore") for i in range(len(lengths))]
    assert offsets == [len(text) for text in begun]
    assert len(set(offsets)) < len(offsets)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_behind_an_echoed_prompt(server: Running, client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": server.model, "max_tokens": 60, "stream": stream, "logprobs": 0, "echo": True}
    options["extra_body"] = {"guided_choice": ["日本"], "return_token_ids": True}
    for prompt in ("é日x", server.engine.tokenizer.encode("é日x")):  # only the second text has the <|bos|>
        found = client.completions.create(prompt=prompt, **options)
        choices = [chunk.choices[0] for chunk in found] if stream else found.choices
        text = "".join(choice.text for choice in choices)
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
        for token, offset in zip(tokens[1:-1], offsets[1:-1]):
            assert token == "\ufffd" or text.startswith(token, offset)
        assert (offsets[0], offsets[-1], tokens[-1]) == (0, len(text), "<|eos|>")

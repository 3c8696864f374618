"""LLM, the offline interface: every form of prompt, chat, token ids without a tokenizer."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, RequestError, SamplingParams, TextPrompt, TokensPrompt
from tests.tiny_models import CHAT_TEMPLATE, NEW_TOKENS, VOCAB, TinyModel, save_tokenizer

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def test_one_params_for_all_or_one_for_each(llm: LLM, llama: TinyModel) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(llama.prompts[:2], [GREEDY, short], use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [llama.tokens[0], llama.tokens[1][:2]]
    assert len(llm.generate("the", use_tqdm=False)[0]["token_ids"]) <= 16  # vLLM's default


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    prompts = ["the", "the town on", "é", "in the rain ☔", "a b  c", " "]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False):
        assert output.prompt + output["text"] == decode(
            output.prompt_token_ids + output["token_ids"], skip_special_tokens=True
        )


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "sing"}, {"role": "user", "content": "the rain"}]
    text = "<|system|>sing<|end|><|user|>the rain<|end|><|assistant|>"
    expected = llm.get_tokenizer().encode(text, add_special_tokens=False)  # the template has the special tokens
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in one] == [expected]
    two = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert two[0]["token_ids"] == one[0]["token_ids"]
    assert len(two) == 2
    without = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert without[0].prompt_token_ids == expected[:-1]
    sent = llm.generate({"prompt_token_ids": expected}, GREEDY, use_tqdm=False)
    assert sent[0]["token_ids"] == one[0]["token_ids"]


def test_every_form_of_prompt(llm: LLM) -> None:
    text = "the river"
    ids = llm.get_tokenizer().encode(text)
    [expected] = llm.generate([ids], GREEDY, use_tqdm=False)
    array = np.array(ids)
    for prompt in (
        text,
        [text],
        ids,
        tuple(ids),
        {"prompt": text},
        [{"prompt": text}],
        {"prompt_token_ids": ids},
        array,
        array.astype(np.uint16),
        list(array),
        [array],
        array[None],
        torch.tensor(ids),
        deque(ids),
        {"prompt_token_ids": array},
        TokensPrompt(prompt_token_ids=array),
        {"prompt_token_ids": tuple(array)},
        TokensPrompt(prompt="shown, not read", prompt_token_ids=ids, cache_salt=None),
        {"prompt_token_ids": ids, "multi_modal_data": None},
        TextPrompt(prompt=text),
    ):
        [found] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert found["token_ids"] == expected["token_ids"]
        assert found.prompt_token_ids == ids
        assert {type(token) for token in found.prompt_token_ids} == {int}
    both = llm.generate({"prompt": "shown", "prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0]
    assert both.prompt == "shown"
    for prompts in (np.array([ids, ids]), [text, ids], [{"prompt": text}, {"prompt_token_ids": ids}]):
        assert [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == [expected["token_ids"]] * 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_whole_vocabulary_of_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    few = params.clone(logprobs=2, prompt_logprobs=1)
    for_all, for_few = llm.generate(["the rain", "the rain"], [params, few], use_tqdm=False)
    for whole, part in [
        *zip(for_all["logprobs"], for_few["logprobs"]),
        *zip(for_all.prompt_logprobs[1:], for_few.prompt_logprobs[1:]),
    ]:
        assert set(whole) == set(range(VOCAB))
        assert sum(math.exp(entry.logprob) for entry in whole.values()) == pytest.approx(1, abs=1e-5)
        assert {token: whole[token].rank for token in part} == {token: part[token].rank for token in part}
        assert [whole[t].decoded_token for t in (5, 299)] == [llm.get_tokenizer().decode([t]) for t in (5, 299)]


def test_half_on_a_cpu(make_llm: MakeLLM) -> None:
    llm = make_llm(dtype="half", trust_remote_code=False, swap_space=0, seed=None, block_size=16)
    assert llm.llm_engine.describe()["runs_on"]["dtype"] == "float16"
    assert len(llm.generate("the rain", GREEDY, use_tqdm=False)[0]["token_ids"]) == NEW_TOKENS


def test_reset_prefix_cache(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=True)
    prompt = {"prompt_token_ids": [7] * 70}

    def cached() -> int:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 64]
    llm.engine.add_request("runs", prompt, GREEDY)
    llm.engine.step()
    assert not llm.reset_prefix_cache()  # it runs, and reads those blocks
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert cached() == 64
    assert llm.reset_prefix_cache()
    assert llm.engine.scheduler.blocks.findable() == ([], [])
    assert [cached(), cached()] == [0, 64]
    llm.close()
    assert not llm.reset_prefix_cache()


def test_reset_prefix_cache_ends_what_was_planned_ahead(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight holds the blocks of a request that was aborted."""
    llm = make_llm()
    monkeypatch.setattr(llm.engine.executor.runner, "overlap", 2)
    llm.engine.add_request("0", [7] * 70, GREEDY)
    llm.engine.step()
    llm.engine.abort_request("0")
    blocks = llm.engine.scheduler.blocks
    assert blocks.num_held
    assert llm.reset_prefix_cache()
    assert (blocks.num_used, blocks.findable()) == (0, ([], []))
    assert len(llm.generate([7] * 70, GREEDY, use_tqdm=False)[0]["token_ids"]) == NEW_TOKENS


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_the_device_begins_before_all_prompts_are_read(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """With the plans that it has if all are there. Where the shortest goes first, all must be there."""
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=8, scheduling_policy=policy)
    engine, launch, add = llm.engine, llm.engine.executor.launch, llm.engine.scheduler.add
    monkeypatch.setattr(engine.executor.runner, "overlap", 2)
    events: list[Any] = []
    monkeypatch.setattr(engine.executor, "launch", lambda plan: events.append(plan.entries) or launch(plan))
    monkeypatch.setattr(engine.scheduler, "add", lambda seq: events.append("add") or add(seq))
    prompts = [[3 + (i * k) % (VOCAB - 3) for k in range(1, 12 + 7 * i)] for i in range(1, 9)]

    def run() -> tuple[list[Any], list[Any], int]:
        events.clear()
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.reset_prefix_cache()
        plans = [event for event in events if event != "add"]
        shapes = [[(entry.start, entry.num_new, entry.samples) for entry in plan] for plan in plans]
        return [o["token_ids"] for o in outputs], shapes, events.index(plans[0])

    tokens, shapes, num_before = run()
    assert num_before == (3 if policy == "fcfs" else 8)
    monkeypatch.setattr(engine, "begin", lambda: None)
    assert run() == (tokens, shapes, 8)


def test_a_prompt_refused_behind_a_step_that_runs(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=8)
    monkeypatch.setattr(llm.engine.executor.runner, "overlap", 2)
    prompts = [[5 + i] * 70 for i in range(3)]
    expected = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    step = llm.engine.scheduler.step
    with pytest.raises(RequestError, match=r"prompt 3: .*-1"):
        llm.generate([*prompts, [-1]], GREEDY, use_tqdm=False)
    assert llm.engine.scheduler.step > step, "nothing ran: this test shows nothing"
    assert not llm.engine.has_unfinished_requests()
    assert [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
    assert llm.engine.scheduler.blocks.num_used == 0


def test_watchers_see_the_empty_cache(make_llm: MakeLLM) -> None:
    llm, events = make_llm(), []

    class Reader:
        def put(self, event: Any) -> None:
            events.append(json.loads(event.line))

        def end(self) -> None:
            events.append({"type": "end"})

    llm.generate([7] * 70, GREEDY, use_tqdm=False)
    llm.engine.watch.attach(Reader())
    assert llm.reset_prefix_cache()
    llm.close()
    assert [event["type"] for event in events] == ["snapshot", "snapshot", "end"]
    assert [bool(event["cached"]) for event in events[:2]] == [True, False]


RAIN = {"role": "user", "content": "the rain"}
OWN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ suffix }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chat_template": OWN}, "user:the rain"),
        ({"chat_template": OWN, "chat_template_kwargs": {"suffix": "!", "enable_thinking": False}}, "user:the rain!"),
        ({"chat_template_kwargs": {}}, "<|user|>the rain<|end|><|assistant|>"),
        ({"chat_template": OWN, "tools": [{"type": "function"}]}, "user:the rain[{'type': 'function'}]"),
        ({"tools": []}, "<|user|>the rain<|end|><|assistant|>"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|user|>the rain"),
    ],
)
def test_options_of_chat(llm: LLM, options: dict[str, Any], text: str) -> None:
    for conversations in ([RAIN], [[RAIN], [RAIN]]):
        for output in llm.chat(conversations, GREEDY, use_tqdm=False, **options):
            assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools: the chat template does not show them"),
        ({"continue_final_message": True}, "add_generation_prompt=False"),
        ({"chat_template": "./template.jinja"}, "text of a Jinja template"),
        ({"chat_template": 5}, "text of a Jinja template"),
        ({"chat_template": "{% for"}, "chat template refused"),
        ({"chat_template_kwargs": {"tokenize": True, "tools": []}}, r"\['tokenize', 'tools'\]"),
        ({"chat_template_kwargs": {"messages": []}}, r"\['messages'\] are not variables"),
        ({"chat_template_kwargs": [1]}, "must map"),
    ],
)
def test_options_of_chat_that_cannot_be_honoured(llm: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat([RAIN], GREEDY, use_tqdm=False, **options)


def test_content_parts_and_messages_without_content(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "rain"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.x }};{% endfor %}{% endfor %}"
    )
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    text = "user=the\nrain;assistant=;1;assistant=;"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert messages[0]["content"][0]["text"] == "the"  # the caller's own are not touched


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     [{"role": "user", "content": [5]}],
     [{"role": "user", "content": 5}], [{"role": "tool"}],
     [RAIN, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     [], {}, "hello", 5, None, [[]], [{}], [{"role": "user"}], [{"content": "x"}], ["x"], [[{"role": "user"}]],
     [{"role": "forbidden", "content": "x"}], [{"role": "user", "content": None}], [{"role": 3, "content": "x"}]],
)  # fmt: skip
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 5}, {"type": "text", "text": None}])
def test_a_text_part_without_text(llm: LLM, part: Any) -> None:
    with pytest.raises(RequestError, match="messages: a content part of type 'text' needs 'text', a string"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_chat_without_a_template(make_llm: MakeLLM, llama_copy: Path) -> None:
    (llama_copy / "chat_template.jinja").unlink()
    llm = make_llm(llama_copy)
    with pytest.raises(RequestError, match=r"no chat template: use generate\(\)"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
    assert CHAT_TEMPLATE not in str(llm.get_tokenizer().init_kwargs)


def test_without_a_tokenizer(make_llm: MakeLLM, llama: TinyModel) -> None:
    llm = make_llm(skip_tokenizer_init=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in llama.prompts], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == llama.tokens
    assert {o["text"] for o in outputs} == {""}
    assert llm.get_tokenizer() is None
    logprobs = llm.generate([5], SamplingParams(temperature=0, logprobs=1, max_tokens=1), use_tqdm=False)[0]
    assert next(iter(logprobs["logprobs"][0].values())).decoded_token is None
    for use in (
        lambda: llm.generate("text", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "x"}], use_tqdm=False),
        lambda: llm.generate([5], SamplingParams(stop="x"), use_tqdm=False),
        lambda: llm.generate([5], SamplingParams(bad_words=["x"]), use_tqdm=False),
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            use()


def test_a_tokenizer_from_elsewhere(make_llm: MakeLLM, llama_copy: Path, tmp_path: Path) -> None:
    (llama_copy / "tokenizer.json").unlink()
    other = tmp_path / "tokenizer"
    save_tokenizer(other)
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert make_llm(llama_copy, tokenizer=str(other)).get_tokenizer().encode("the")[0] == 1


def test_progress_bar_shows_both_speeds(llm: LLM, llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(llama.prompts, GREEDY)
    shown = capsys.readouterr().err
    assert "11/11" in shown
    assert "prefill" in shown
    assert "decode" in shown
    llm.generate(llama.prompts, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_import_does_not_need_torch() -> None:
    """`import nanovllm` and `nanovllm --help` are instant: torch is imported when an engine is made."""
    import subprocess
    import sys

    script = (
        "import sys, nanovllm; nanovllm.SamplingParams(); "
        "assert not {'torch', 'transformers', 'triton', 'fastapi', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_of_the_package() -> None:
    import nanovllm

    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None
    with pytest.raises(AttributeError, match="LMM"):
        _ = nanovllm.LMM

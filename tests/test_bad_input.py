"""Bad input through the front door: the right class of error, with the value, the limit and the remedy in its text,
and an engine that goes on answering right.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, ConfigError, ModelError, NanoVLLMError, RequestError, SamplingParams
from tests.tiny_models import EOS, MAX_POSITION, NEW_TOKENS, VOCAB, TinyModel, edit_config

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def assert_answers(llm: LLM, llama: TinyModel) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert [o["token_ids"] for o in llm.generate(llama.prompts[:3], GREEDY, use_tqdm=False)] == llama.tokens[:3]
    assert llm.engine.scheduler.blocks.num_used == 0


def refused(llm: LLM, llama: TinyModel, prompt: Any, params: Any = GREEDY, **options: Any) -> str:
    """The message; alone and in the middle of good prompts, where nothing must run and the bad one is named."""
    with pytest.raises(RequestError) as alone:
        llm.generate(prompt, params, use_tqdm=False, **options)
    steps = llm.engine.stats.num_steps
    with pytest.raises(RequestError, match="prompt 1: "):
        llm.generate(["the", prompt, "town"], [GREEDY, params, GREEDY], use_tqdm=False)
    assert llm.engine.stats.num_steps == steps
    assert_answers(llm, llama)
    return str(alone.value)


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[[]], {"prompt_token_ids": []}, {"prompt_token_ids": ()}])
def test_empty_prompt(llm: LLM, llama: TinyModel, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"empty.*at least one token"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert_answers(llm, llama)


def test_empty_text_is_empty_unless_the_tokenizer_adds_a_token(
    make_llm: MakeLLM, llm: LLM, llama: TinyModel, llama_copy: Path
) -> None:
    assert llm.generate("", GREEDY, use_tqdm=False)[0].prompt_token_ids == [1]  # this tokenizer writes a bos
    tokenizer = json.loads((llama_copy / "tokenizer.json").read_text())
    (llama_copy / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    assert "empty" in refused(make_llm(llama_copy), llama, "")


@pytest.mark.parametrize("bad", [VOCAB, -1, 10**9, 2**70, "x", 1.5, None, True])
def test_ids_outside_the_vocabulary(llm: LLM, llama: TinyModel, bad: Any) -> None:
    message = refused(llm, llama, {"prompt_token_ids": [5, bad, 6]})
    assert repr(bad) in message
    assert f"[0, {VOCAB - 1}]" in message


@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_too_long_for_the_model(llm: LLM, llama: TinyModel, extra: int) -> None:
    """One token less is served."""
    message = refused(llm, llama, {"prompt_token_ids": [5] * (MAX_POSITION + extra)})
    for part in (f"{MAX_POSITION + extra} tokens", f"max_model_len={MAX_POSITION}", "shorten"):
        assert part in message
    longest = llm.generate([5] * (MAX_POSITION - 1), GREEDY, use_tqdm=False)[0]
    assert len(longest["token_ids"]) == 1


@pytest.mark.parametrize("num_tokens", [32, 33, 100])
def test_larger_than_the_whole_cache(make_llm: MakeLLM, llama: TinyModel, num_tokens: int) -> None:
    """It is refused before it waits; requests before and after it are served."""
    llm = make_llm(num_kvcache_blocks=2, kvcache_block_size=16)
    message = refused(llm, llama, {"prompt_token_ids": [5] * num_tokens})
    for part in (str(num_tokens), "holds 32", "num_kvcache_blocks"):
        assert part in message
    assert llm.generate([5] * 31, GREEDY, use_tqdm=False)[0]["token_ids"]


def test_huge_prompts_are_refused_without_reading_them(llm: LLM, llama: TinyModel) -> None:
    """100 MB of text would take a minute to tokenise, only to be refused."""
    started = time.monotonic()
    assert "100000000 characters" in refused(llm, llama, "a " * 50_000_000)
    assert "20000000 tokens" in refused(llm, llama, {"prompt_token_ids": [5] * 20_000_000})
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "prompt",
    [5, None, 1.5, b"the", {5}, object(), {"prompt_token_ids": 5}, {"prompt_token_ids": None}, {"prompt": 5}, {},
     {"prompt": b"x"}, {"prompt": 5, "prompt_token_ids": [5]}, {"text": "x"}, {"prompt": "x", "image": 1},
     {"prompt": "x", "cache_salt": 5}, {"prompt_token_ids": {"a": 1}}, {"prompt_token_ids": "abc"}],
)  # fmt: skip
def test_things_that_are_no_prompt(llm: LLM, llama: TinyModel, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: .*prompt"):
        llm.generate(["the", prompt], GREEDY, use_tqdm=False)
    assert_answers(llm, llama)


@pytest.mark.parametrize("prompts", [5, None, b"the", 1.5])
def test_things_that_are_no_list_of_prompts(llm: LLM, llama: TinyModel, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts? must be"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_answers(llm, llama)


def test_text_that_is_no_unicode(llm: LLM, llama: TinyModel) -> None:
    """Lone surrogates come out of json.loads; they must not reach a hash, a tokenizer or a matcher as they are."""
    assert "Unicode" in refused(llm, llama, "the \ud800 town")
    refused(llm, llama, {"prompt_token_ids": llama.prompts[-1], "cache_salt": "\ud800"})
    refused(llm, llama, "the", SamplingParams(bad_words=["\ud800"]))
    llm.generate("the", SamplingParams(stop="\ud800", max_tokens=2), use_tqdm=False)  # simply never found
    assert_answers(llm, llama)


def test_other_text_is_served(llm: LLM, llama: TinyModel) -> None:
    prompts = ["\0", "\n", "é", "e\u0301", "👩‍👩‍👧", "\u202e", "<|eos|><|end|>", "a" * 100]
    assert all(o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False))
    assert_answers(llm, llama)


# ---- params ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        (SamplingParams(stop_token_ids=[VOCAB]), ("stop_token_ids", str(VOCAB))),
        (SamplingParams(allowed_token_ids=[5, VOCAB]), ("allowed_token_ids", str(VOCAB))),
        (SamplingParams(logit_bias={10**6: 1.0}), ("logit_bias", "1000000", str(VOCAB))),
        (SamplingParams(logprobs=VOCAB + 1), (f"logprobs={VOCAB + 1}", str(VOCAB))),
        (SamplingParams(prompt_logprobs=VOCAB + 1), (f"prompt_logprobs={VOCAB + 1}", str(VOCAB))),
        (
            SamplingParams(allowed_token_ids=[5, 6], stop_token_ids=[6, 5, 7], min_tokens=1),
            ("allowed_token_ids", "min_tokens and stop_token_ids", "ban all"),
        ),
        (
            SamplingParams(allowed_token_ids=[EOS], min_tokens=1),
            ("allowed_token_ids", "min_tokens and the model's end tokens", "ban all"),
        ),
        (SamplingParams(bad_words=["the " * 80]), ("bad_words", "tokens", "the limit is 64")),
        (SamplingParams(bad_words=["x" * 10**6]), ("bad_words", "1000000 characters", "at most")),
        ({"temperature": 0}, ("SamplingParams",)),
        ("greedy", ("SamplingParams",)),
    ],
)
def test_params_that_do_not_fit_the_model(llm: LLM, llama: TinyModel, params: Any, parts: tuple[str, ...]) -> None:
    if isinstance(params, str):  # a string is a sequence: one character for each prompt
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate("the", params, use_tqdm=False)
        return
    message = refused(llm, llama, "the", params)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_different_lengths(llm: LLM, llama: TinyModel, count: int) -> None:
    with pytest.raises(RequestError, match=f"sampling_params has {count} entries for 2 prompts.*one for each"):
        llm.generate(["the", "town"], [GREEDY] * count, use_tqdm=False)
    with pytest.raises(RequestError, match=f"priority has {count} entries for 2 prompts"):
        llm.generate(["the", "town"], GREEDY, use_tqdm=False, priority=[0] * count)
    assert_answers(llm, llama)


def test_priority_is_honoured_or_refused(make_llm: MakeLLM, llm: LLM, llama: TinyModel) -> None:
    with pytest.raises(RequestError, match=r"priority=3.*scheduling_policy='priority'"):
        llm.generate(["the", "town"], GREEDY, use_tqdm=False, priority=[0, 3])
    assert_answers(llm, llama)
    by_priority = make_llm(scheduling_policy="priority")
    for bad in ("high", None, 1.5, True):
        with pytest.raises(RequestError, match=r"priority=.*integer"):
            by_priority.generate(["the", "town"], GREEDY, use_tqdm=False, priority=[0, bad])
    assert_answers(by_priority, llama)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_model_len": MAX_POSITION + 1}, (f"max_model_len={MAX_POSITION + 1}", f"at most {MAX_POSITION}")),
        ({"num_kvcache_blocks": 10**9}, ("num_kvcache_blocks=1000000000", "at most")),
        ({"tensor_parallel_size": 2}, ("tensor_parallel_size=2",)),
        ({"max_model_length": 5}, ("'max_model_length'", "did you mean 'max_model_len'")),
    ],
)
def test_options_that_do_not_fit_the_model(make_llm: MakeLLM, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        make_llm(**options)
    for part in parts:
        assert part in str(error.value)


# ---- model folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("/no/such/folder", ("/no/such/folder", "config.json", "smollm2")),
        ("no/such/model.gguf", ("no/such/model.gguf", ".gguf")),
        ("", ("model=''",)),
    ],
)
def test_a_wrong_path(name: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(NanoVLLMError) as error:
        LLM(name)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("'GPT2LMHeadModel'", "LlamaForCausalLM", "Qwen3ForCausalLM")),
        ({"vocab_size": ...}, ("'vocab_size'", "Hugging Face format")),
        ({"head_dim": 7}, ("7", "even")),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("quantization_config", "'bitsandbytes'", "GGUF")),
    ],
)
def test_a_config_that_cannot_be_honoured(
    make_llm: MakeLLM, llama_copy: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    edit_config(llama_copy, **changes)
    with pytest.raises(ModelError) as error:
        make_llm(llama_copy)
    for part in parts:
        assert part in str(error.value)


def test_a_context_too_long_for_a_rotary_table(make_llm: MakeLLM, llama: TinyModel, llama_copy: Path) -> None:
    edit_config(llama_copy, max_position_embeddings=2**31 - 1)
    with pytest.raises(ConfigError, match=r"max_model_len=2147483647: .* set max_model_len"):
        make_llm(llama_copy)
    with make_llm(llama_copy, max_model_len=64) as llm:
        assert llm.generate(llama.prompts[0], GREEDY, use_tqdm=False)[0]["token_ids"] == llama.tokens[0]


def test_a_booby_trapped_folder_runs_nothing(make_llm: MakeLLM, llama: TinyModel, llama_copy: Path) -> None:
    """Code in a model folder is never imported, also if the folder's files demand it."""
    trap = "open({!r}, 'w').close()\nclass C: pass\nTinyConfig = TinyModel = TinyTokenizer = C\n"
    sprung = llama_copy / "sprung"
    for module in ("configuration_tiny", "modeling_tiny", "tokenization_tiny", "__init__", "tokenizer_config"):
        (llama_copy / f"{module}.py").write_text(trap.format(str(sprung)))
    auto_map = {
        "AutoConfig": "configuration_tiny.TinyConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyModel",
        "AutoTokenizer": ["tokenization_tiny.TinyTokenizer", "tokenization_tiny.TinyTokenizer"],
    }
    edit_config(llama_copy, auto_map=auto_map, trust_remote_code=True)
    path = llama_copy / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map, "trust_remote_code": True}))
    assert_answers(make_llm(llama_copy), llama)
    edit_config(llama_copy, model_type="tiny")
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "TinyTokenizer"}))
    assert_answers(make_llm(llama_copy), llama)
    edit_config(llama_copy, architectures=["TinyModel"])
    with pytest.raises(ModelError, match="'TinyModel' is not supported"):
        make_llm(llama_copy)
    assert not sprung.exists()
    assert not [name for name in sys.modules if name.endswith("_tiny")]


def test_a_chat_template_is_sandboxed(make_llm: MakeLLM, llama_copy: Path, llama: TinyModel) -> None:
    """A template can reach neither Python's internals nor change what it is given."""
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ):
        (llama_copy / "chat_template.jinja").write_text(template)
        llm = make_llm(llama_copy)
        with pytest.raises(RequestError, match="chat template refused"):
            llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
        assert_answers(llm, llama)

"""The effect of SamplingParams, end to end: stops, limits, bias, logprobs, seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, Logprob, SamplingParams
from tests.tiny_models import EOS, TinyModel

MakeLLM = Callable[..., LLM]
PROMPT = "the men of the town"


def run(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    """The one completion, greedy by default."""
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)[0].outputs[0]


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


@pytest.fixture
def letters(llm: LLM) -> list[int]:
    """Tokens of one letter each: a model held to them writes plain text, one letter a token."""
    ids = [ids_of(llm, chr(code))[0] for code in range(ord("a"), ord("z") + 1)]
    assert len(set(ids)) == 26
    return ids


# ---- how a sequence ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, None), (10, 1000), (22, None), (23, None), (1, None)])
def test_max_model_len_ends_a_sequence(
    make_llm: MakeLLM, llama: TinyModel, num_prompt: int, max_tokens: int | None, decode_steps: int
) -> None:
    """At exactly max_model_len, not one token later, and with the tokens a longer engine gives."""
    prompt = llama.prompts[-1][:num_prompt]
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    out = run(make_llm(max_model_len=24, decode_steps=decode_steps), prompt, **params)
    assert (len(out.token_ids), out.finish_reason) == (24 - num_prompt, "length")
    assert run(make_llm(), prompt, max_tokens=24 - num_prompt, ignore_eos=True).token_ids == out.token_ids


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_a_sequence_that_outgrows_the_cache_ends_with_the_reason(
    make_llm: MakeLLM, llama: TinyModel, decode_steps: int
) -> None:
    """It has the whole cache to itself; preempting it would repeat for ever."""
    prompt = llama.prompts[2]
    small = make_llm(num_kvcache_blocks=2, kvcache_block_size=16, decode_steps=decode_steps)
    out = run(small, prompt, max_tokens=None, ignore_eos=True)
    assert out.finish_reason == "length"
    assert "32 tokens" in out.stop_reason
    assert len(out.token_ids) == 32 + 1 - len(prompt)
    assert out.token_ids[:12] == llama.tokens[2]
    assert run(small, prompt, max_tokens=12, ignore_eos=True).token_ids == llama.tokens[2]  # the engine goes on


def test_eos_ends_and_ignore_eos_does_not(llm: LLM) -> None:
    out = run(llm, logit_bias={EOS: 100.0}, max_tokens=5)
    assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == ([EOS], "", "stop", None)
    out = run(llm, logit_bias={EOS: 100.0}, max_tokens=5, ignore_eos=True)
    assert (out.token_ids, out.text, out.finish_reason) == ([EOS] * 5, "", "length")
    out = run(llm, logit_bias={EOS: 100.0}, max_tokens=2, ignore_eos=True, skip_special_tokens=False)
    assert out.text == "<|eos|><|eos|>"


@pytest.mark.parametrize("eos", [[7, 9], 9])
def test_eos_list_of_generation_config(make_llm: MakeLLM, llama_copy: Path, eos: Any) -> None:
    """A chat model ends its turn with another token than the tokenizer's eos."""
    (llama_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    llm = make_llm(llama_copy)
    assert run(llm, logit_bias={9: 100.0}).token_ids == [9]
    assert run(llm, logit_bias={9: 100.0}).finish_reason == "stop"
    assert run(llm, logit_bias={EOS: 100.0}).token_ids == [EOS]  # config.json's own still counts
    assert len(run(llm, logit_bias={9: 100.0}, ignore_eos=True).token_ids) == 16


def test_stop_token_ids(llm: LLM, llama: TinyModel) -> None:
    wanted = llama.answers[3]
    stop = wanted.tokens[4]
    out = run(llm, wanted.prompt, stop_token_ids=[299, stop], ignore_eos=True)
    first = wanted.tokens.index(stop)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (wanted.tokens[: first + 1], "stop", stop)


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_token_that_ends_an_answer_is_no_text(
    make_llm: MakeLLM, letters: list[int], decode_steps: int, skip_special_tokens: bool
) -> None:
    """As in vLLM: token_ids and logprobs have it, the text only if include_stop_str_in_output."""
    llm = make_llm(decode_steps=decode_steps)
    full = run(llm, allowed_token_ids=letters, max_tokens=20)
    stop = full.token_ids[6]
    at = full.token_ids.index(stop)
    params = {"max_tokens": 20, "logprobs": 0, "skip_special_tokens": skip_special_tokens, "stop": ["##"]}
    by_id = {**params, "allowed_token_ids": letters, "stop_token_ids": [stop]}
    by_eos = {**params, "structured_outputs": {"choice": ["the town"]}}
    marker = "" if skip_special_tokens else "<|eos|>"
    for wanted, given, end in ((full.text[:at], by_id, full.text[at]), ("the town", by_eos, marker)):
        out = run(llm, **given)
        assert (out.text, out.finish_reason) == (wanted, "stop")
        assert out.token_ids[-1] == (stop if given is by_id else EOS)
        assert len(out.logprobs) == len(out.token_ids)
        shown = run(llm, include_stop_str_in_output=True, **given)
        assert (shown.text, shown.token_ids) == (wanted + end, out.token_ids)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_min_tokens_bans_eos_and_stop_tokens(llm: LLM, min_tokens: int) -> None:
    for params in ({"logit_bias": {EOS: 100.0}}, {"logit_bias": {50: 100.0}, "stop_token_ids": [50]}):
        out = run(llm, min_tokens=min_tokens, max_tokens=10, **params)
        assert len(out.token_ids) == min_tokens + 1
        assert out.finish_reason == "stop"


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_stop_strings_across_token_borders(
    make_llm: MakeLLM, letters: list[int], width: int, decode_steps: int
) -> None:
    llm = make_llm(decode_steps=decode_steps)
    params = {"allowed_token_ids": letters, "max_tokens": 20}
    full = run(llm, **params)
    assert len(full.text) == 20
    for start in (0, 5, 20 - width):
        stop = full.text[start : start + width]
        at = full.text.find(stop)
        out = run(llm, stop=["##", stop], **params)
        assert (out.text, out.finish_reason, out.stop_reason) == (full.text[:at], "stop", stop)
        assert out.token_ids == full.token_ids[: at + width]
        shown = run(llm, stop=stop, include_stop_str_in_output=True, **params)
        assert shown.text == full.text[: at + width]


def test_a_stop_string_that_never_completes_is_given_back(llm: LLM, letters: list[int]) -> None:
    full = run(llm, allowed_token_ids=letters, max_tokens=8)
    out = run(llm, allowed_token_ids=letters, max_tokens=8, stop=full.text[-3:] + "!")
    assert (out.text, out.finish_reason) == (full.text, "length")


def test_stop_strings_wait_for_min_tokens(llm: LLM, letters: list[int]) -> None:
    params = {"allowed_token_ids": letters[:1], "max_tokens": 9}
    assert len(run(llm, stop="a", **params).token_ids) == 1
    out = run(llm, stop="a", min_tokens=4, **params)
    assert (out.finish_reason, len(out.token_ids)) == ("stop", 5)


# ---- which tokens ----------------------------------------------------------------------------------------------------


def test_allowed_token_ids_and_bias(llm: LLM) -> None:
    out = run(llm, allowed_token_ids=[40, 41, 42], max_tokens=30, temperature=2.0, seed=1)
    assert set(out.token_ids) == {40, 41, 42}
    assert set(run(llm, allowed_token_ids=[40, 41], logit_bias={41: -100.0}, max_tokens=9).token_ids) == {40}
    assert run(llm, logit_bias={77: 100.0}, max_tokens=3).token_ids == [77] * 3
    assert run(llm, logit_bias={"77": 100.0}, max_tokens=3).token_ids == [77] * 3


def test_bad_words(llm: LLM, letters: list[int]) -> None:
    params = {"allowed_token_ids": letters, "max_tokens": 20}
    full = run(llm, **params).text
    for word in (full[0], full[4], full[3:5]):
        out = run(llm, bad_words=[word], **params).text
        assert word in full
        assert word not in out
        assert len(out) == 20


def test_detokenize_off(llm: LLM, llama: TinyModel) -> None:
    out = run(llm, llama.prompts[0], detokenize=False, max_tokens=12, ignore_eos=True)
    assert (out.text, out.token_ids) == ("", llama.tokens[0])


def test_top_k_of_one_is_greedy(llm: LLM, llama: TinyModel) -> None:
    warm = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        out = run(llm, llama.prompts[5], **{**warm, **params})
        assert out.token_ids == llama.tokens[5], params


def test_repetition_is_punished(llm: LLM) -> None:
    for params in ({"repetition_penalty": 100.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}):
        bias = dict.fromkeys(range(100, 110), 40.0)  # ten tokens far above the others, all much alike
        plain = run(llm, max_tokens=10, logit_bias=bias).token_ids
        varied = run(llm, max_tokens=10, logit_bias=bias, **params).token_ids
        assert len(set(varied)) > len(set(plain))


# ---- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == 4
    for token, position in zip(completion.token_ids, completion.logprobs):
        assert len(position) == 3  # greedy: the sampled token is among the best three
        assert all(isinstance(entry, Logprob) for entry in position.values())
        assert position[token].rank == 1
        assert sorted(entry.rank for entry in position.values()) == [1, 2, 3]
        assert position[token].decoded_token == llm.get_tokenizer().decode([token])
    assert completion.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
        assert next(iter(position)) == token
        assert len(position) == (2 if position[token].rank <= 2 else 3)


def test_logprobs_of_a_sampled_token_that_is_not_among_the_best(llm: LLM) -> None:
    params = {"allowed_token_ids": [123], "max_tokens": 1}
    assert list(run(llm, logprobs=0, **params).logprobs[0]) == [123]
    position = run(llm, logprobs=2, **params).logprobs[0]
    assert next(iter(position)) == 123
    assert len(position) == 3
    assert position[123].rank > 2
    assert run(llm, **params).logprobs is None
    assert run(llm, **params).cumulative_logprob is None


def test_logprobs_end_with_the_tokens(make_llm: MakeLLM, letters: list[int]) -> None:
    """Several tokens are decoded at once; what comes after the stop is dropped, its logprobs too."""
    llm = make_llm(decode_steps=8)
    out = run(llm, allowed_token_ids=letters[:1], stop="aaa", logprobs=1, max_tokens=20)
    assert len(out.token_ids) == len(out.logprobs) == 3


# ---- seeds -----------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True, top_p=0.95)
NOISE = SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True)


def seeded_tokens(llm: LLM, prompt: list[int], noise: list[list[int]], place: int) -> list[int]:
    prompts = [*noise[:place], prompt, *noise[place:]]
    params = [NOISE] * place + [SEEDED] + [NOISE] * (len(noise) - place)
    return llm.generate(prompts, params, use_tqdm=False)[place]["token_ids"]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_llm: MakeLLM, llama: TinyModel) -> None:
    prompt, noise = llama.prompts[4], llama.prompts[:4] * 2
    alone = seeded_tokens(make_llm(), prompt, [], 0)
    assert len(set(alone)) > 5
    llm = make_llm()
    for place in (0, 3, 8):
        assert seeded_tokens(llm, prompt, noise, place) == alone
    for options in (
        {"decode_steps": 4},
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"kvcache_block_size": 32},
        {"enable_prefix_caching": False},
        {"seed": 99},
        {"attn_backend": "sdpa.math"},
    ):
        assert seeded_tokens(make_llm(**options), prompt, noise, 4) == alone, options
    small = make_llm(num_kvcache_blocks=8)  # four sequences begin with 5 blocks and would end with 12
    outputs = small.generate([llama.prompts[3]] * 3 + [prompt], [NOISE] * 3 + [SEEDED], use_tqdm=False)
    assert outputs[3].metrics.num_preemptions > 0
    assert outputs[3]["token_ids"] == alone


def test_other_seeds_and_other_completions_differ(llm: LLM, llama: TinyModel) -> None:
    def completions(**changes: Any) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, **changes)
        return [tuple(c.token_ids) for c in llm.generate(llama.prompts[2], params, use_tqdm=False)[0].outputs]

    four = completions(seed=5, n=4)
    assert len(set(four)) == 4
    assert completions(seed=5, n=4) == four
    assert completions(seed=5, n=2) == four[:2]
    assert completions(seed=500) != completions(seed=501)
    assert completions(n=3) != completions(n=3)  # no seed: every request draws anew


def test_an_engine_seed_repeats_a_whole_run(make_llm: MakeLLM, llama: TinyModel) -> None:
    def tokens(seed: int) -> list[list[int]]:
        llm = make_llm(seed=seed)
        return [o["token_ids"] for _ in range(2) for o in llm.generate(llama.prompts[:4], NOISE, use_tqdm=False)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)

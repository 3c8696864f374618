"""Guessed tokens change how long an answer takes, never the answer: greedy and seeded, beside every other feature.

Tiny random models write text that no lookup could guess, so most tests put a drafter in its place that knows the answer
and spoils some of its tokens: guesses are accepted and refused at all places. SmolLM2 has the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.runner.drafter import TokenDrafter
from tests.drafting import always
from tests.tiny_models import EOS, TinyModel

MakeLLM = Callable[..., LLM]
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}}
# From the repository's own vocabulary of tiny models, so that all of these are legal tokens.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "penalties": {"seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0, "logit_bias": {7: 3.0, 11: -100}, "min_tokens": 9},
    "bad words": {"temperature": 1.0, "seed": 8, "bad_words": ["e", "th"]},
    "allowed": {"temperature": 1.0, "seed": 9, "allowed_token_ids": list(range(20, 60))},
    "logprobs": {"temperature": 1.0, "seed": 4, "logprobs": 3},
    "several": {"temperature": 1.0, "seed": 6, "n": 3},
    "short": {"temperature": 1.0, "seed": 2, "max_tokens": 2},
}


class Knowing(TokenDrafter):
    """Proposes what the answers have, with a wrong token now and then."""

    lengths = (4, 2, 0)

    def __init__(self, answers: list[list[int]], seed: int) -> None:
        self._answers, self._random = answers, random.Random(seed)

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        known = token_ids.tolist()
        following = [answer[len(known) :] for answer in self._answers if answer[: len(known)] == known]
        draft = (self._random.choice(following) if following else [])[:most]
        if draft and self._random.random() < 0.6:
            draft[self._random.randrange(len(draft))] = self._random.randrange(20, 60)
        return np.array(draft, np.int32)


def params_of(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **fields})


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def plain(outs: list[Any]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in out.outputs] for out in outs]


def knowing(llm: LLM, outs: list[Any], seed: int = 0) -> LLM:
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    runner.drafter = Knowing([out.prompt_token_ids + c.token_ids for out in outs for c in out.outputs], seed)
    return llm


def near(got: list[Any], wanted: list[Any]) -> None:
    """All but logprobs exactly: another number of rows may round them otherwise."""
    for g, w in zip(plain(got), plain(wanted), strict=True):
        assert [c[:4] for c in g] == [c[:4] for c in w]
        for (*_, some), (*_, others) in zip(g, w):
            assert (some is None) == (others is None)
            for a, b in zip(some or (), others or (), strict=True):
                assert list(a) == list(b)
                assert [x.rank for x in a.values()] == [x.rank for x in b.values()]
                assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode_steps": 4},
        {"attn_backend": "sdpa"},
        {"num_kvcache_blocks": 9, "kvcache_block_size": 16},  # sequences are preempted
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},  # prompts in chunks
        {"max_model_len": 40},
        {"quantization": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_the_output_is_that_without_drafts(make_llm: MakeLLM, llama: TinyModel, options: dict[str, Any]) -> None:
    prompts = [llama.prompts[i % len(llama.prompts)][:20] for i in range(len(REQUESTS))]
    params = [params_of(fields) for fields in REQUESTS.values()]
    wanted = answers(make_llm(**options), prompts, params)
    llm = knowing(make_llm(**options, **NGRAM), wanted)
    got = answers(llm, prompts, params)
    near(got, wanted)
    stats = llm.engine.stats
    assert 0 < stats.num_accepted < stats.num_drafted
    assert stats.num_drafted / 4 <= stats.num_drafts < stats.num_drafted
    assert sum(out.metrics.num_accepted for out in got) == stats.num_accepted
    assert llm.engine.scheduler.blocks.num_used == 0
    near(answers(llm, prompts, params), wanted)  # what is in the prefix cache now is right
    if "num_kvcache_blocks" in options:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("model", ["qwen3", "mixtral", "deepseek-v3"])
def test_every_family(tiny: Callable[[str], TinyModel], make_llm: MakeLLM, model: str) -> None:
    found = tiny(model)
    params = [params_of(REQUESTS[name]) for name in ("greedy", "seeded", "penalties")]
    prompts = found.prompts[:3]
    wanted = answers(make_llm(found.path), prompts, params)
    llm = knowing(make_llm(found.path, **NGRAM), wanted)
    near(answers(llm, prompts, params), wanted)
    assert llm.engine.stats.num_accepted > 0


def test_stops_between_guesses(make_llm: MakeLLM, llama: TinyModel) -> None:
    """A stop string or token in the middle of accepted guesses ends the answer there, as it does token by token."""
    prompt = llama.prompts[1]
    [free] = answers(make_llm(), [prompt], [params_of({"temperature": 1.0, "seed": 7, "max_tokens": 40})])
    text, token = free.outputs[0].text, free.outputs[0].token_ids[17]
    stops: list[dict[str, Any]] = [
        {"stop": [text[15:18]]},
        {"stop_token_ids": [token]},
        {"min_tokens": 5, "stop": [text[2:4]]},
    ]
    stops = [{"temperature": 1.0, "seed": 7, "max_tokens": 40, **stop} for stop in stops]
    wanted = answers(make_llm(), [prompt] * 3, [params_of(fields) for fields in stops])
    assert any(out.outputs[0].finish_reason == "stop" for out in wanted)
    llm = knowing(make_llm(**NGRAM), [free])
    near(answers(llm, [prompt] * 3, [params_of(fields) for fields in stops]), wanted)


def test_a_grammar_masks_guesses(make_llm: MakeLLM, llama: TinyModel) -> None:
    """What it forbids is not even fed; each guess's own row is masked by the guesses before it."""
    pytest.importorskip("llguidance")
    fields = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "max_tokens": 40}
    grammar = [
        {"regex": "(ab|ba){4,9}"},
        {"choice": ["abba", "baab"]},
        {"json": {"type": "array", "items": {"type": "integer"}}},
    ]
    params = [params_of({**fields, "structured_outputs": one, "n": 2}) for one in grammar]
    prompts = [llama.prompts[0]] * 3
    wanted = answers(make_llm(), prompts, params)
    llm = knowing(make_llm(**NGRAM), wanted)
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    propose, add_draft, num_proposed, num_fed = runner.drafter.propose, runner.batch.add_draft, 0, 0

    def counted(token_ids: np.ndarray, most: int) -> np.ndarray:
        nonlocal num_proposed
        num_proposed += len(found := propose(token_ids, most))
        return found

    def checked(seq_id: int, draft: np.ndarray) -> Any:
        nonlocal num_fed
        grammar = runner.batch.arrival(seq_id).params.structured_outputs
        known = runner.batch.sampling_row(runner.batch._rows[seq_id]).output_ids.copy()
        assert len(draft) == 0 or grammar.num_allowed(known, draft) == len(draft), "a forbidden guess is fed"
        num_fed += len(draft)
        return add_draft(seq_id, draft)

    runner.drafter.propose, runner.batch.add_draft = counted, checked
    near(answers(llm, prompts, params), wanted)
    assert num_proposed > num_fed >= llm.engine.stats.num_accepted > 0


def test_several_ranks_guess_alike(make_llm: MakeLLM, tiny: Callable[[str], TinyModel]) -> None:
    """The real drafter, which looks for a single token in answers of four different ones: some guesses are right."""
    model = tiny("qwen3")
    params = [params_of({"seed": seed, "allowed_token_ids": [20, 21, 22, 23], "max_tokens": 40}) for seed in range(3)]
    wanted = answers(make_llm(model.path), model.prompts[:3], params)
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    llm = make_llm(model.path, tensor_parallel_size=2, speculative_config=lookup)
    always(llm, 3, 2, 0)
    near(answers(llm, model.prompts[:3], params), wanted)
    assert 0 < llm.engine.stats.num_accepted < llm.engine.stats.num_drafted


def test_completions_that_are_not_abreast_keep_their_grammar(make_llm: MakeLLM, llama: TinyModel) -> None:
    """Greedy completions of one prompt write the same, one some tokens behind the other."""
    pytest.importorskip("llguidance")
    form = {"temperature": 0, "ignore_eos": False, "structured_outputs": {"regex": "(ab|ba){6,9}"}}
    params = [params_of({**form, "n": 2, "max_tokens": 60})]
    wanted = answers(make_llm(), [llama.prompts[0]], params)
    for seed in range(8):
        llm = knowing(make_llm(**NGRAM), wanted, seed)
        near(answers(llm, [llama.prompts[0]], params), wanted)


def test_guesses_behind_a_stop_are_not_counted(make_llm: MakeLLM, llama: TinyModel) -> None:
    prompt = llama.prompts[1]
    free = {"temperature": 1.0, "seed": 7, "max_tokens": 60}
    wanted = answers(make_llm(), [prompt], [params_of(free)])
    stop = wanted[0].outputs[0].token_ids[5]
    llm = knowing(make_llm(decode_steps=16, **NGRAM), wanted)
    [out] = answers(llm, [prompt], [params_of({**free, "stop_token_ids": [stop]})])
    assert out.metrics.num_accepted <= len(out.outputs[0].token_ids) <= 6
    assert llm.engine.stats.num_accepted == out.metrics.num_accepted


def test_an_abort_and_a_failure_leave_nothing(make_llm: MakeLLM, llama: TinyModel) -> None:
    prompt, params = llama.prompts[2], params_of(REQUESTS["seeded"])
    [wanted] = answers(make_llm(), [prompt], [params])
    llm = knowing(make_llm(**NGRAM), [wanted])
    engine = llm.engine
    engine.add_request("gone", prompt, params)
    for _ in range(3):
        engine.step()
    assert engine.stats.num_drafted
    engine.abort_request("gone")

    class Broken(TokenDrafter):
        lengths = (4, 2, 0)

        def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
            raise RuntimeError("no guess")

    runner = engine.executor.runner  # type: ignore[attr-defined]
    drafter, runner.drafter = runner.drafter, Broken()
    [out] = answers(llm, [prompt], [params])
    assert "no guess" in out.error
    runner.drafter = drafter
    near(answers(llm, [prompt], [params]), [wanted])
    assert engine.scheduler.blocks.num_used == 0


def test_eos_inside_guesses(make_llm: MakeLLM, llama: TinyModel) -> None:
    prompt = llama.prompts[0]
    wanted = [*llama.tokens[0][:5], EOS]
    bias = {"temperature": 0, "ignore_eos": False, "max_tokens": 30}
    engines = make_llm(), make_llm(**NGRAM)
    outs = [answers(llm, [prompt], [params_of(bias)])[0].outputs[0].token_ids for llm in engines]
    assert outs[0] == outs[1]
    llm = engines[1]
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    runner.drafter = Knowing([prompt + wanted + [5, 6]], 1)
    assert answers(llm, [prompt], [params_of(bias)])[0].outputs[0].token_ids == outs[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "eagle"}, "one of ngram, draft_model, mtp"),
        ({"method": "mtp"}, "has no layer for multi-token prediction"),
        ({"method": "draft_model"}, "give both or neither"),
        ({"method": "ngram", "model": "x"}, "give both or neither"),
        ({"method": "draft_model", "model": ""}, "give a folder"),
        ({"num_speculative_tokens": 3}, "has no method"),
        ({"method": None}, "speculative_config={'method': None}: has no method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "in [1, 16]"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "lower the former"),
        ({"method": "ngram", "depth": 2}, "'depth' is unknown; possible: method"),
        ("ngram", "must be a dictionary"),
        (
            {"method": "ngram", "draft_tensor_parallel_size": 2},
            "speculative_config: draft_tensor_parallel_size=2: only 1",
        ),
        ({"method": "ngram", "disable_by_batch_size": 4}, "whether guesses pay is measured"),
        ({"method": "draft_model", "model": "ngram"}, "speculative_model='ngram'"),
        ({"method": "mtp", "model": "ngram"}, "give both or neither"),
        ({"method": ["ngram"]}, "one of ngram, draft_model, mtp"),
    ],
)
def test_bad_options_are_refused(make_llm: MakeLLM, given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(speculative_config=given)
    assert said in str(caught.value)

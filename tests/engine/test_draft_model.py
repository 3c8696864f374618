"""A smaller model guesses: the answer is that without guesses, and what the draft model has not read it reads.

Tiny random models agree about nothing, so the draft model is often the model itself: then every guess must be right,
and one that is not shows that K or V of the draft model were missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from tests.drafting import always
from tests.engine.test_speculation import REQUESTS, answers, near, params_of
from tests.tiny_models import TinyModel

MakeLLM = Callable[..., LLM]


def drafted_by(model: TinyModel, most: int = 3) -> dict[str, Any]:
    return {"speculative_config": {"model": str(model.path), "num_speculative_tokens": most}}


def counts(llm: LLM) -> tuple[int, int]:
    return llm.engine.stats.num_drafted, llm.engine.stats.num_accepted


def right(llm: LLM) -> float:
    drafted, accepted = counts(llm)
    assert drafted > 0
    return accepted / drafted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode_steps": 3},
        {"attn_backend": "sdpa"},
        {"num_kvcache_blocks": 9, "kvcache_block_size": 16},  # sequences are preempted
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},  # prompts in chunks
        {"max_model_len": 40},
        {"quantization": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_the_output_is_that_without_drafts(
    make_llm: MakeLLM, llama: TinyModel, tiny: Callable[[str], TinyModel], options: dict[str, Any]
) -> None:
    prompts = [llama.prompts[i % len(llama.prompts)][:20] for i in range(len(REQUESTS))]
    params = [params_of(fields) for fields in REQUESTS.values()]
    wanted = answers(make_llm(**options), prompts, params)
    for draft in (llama, tiny("qwen3")):
        llm = make_llm(**options, **drafted_by(draft))
        always(llm, 3, 1, 0, 2)
        near(answers(llm, prompts, params), wanted)
        near(answers(llm, prompts, params), wanted)  # with what is in the prefix cache now
        assert llm.engine.scheduler.blocks.num_used == 0
        if draft is llama:
            # Not all: a guess is drawn by a product of other rows, and its last digit may tip a tie.
            assert right(llm) > 0.95
        else:
            assert right(llm) < 0.5


def test_a_guess_obeys_what_the_token_obeys(make_llm: MakeLLM, llama: TinyModel) -> None:
    """Penalties, filters and grammars see the guesses before."""
    pytest.importorskip("llguidance")
    form = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "max_tokens": 30}
    params = [params_of(REQUESTS[name]) for name in ("penalties", "filtered", "bias", "bad words")]
    params.append(params_of({**form, "structured_outputs": {"regex": "(ab|ba){4,9}"}, "n": 2}))
    prompts = [llama.prompts[i % 3] for i in range(len(params))]
    wanted = answers(make_llm(), prompts, params)
    llm = make_llm(**drafted_by(llama))
    always(llm, 3)
    near(answers(llm, prompts, params), wanted)
    assert right(llm) > 0.95


def test_prompts_that_it_has_not_read(make_llm: MakeLLM, llama: TinyModel) -> None:
    """A request that ends with its first token leaves blocks in the prefix cache that the draft model has never read;
    tokens of plans without guesses are such, too."""
    prompt = (llama.prompts[0] * 20)[:70]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [wanted] = answers(make_llm(kvcache_block_size=16), [prompt], [params])
    llm = make_llm(kvcache_block_size=16, **drafted_by(llama))
    always(llm, 3)
    answers(llm, [prompt], [SamplingParams(temperature=0, max_tokens=1)])
    assert counts(llm) == (0, 0)
    near(answers(llm, [prompt], [params]), [wanted])
    drafted, accepted = counts(llm)
    assert accepted == drafted > 0
    always(llm, 0)  # the whole answer without guesses, then a longer prompt that begins with it
    longer = prompt + wanted.outputs[0].token_ids + [7]
    llm.engine.reset_prefix_cache()
    near(answers(llm, [prompt], [params]), [wanted])
    always(llm, 3)
    [again] = answers(make_llm(kvcache_block_size=16), [longer], [params])
    near(answers(llm, [longer], [params]), [again])
    assert counts(llm)[0] - drafted == counts(llm)[1] - accepted > 0


def test_several_ranks_guess_alike(make_llm: MakeLLM, tiny: Callable[[str], TinyModel], llama: TinyModel) -> None:
    model = tiny("qwen3")
    params = [params_of(REQUESTS[name]) for name in ("greedy", "seeded", "penalties")]
    wanted = answers(make_llm(model.path), model.prompts[:3], params)
    llm = make_llm(model.path, tensor_parallel_size=2, **drafted_by(model))
    always(llm, 3)
    near(answers(llm, model.prompts[:3], params), wanted)
    assert right(llm) > 0.9
    with pytest.raises(ConfigError, match=r"speculative_model=.*num_attention_heads=9 does not divide"):
        make_llm(model.path, tensor_parallel_size=2, **drafted_by(llama))


def test_a_block_holds_both(make_llm: MakeLLM, llama: TinyModel) -> None:
    alone, both = (make_llm(num_kvcache_blocks=12, **more) for more in ({}, drafted_by(llama)))
    facts = both.engine.describe()
    assert facts["runs_on"]["kv_bytes"] == 2 * alone.engine.describe()["runs_on"]["kv_bytes"]
    assert facts["speculative_model"] == str(llama.path)
    assert facts["num_speculative_tokens"] == 3


@pytest.mark.parametrize(
    "options",
    [{"expert_placement": "offload"}, {"tensor_parallel_size": 2, "expert_parallel_size": 2}],
    ids=["offloaded", "spread"],
)
def test_a_mixture_has_a_dense_draft_model(
    make_llm: MakeLLM, tiny: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Options of experts are not those of the draft model."""
    model = tiny("mixtral")
    params = [params_of(REQUESTS[name]) for name in ("greedy", "seeded")]
    wanted = answers(make_llm(model.path, **options), model.prompts[:2], params)
    llm = make_llm(model.path, **options, **drafted_by(tiny("qwen3")))
    always(llm, 3)
    near(answers(llm, model.prompts[:2], params), wanted)
    assert counts(llm)[0] > 0
    assert "has no effect" not in caplog.text


def test_models_that_cannot_guess_are_refused(make_llm: MakeLLM, tiny: Callable[[str], TinyModel]) -> None:
    with pytest.raises(ConfigError, match=r"speculative_model='/nowhere': .*no such file"):
        make_llm(speculative_config={"model": "/nowhere"})
    with pytest.raises(ConfigError, match="mixture of experts"):
        make_llm(**drafted_by(tiny("mixtral")))
    with pytest.raises(ConfigError, match=r"has 49152 tokens, .* a smaller model of the same family"):
        make_llm(speculative_config={"method": "draft_model", "model": "smollm2"})

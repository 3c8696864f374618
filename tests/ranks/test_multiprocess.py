"""Ranks in processes of their own: the tokens of one rank; a clear error where one cannot start or a size does not
divide; nothing listens where other machines could reach it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.errors import EngineDeadError
from nanovllm.ranks import multiprocess
from nanovllm.ranks.local import LocalExecutor
from nanovllm.ranks.multiprocess import MultiprocessExecutor
from tests.ranks.processes import children, listening
from tests.tiny_models import VOCAB, TinyModel, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, top_p=0.9)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((3, 17, 33, 40))]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("name", "size"), [("llama-mqa-bias", 4), ("mixtral", 2), ("deepseek-v3", 2)])
def test_tokens_of_several_ranks_are_those_of_one(
    make_llm: Callable[..., LLM], tiny: Callable[[str], TinyModel], name: str, size: int
) -> None:
    path, before = tiny(name).path, children()
    alone = make_llm(path)
    expected = tokens(alone, GREEDY), tokens(alone, SEEDED)
    several = make_llm(path, tensor_parallel_size=size)
    assert isinstance(several.engine.executor, MultiprocessExecutor)
    assert (tokens(several, GREEDY), tokens(several, SEEDED)) == expected
    assert len(children() - before) == size - 1
    several.close()
    assert children() <= before


def test_parameters_of_numpy_all_logprobs_and_a_reset_cache_on_two_ranks(
    make_llm: Callable[..., LLM], qwen: Path
) -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        seed=np.int64(3),
        max_tokens=np.int32(4),
        logprobs=-1,
        ignore_eos=True,
        stop_token_ids=np.array([5]),
        logit_bias={np.int64(7): np.float32(1.5)},
    )
    for llm in (make_llm(qwen), make_llm(qwen, tensor_parallel_size=2)):
        prompt = {"prompt_token_ids": np.arange(10, 50)}
        answers = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
        assert llm.reset_prefix_cache()
        answers += llm.generate(prompt, params, use_tqdm=False)
        assert [answer.num_cached_tokens for answer in answers] == [0, 32, 0]
        assert all(len(position) == VOCAB for answer in answers for position in answer["logprobs"])


def test_ranks_listen_on_the_loopback_interface_only(make_llm: Callable[..., LLM], qwen: Path) -> None:
    """One rank listens nowhere; of several, the store and gloo do, and no other machine can reach them."""
    before = listening(os.getpid())
    assert isinstance(make_llm(qwen).engine.executor, LocalExecutor)
    assert listening(os.getpid()) <= before
    running = children()
    make_llm(qwen, tensor_parallel_size=2)
    (worker,) = children() - running
    found = (listening(os.getpid()) - before) | listening(worker)
    assert found == {"0100007F"}


def test_two_engines_of_several_ranks_at_once(make_llm: Callable[..., LLM], qwen: Path) -> None:
    """No port and no name of shared memory is fixed."""
    first, second = (make_llm(qwen, tensor_parallel_size=2, seed=seed) for seed in (1, 2))
    assert tokens(first, GREEDY) == tokens(second, GREEDY)
    first.close()
    assert tokens(second, SEEDED) == tokens(make_llm(qwen), SEEDED)


def test_a_rank_that_cannot_start_is_named(
    make_llm: Callable[..., LLM], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = children(), multiprocess.start_worker

    def start_and_kill(rank: int) -> multiprocess.Worker:
        worker = start(rank)
        worker.process.kill()
        return worker

    monkeypatch.setattr(multiprocess, "start_worker", start_and_kill)
    with pytest.raises(EngineDeadError, match=r"rank 1: .*killed by signal 9"):
        make_llm(qwen, tensor_parallel_size=2)
    assert children() <= before


def test_sizes_that_do_not_divide_are_refused_with_those_that_would(make_llm: Callable[..., LLM], qwen: Path) -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3: .* possible: \[1, 2, 4"):
        make_llm(qwen, tensor_parallel_size=3)
    assert children() <= before, "refused before any rank is started"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distributed_executor_backend": "mpi"}, r"distributed_executor_backend='mpi': must be one of local, mp"),
        ({"distributed_executor_backend": "local", "tensor_parallel_size": 2}, r"'local' is one rank.*use 'mp', 'ray'"),
        (
            {"distributed_executor_backend": "torchrun"},
            r"tensor_parallel_size=1: this process was not started by torchrun",
        ),
    ],
)
def test_an_executor_that_cannot_be_is_refused(make_llm: Callable[..., LLM], options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_llm(**options)


def test_one_rank_under_the_multiprocess_executor(make_llm: Callable[..., LLM]) -> None:
    before = children()
    forced = make_llm(distributed_executor_backend="mp")
    assert isinstance(forced.engine.executor, MultiprocessExecutor)
    assert tokens(forced, GREEDY) == tokens(make_llm(distributed_executor_backend="local"), GREEDY)
    assert children() <= before, "one rank starts no process"


def test_a_step_that_fails_alone_is_not_the_end_of_one_rank(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(distributed_executor_backend="mp")
    expected = tokens(llm, GREEDY)

    def fail(plan: object) -> None:
        raise ValueError("one bad step")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor._inner, "launch", fail)  # type: ignore[attr-defined]
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)
    assert "one bad step" in (output.error or "")
    assert tokens(llm, GREEDY) == expected


def test_structured_output_on_two_ranks(make_llm: Callable[..., LLM], qwen: Path) -> None:
    """Every rank masks its logits itself: the texts of one rank, beside requests without a grammar."""
    words = {"choice": ["the rain", "a town"]}
    choice = SamplingParams(temperature=0.9, seed=1, max_tokens=30, structured_outputs=words)
    digits = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "[0-9]{3,5}"})
    params = [choice, digits, SEEDED, choice.clone(n=2, seed=5)]
    texts = []
    for llm in (make_llm(qwen), make_llm(qwen, tensor_parallel_size=2)):
        outputs = llm.generate(["in the", "on a", "the town", "a rain"], params, use_tqdm=False)
        texts.append([one.text for output in outputs for one in output.outputs])
    assert texts[0] == texts[1]
    assert {texts[0][0], *texts[0][3:]} <= {"the rain", "a town"}
    assert texts[0][1].isdigit()

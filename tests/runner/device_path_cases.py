"""The runner as a GPU has it, on a CPU: Triton's interpreter runs the kernels, and a graph is the function itself.

Sampling kernels, lanes, fixed uploads, padding and two plans in flight are the real ones; only the hardware is not.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.ops.opset import triton_ops
from nanovllm.outputs import RequestOutput
from nanovllm.runner import build, captured_steps
from nanovllm.runner.model_runner import ModelRunner
from tests.tiny_models import TinyModel

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 12,
    "num_kvcache_blocks": 7,
    "kvcache_block_size": 16,
    "max_model_len": 128,
    "decode_steps": 3,
}


def replayed(function: Callable[[], None], trial: bool = True) -> Callable[[], None]:
    if trial:
        function()
    return function


def on_device(llm: LLM) -> ModelRunner:
    executor = llm.engine.executor
    for layer in executor.runner.model.layers:
        layer.attention.backend = TritonBackend()
    plan = executor.blueprint
    runner = ModelRunner(
        executor.runner.model, executor.layout, executor.device, plan.limits, plan.config.max_num_seqs, on_device=True
    )
    assert runner._loop is not None
    runner._loop.capture(replayed)
    runner._captured.capture(replayed, 8)
    runner.warm_up()
    executor.runner = runner
    return runner


def tokens(output: RequestOutput) -> Any:
    return [(completion.token_ids, completion.finish_reason) for completion in output.outputs]


def logprobs(output: RequestOutput) -> list[float]:
    """Of every token that was drawn or fed, and of the others in descending order: near-ties may stand either way."""
    positions = [*(output.prompt_logprobs or ()), *(p for c in output.outputs for p in c.logprobs or ())]
    return [score.logprob for position in positions for score in (position or {}).values()]


REQUESTS = [
    ([5, 9, 2, 7, 1, 3], {"temperature": 0}),
    (list(range(20, 40)), {"temperature": 0.9, "seed": 3}),  # longer than a step
    ([5, 9, 2, 7, 1, 3, 8], {"temperature": 1.0, "top_p": 0.8, "top_k": 30, "seed": 4, "logprobs": 3}),
    ([7] * 6, {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 5}),
    ([11, 12, 13, 14], {"temperature": 0, "prompt_logprobs": 2, "logprobs": 30}),
    ([33, 34], {"temperature": 1.2, "min_p": 0.05, "seed": 6, "min_tokens": 4, "stop_token_ids": list(range(0, 90))}),
    ([40, 41, 42], {"temperature": 1.0, "seed": 7, "allowed_token_ids": [3, 50, 77], "logit_bias": {50: 3.0}}),
    ([45] * 17, {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.7, "top_p": 0.5}),
]


WITH_A_GRAMMAR = [
    ([46, 47], {"temperature": 1.0, "seed": 9, "structured_outputs": {"regex": "[0-9]{4,9}"}, "ignore_eos": False}),
    ([5, 9, 2, 7, 1, 3], {"temperature": 0}),
]


@pytest.mark.parametrize("requests", [REQUESTS, WITH_A_GRAMMAR], ids=["any", "grammar"])
def test_tokens_are_those_of_the_plain_runner(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, requests: list[tuple[list[int], dict[str, Any]]]
) -> None:
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **given}) for _, given in requests]
    path = str(tiny("llama-gqa-tied").path)
    with LLM(path, **OPTIONS) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    with LLM(path, **OPTIONS) as llm:
        runner = on_device(llm)
        device = llm.generate(prompts, params, use_tqdm=False)
    assert runner.overlap == 2
    for request, one, other in zip(requests, device, plain):
        assert tokens(one) == tokens(other), request
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3), request

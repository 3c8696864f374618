"""The runner as a GPU has it, on a CPU: Triton's interpreter runs the kernels, and a graph is the function itself.

Sampling kernels, lanes, fixed uploads, padding and two plans in flight are the real ones; only the hardware is not.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from nanovllm import LLM, SamplingParams
from nanovllm.attention.base import LatentSpec
from nanovllm.attention.latent import TritonLatentBackend
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.attention.select import BackendChoice
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.layers.scaled_attention import scaled_layers
from nanovllm.ops import kv_cache
from nanovllm.ops.kv_cache import E4M3, expand_kv
from nanovllm.ops.opset import PLAIN, triton_ops
from nanovllm.ops.triton import decode_state, matmul
from nanovllm.outputs import RequestOutput
from nanovllm.runner import build, captured_steps
from nanovllm.runner.draft_model import DraftModel
from nanovllm.runner.model_runner import ModelRunner
from tests.mtp_models import add_mtp_layer
from tests.ops.quick_interpreter import skip_overflow_checks
from tests.tiny_models import TinyModel

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_device_path.py"
skip_overflow_checks()

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
    is_latent = isinstance(executor.runner.model.specs[0], LatentSpec)
    for layer in executor.runner.model.layers:
        layer.attention.backend = TritonLatentBackend() if is_latent else TritonBackend()
    if executor.runner.model.mtp is not None:
        executor.runner.model.mtp.layer.attention.backend = TritonLatentBackend()
    if isinstance(executor.runner.drafter, DraftModel):
        for layer in executor.runner.drafter.model.layers:
            layer.attention.backend = TritonBackend()
    plan = executor.blueprint
    places = (executor.runner.model, executor.layout, executor.device, plan.limits, plan.config.max_num_seqs)
    runner = ModelRunner(*places, on_device=True, drafter=executor.runner.drafter)
    assert runner._loop is not None
    runner._loop.capture(replayed)
    if runner._draft_loop is not None:
        runner._draft_loop.capture(replayed)
    if not is_latent:
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


@pytest.mark.parametrize(
    ("name", "requests"),
    [("llama-mqa-bias", REQUESTS), ("qwen3-bias-tied", WITH_A_GRAMMAR), ("deepseek-v3", REQUESTS[:3])],
    ids=["any", "grammar", "deepseek"],
)
def test_tokens_are_those_of_the_plain_runner(
    tiny: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    requests: list[tuple[list[int], dict[str, Any]]],
) -> None:
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **given}) for _, given in requests]
    path = str(tiny(name).path)
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


def test_nothing_is_computed_behind_the_end_of_a_text(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and stop tokens in the middle of a visit, and while the next one is planned already."""
    given: list[dict[str, Any]] = [
        {"max_tokens": 9},
        {"max_tokens": 14},
        {"max_tokens": 30, "seed": 2, "stop_token_ids": list(range(20, 28)), "min_tokens": 7},
        {"max_tokens": 30, "seed": 3, "stop_token_ids": [*range(8, 15), 40]},
        {"max_tokens": 200, "logprobs": 1, "stop_token_ids": [1]},  # until max_model_len
    ]
    params = [SamplingParams(**{"temperature": 1.0, "ignore_eos": True, "seed": 1, **one}) for one in given]
    prompts = [{"prompt_token_ids": [5 + i, 9, 2, 7]} for i in range(len(given))]
    options = {**OPTIONS, "max_num_batched_tokens": 64, "num_kvcache_blocks": 32, "max_model_len": 40}
    path = str(tiny("llama-mqa-bias").path)
    with LLM(path, **options) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    live: list[int] = []
    advance = decode_state.advance

    def counted(*args: Any) -> None:
        live.append(int((args[3] > 0).sum()))  # context lengths
        advance(*args)

    with LLM(path, **options) as llm:
        on_device(llm)
        monkeypatch.setattr(decode_state, "advance", counted)
        device = llm.generate(prompts, params, use_tqdm=False)
    assert [tokens(one) for one in device] == [tokens(one) for one in plain]
    lens = [len(one.outputs[0].token_ids) for one in device]
    assert [one.outputs[0].finish_reason for one in device] == ["length", "length", "stop", "stop", "length"]
    assert len({n % 3 for n in lens}) == 3, "all end with a visit, or all with its first step: this shows nothing"
    assert sum(live) == sum(lens) - len(lens)  # all first tokens are drawn by the step that reads the prompts


def test_products_in_parts(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that RoPE and norms complete, and gates inside of a product, as on Hopper; with biases."""
    used: list[bool] = []

    def launch_for(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> matmul.MatmulLaunch | None:
        used.append(gated)
        splits = 2 if x.shape[1] % 16 == 0 and not gated else 1
        return matmul.MatmulLaunch(16, 8, 1, splits) if x.shape[1] % 8 == 0 else None

    prompts, params = (
        [{"prompt_token_ids": ids} for ids, _ in REQUESTS[:2]],
        SamplingParams(temperature=0, max_tokens=3),
    )
    path = str(tiny("llama-mqa-bias").path)
    with LLM(path, **OPTIONS) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    monkeypatch.setattr(matmul, "launch_for", launch_for)
    with LLM(path, **OPTIONS) as llm:
        on_device(llm)
        found = llm.generate(prompts, params, use_tqdm=False)
    assert set(used) == {True, False}
    assert [tokens(output) for output in found] == [tokens(output) for output in plain]


@pytest.mark.parametrize(
    ("name", "method"),
    [*itertools.product(["qwen3", "mixtral", "deepseek-v3"], ["none", "ngram", "draft_model"]), ("deepseek-v3", "mtp")],
)
def test_kernels_may_be_compiled_without_running(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, method: str
) -> None:
    """What no kernel has written must not become an index: on a GPU that ends the process."""
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    guessing: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        guessing["model"] = str(tiny("llama").path)
    more = {} if method == "none" else {"speculative_config": guessing}
    path = tiny(name).path
    if method == "mtp":
        add_mtp_layer(path, tmp_path)
        path = tmp_path
    with LLM(str(path), **OPTIONS, **more, skip_tokenizer_init=True) as llm:
        runner = on_device(llm)
        monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: None)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # integers: the largest
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            runner.launch_every_kernel()
        finally:
            torch.use_deterministic_algorithms(False)


class TwinBackend(SdpaBackend):
    """Expands the whole cache to numbers, by the formula of ops/kv_cache.py."""

    def attend(self, q: Any, k_cache: Any, v_cache: Any, batch: Any, spec: Any, scales: Any = None) -> Any:
        keys, values = (expand_kv(cache, q.dtype) * scale for cache, scale in zip((k_cache, v_cache), scales))
        return super().attend(q, keys, values, batch, spec)


def with_8_bits(monkeypatch: pytest.MonkeyPatch, backend: Any, ops: Any) -> None:
    monkeypatch.setattr(build, "choose_kv_dtype", lambda *_: E4M3)
    monkeypatch.setattr(build, "select_backend", lambda *_: BackendChoice(backend, {backend.name: "chosen"}))
    monkeypatch.setattr(build, "choose_ops", lambda *_: ops)


def scales_of(llm: LLM) -> list[list[float]]:
    return [layer.scales.tolist() for layer in scaled_layers(llm.engine.executor.runner.model.layers)]


def test_a_cache_in_8_bits(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, captured steps, preemption and prefix hits give what the plain twin gives, which rounds and
    expands with torch. Both measure their scales on the first step, and never again. That is a prompt of one token: a
    plan of decodes, which later ones replay."""
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 7, 1, 3], list(range(20, 44)), [45] * 12)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    path = str(tiny("qwen3-bias-tied").path)
    options = {**OPTIONS, "num_kvcache_blocks": 6, "max_model_len": 80}
    monkeypatch.setattr(kv_cache, "MIN_SCALE", 1e-6)
    with LLM(path, **options) as llm:
        rounded_nothing = llm.generate(prompts, params, use_tqdm=False)
    with_8_bits(monkeypatch, TwinBackend(), PLAIN)
    with LLM(path, **options) as llm:
        assert llm.engine.describe()["runs_on"]["kv_cache_dtype"] == "float8_e4m3fn"
        assert llm.engine.describe()["runs_on"]["kv_scales"] == "first prompts"
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1), use_tqdm=False)
        expected_scales = scales_of(llm)
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    with_8_bits(monkeypatch, TritonBackend(), triton_ops())
    with LLM(path, **options) as llm:
        runner = on_device(llm)
        assert {scale for scales in scales_of(llm) for scale in scales} == {1.0}  # neither trial nor warm-up counts
        llm.engine.add_request("first", [5], params)
        llm.engine.step()
        measured = scales_of(llm)
        assert not runner.measures
        assert all(scale != 1.0 for scales in measured for scale in scales)
        llm.engine.abort_request("first")
        device = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
        again = llm.generate(prompts[1:2], params, use_tqdm=False)
        assert again[0].num_cached_tokens >= 16
        assert scales_of(llm) == measured
        assert {tensor.dtype for cache in runner._caches for tensor in cache} == {torch.uint8}
    assert torch.tensor(measured).allclose(torch.tensor(expected_scales), rtol=1e-5)
    loss = distance(plain, rounded_nothing)
    assert loss > 1e-3, "the cache is not rounded"
    assert distance(device, plain) < loss / 3, (distance(device, plain), loss)
    assert distance(again, plain[1:2]) < loss / 3


def distance(some: list[RequestOutput], others: list[RequestOutput]) -> float:
    """The mean, of logprobs of texts that are still the same."""
    found = []
    for one, other in zip(some, others):
        a, b = one.outputs[0], other.outputs[0]
        for x, y, same in zip(a.logprobs or (), b.logprobs or (), map(int.__eq__, a.token_ids, b.token_ids)):
            found += [abs(x[token].logprob - y[token].logprob) for token in x.keys() & y.keys()]
            if not same:
                break
    return sum(found) / len(found)


def test_padding_counts_for_no_expert(tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps are larger than what is in them; each size has choices of its own (moe/load.py). A text that ends
    inside a visit is not counted on, so the other engine computes one step at a time."""
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 2], [7, 1, 3, 8, 4, 6], [11] * 13)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    path = str(tiny("mixtral").path)
    with LLM(path, **{**OPTIONS, "decode_steps": 1}) as llm:
        llm.engine.executor.expert_load()
        llm.generate(prompts, params, use_tqdm=False)
        plain = llm.engine.executor.expert_load()
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    with LLM(path, **OPTIONS) as llm:
        on_device(llm)
        llm.engine.executor.expert_load()
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.executor.expert_load() == plain
    [total] = {sum(layer) for layer in plain}
    assert total == (3 + 6 + 13 + 3 * 3) * 2


@pytest.mark.parametrize("more", [{"max_tokens": 5}, {"max_tokens": 30, "stop_token_ids": [33]}])
def test_a_grammar_is_not_asked_behind_the_end(
    tiny: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
) -> None:
    """Of a text that ends in the middle of a visit, while another goes on."""
    form = {"structured_outputs": {"regex": "(9:;){6,9}"}}
    params = [SamplingParams(seed=9, **form, **more), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
    prompts: list[Any] = [{"prompt_token_ids": [46, 47]}, {"prompt_token_ids": [5, 9, 2, 7]}]
    path, options = str(tiny("llama-mqa-bias").path), {**OPTIONS, "num_kvcache_blocks": 32}
    with LLM(path, **options) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    with LLM(path, **options) as llm:
        on_device(llm)
        caplog.clear()
        assert list(map(tokens, llm.generate(prompts, params, use_tqdm=False))) == list(map(tokens, plain))
    assert not [record.message for record in caplog.records if "structured" in record.message]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_huge_min_tokens_ends_nobody(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, ignore_eos: bool
) -> None:
    """It reaches the device as an int32, with the prompt before it."""
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
    params += [SamplingParams(min_tokens=2**31 - 1, max_tokens=None, ignore_eos=ignore_eos)]
    prompts: list[Any] = [{"prompt_token_ids": [5, 9, 2, 7]}, {"prompt_token_ids": [5] * 20}]
    with LLM(str(tiny("llama-mqa-bias").path), **{**OPTIONS, "max_model_len": 32}) as llm:
        on_device(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    ends = [(len(out["token_ids"]), out.outputs[0].finish_reason) for out in outputs]
    assert ends == [(3, "length"), (12, "length")]

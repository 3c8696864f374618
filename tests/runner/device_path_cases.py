"""The runner as a GPU has it, on a CPU: Triton's interpreter runs the kernels, and a graph is the function itself.

Sampling kernels, lanes, fixed uploads, padding and two plans in flight are the real ones; only the hardware is not.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from nanovllm.ops.triton import matmul
from nanovllm.outputs import RequestOutput
from nanovllm.runner import build, captured_steps
from nanovllm.runner.draft_model import DraftModel
from nanovllm.runner.model_runner import ModelRunner, try_largest_step
from tests.engine.test_draft_model import always
from tests.mtp_models import MtpReference, add_knowing_layer, add_mtp_layer
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


FEW = [31, 32, 33]  # "9", ":", ";": a lookup of single tokens is right now and then
# The least used token is next, so the text repeats itself, and a wrong count changes it.
COUNTING: dict[str, Any] = {"temperature": 0, "frequency_penalty": 2.0, "max_tokens": 40}
GUESSED = [
    ([5, 9, 2, 7, 1, 3], {"temperature": 0, "logprobs": 2}),
    ([33, 31, 32] * 6, {"seed": 3, "allowed_token_ids": FEW, "logprobs": 25}),
    ([31, 33], {"seed": 4, "allowed_token_ids": FEW, "top_p": 0.9, "top_k": 3}),
    ([32, 32, 31], {"seed": 5, "allowed_token_ids": FEW, "repetition_penalty": 1.4, "frequency_penalty": 2.0}),
    ([40, 41], {"seed": 6, "allowed_token_ids": FEW, "min_tokens": 3, "stop_token_ids": [32], "max_tokens": 20}),
    ([41, 42], {"seed": 8, "allowed_token_ids": FEW, "logit_bias": {32: 1.5}, "min_tokens": 9}),
    ([33] * 17, {"seed": 7, "allowed_token_ids": FEW, "n": 2}),
    ([31, 32] * 3, {"allowed_token_ids": [*FEW, 40], "presence_penalty": 0.4, "logprobs": 2, **COUNTING}),
    ([31, 33, 32] * 4, {"seed": 10, "allowed_token_ids": FEW, "bad_words": ["9:", ";9;", ":::"], "max_tokens": 22}),
]
FORM: dict[str, Any] = {"ignore_eos": False, "max_tokens": 30}
GUESSED_IN_A_FORM: list[tuple[list[int], dict[str, Any]]] = [
    ([31, 32, 33] * 3, {**FORM, "seed": 1, "structured_outputs": {"regex": "[9:;]{14,18}"}, "logprobs": 2}),
    ([31, 32, 31], {**FORM, "seed": 2, "structured_outputs": {"regex": "(9:|:9|;){6,9}"}, "n": 2}),
    ([33] * 17, {**FORM, "structured_outputs": {"regex": "[9:;]{24,28}"}, **COUNTING}),
    ([33, 31, 32] * 6, {"seed": 3, "allowed_token_ids": FEW}),
    ([31, 33, 32] * 2, {"seed": 7, "allowed_token_ids": FEW, "bad_words": ["9:"], "max_tokens": 20}),
]


def watch_masks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The guesses of each step with a grammar: before and after it was asked."""
    before: list[int] = []
    after: list[int] = []
    sampler: Any = runner.sampler
    mask_guesses = sampler.mask_guesses

    def watched(entries: Any, fed: np.ndarray, exists: np.ndarray) -> np.ndarray:
        left = mask_guesses(entries, fed, exists)
        before.append(int(exists[:, 1:].sum()))
        after.append(int(left[:, 1:].sum()))
        return left

    monkeypatch.setattr(sampler, "mask_guesses", watched)
    return before, after


@pytest.mark.parametrize(
    ("name", "draft", "has_form"),
    [
        ("llama-mqa-bias", None, False),
        ("llama-mqa-bias", None, True),
        ("llama-mqa-bias", "llama-mqa-bias", False),
        ("llama-mqa-bias", "llama-mqa-bias", True),
        ("deepseek-v3", None, False),
        ("mixtral", None, True),
    ],
)
def test_guesses_change_nothing(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, name: str, draft: str | None, has_form: bool
) -> None:
    """By lookup; and by the model itself, which is right, also with penalties. With a grammar, which it does not know,
    it often is not."""
    requests = GUESSED if name == "llama-mqa-bias" else GUESSED[1:4]
    if has_form:
        requests = GUESSED_IN_A_FORM if name == "llama-mqa-bias" else GUESSED_IN_A_FORM[:2]
    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [SamplingParams(**{"max_tokens": 14, "ignore_eos": True, **given}) for _, given in requests]
    options = {**OPTIONS, "max_num_batched_tokens": 24, "num_kvcache_blocks": 9}
    path = str(tiny(name).path)
    with LLM(path, **options) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(captured_steps, "TOKEN_BUCKETS", (4, 8))
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    how: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if draft is not None:
        how = {"method": "draft_model", "model": str(tiny(draft).path)}
    with LLM(path, **options, speculative_config={"num_speculative_tokens": 3, **how}) as llm:
        runner = on_device(llm)
        always(llm, 3, 3, 0, 0, 2)  # two plans are in flight where two in turn do not guess
        fed, left = watch_masks(runner, monkeypatch)
        device = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats
    assert (sum(fed) > sum(left)) == has_form
    if all("structured_outputs" in given for _, given in requests):
        assert sum(left) >= stats.num_drafted  # what a grammar forbids is no guess
    for request, one, other in zip(requests, device, plain):
        assert tokens(one) == tokens(other), request
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3), request
    assert 0 < stats.num_accepted <= stats.num_drafted
    assert has_form or (stats.num_accepted > 0.9 * stats.num_drafted) == (draft is not None)
    assert sum(out.metrics.num_accepted for out in device) == stats.num_accepted
    if name == "llama-mqa-bias" and draft is None:
        accepted = [out.metrics.num_accepted for out in device]
        assert all(accepted) if has_form else all(accepted[3:]), accepted


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


@pytest.mark.parametrize("knows", [False, True])
def test_the_models_own_layer_guesses(
    tiny: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows: bool
) -> None:
    """Prompts in chunks beside decodes, plans with and without guesses. Each greedy guess is that of the formulas, so K
    and V of the layer and its ring of hidden states are right in captured steps, too."""
    model = tiny("deepseek-v3")
    (add_knowing_layer if knows else add_mtp_layer)(model.path, tmp_path)
    prompts = [[5, 9, 2, 7, 1, 3], list(range(20, 50)), [31], [33] * 17, [40, 41]]
    given: list[dict[str, Any]] = [{"temperature": 0}] * 3
    given += [{"temperature": 1.0, "seed": 3}, {"temperature": 0, "repetition_penalty": 1.2}]
    params = [SamplingParams(**{"max_tokens": 18 - i, "ignore_eos": True, **one}) for i, one in enumerate(given)]
    options = {**OPTIONS, "max_num_batched_tokens": 24, "num_kvcache_blocks": 14, "enable_prefix_caching": False}
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    with LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
        plain = llm.generate(inputs, params, use_tqdm=False)
    monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops())
    how = {"method": "mtp", "num_speculative_tokens": 2}
    found: list[tuple[list[int], list[int]]] = []
    with LLM(str(tmp_path), skip_tokenizer_init=True, **options, speculative_config=how) as llm:
        drafter = llm.engine.executor.runner.drafter
        guess = drafter.guess

        def watched(state: Any, history: torch.Tensor, tables: torch.Tensor, ints: torch.Tensor, num: int) -> None:
            guess(state, history, tables, ints, num)
            rows, tokens = state.rows.view(-1, 1 + num), state.tokens.view(-1, 1 + num)
            for lane, row in enumerate(state.lanes.tolist()):
                if row >= 0 and rows[lane, -1] >= 0:
                    text = history[row, : int(state.ends[lane]) + 1].tolist()
                    found.append((text, tokens[lane, 1:].tolist()))

        monkeypatch.setattr(drafter, "guess", watched)
        runner, blueprint = on_device(llm), llm.engine.executor.blueprint
        try_largest_step(runner.model, blueprint.device, blueprint.limits, 5)  # as on a card, before there is a cache
        always(llm, 2, 0, 0, 1)
        device = llm.generate(inputs, params, use_tqdm=False)
        stats = llm.engine.stats
    for one, other in zip(device, plain):
        assert tokens(one) == tokens(other)
    assert stats.num_drafted > 10
    if knows:
        assert stats.num_accepted > 0.95 * stats.num_drafted
        return
    reference = MtpReference(model, tmp_path)
    greedy = [(text, new) for text, new in found if any(text[: len(ids)] == ids for ids in prompts[:3])]
    assert {len(new) for _, new in greedy} == {1, 2}
    for text, new in greedy:
        reference.check(text, new)


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
    """Captured steps are larger than what is in them; each size has choices of its own (moe/load.py)."""
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 2], [7, 1, 3, 8, 4, 6], [11] * 13)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    path = str(tiny("mixtral").path)
    with LLM(path, **OPTIONS) as llm:
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
    assert total >= (3 + 6 + 13 + 3 * 3) * 2

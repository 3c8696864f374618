"""kv_cache_dtype: a KV cache on the CPU in 16 or 8 bits, beside everything else that touches the cache.

What a token sees is what the cache holds, however the engine came there. So two ways to the same text differ by the
rounding of float32, which now and then tips a number of the cache to its neighbour, while the cache itself is off by
half a step in every number. Measured: the mean difference of logprobs between two ways is 1/25 or less of the one to an
engine with the model's dtype. `check` allows 1/5, and another token where the two best were closer than GAP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, ConfigError, RequestOutput, SamplingParams
from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.attention.select import BackendChoice, select_backend
from nanovllm.config import EngineConfig
from nanovllm.model_config import ModelConfig
from nanovllm.ops.native import build
from nanovllm.runner.quantization import choose_kv_dtype
from tests.attention import fakes
from tests.tiny_models import TinyModel, edit_config

MakeLLM = Callable[..., LLM]
Tiny = Callable[[str], TinyModel]
needs_compiler = pytest.mark.skipif(isinstance(build.load_library(), str), reason="no C compiler")
both = pytest.mark.parametrize("kind", ["float16", "int8"])
GAP = 0.05
LATENT = "refused: computes only latent attention (DeepSeek)"
WHOLE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=5)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)


def run(llm: LLM, model: TinyModel, params: SamplingParams = WHOLE) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in model.prompts], params, use_tqdm=False)


def difference(some: list[RequestOutput], others: list[RequestOutput]) -> float:
    """The mean, of logprobs of texts that are still the same."""
    found = []
    for one, other in zip(some, others):
        a, b = one.outputs[0], other.outputs[0]
        same = [x == y for x, y in zip(a.token_ids, b.token_ids)]
        end = len(same) if all(same) else same.index(False) + 1
        pairs = list(zip((one.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:]))
        for x, y in pairs + list(zip(a.logprobs[:end], b.logprobs[:end])):
            found += [abs(x[token].logprob - y[token].logprob) for token in x.keys() & y.keys()]
    return sum(found) / len(found)


def check(got: list[RequestOutput], expected: list[RequestOutput], loss: float) -> None:
    for one, other in zip(got, expected):
        a, b = one.outputs[0], other.outputs[0]
        assert len(a.token_ids) == len(b.token_ids)
        for x, y, logprobs in zip(a.token_ids, b.token_ids, b.logprobs):
            if x != y:
                best, second = sorted((entry.logprob for entry in logprobs.values()), reverse=True)[:2]
                assert best - second < GAP
                break
    assert difference(got, expected) < loss / 5


@needs_compiler
@both
@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-window"])  # windowed: 20 tokens
def test_every_way_to_a_text_gives_the_same(make_llm: MakeLLM, tiny: Tiny, name: str, kind: str) -> None:
    model = tiny(name)
    options: dict[str, Any] = {"kvcache_block_size": 16, "max_num_batched_tokens": 512}
    whole = make_llm(model.path, kv_cache_dtype=kind, **options)
    assert whole.engine.describe()["runs_on"]["kv_cache_dtype"] == kind
    expected = run(whole, model)
    loss = difference(expected, run(make_llm(model.path, **options), model))
    assert loss > {"float16": 2e-4, "int8": 5e-3}[kind], "the cache is not rounded"
    # Chunks that the C kernel rounds, and such that PyTorch rounds (ops/native/ops.py:MAX_ROWS).
    for size in (7, 40):
        chunked = make_llm(model.path, kv_cache_dtype=kind, max_num_seqs=3, max_num_batched_tokens=size)
        check(run(chunked, model), expected, loss)
    whole.reset_prefix_cache()
    expected, again = run(whole, model, LONG), run(whole, model, LONG)
    assert sum(output.num_cached_tokens for output in again) > 200
    check(again, expected, loss)
    small = make_llm(model.path, kv_cache_dtype=kind, num_kvcache_blocks=9, kvcache_block_size=16)
    check(run(small, model, LONG), expected, loss)
    assert small.engine.scheduler.num_preemptions > 0


@needs_compiler
def test_on_two_ranks(make_llm: MakeLLM, tiny: Tiny) -> None:
    model = tiny("mistral-window")
    expected = run(make_llm(model.path, kv_cache_dtype="int8"), model)
    loss = difference(expected, run(make_llm(model.path), model))
    check(run(make_llm(model.path, kv_cache_dtype="int8", tensor_parallel_size=2), model), expected, loss)


@needs_compiler
def test_more_tokens_fit_into_the_same_memory(make_llm: MakeLLM, llama_copy: Path) -> None:
    """Heads of 64 numbers: 256 bytes, 128, or 64 and a scale of 2."""
    edit_config(llama_copy, head_dim=64)
    fit = {"num_kvcache_blocks": None, "cpu_kvcache_gb": 0.001, "max_num_seqs": 256, "load_format": "dummy"}
    counts = {}
    for kind in ("auto", "float16", "int8"):
        llm = make_llm(llama_copy, kv_cache_dtype=kind, **fit)
        layout = llm.engine.executor.layout
        caches = llm.engine.executor.runner._caches
        assert layout.num_bytes == sum(tensor.nbytes for cache in caches for tensor in cache) <= 0.001 * 2**30
        counts[kind] = layout.num_tokens
    assert counts["float16"] / counts["auto"] == pytest.approx(2, rel=0.05)  # whole blocks
    assert counts["int8"] / counts["auto"] == pytest.approx(256 / 66, rel=0.05)


# ---- where it is not possible -----------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "computes in float32, not bfloat16; leave dtype out"),
        ({"attn_backend": "sdpa"}, "attn_backend='sdpa' does not read it, 'native' does; leave attn_backend out"),
    ],
)
@both
def test_a_refusal_names_the_remedy_before_weights_are_read(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str, kind: str
) -> None:
    monkeypatch.setattr("nanovllm.runner.build.load_weights", None)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{kind}': .*{words}, or set kv_cache_dtype='auto'"):
        make_llm(kv_cache_dtype=kind, **options)


def test_refused_on_a_gpu_and_with_latents(make_llm: MakeLLM, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': latent attention .* kv_cache_dtype='auto'"):
        make_llm(tiny("deepseek-v3").path, kv_cache_dtype="int8")
    model = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **SIZES})
    config = EngineConfig(kv_cache_dtype="float16")
    words = (
        r"'float16': .* is for CPUs; set device='cpu', or on a GPU kv_cache_dtype='fp8', or set kv_cache_dtype='auto'"
    )
    with pytest.raises(ConfigError, match=words):
        choose_kv_dtype(config, model, True, torch.float16)


# ---- 8-bit floats, on a GPU (kernels: tests/ops/kv8_interpreter_cases.py, tests/runner/device_path_cases.py) ---------


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_8_bit_floats_are_for_gpus(make_llm: MakeLLM, tiny: Tiny, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}': .* for GPUs; on a CPU set kv_cache_dtype='float16' or 'int8'"):
        make_llm(kv_cache_dtype=kind)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{kind}': latent attention .* kv_cache_dtype='auto'"):
        make_llm(tiny("deepseek-v3").path, kv_cache_dtype=kind)
    model = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **SIZES})
    config = EngineConfig(kv_cache_dtype=kind)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert choose_kv_dtype(config, model, True, dtype) == torch.float8_e4m3fn
    config = EngineConfig(kv_cache_dtype=kind, attn_backend="sdpa")
    with pytest.raises(
        ConfigError, match="attn_backend='sdpa' does not read it, 'triton' does; leave attn_backend out"
    ):
        choose_kv_dtype(config, model, True, torch.float16)


def test_only_triton_reads_8_bit_floats() -> None:
    pytest.importorskip("triton")
    spec = AttentionSpec(4, 2, 64, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    choice = select_backend("auto", [spec], fakes.gpu(), 64)
    assert choice.backend.name == "triton"
    others = {reason for name, reason in choice.reasons.items() if name != "triton"} - {LATENT}
    assert others == {"refused: reads a KV cache of the model's dtype"}


def test_twice_the_tokens_fit_in_8_bit_floats(
    make_llm: MakeLLM, llama_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit: dict[str, Any] = {"num_kvcache_blocks": None, "cpu_kvcache_gb": 0.001, "load_format": "dummy"}
    fit |= {"dtype": "bfloat16", "max_num_seqs": 256}
    edit_config(llama_copy, head_dim=64)
    blocks = [make_llm(llama_copy, **fit).engine.executor.layout.num_blocks]
    monkeypatch.setattr("nanovllm.runner.build.choose_kv_dtype", lambda *_: torch.float8_e4m3fn)
    backend = BackendChoice(SdpaBackend(), {})  # which is not called
    monkeypatch.setattr("nanovllm.runner.build.select_backend", lambda *_: backend)
    monkeypatch.setattr("nanovllm.runner.memory.try_largest_step", lambda *_: None)
    executor = make_llm(llama_copy, **fit).engine.executor
    blocks.append(executor.layout.num_blocks)
    caches = [tensor for cache in executor.runner._caches for tensor in cache]
    assert executor.layout.num_bytes == sum(cache.nbytes for cache in caches) <= 0.001 * 2**30
    assert blocks[1] // 2 == blocks[0] > 10


SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def test_without_a_compiler(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_NATIVE", "0")
    build.load_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"'int8': it needs compiled C code: .*leave that out.*'auto'"):
            make_llm(kv_cache_dtype="int8")
        assert make_llm(kv_cache_dtype="auto").engine.describe()["runs_on"]["kv_cache_dtype"] == "float32"
    finally:
        build.load_library.cache_clear()

"""EngineConfig: every bad value is refused with the value, the limit and a way out; good ones pass unchanged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nanovllm import ConfigError, EngineConfig, NanoVLLMError
from nanovllm.config import Config

NAN, INF = float("nan"), float("inf")


def refusal(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert isinstance(caught.value, NanoVLLMError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_paths_are_taken_as_text() -> None:
    names = {"model": "folder", "tokenizer": "other", "generation_config": "third"}
    assert EngineConfig(**{name: Path(value) for name, value in names.items()}) == EngineConfig(**names)  # type: ignore[arg-type]
    assert EngineConfig.from_options(model=Path("folder")).model == "folder"


@pytest.mark.parametrize(
    ("name", "bad", "limit"),
    [
        ("max_num_seqs", [0, -1, 65537, 1.5, "8", True, NAN], "[1, 65536]; 256"),
        ("max_model_len", [0, 1, -5, 2**24 + 1, 3.0, True], "[2, 16777216]"),
        ("max_num_batched_tokens", [0, -1, 2**20 + 1, "many", False], "[1, 1048576]"),
        ("kvcache_block_size", [0, 15, 257, 16.0, True], "[16, 256]"),
        ("num_kvcache_blocks", [0, -1, 2**31, 1e9], "[1, 2147483647]"),
        ("max_wait_steps", [-1, 0.5, True], "[0, 2147483647]"),
        ("decode_steps", [0, 65, True], "[1, 64]"),
        ("tensor_parallel_size", [0, -2, 1025, "2"], "[1, 1024]"),
        ("seed", [2**64, -(2**63) - 1, 0.5], "18446744073709551615]"),
        ("gpu_memory_utilization", [0, -0.5, 1.01, NAN, INF, "0.9", True], "(0, 1]"),
        ("cpu_kvcache_gb", [0, -1, NAN, INF, "2"], "positive"),
        ("gpu_memory_gb", [0, -1, NAN, INF, "11", 2**20], "positive number of gigabytes below 1048576"),
        ("expert_cache_gb", [0, -1, NAN, INF, "2", 2**20], "positive number of gigabytes below 1048576"),
        ("expert_host_gb", [-1, -1e-9, NAN, INF, "2", 2**20], "number of gigabytes from 0 below 1048576"),
        ("expert_placement", ["gpu", True], "auto, resident, offload"),
        ("expert_policy", ["LFU", "fifo"], "lfu, lru, none"),
        ("expert_prefetch", [1], "True or False"),
        ("expert_cpu_misses", ["yes"], "True or False"),
        ("enable_prefix_caching", [1, "yes"], "True or False"),
        ("enforce_eager", [0], "True or False"),
        ("skip_tokenizer_init", ["no"], "True or False"),
        ("device", ["gpu", 0, ["cpu"]], "auto, cpu, cuda"),
        ("dtype", ["int8", 16], "auto, float32, float16, bfloat16"),
        ("load_format", ["pickle", True], "auto, dummy"),
        ("scheduling_policy", ["FCFS", "lifo"], "fcfs, sjf, priority"),
        ("attn_backend", ["xformers", ""], "sdpa"),
        ("model", ["", 5], "folder"),
    ],
)
def test_bad_values_are_refused_by_name_with_the_limit(name: str, bad: list[object], limit: str) -> None:
    for value in bad:
        message = refusal(**{name: value})
        assert f"{name}=" in message, message
        assert limit in message, message
        assert str(value) in message, message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_kvcache_gb", True),
        ("gpu_memory_gb", True),
        ("expert_host_gb", False),
        ("expert_cache_gb", 10**400),
        ("gpu_memory_utilization", 10**400),
    ],
)
def test_a_bool_is_no_number_and_a_huge_integer_no_crash(name: str, value: object) -> None:
    refusal(**{name: value})


@pytest.mark.parametrize(("value", "near"), [(17, 16), (24, 16), (48, 32), (100, 64), (255, 128)])
def test_block_size_must_be_a_power_of_two_and_the_nearest_below_is_offered(value: int, near: int) -> None:
    assert refusal(kvcache_block_size=value) == f"kvcache_block_size={value}: must be a power of two (try {near})"


def test_the_token_budget_covers_a_decode_of_every_sequence() -> None:
    message = refusal(max_num_seqs=64, max_num_batched_tokens=63)
    assert "63" in message
    assert "64" in message
    assert "raise" in message
    assert EngineConfig(max_num_seqs=64, max_num_batched_tokens=64).max_num_batched_tokens == 64


def test_expert_options_that_contradict() -> None:
    message = refusal(expert_placement="resident", expert_cache_gb=4)
    assert "expert_cache_gb=4" in message
    assert "leave one of the two out" in message
    message = refusal(gpu_memory_gb=11, expert_cache_gb=11.5)
    assert "expert_cache_gb=11.5 is more than gpu_memory_gb=11" in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_model_len": 2},
        {"max_model_len": 2**24},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": 1e-6},
        {"kvcache_block_size": 16},
        {"kvcache_block_size": 256},
        {"num_kvcache_blocks": 1},
        {"max_wait_steps": 0},
        {"max_wait_steps": None},
        {"decode_steps": 64},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"scheduling_policy": "sjf"},
        {"gpu_memory_gb": 11, "expert_cache_gb": 11, "expert_host_gb": 0, "expert_placement": "offload"},
        {"expert_cache_gb": 1e-6, "expert_host_gb": 2**20 - 1, "expert_policy": "none", "expert_prefetch": False},
        {"expert_placement": "resident", "expert_host_gb": 1.5, "expert_cpu_misses": True, "expert_policy": "lru"},
        {"device": "cpu", "dtype": "float32", "enforce_eager": True, "load_format": "dummy"},
    ],
)
def test_good_values_pass(options: dict[str, object]) -> None:
    config = EngineConfig.from_options(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("kv_cache_block_size", "kvcache_block_size"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_name(typo: str, near: str) -> None:
    message = refusal(**{typo: 1})
    assert repr(typo) in message
    assert f"did you mean {near!r}" in message


def test_an_option_like_nothing_known_is_answered_with_the_list() -> None:
    message = refusal(zzz=1)
    for field in dataclasses.fields(EngineConfig):
        assert field.name in message


def test_dtype_as_torch_prints_it_and_as_vllm_names_it() -> None:
    class FakeDtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert EngineConfig.from_options(dtype=FakeDtype()).dtype == "bfloat16"
    assert EngineConfig.from_options(dtype="half").dtype == "float16"
    assert EngineConfig.from_options(dtype="float").dtype == "float32"


def test_none_is_the_default_of_every_option() -> None:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    given = EngineConfig.from_options(**dict.fromkeys(names))
    assert given == EngineConfig(max_wait_steps=None)  # which means: no aging


def test_what_vllm_scripts_write_out() -> None:
    config = EngineConfig.from_options(
        trust_remote_code=False,
        block_size=32,
        enable_chunked_prefill=True,
        swap_space=0,
        quantization=None,
        revision=None,
        disable_log_stats=True,
        seed=None,
        dtype="half",
        max_logprobs=-1,
    )
    assert config == EngineConfig(kvcache_block_size=32, seed=0, dtype="float16")
    assert EngineConfig.from_options(block_size=None, disable_log_stats=False, swap_space=0.0) == EngineConfig()
    assert EngineConfig.from_options(block_size=16, kvcache_block_size=16) == EngineConfig(kvcache_block_size=16)
    assert Config is EngineConfig
    assert "give one" in refusal(block_size=16, kvcache_block_size=32)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("trust_remote_code", True, "never run"),
        ("enable_chunked_prefill", False, "max_num_batched_tokens"),
        ("swap_space", 4, "only 0 is possible"),
        ("quantization", "awq", "leave it out"),
        ("quantization", "w8a8", "int8"),
        ("kv_cache_dtype", "fp8_e5m2", "must be one of auto, float16, int8, fp8, fp8_e4m3"),
        ("kv_cache_dtype", "float64", "auto, float16, int8"),
        ("revision", "v1.0", "folder"),
        ("max_logprobs", 20, "1000"),
        ("disable_log_stats", "yes", "True or False"),
        ("block_size", 8, "[16, 256]"),
        ("pipeline_parallel_size", 2, "unknown option"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: object, word: str) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message or "unknown" in message
    assert word in message


def test_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("smollm2")  # type: ignore[misc]


def test_balancing_in_the_words_of_vllm() -> None:
    ranks = {"tensor_parallel_size": 4, "expert_parallel_size": 2, "enable_eplb": True}
    config = EngineConfig.from_options(
        **ranks, eplb_config={"window_size": 10, "step_interval": 20, "num_redundant_experts": 4}
    )
    assert (config.eplb_window_size, config.eplb_step_interval, config.num_redundant_experts) == (10, 20, 4)
    assert EngineConfig.from_options(**ranks, eplb_config={"window_size": None}).eplb_window_size == 1000
    with pytest.raises(ConfigError, match=r"eplb_config=.*'policy'.*: must be a dictionary with some of window_size"):
        EngineConfig.from_options(**ranks, eplb_config={"policy": "x"})
    with pytest.raises(ConfigError, match=r"num_redundant_experts=2 and eplb_config=.* differ: give one"):
        EngineConfig.from_options(**ranks, num_redundant_experts=2, eplb_config={"num_redundant_experts": 4})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"method": "ngram"}, {"speculative_method": "ngram"}),
        ({"model": "[ngram]"}, {"speculative_method": "ngram"}),
        ({"method": "ngram_gpu", "model": "ngram"}, {"speculative_method": "ngram"}),
        ({"method": "ngram", "draft_tensor_parallel_size": 2, "revision": "main"}, {"speculative_method": "ngram"}),
        ({"method": "ngram", "quantization": None, "enforce_eager": False}, {"speculative_method": "ngram"}),
        ({"method": "ngram", "depth": None}, {"speculative_method": "ngram"}),
        ({"model": "m"}, {"speculative_method": "draft_model", "speculative_model": "m"}),
        ({"method": "deepseek_mtp", "model": "big"}, {"speculative_method": "mtp"}),
    ],
)
def test_speculation_in_the_names_of_vllm(given: dict[str, Any], found: dict[str, Any]) -> None:
    """What scripts for vLLM often write out and this engine does anyway."""
    config = EngineConfig.from_options(model="big", tensor_parallel_size=2, speculative_config=given)
    assert config == EngineConfig(model="big", tensor_parallel_size=2, **found)


@pytest.mark.parametrize("model", [None, "m", Path("m")])
def test_the_models_own_layer_needs_no_other_model(model: Any) -> None:
    wanted = EngineConfig.from_options(model=model, speculative_method="mtp")
    for given in ({"method": "mtp"}, {"method": "mtp", "model": str(model or "smollm2")}):
        assert EngineConfig.from_options(model=model, speculative_config=given) == wanted

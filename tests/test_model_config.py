"""ModelConfig: a config file is untrusted input; a form of RoPE or window we cannot honour is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from transformers import LlamaConfig

from nanovllm.errors import ModelError
from nanovllm.model_config import ModelConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
MISTRAL = {"architectures": ["MistralForCausalLM"]}


def load(generation: dict[str, object] | None = None, **changes: object) -> ModelConfig:
    config = {**BASE, **changes}
    return ModelConfig.from_hf({k: v for k, v in config.items() if v != "absent"}, generation)


def test_defaults() -> None:
    config = load()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope.theta, config.rope.kind, config.rope.rotary_dim) == (1e4, "default", 16)
    assert config.dtype == "float32"
    assert config.sliding_window is None
    assert config.windowed_layers == (False,) * 4
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


def test_nine_query_and_three_kv_heads() -> None:
    """SmolLM2's shape."""
    config = load(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert load(head_dim=80).head_dim == 80


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, "64", True, [64]])
def test_a_size_that_is_no_sane_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=name) as caught:
        load(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", ["absent", None])
def test_a_missing_size_is_named(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"no '{name}'"):
        load(**{name: value})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "exactly one"),
        ({"architectures": ["A", "B"]}, "exactly one"),
        ({"architectures": "LlamaForCausalLM"}, "exactly one"),
        ({"architectures": [7]}, "exactly one"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"num_key_value_heads": 8}, "8 KV heads"),
        ({"num_attention_heads": 128}, "head_dim"),  # more heads than hidden dimensions
        ({"head_dim": 4096}, "head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "rotary dimension 24"),
        ({"partial_rotary_factor": 0.2}, "rotary dimension 3"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({**MISTRAL, "sliding_window": -4}, "sliding_window"),
        ({**MISTRAL, "sliding_window": "4"}, "sliding_window"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": 1}, "rope_theta=1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e25}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}}, "original"),
        ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary dimension 2"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor='all'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types"),
        ({**QWEN, "max_window_layers": "2"}, "max_window_layers"),
    ],
)
def test_untrusted_values_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        load(**changes)


# ---- RoPE: scaling that is silently ignored gives wrong text without an error ------------------------------------


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_both_forms_of_rope_say_the_same(kind: str) -> None:
    extra = {"factor": 8.0, "original_max_position_embeddings": 128}
    forms = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **extra}},
        {"rope_theta": 5e5, "rope_scaling": {"type": kind, **extra}},
        {"rope_theta": 5e5, "rope_scaling": {"type": kind, "rope_type": kind, **extra}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **extra}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": kind, **extra}},
    ]
    for form in forms:
        rope = load(**form).rope
        assert (rope.theta, rope.kind, rope.rotary_dim) == (5e5, kind, 16)
        assert rope.params["factor"] == 8.0
        assert rope.params["original_max_position_embeddings"] == 128


def test_rope_theta_alone_and_null_scaling() -> None:
    assert load(rope_theta=1e6).rope.theta == 1e6
    assert load(rope_theta=1e6, rope_scaling=None).rope.kind == "default"
    assert load(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope.theta == 7.0
    assert load(rope_theta=3.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope.theta == 7.0
    assert load(rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 0.5}).rope.rotary_dim == 8
    assert load(partial_rotary_factor=0.5).rope.rotary_dim == 8


@pytest.mark.parametrize("kind", ["longrope", "mrope", "su", "LINEAR"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_is_refused_by_name(kind: str, where: str) -> None:
    with pytest.raises(ModelError, match=f"{kind}.*llama3, yarn"):
        load(**{where: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize("factor", [None, 0, -2.0, float("nan"), "8", True])
def test_a_scaled_rope_needs_a_factor(factor: object) -> None:
    with pytest.raises(ModelError, match="factor"):
        load(rope_scaling={"rope_type": "yarn", "factor": factor})


def test_rope_per_layer_type_is_refused() -> None:
    with pytest.raises(ModelError, match="per layer type"):
        load(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}})


def test_rope_scaling_replaces_rope_parameters_as_in_transformers() -> None:
    """All of it: the theta of the one that is not read is not read either."""
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    forms: list[dict[str, Any]] = [
        {"rope_parameters": parameters, "rope_scaling": scaling},
        {"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": 5e5},
        {"rope_parameters": parameters, "rope_scaling": {**scaling, "rope_theta": 6e5}, "rope_theta": 5e5},
        {"rope_parameters": parameters, "rope_scaling": {}},
        {"rope_parameters": parameters, "rope_scaling": None, "rope_theta": 5e5},
    ]
    for form in forms:
        theirs = LlamaConfig.from_dict(copy.deepcopy(form)).rope_parameters
        ours = load(**form).rope
        assert (ours.kind, ours.theta, ours.params["factor"]) == tuple(
            theirs[name] for name in ("rope_type", "rope_theta", "factor")
        )


FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", ["absent", None])
def test_defaults_are_those_of_the_family(family: str, value: object) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    names = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
    ours = load(architectures=[f"{family}ForCausalLM"], **experts, **dict.fromkeys(names, value))
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [None, {}])
def test_no_quantization_is_no_quantization(name: str, value: object) -> None:
    load(**{name: value})


def test_rope_config_can_be_read_alone() -> None:
    assert RopeConfig.from_hf({}, head_dim=64) == RopeConfig(1e4, "default", {"rope_theta": None}, 64)


# ---- sliding window, eos, dtype --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({**MISTRAL, "sliding_window": 32}, 32, "1111"),
        ({**MISTRAL, "sliding_window": None}, None, "0000"),
        (MISTRAL, 4096, "1111"),  # transformers' default
        ({"sliding_window": 32}, None, "0000"),  # Llama has none: a stray one is ignored
        ({"sliding_window": "32"}, None, "0000"),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": False}, None, "0000"),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": "absent"}, None, "0000"),
        ({**QWEN, "sliding_window": 32, "max_window_layers": 3}, 32, "0001"),
        ({**QWEN, "sliding_window": 32, "max_window_layers": 4}, None, "0000"),
        ({**QWEN, "sliding_window": 32, "max_window_layers": 0}, 32, "1111"),
        ({**QWEN, "sliding_window": 32, "max_window_layers": None}, None, "0000"),  # transformers' default is 28
        ({**QWEN, "sliding_window": 32, "architectures": ["Qwen3ForCausalLM"]}, None, "0000"),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 4}, None, "0000"),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 2}, 32, "0101"),
    ],
)
def test_sliding_window_forms(changes: dict[str, object], window: int | None, layers: str) -> None:
    config = load(**changes)
    assert config.sliding_window == window
    assert config.windowed_layers == tuple(c == "1" for c in layers)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, {"eos_token_id": 5}, (5,)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        ([2, 2], {"eos_token_id": None}, (2,)),
        (0, None, (0,)),
        ([2, 1000, 2**70], None, (2,)),  # outside the vocabulary: cannot be sampled
    ],
)
def test_eos_comes_from_both_files(config: object, generation: dict[str, object] | None, ids: tuple[int, ...]) -> None:
    """All of them end a sequence, generation_config's first."""
    assert load(generation, eos_token_id=config).eos_token_ids == ids


@pytest.mark.parametrize("value", ["2", ["2"], 2.0, True, [2, None, {}]])
def test_eos_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"^config.json: eos_token_id=.* is no token id"):
        load(eos_token_id=value)
    with pytest.raises(ModelError, match=r"^generation_config.json: eos_token_id="):
        load({"eos_token_id": value})


def test_eos_outside_the_vocabulary_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert load(eos_token_id=[2, -1]).eos_token_ids == (2,)
    assert not caplog.records
    assert load(eos_token_id=-1).eos_token_ids == ()
    assert "eos_token_id=-1 is outside the vocabulary" in caplog.text


def test_dtype_in_old_and_new_names() -> None:
    assert load(torch_dtype="bfloat16").dtype == "bfloat16"
    assert load(dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert load(dtype="torch.bfloat16").dtype == "bfloat16"

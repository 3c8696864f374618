"""quantization_config: what is read, and that everything else is refused by its name and with what would work."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.errors import ModelError
from nanovllm.model_config import ModelConfig
from nanovllm.quantization_config import AWQ, FP8, GPTQ, PACKED, QuantizationConfig

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ_GEMM = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "actorder": None}


def compressed(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


FLOATS, INTS = compressed(FLOAT, "float-quantized"), compressed(INT, "pack-quantized")


def read(config: object, name: str = "quantization_config") -> QuantizationConfig | None:
    return QuantizationConfig.from_hf({name: config})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BLOCKS, QuantizationConfig(FP8, (128, 128))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, QuantizationConfig(FP8)),
        (AWQ_GEMM, QuantizationConfig(AWQ, group_size=128)),
        ({**AWQ_GEMM, "version": "GEMM", "group_size": -1}, QuantizationConfig(AWQ)),
        (GPTQ_4, QuantizationConfig(GPTQ, None, 128, True, True)),
        ({**GPTQ_4, "checkpoint_format": "gptq_v2", "sym": False}, QuantizationConfig(GPTQ, None, 128, False, False)),
        (
            {**GPTQ_4, "format": "GPTQ_v2", "checkpoint_format": "gptq_v2"},
            QuantizationConfig(GPTQ, None, 128, True),
        ),
        ({**GPTQ_4, "format": "gptq_v2"}, QuantizationConfig(GPTQ, None, 128, True)),
        ({**GPTQ_4, "format": "gptq", "checkpoint_format": None}, QuantizationConfig(GPTQ, None, 128, True, True)),
        (
            {**GPTQ_4, "dynamic": {"-:lm_head": {}}, "desc_act": True},
            QuantizationConfig(GPTQ, None, 128, True, True, act_order=True),
        ),
        (FLOATS, QuantizationConfig(FP8)),
        ({**FLOATS, "format": "naive-quantized", "sparsity_config": {"format": "dense"}}, QuantizationConfig(FP8)),
        (
            compressed({**FLOAT, "strategy": "block", "block_structure": [64, 32]}, "float-quantized"),
            QuantizationConfig(FP8, (64, 32)),
        ),
        (
            compressed({**FLOAT, "strategy": "block", "block_structure": "64x32"}, "float-quantized"),
            QuantizationConfig(FP8, (64, 32)),
        ),
        (INTS, QuantizationConfig(PACKED, None, 64, True)),
        (
            compressed({**INT, "strategy": "channel", "group_size": None, "symmetric": False}, "pack-quantized"),
            QuantizationConfig(PACKED),
        ),
        *[
            (compressed({**INT, "actorder": order}, "pack-quantized"), QuantizationConfig(PACKED, None, 64, True))
            for order in (False, "weight", "static", "STATIC")  # only the order in which a tool rounded
        ],
        *[
            (
                compressed({**INT, "actorder": order}, "pack-quantized"),
                QuantizationConfig(PACKED, None, 64, True, act_order=True),
            )
            for order in (True, "group", "dynamic", "Group")
        ],
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
            QuantizationConfig(None),
        ),
    ],
)
def test_what_is_read(config: dict[str, Any], expected: QuantizationConfig) -> None:
    assert read(config) == read(config, "compression_config") == expected


def test_lists_of_modules_are_compared_in_whole_words() -> None:
    found = read({**AWQ_GEMM, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "visual", "re:(a+)+$"]})
    assert found is not None
    assert found.contradicted_by("model.layers.1.mlp.gate") == "model.layers.1.mlp.gate"
    assert found.contradicted_by("model.visual.blocks.0.q") == "visual"
    for other in ("model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate", "a" * 64 + "!", "." * 10000):
        assert found.contradicted_by(other) is None
    for name in ("ignored_layers", "ignore"):
        assert read({**BLOCKS, name: ["lm_head"]}).contradicted_by("lm_head")  # type: ignore[union-attr]


REFUSED = [
    *[
        ({"quant_method": method}, f"quant_method='{method}' is not supported: this engine reads fp8, awq, gptq, comp")
        for method in ("bitsandbytes", "mxfp4", "modelopt", "fbgemm_fp8", "quark", "auto-round", "aqlm", "torchao")
    ],
    ({"bits": 4}, "quant_method=None"),
    ({"quant_method": ["awq"]}, r"quant_method=\['awq'\]"),
    ("awq", "quantization_config='awq' must be an object"),
    *[({**AWQ_GEMM, "bits": bits}, "bits=.* reads AWQ in 4 bits") for bits in (3, 8, "4", None, True)],
    *[
        ({**AWQ_GEMM, "version": it}, f"version='{it}'.* reads gemm")
        for it in ("gemv", "gemv_fast", "marlin", "exllama")
    ],
    *[({**AWQ_GEMM, "checkpoint_format": it}, f"checkpoint_format='{it}'.* reads gemm") for it in ("gemv", "llm-awq")],
    *[({**GPTQ_4, "bits": bits}, f"bits={bits} .* reads GPTQ in 4 bits; get the 16-bit") for bits in (2, 3, 8)],
    *[({**GPTQ_4, "checkpoint_format": it}, f"checkpoint_format='{it}'") for it in ("marlin", "bitblas", "exllama_v2")],
    *[({**GPTQ_4, "format": it}, f"format='{it}'.* reads gptq or gptq_v2") for it in ("marlin", "bitblas", "gemm", "")],
    *[
        (
            {**GPTQ_4, "format": one, "checkpoint_format": other},
            f"format='{one}' contradicts checkpoint_format='{other}'",
        )
        for one, other in (("gptq", "gptq_v2"), ("gptq_v2", "gptq"))
    ],
    ({**GPTQ_4, "is_marlin_format": True}, "is_marlin_format=True"),
    ({**GPTQ_4, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, r"dynamic=.*\+:\.\*mlp"),
    ({**GPTQ_4, "desc_act": "yes"}, "desc_act='yes' must be true or false"),
    *[({**GPTQ_4, "group_size": n}, "group_size=.* must be an integer") for n in (0, -2, 2**40, "128", 1.5, True)],
    ({**BLOCKS, "fmt": "e5m2"}, "fmt='e5m2'.*e4m3"),
    ({**BLOCKS, "weight_block_size": 128}, "weight_block_size=128 must be two integers"),
    ({**BLOCKS, "weight_block_size": [128, 0]}, "weight_block_size=0"),
    ({**BLOCKS, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
    ({**BLOCKS, "ignored_layers": [1]}, "ignored_layers must be a list"),
    *[
        ({**INTS, "format": form}, f"format='{form}'.*float-quantized or naive-quantized or pack-quantized")
        for form in ("int-quantized", "marlin-24", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense")
    ],
    (compressed({**INT, "num_bits": 8}, "pack-quantized"), "num_bits=8 .* in 4 bits"),
    (compressed({**INT, "strategy": "tensor"}, "pack-quantized"), "strategy='tensor'"),
    (compressed({**INT, "strategy": "tensor_group"}, "pack-quantized"), "strategy='tensor_group'"),
    (compressed({**FLOAT, "num_bits": 4}, "float-quantized"), "num_bits': 4"),
    (compressed({**FLOAT, "type": "int"}, "float-quantized"), "type='int'.* reads float"),
    (compressed({**FLOAT, "dynamic": True}, "float-quantized"), "dynamic=True"),
    *[
        (
            compressed({**FLOAT, "strategy": "block", "block_structure": it}, "float-quantized"),
            f"block_structure=.*{it}.* must be two integers",
        )
        for it in (None, "128", "128x", "axb", "1x2x3", "-1x2", "9999999999x1")
    ],
    (
        compressed({**INT, "actorder": "sorted"}, "pack-quantized"),
        "actorder='sorted'.* reads group or dynamic or weight or static; get",
    ),
    (compressed({**INT, "actorder": 1}, "pack-quantized"), "actorder=1 "),
    (
        compressed({**FLOAT, "strategy": "group", "group_size": 64, "actorder": "group"}, "float-quantized"),
        "actorder='group' .* reads 8-bit floats with inputs in the order of the model; get the 16-bit",
    ),
    ({**INTS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format='sparse-24-bitmask'.*dense"),
    ({**INTS, "transform_config": {"config_groups": {"u": {}}}}, "transform_config=.*without rotations"),
    ({**INTS, "config_groups": [INT]}, "config_groups=.* must be an object"),
    ({**INTS, "config_groups": {"a": 1}}, "config_groups: a=1 must be an object"),
    (
        {**INTS, "config_groups": {str(n): {"weights": {**INT, "group_size": n}} for n in (32, 64)}},
        r"config_groups=\['32', '64'\].* one scheme for all",
    ),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_everything_else_is_refused_by_name(config: object, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(config)
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], "quantization_config": config})


WORDS = st.sampled_from(["", "gemm", "fp8", "pack-quantized", "x"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), WORDS, st.lists(st.integers(), max_size=3))
KNOWN: list[dict[str, Any]] = [BLOCKS, AWQ_GEMM, GPTQ_4, FLOATS, INTS]
KEYS = sorted({key for config in KNOWN for key in config} | {"ignore", "sparsity_config", "dynamic", "fmt", "format"})


@given(st.sampled_from(KNOWN), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_value_is_read_or_refused(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Any other exception would be a crash."""
    with suppress(ModelError):
        read({**config, **changes})

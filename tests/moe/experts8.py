"""What tests of experts in fewer bits share: tiny models, formats of their files, and a CPU that decides as a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.scaled import Scales
from nanovllm.ops import fp8, integers
from nanovllm.ops.opset import PLAIN, Ops
from nanovllm.runner.quantization import choose_scales
from tests.tiny_models import DEEPSEEK_VARIANTS
from tests.weights.quantised_samples import Sample, awq, compressed, compressed_config, float_scheme, floats, gptq

BLOCK_FILE = floats("block", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128))
ROW_FILE = floats("channel", compressed_config("float-quantized", float_scheme("channel")))
# Sizes on both sides of a block of 128
SIZES = {"hidden_size": 144, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES, "intermediate_size": 136, "num_local_experts": 6}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES, "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK_VARIANTS["deepseek-v3"].config, "hidden_size": 144}),
}


# Integers: rows are multiples of 32, on both sides of a block of 128 inputs
SIZES4 = {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS4: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES4, "intermediate_size": 96, "num_local_experts": 6}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES4, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **DEEPSEEK_VARIANTS["deepseek-v3"].config,
            **{"hidden_size": 160, "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32},
            **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32, "head_dim": 8},
        },
    ),
}
FILES4: dict[str, Sample] = {"awq": awq(32), "gptq": gptq(32, True), "compressed": compressed(None, False)}


def as_on_a_gpu(
    config: Any, model: Any, checkpoint: Any, is_gpu: bool, low_rank: bool = False
) -> Scales | IntegerForm | None:
    return choose_scales(config, model, checkpoint, True, low_rank)


def twin_ops() -> Ops:
    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return F.linear(x, weight, bias)
        return {"fp8": fp8.scaled_linear, "integers": integers.integer_linear}[weight.kind](x, weight, bias)

    return replace(PLAIN, linear=linear)

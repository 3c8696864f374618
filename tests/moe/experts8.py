"""What tests of experts in 8-bit floats share: tiny models, formats of their files, and a CPU that decides as a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.scaled import Scales
from nanovllm.ops import fp8
from nanovllm.ops.opset import PLAIN, Ops
from nanovllm.runner.quantization import choose_scales
from tests.tiny_models import DEEPSEEK_VARIANTS
from tests.weights.quantised_samples import compressed_config, float_scheme, floats

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


def as_on_a_gpu(config: Any, model: Any, checkpoint: Any, is_gpu: bool, low_rank: bool = False) -> Scales | None:
    return choose_scales(config, model, checkpoint, True, low_rank)


def twin_ops() -> Ops:
    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return F.linear(x, weight, bias)
        return fp8.scaled_linear(x, weight, bias)

    return replace(PLAIN, linear=linear)

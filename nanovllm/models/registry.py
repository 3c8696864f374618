"""Architecture name in config.json -> the family that builds it. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.errors import ModelError
from nanovllm.model_config import ModelConfig
from nanovllm.models import deepseek, llama, mixtral, qwen2, qwen3, qwen3_moe
from nanovllm.models.transformer import Parts, Transformer

FAMILIES = (llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek)


def find_family(config: ModelConfig) -> Callable[[ModelConfig, Parts], Transformer]:
    for family in FAMILIES:
        if config.architecture in family.ARCHITECTURES:
            return family.build
    known = [name for family in FAMILIES for name in family.ARCHITECTURES]
    raise ModelError(f"architecture {config.architecture!r} is not supported; this engine has {', '.join(known)}")

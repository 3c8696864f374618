"""Sampling parameters of a request that does not set them, from the model's generation_config.json, as in vLLM.

The option generation_config names the source: "auto" is the file in the model's folder, "vllm" is no file (the
defaults of SamplingParams), anything else is a folder with another generation_config.json. do_sample is not read: a
file for greedy decoding sets temperature to 0. End tokens (ModelConfig.eos_token_ids) always come from the model's own
file.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.shards import read_json

logger = logging.getLogger("nanovllm")
FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
NEUTRAL = "neutral (temperature 1, no filter, no penalty)"


@dataclass(frozen=True)
class SamplingDefaults:
    values: dict[str, Any]  # arguments of SamplingParams
    source: str  # where they come from, or why there are none

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{listed}, from {self.source}" if listed else f"{NEUTRAL}; {self.source}"


def read_sampling_defaults(generation_config: str, model: Path) -> SamplingDefaults:
    """`model`: its folder, or a .gguf file, which has no such file. A value that no request may have is left out."""
    if generation_config == "vllm":
        return SamplingDefaults({}, "generation_config='vllm'")
    file = (model if generation_config == "auto" else Path(os.path.expanduser(generation_config))) / FILE
    if not file.is_file():
        if generation_config == "auto":
            return SamplingDefaults({}, f"the model has no {FILE}")
        raise ConfigError(
            f"generation_config={generation_config!r}: there is no {file.absolute()}; give a folder that has one, "
            f"'auto' for the model's own or 'vllm' for neutral defaults"
        )
    values: dict[str, Any] = {}
    content = read_json(file)
    for name in FIELDS:
        if content.get(name) is None:
            continue
        field = "max_tokens" if name == "max_new_tokens" else name
        try:
            values[field] = getattr(SamplingParams(**{field: content[name]}), field)
        except RequestError as error:
            reason = str(error).partition(": must be ")[2]  # before it is the value, which may have colons too
            logger.warning("%s: %s=%.40r is ignored: must be %.200s", file, name, content[name], reason)
    return SamplingDefaults(values, str(file) if values else f"{file} sets none")

"""Nano-vLLM: a small LLM inference engine. `from nanovllm import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.engine.inputs import TextPrompt, TokensPrompt
from nanovllm.errors import ConfigError, EngineDeadError, ModelError, NanoVLLMError, RequestError
from nanovllm.hardware.host import wait_briefly
from nanovllm.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncLLMEngine
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "Logprob",
    "ModelError",
    "NanoVLLMError",
    "RequestDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

wait_briefly()
_HEAVY = {  # these import torch; found on first use, so that `import nanovllm` and `nanovllm --help` are instant
    "LLM": "nanovllm.llm",
    "LLMEngine": "nanovllm.engine.llm_engine",
    "AsyncLLMEngine": "nanovllm.engine.async_engine",
}


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        from importlib import import_module

        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")

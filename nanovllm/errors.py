"""Every error a user can meet. A message names the value, the limit and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.outputs import RequestOutput


class NanoVLLMError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An option of `LLM(...)` or of the command line cannot be honoured."""


class RequestError(NanoVLLMError, ValueError):
    """One request cannot be served; the engine and all other requests go on."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt with the new tokens that were asked for, is longer than max_model_len or the cache."""


class ModelError(ConfigError):
    """A model folder, file or architecture cannot be used."""


class EngineDeadError(NanoVLLMError, RuntimeError):
    """The engine was closed or failed; create a new one.

    `finished`: what LLM.generate or LLM.chat had completed before, as {number of the prompt: its output}."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.finished: dict[int, RequestOutput] = {}

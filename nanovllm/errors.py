"""Every error a user can meet. A message names the value, the limit and the remedy."""


class NanoVLLMError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An option of `LLM(...)` or of the command line cannot be honoured."""


class RequestError(NanoVLLMError, ValueError):
    """One request cannot be served; the engine and all other requests go on."""


class ModelError(ConfigError):
    """A model folder, file or architecture cannot be used."""


class EngineDeadError(NanoVLLMError, RuntimeError):
    """The engine was closed or failed; create a new one."""

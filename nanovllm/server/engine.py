"""ServedEngine: an AsyncLLMEngine that can be asked whether it still lives."""

from __future__ import annotations

from nanovllm.engine.async_engine import AsyncLLMEngine


class ServedEngine(AsyncLLMEngine):
    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more, or None. The class of the error, not its text: strangers may read it."""
        if self._failure is not None:
            return f"the engine thread failed ({type(self._failure).__name__}); the server's log has the details"
        if self._stopping or not self._thread.is_alive():
            return "the engine was closed"
        return None

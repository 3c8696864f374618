"""What the caller gets back, in vLLM's names; `out["text"]` and `out["token_ids"]` work too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)  # a whole vocabulary of them for each token, if asked for
class Logprob:
    logprob: float
    rank: int | None = None  # 1 = the most likely token
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id -> Logprob, the sampled (or prompt) token first


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n completions of a prompt, as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # which stop string or token id ended it, or why it was cut

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds on one monotonic clock, so only differences mean something."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    # Offloaded experts, from this request's arrival to its last output, other requests' tokens included: hit_rate,
    # bytes_per_token, stall_seconds, prefetch_precision and the counts behind them. None if all experts are resident.
    experts: dict[str, Any] | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """All completions of one request. `generate` returns finished ones; streaming yields one per step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None  # set when finish_reason is "error"

    def __getitem__(self, key: str) -> Any:
        """`out["text"]`, `out["token_ids"]`: the first completion, as the small engines of this family return it."""
        if key in CompletionOutput.__dataclass_fields__:
            return getattr(self.outputs[0], key)
        if key in type(self).__dataclass_fields__:
            return getattr(self, key)
        raise KeyError(f"{key!r}: a RequestOutput has {', '.join(CompletionOutput.__dataclass_fields__)}")

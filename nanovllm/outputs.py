"""Results of requests, in vLLM's names; `out["text"]` and `out["token_ids"]` work too.

The engine reports progress as deltas: what a request gained since its last report. `LLM` and `AsyncLLMEngine.generate`
add them up to outputs, which hold everything so far:

    total = next(deltas)
    for delta in deltas:
        total.merge(delta)
    total.output()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)  # slots: logprobs=-1 makes a whole vocabulary of them for each token
class Logprob:
    logprob: float
    rank: int | None = None  # 1 = the most likely token
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id -> Logprob, the sampled (or prompt) token first


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n completions of a prompt, so far."""

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


@dataclass
class RequestMetrics:
    """Seconds on one monotonic clock, so only differences mean something. One record for each request: the engine fills
    it in as the request runs, and all outputs of the request share it."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0  # filled in at the end
    num_drafted: int = 0  # tokens that were guessed and verified (speculative_method), of all completions
    num_accepted: int = 0  # and were right
    # Offloaded experts, from this request's arrival to its last output, other requests' tokens included: hit_rate,
    # bytes_per_token, stall_seconds, prefetch_precision and the counts behind them. None if all experts are resident.
    experts: dict[str, Any] | None = None

    def scheduled(self, now: float) -> None:
        """First, or again after a preemption."""
        self.first_scheduled_time = self.first_scheduled_time or now

    def add_drafts(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

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


@dataclass(slots=True)
class CompletionDelta:
    """What one completion gained. Lists, so that the cost of merging depends on what is new, not on what was there."""

    index: int
    start: int  # how many tokens the completion had before these
    token_ids: list[int]
    texts: list[str]  # `text` in pieces; a piece may be missing (half a character) or hold several tokens
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None  # of all tokens so far, not only the new ones
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    def merge(self, newer: CompletionDelta) -> None:
        self.token_ids += newer.token_ids
        self.texts += newer.texts
        if newer.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += newer.logprobs
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason


@dataclass(slots=True)
class RequestDelta:
    """What one request gained since its last delta. The facts of its prompt come with each delta, by reference."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionDelta]  # those that moved; in the first delta of a request all of them, in order
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None  # grows until the first completion has its first token
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None

    def merge(self, newer: RequestDelta) -> RequestDelta:
        """Add the next delta of the same request, which must not be used afterwards."""
        mine = {completion.index: completion for completion in self.outputs}
        for completion in newer.outputs:
            if completion.index in mine:
                mine[completion.index].merge(completion)
            else:
                self.outputs.append(completion)
        self.finished, self.error = newer.finished, self.error or newer.error
        self.num_cached_tokens = newer.num_cached_tokens
        return self

    def output(self) -> RequestOutput:
        """Of the first delta with all later ones merged into it: the output so far. Lists that grow are copied."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [
                CompletionOutput(
                    c.index,
                    c.text,
                    c.token_ids[:],
                    c.cumulative_logprob,
                    c.logprobs and c.logprobs[:],
                    c.finish_reason,
                    c.stop_reason,
                )
                for c in self.outputs
            ],
            self.finished,
            self.prompt_logprobs and self.prompt_logprobs[:],
            self.num_cached_tokens,
            self.metrics,
            self.error,
        )


def gather(unread: dict[Any, RequestDelta], key: Any, delta: RequestDelta) -> None:
    """Merge a delta into the unread ones of its request."""
    unread[key] = unread[key].merge(delta) if key in unread else delta

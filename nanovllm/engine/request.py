"""Request: the caller's view of one request, which is n sequences, and the outputs built from their progress."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.inputs import EngineInput
from nanovllm.moe.cache import ExpertStats
from nanovllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.sequence import Sequence

logger = logging.getLogger("nanovllm")


@dataclass
class Completion:
    """One of the n sequences, with its text and logprobs as far as they have come."""

    seq: Sequence
    detokenizer: Detokenizer | None
    num_fed: int = 0  # output tokens that the detokenizer has seen
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float = 0.0

    def find_stop(self) -> str | None:
        """Feed the newest tokens; the stop string that their text completes, if any."""
        if self.detokenizer is None or not self.seq.params.stop:
            return None
        searching = self.seq.num_output > self.seq.params.min_tokens  # as in vLLM: earlier text is not searched
        match = self.detokenizer.feed(self._unfed(), look_for_stops=searching)
        return None if match is None else match.string

    def text(self) -> str:
        if self.detokenizer is None:
            return ""
        self.detokenizer.feed(self._unfed())
        if self.seq.finished:
            self.detokenizer.finish()
        return self.detokenizer.text

    def _unfed(self) -> list[int]:
        seq = self.seq
        output = seq.token_ids[seq.num_prompt + self.num_fed :]
        self.num_fed += len(output)
        # As in vLLM, the token that ended the answer by its id (eos, stop_token_ids) is text only if stop strings are.
        ended_by_id = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        return output[:-1] if ended_by_id and not seq.params.include_stop_str_in_output else output


@dataclass
class Request:
    request_id: str
    input: EngineInput
    params: SamplingParams
    tokenizer: Any | None
    final_only: bool  # report once, at the end; else after every step
    arrival_time: float
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    experts_before: ExpertStats | None = None  # what was counted when it arrived
    experts: dict[str, Any] | None = None  # what was counted since, once it has finished
    decoded: dict[int, str] = field(default_factory=dict)  # of logprobs: a whole vocabulary takes a second to decode

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first token

    @property
    def finished(self) -> bool:
        return all(completion.seq.finished for completion in self.completions)

    def note_experts(self, now: ExpertStats | None) -> None:
        """What offloading did while this request ran, for its metrics and the log."""
        if now is None or self.experts_before is None:
            return
        since = now - self.experts_before
        self.experts = since.summary()
        logger.info(
            "experts: %.0f %% found on the device, %.3f GB copied a token, %.2f s waited for copies, %.0f %% of the "
            "guesses right", 100 * since.hit_rate, since.bytes_per_token / 1e9, since.stall_seconds,
            100 * since.prefetch_precision,
        )  # fmt: skip

    def add_logprobs(self, completion: Completion, scores: list[TokenLogprobs | None]) -> None:
        for score in scores:
            if score is None:
                continue
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.append(self._position(score))
            completion.cumulative_logprob += score.logprobs[0]

    def add_prompt_logprobs(self, start: int, scores: list[TokenLogprobs]) -> None:
        """scores[i] is of the token at start + i + 1. A preempted prompt is computed anew: positions known are kept."""
        assert self.prompt_logprobs is not None
        for i, score in enumerate(scores):
            if start + i + 1 == len(self.prompt_logprobs):
                self.prompt_logprobs.append(self._position(score))

    def _position(self, score: TokenLogprobs) -> PositionLogprobs:
        return {
            token_id: Logprob(logprob, rank, self._decode(token_id))
            for token_id, logprob, rank in zip(score.token_ids, score.logprobs, score.ranks)
        }

    def _decode(self, token_id: int) -> str | None:
        if self.tokenizer is not None and token_id not in self.decoded:
            self.decoded[token_id] = self.tokenizer.decode([token_id])
        return self.decoded.get(token_id)

    def output(self) -> RequestOutput:
        first = self.completions[0].seq
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.input.text,
            prompt_token_ids=self.input.token_ids,
            outputs=[self._completion_output(i, completion) for i, completion in enumerate(self.completions)],
            finished=self.finished,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=first.num_cached_tokens,
            metrics=RequestMetrics(
                self.arrival_time, self.first_scheduled_time, self.first_token_time, self.finished_time,
                sum(completion.seq.num_preemptions for completion in self.completions), self.experts,
            ),
            error=next((str(c.seq.stop_reason) for c in self.completions if c.seq.finish_reason == "error"), None),
        )  # fmt: skip

    def _completion_output(self, index: int, completion: Completion) -> CompletionOutput:
        seq = completion.seq
        text = completion.text()
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=seq.token_ids[seq.num_prompt :],
            cumulative_logprob=completion.cumulative_logprob if completion.logprobs is not None else None,
            logprobs=None if completion.logprobs is None else list(completion.logprobs),  # ours grows on
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

"""Request: the caller's view of one request, which is n sequences, and the deltas made from their progress."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.inputs import EngineInput
from nanovllm.moe.offload.cache import ExpertStats
from nanovllm.outputs import CompletionDelta, Logprob, PositionLogprobs, RequestDelta, RequestMetrics
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.structured import Grammar
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.sequence import Sequence

logger = logging.getLogger("nanovllm")


@dataclass
class Completion:
    """One of the n sequences, and how much of it has been reported."""

    index: int
    seq: Sequence
    detokenizer: Detokenizer | None
    num_fed: int = 0  # output tokens given to the detokenizer
    num_reported: int = 0  # output tokens in deltas
    end_reported: bool = False
    text: str = ""  # not in a delta yet; so are these logprobs
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None

    def find_stop(self) -> str | None:
        """Feed the newest tokens; the stop string that their text completes, if any."""
        if self.detokenizer is None or not self.seq.params.stop:
            return None
        searching = self.seq.num_output > self.seq.params.min_tokens  # as in vLLM: earlier text is not searched
        match = self.detokenizer.feed(self._unfed(), look_for_stops=searching)
        return None if match is None else match.string

    def delta(self, is_first: bool) -> CompletionDelta | None:
        """What is new, or None if nothing is; the first delta is made in any case."""
        seq = self.seq
        token_ids = seq.token_ids[seq.num_prompt + self.num_reported :]
        if self.end_reported or not (token_ids or seq.finished or is_first):
            return None
        if self.detokenizer is not None:
            self.detokenizer.feed(self._unfed())
            if seq.finished:
                self.detokenizer.finish()
            self.text += self.detokenizer.take()
        return CompletionDelta(
            self.index,
            self.num_reported,
            token_ids,
            [self.text] if self.text else [],
            self.logprobs,
            self.cumulative_logprob,
            *self._end(),
        )

    def _end(self) -> tuple[str | None, int | str | None]:
        """(finish_reason, stop_reason). A text that ends because its grammar failed is cut off, not complete."""
        seq, grammar = self.seq, self.seq.params.structured_outputs
        if isinstance(grammar, Grammar) and (seq.finish_reason, seq.stop_reason) == ("stop", None):
            output = seq.token_ids[seq.num_prompt :]
            if not grammar.is_complete(output[:-1]):
                return "length", "structured output given up"
        return seq.finish_reason, seq.stop_reason

    def mark_reported(self, new: CompletionDelta) -> None:
        end = new.start + len(new.token_ids), new.finish_reason is not None
        if end != (self.num_reported, self.end_reported):  # else it was marked before
            (self.num_reported, self.end_reported), self.text, self.logprobs = end, "", None

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
    metrics: RequestMetrics
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    experts_before: ExpertStats | None = None  # the counters when it arrived
    is_reported: bool = False  # a delta was marked
    decoded: dict[int, str] = field(default_factory=dict)  # of logprobs: a whole vocabulary takes a second to decode

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has no probability: no token comes before it

    @property
    def finished(self) -> bool:
        for completion in self.completions:  # noqa: SIM110 (runs twice a step, and all(...) takes three times as long)
            if not completion.seq.finished:
                return False
        return True

    def note_experts(self, now: ExpertStats | None) -> None:
        """What offloading did while this request ran, for its metrics and the log."""
        if now is None or self.experts_before is None:
            return
        since = now - self.experts_before
        self.metrics.experts = since.summary()
        logger.info(
            "experts: %.0f %% found on the device, %.3f GB copied a token, %.2f s waited for copies, %.0f %% of the "
            "guesses right",
            100 * since.hit_rate,
            since.bytes_per_token / 1e9,
            since.stall_seconds,
            100 * since.prefetch_precision,
        )

    def add_logprobs(self, completion: Completion, scores: list[TokenLogprobs | None]) -> None:
        for score in scores:
            if score is None:
                continue
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.append(self._position(score))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + score.logprobs[0]

    def add_prompt_logprobs(self, start: int, scores: list[TokenLogprobs]) -> None:
        """scores[i] is of the token at start + i + 1. A preempted prompt is computed anew: earlier scores are kept."""
        assert self.prompt_logprobs is not None
        for i, score in enumerate(scores):
            if start + i + 1 == len(self.prompt_logprobs):
                self.prompt_logprobs.append(self._position(score))

    def _position(self, score: TokenLogprobs) -> PositionLogprobs:
        return {
            token_id: Logprob(logprob, rank, self._decode(token_id))
            for token_id, logprob, rank in zip(score.token_ids, score.logprobs, score.positions)
        }

    def _decode(self, token_id: int) -> str | None:
        if self.tokenizer is not None and token_id not in self.decoded:
            self.decoded[token_id] = self.tokenizer.decode([token_id])
        return self.decoded.get(token_id)

    def delta(self) -> RequestDelta:
        """What is new since the last delta that was marked as reported."""
        outputs, error = [], None
        for completion in self.completions:
            if (new := completion.delta(is_first=not self.is_reported)) is not None:
                outputs.append(new)
                if new.finish_reason == "error":
                    error = str(new.stop_reason)
        finished = self.finished
        if finished:
            self.metrics.num_preemptions = sum(completion.seq.num_preemptions for completion in self.completions)
        return RequestDelta(
            self.request_id,
            self.input.text,
            self.input.token_ids,
            outputs,
            finished,
            self.prompt_logprobs,
            self.completions[0].seq.num_cached_tokens,
            self.metrics,
            error,
        )

    def mark_reported(self, delta: RequestDelta) -> None:
        """The next step will return this delta. Not part of `delta`, so that an interrupt between the two loses
        nothing; marking twice changes nothing."""
        for new in delta.outputs:
            self.completions[new.index].mark_reported(new)
        self.is_reported = True

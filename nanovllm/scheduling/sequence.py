"""Sequence: one stream of tokens, prompt first, and the state of its computation.

This is the only record of a request's state that decides anything. The runner's InputBatch (tokens and block tables)
and the sampler's DeviceRows are copies that the plans fill; after a preemption or a failure they are filled anew.
Only the scheduler and its block manager change it (the engine ends those that an interrupt has cut off). A request for
n completions is n sequences; they share the prompt's blocks through the prefix cache, not through a special case.

Three counters are its whole state, in a sequence of `len(token_ids)` known tokens:

    num_computed   tokens whose K and V are in the cache, or will be once the steps already planned have run
    num_pending    tokens that planned steps will sample but whose ids are not known yet (0 unless steps overlap)
    num_remaining  tokens still to feed to the model: known + pending - computed. 1 = decode, more = prefill.

There is no phase flag: a preempted sequence has num_computed == 0 again, with output tokens or without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nanovllm.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class StopRule:
    """When token ids alone end a sequence. Stop strings need text: the engine's detokenizer finds those."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()  # empty when ignore_eos
    stop_token_ids: frozenset[int] = frozenset()

    def ends(self, token_id: int, num_output: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if this newest token, the num_output-th, ends the sequence."""
        if num_output >= self.min_tokens:
            if token_id in self.stop_token_ids:
                return "stop", token_id
            if token_id in self.eos_token_ids:
                return "stop", None
        return ("length", None) if num_output >= self.max_tokens else None


@dataclass(eq=False, slots=True)
class Sequence:
    seq_id: int
    token_ids: list[int]  # the prompt, then the output as it comes
    num_prompt: int
    stop: StopRule
    params: SamplingParams
    seed: int = 0
    arrival: int = 0  # how many sequences were added before it
    priority: int = 0  # smaller is served first, under the priority policy
    cache_salt: str = ""  # only sequences with the same salt share cached blocks
    reads_prefix_cache: bool = True  # False for prompt_logprobs, which need the logits of every prompt position
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    status: Status = Status.WAITING
    num_computed: int = 0
    num_pending: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    matched: list[int] = field(default_factory=list)  # cached blocks found while it waits,
    matched_at: int = -1  # valid while the cache has forgotten none since
    num_published: int = 0  # leading blocks of block_table that others may find in the prefix cache
    num_announced: int = 0  # leading blocks of block_table that were in a plan
    queued_step: int = 0  # the step at which it first began to wait
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first ran
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason, self.status = reason, stop_reason, Status.FINISHED

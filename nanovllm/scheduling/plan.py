"""StepPlan and StepResult: all that passes between the scheduler and the model runner.

Only ints (and the sampling parameters, once, when a sequence arrives), so that a plan can travel to another process
without pickle and a simulator can execute it without torch. The runner keeps the tokens and the block table of every
sequence that runs, so an entry holds only what is new: a decode entry is a few ints however long the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence begins to run (or runs again after preemption: then token_ids includes its output so far)."""

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # not to be sampled before params.min_tokens
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    max_len: int = 0  # its text ends with so many tokens at the latest; 0: not known


class PlanEntry(NamedTuple):  # made 256 times a step: a tuple takes a third of the time of a frozen dataclass
    """Feed tokens [start, start + num_new) of one sequence. There are no phases: num_new == 1 is a decode."""

    seq_id: int
    start: int
    num_new: int
    first_block: int  # block_ids go into the sequence's block table from this index on
    block_ids: tuple[int, ...]
    samples: bool  # the last fed token is the last known one, so the next is sampled


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    entries: tuple[PlanEntry, ...]
    arrivals: tuple[Arrival, ...] = ()
    # Finished, aborted or preempted since the last plan. The runner removes them before it adds the arrivals (a
    # sequence may be in both) and ignores ids that it does not have: departures of a failed plan are repeated.
    departures: tuple[int, ...] = ()
    num_steps: int = 1  # > 1 only if is_decode_only: decode so many tokens before reporting back
    num_drafts: int = 0  # > 0 only if is_decode_only: most tokens that each step may guess for each sequence

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new for entry in self.entries)

    @property
    def is_decode_only(self) -> bool:
        return all(entry.num_new == 1 and entry.samples for entry in self.entries)


@dataclass(slots=True)
class StepResult:
    """What the runner computed. token_ids[i], of the i-th entry that samples, has num_steps tokens and right guesses.

    `logprobs` (per sampling entry, per token) and `prompt_logprobs` (per seq_id, of what was fed) only pass through.
    """

    token_ids: list[list[int]]
    logprobs: list[list[Any]] | None = None
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    num_drafted: list[int] | None = None  # guessed tokens that were verified, by sampling entry
    num_drafts: list[int] | None = None  # in so many steps

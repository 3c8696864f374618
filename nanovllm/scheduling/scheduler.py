"""Scheduler: which tokens of which sequences the next step computes, and how its result changes the sequences.

    plan = scheduler.schedule()          # decide; sequences and blocks change
    result = runner.execute(plan)        # compute; no sequence or block changes
    scheduler.commit(plan, result)       # record; sequences and blocks change

One step computes at most max_num_batched_tokens tokens of at most max_num_seqs sequences. Running sequences come
first (a decode needs one token, an unfinished prompt takes a chunk of what is left), then waiting ones are admitted in
the policy's order. When a running sequence needs a block and none is free, the last in order gives up all of its
blocks and waits again; its tokens are kept and computed anew later (which is often cheap: its full blocks are usually
still in the prefix cache).

Steps may overlap: schedule() may be called again before the last plan was committed. A sampled token that is not known
yet is counted in `num_pending`; blocks given up meanwhile are held until the steps in flight have ended.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import ContextLengthError
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.drafts import Drafts
from nanovllm.scheduling.plan import Arrival, PlanEntry, StepPlan, StepResult
from nanovllm.scheduling.policy import Policy, WaitingQueue
from nanovllm.scheduling.sequence import Sequence, Status

# (sequence with its newest token appended) -> the stop string that its text now contains, if any
TextStop = Callable[[Sequence], "str | None"]
End = tuple[str, "int | str | None"]  # (finish_reason, stop_reason)


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_steps: int = 1
    num_drafts: int = 0  # most tokens that may be guessed for a sequence in one step


@dataclass
class Progress:
    """What one commit did to one sequence."""

    seq: Sequence
    token_ids: list[int]  # newly accepted
    logprobs: list[Any] | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)  # guesses that were verified, those that were right, in how many steps


@dataclass
class _NewStep:
    """The step that `schedule` is putting together."""

    budget: int  # tokens that may still be added
    chosen: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, number of tokens to feed)
    arrivals: list[Arrival] = field(default_factory=list)
    published: list[int] = field(default_factory=list)  # blocks made findable because this step will compute them


@dataclass
class _Flight:
    """A plan that `schedule` returned and that is neither committed nor failed yet."""

    plan: StepPlan
    published: list[int]  # of its making; if the step fails, they must not be findable any more


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, policy: Policy, text_stop: TextStop | None = None
    ) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "every running sequence decodes in every step"
        self.limits = limits
        self.blocks = blocks
        self.policy = policy
        self.waiting = WaitingQueue(policy)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.step = 0  # id of the newest plan
        self.drafts = Drafts(limits)
        self._text_stop = text_stop
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[_Flight] = deque()
        self._departures: list[int] = []
        self._ended: list[Sequence] = []
        self._num_added = 0

    # ---- the caller's side -------------------------------------------------------------------------------------

    def check_fits(self, num_prompt: int) -> None:
        """A prompt that can never run is refused before it waits: the queue behind it would wait for ever."""
        limit = self.limits.max_model_len
        if num_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, max_model_len={limit} leaves room for {limit - 1} and one new "
                f"token: shorten it or raise max_model_len"
            )
        capacity = self.blocks.num_blocks * self.blocks.block_size
        if num_prompt >= capacity:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens but the whole KV cache holds {capacity} (prompt and output "
                f"together): shorten it or give the cache more memory (num_kvcache_blocks)"
            )

    def add(self, seq: Sequence) -> None:
        self.check_fits(seq.num_prompt)
        seq.arrival = self._num_added
        seq.queued_step = self.step
        self._num_added += 1
        self._sequences[seq.seq_id] = seq
        self.waiting.push(seq)

    def abort(self, seq_id: int, reason: str = "abort") -> Sequence | None:
        """End a sequence now; its blocks are free at once (or when the steps in flight have ended)."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._finish(seq, reason, None)
        return seq

    def clear(self) -> None:
        """Forget every sequence and every cached block, whatever an interrupted change has left behind."""
        for flight in self._flights:
            self._departures += flight.plan.departures  # the runner may not have applied them
        self._departures += self._sequences
        self._sequences, self._flights, self._ended = {}, deque(), []
        self.waiting, self.running = WaitingQueue(self.policy), []
        self.blocks.clear()

    def take_ended(self) -> list[Sequence]:
        """Sequences that schedule() had to end (they outgrew the cache); each is reported once."""
        ended, self._ended = self._ended, []
        return ended

    def set_policy(self, policy: Policy) -> None:
        """Between two steps. Running sequences go on; both queues are sorted anew."""
        self.policy = policy
        waiting, self.waiting = self.waiting, WaitingQueue(policy)
        for seq in waiting:
            self.waiting.push(seq)
        self.running.sort(key=policy.order)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def flights(self) -> list[int]:
        """Steps that were planned and have not ended."""
        return [flight.plan.step_id for flight in self._flights]

    # ---- schedule ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        self.step += 1
        new = _NewStep(self.limits.max_num_batched_tokens)
        self._continue_running(new)
        self._admit_waiting(new)
        num_steps = self._extend_decodes(new.chosen)
        num_drafts = self.drafts.reserve(new.chosen, num_steps, self.blocks)
        entries = tuple(self._entry(seq, num_new, num_steps) for seq, num_new in new.chosen)
        plan = StepPlan(self.step, entries, tuple(new.arrivals), tuple(self._departures), num_steps, num_drafts)
        if entries:  # an empty plan is not executed: its departures are in the next one
            self._flights.append(_Flight(plan, new.published))
            self._departures = []
        return plan

    def _continue_running(self, new: _NewStep) -> None:
        """Decodes and unfinished prompts, in the order of service."""
        # All that a complete sequence may sample is in flight. Each of the other decodes keeps one token of the budget.
        ready = [seq for seq in self.running if not self._is_complete(seq)]
        num_decodes = sum(seq.num_remaining == 1 for seq in ready)
        for seq in ready:
            if seq.status is not Status.RUNNING:
                break  # preempted for one before it, and so are all that follow: the last in order is preempted first
            num_decodes -= seq.num_remaining == 1
            num_new = min(seq.num_remaining, new.budget - num_decodes)
            if num_new <= 0:
                continue
            self._make_room(seq, num_new)
            if seq.status is Status.RUNNING and self.blocks.reserve(seq, num_new):
                self._choose(new, seq, num_new)

    def _make_room(self, seq: Sequence, num_new: int) -> None:
        """Preempt running sequences, the last in order first, until there are enough free blocks for seq."""
        while (missing := self.blocks.num_missing(seq, num_new)) > self.blocks.num_free:
            if missing <= self.blocks.num_free + self.blocks.num_held:
                break  # enough will be free once the steps in flight have ended
            victim = self.running[-1]
            if victim is seq and len(self.running) == 1:
                if not seq.num_pending:  # else it ends when the tokens in flight are known: they are part of the answer
                    self._outgrew_cache(seq)
                break
            self._preempt(victim)
            if victim is seq:
                break

    def _admit_waiting(self, new: _NewStep) -> None:
        while self.waiting and new.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting.peek(self.step)
            if seq.num_pending:
                break  # preempted while a step in flight samples for it; that token must be known first
            num_blocks = self.blocks.num_blocks_for(len(seq.token_ids))
            if num_blocks > self.blocks.num_blocks:
                self._outgrew_cache(seq)
                continue
            matched = self.blocks.match(seq)
            # Blocks for the whole prompt, not just this chunk, and one more for every running sequence: admitting with
            # fewer would preempt again at once.
            needed = num_blocks - len(matched) + len(self.running)
            if needed > self.blocks.num_free_without(matched):
                break
            self.waiting.remove(seq)
            seq.status = Status.RUNNING
            insort(self.running, seq, key=self.policy.order)
            self._count_hits(seq, matched)
            self.blocks.adopt(seq, matched)
            num_new = min(seq.num_remaining, new.budget)
            reserved = self.blocks.reserve(seq, num_new)
            assert reserved
            new.arrivals.append(self._arrival(seq))
            self._choose(new, seq, num_new)

    def _choose(self, new: _NewStep, seq: Sequence, num_new: int) -> None:
        new.chosen.append((seq, num_new))
        new.budget -= num_new
        seq.num_computed += num_new
        new.published += self.blocks.publish(seq)

    def _extend_decodes(self, chosen: list[tuple[Sequence, int]]) -> int:
        """How many tokens each sequence decodes before the next commit: more than one only while none waits."""
        has_prompts = any(num_new > 1 or seq.num_remaining for seq, num_new in chosen)
        if self.limits.decode_steps == 1 or self.waiting or has_prompts or not chosen:
            return 1
        room = min(self.limits.max_model_len - len(seq.token_ids) - seq.num_pending for seq, _ in chosen)
        wanted = max(seq.stop.max_tokens - seq.num_output - seq.num_pending for seq, _ in chosen)
        num_steps = max(1, min(self.limits.decode_steps, self.drafts.most_steps(chosen), room, wanted))
        extra = num_steps - 1
        if sum(self.blocks.num_missing(seq, extra) for seq, _ in chosen) > self.blocks.num_free:
            return 1
        for seq, _ in chosen:
            reserved = self.blocks.reserve(seq, extra)
            assert reserved
            seq.num_computed += extra
        return num_steps

    def _entry(self, seq: Sequence, num_new: int, num_steps: int) -> PlanEntry:
        samples = seq.num_computed >= len(seq.token_ids) + seq.num_pending
        start = seq.num_computed - num_new - (num_steps - 1)
        if samples:
            seq.num_pending += num_steps
        first_block, seq.num_announced = seq.num_announced, len(seq.block_table)
        return PlanEntry(seq.seq_id, start, num_new, first_block, tuple(seq.block_table[first_block:]), samples)

    def _arrival(self, seq: Sequence) -> Arrival:
        tokens, longest = tuple(seq.token_ids), seq.num_prompt + seq.stop.max_tokens
        stops = tuple(sorted(seq.stop.eos_token_ids | seq.stop.stop_token_ids))
        return Arrival(seq.seq_id, tokens, seq.num_prompt, seq.params, seq.seed, stops, seq.bad_words_ids, longest)

    # ---- commit ------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Progress]:
        """Append the sampled tokens up to a stop, plan by plan in their order. `now`: this one's end, in seconds."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans are committed in order"
        self._retire()
        progress: list[Progress] = []
        for row, entry in enumerate(entry for entry in plan.entries if entry.samples):
            if (seq := self._sequences.get(entry.seq_id)) is None:
                continue  # finished or aborted while this step ran
            seq.num_pending -= plan.num_steps
            seq.num_computed += len(result.token_ids[row]) - plan.num_steps  # right guesses were fed: K and V are there
            accepted = self._append(seq, result.token_ids[row])
            assert accepted[-1:] != [-1], "the runner has ended a text that goes on"
            logprobs = result.logprobs[row][: len(accepted)] if result.logprobs else None
            progress.append(Progress(seq, accepted, logprobs, self.drafts.count(plan, result, row, len(accepted))))
            # Blocks filled by tokens that were unknown when the step was planned (none if it just ended). A step in
            # flight may still have to compute the last of them, so they are unpublished if that step fails.
            published = self.blocks.publish(seq)
            if self._flights:
                self._flights[-1].published += published
        self.drafts.record(plan, result, (part.seq for part in progress), now)
        return progress

    def fail(self, plan: StepPlan, reason: str, culprit: int | None = None) -> list[Sequence]:
        """The step raised. Its sequences end with an error, or, if one of them is known to be the cause, that one does
        and the others start over. The blocks it should have filled are unpublished. Plans made after it may have shared
        those blocks, so they fail with it."""
        failed: list[Sequence] = []
        while self._flights and self._flights[-1].plan.step_id >= plan.step_id:
            flight = self._flights.pop()
            self.blocks.unpublish(flight.published)
            self._departures += flight.plan.departures  # the runner may not have applied them
            for entry in flight.plan.entries:
                if (seq := self._sequences.get(entry.seq_id)) is None:
                    continue
                if culprit is None or culprit == seq.seq_id:
                    self._finish(seq, "error", reason)
                    failed.append(seq)
                    continue
                seq.num_pending -= flight.plan.num_steps if entry.samples else 0
                if seq.status is Status.RUNNING:
                    self._preempt(seq)
        self._retire()
        return failed

    def _retire(self) -> None:
        """Every step before the oldest in flight has ended, by its result or by its failure."""
        self.blocks.retire(self._flights[0].plan.step_id - 1 if self._flights else self.step)

    def _append(self, seq: Sequence, token_ids: list[int]) -> list[int]:
        if not (seq.stop.eos_token_ids or seq.stop.stop_token_ids or seq.params.stop):  # only its length can end it
            room = min(seq.stop.max_tokens - seq.num_output, self.limits.max_model_len - len(seq.token_ids))
            seq.token_ids += token_ids[:room]
            if len(token_ids) >= room:
                self._finish(seq, "length", None)
            return token_ids[:room]
        for count, token_id in enumerate(token_ids, 1):
            seq.token_ids.append(token_id)
            end: End | None = seq.stop.ends(token_id, seq.num_output)
            if (end is None or end[0] == "length") and self._text_stop and seq.params.stop:
                end = ("stop", text) if (text := self._text_stop(seq)) else end
            if end is None and len(seq.token_ids) >= self.limits.max_model_len:
                end = ("length", None)
            if end is not None:
                self._finish(seq, *end)
                return token_ids[:count]
        return token_ids

    # ---- how a sequence leaves ---------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: str, stop_reason: int | str | None) -> None:
        self._leave(seq)
        seq.end(reason, stop_reason)
        del self._sequences[seq.seq_id]

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._leave(seq)
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._departures.append(seq.seq_id)
            self.blocks.release(seq, after=self._flights[-1].plan.step_id if self._flights else None)
        else:
            self.waiting.remove(seq)

    def _outgrew_cache(self, seq: Sequence) -> None:
        """seq alone needs more blocks than the cache has: preempting it would repeat for ever."""
        capacity = self.blocks.num_blocks * self.blocks.block_size
        self._finish(seq, "length", f"the KV cache holds {capacity} tokens and this sequence filled it")
        self._ended.append(seq)

    def _is_complete(self, seq: Sequence) -> bool:
        sampled = seq.num_output + seq.num_pending
        return bool(seq.num_pending) and (
            sampled >= seq.stop.max_tokens or len(seq.token_ids) + seq.num_pending >= self.limits.max_model_len
        )

    def _count_hits(self, seq: Sequence, matched: list[int]) -> None:
        hits = len(matched) * self.blocks.block_size
        self.blocks.num_queries += len(seq.token_ids)
        self.blocks.num_hits += hits
        if not seq.num_preemptions:
            seq.num_cached_tokens = min(hits, seq.num_prompt)

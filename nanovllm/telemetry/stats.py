"""StepStats: counters of the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.scheduling.plan import StepPlan
from nanovllm.scheduling.scheduler import Progress, Scheduler


@dataclass
class StepStats:
    """Running totals; the difference of two snapshots is what happened between them."""

    num_steps: int = 0
    prompt_tokens: int = 0  # fed in entries of more than one token, or before the first output
    generated_tokens: int = 0
    prefill_seconds: float = 0.0  # of steps that fed any prompt tokens
    decode_seconds: float = 0.0  # of steps that only decoded
    decode_tokens: int = 0  # generated in those
    num_drafted: int = 0  # tokens that were guessed and verified (speculation)
    num_accepted: int = 0  # and were right
    num_drafts: int = 0  # steps of a sequence in which any were guessed
    peak_waste: float = 1.0  # slots of blocks in use / tokens held, when most blocks were in use
    peak_blocks: int = 0

    def observe(self, scheduler: Scheduler) -> None:
        """After a step was planned."""
        blocks = scheduler.blocks
        if blocks.num_used > self.peak_blocks:
            self.peak_blocks = blocks.num_used
            held = sum(seq.num_computed for seq in scheduler.running)
            self.peak_waste = blocks.num_used * blocks.block_size / max(held, 1)

    def count(self, plan: StepPlan, progress: list[Progress], seconds: float) -> None:
        """After a step was committed."""
        generated = sum(len(moved.token_ids) for moved in progress)
        self.num_steps += 1
        self.generated_tokens += generated
        if plan.num_drafts:
            self.num_drafted += sum(moved.drafts[0] for moved in progress)
            self.num_accepted += sum(moved.drafts[1] for moved in progress)
            self.num_drafts += sum(moved.drafts[2] for moved in progress)
        if plan.is_decode_only:
            self.decode_seconds += seconds
            self.decode_tokens += generated
        else:
            self.prefill_seconds += seconds
            self.prompt_tokens += sum(entry.num_new for entry in plan.entries if entry.num_new > 1)

"""Engine 2: the same mathematics with a paged KV cache and continuous batching.

    python docs/learn/engine2_paged.py
    python docs/learn/engine2_paged.py --max-num-seqs 1              (the cache alone, without batching)
    python docs/learn/engine2_paged.py --num-blocks 10               (too few blocks for all: requests are preempted)

Engine 1 recomputes every token for every new one. But the key and the value of a token depend only on the tokens up to
it, which do not change. So they are kept: the KV cache. Three ideas follow.

    paged cache           the cache is one pool of blocks of 16 slots; a sequence has a list of blocks, its block table
    continuous batching   every step decides anew which sequences take part, so one joins and leaves at any step
    chunked prefill       a step computes at most `budget` tokens; a prompt that is longer is fed in several steps

norm, projections, `attend` and MLP are imported from engine 1: only the source of keys and values has changed.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from engine1_plain import Model, Request, Run, attend, load, mlp, project, read_arguments, report, rms_norm

BLOCK_SIZE = 16


# ---- the bookkeeping: no tensors, only integers ----------------------------------------------------------------------


@dataclass(eq=False)
class Sequence:
    """One request. `token_ids` is the prompt and, as it grows, the answer. Keys and values of the first `num_computed`
    tokens are in the cache. There is no state "prefilling": 1 remaining token is a decode, more is a prefill."""

    number: int
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def new_tokens(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


Plan = list[tuple[Sequence, int]]  # who takes part in a step, and how many of its remaining tokens are fed


class Scheduler:
    """Running sequences are in order of arrival. All of them but the last have one remaining token: a later one is
    admitted only when the prompts before it have been fed, because they take the budget first."""

    def __init__(self, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        if not 1 <= max_num_seqs <= budget:
            raise ValueError(f"max_num_seqs={max_num_seqs}: must be at least 1 and at most budget={budget}")
        self.num_blocks, self.budget, self.max_num_seqs = num_blocks, budget, max_num_seqs
        self.free = deque(range(num_blocks))  # the pool: any free block serves any sequence
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        needed = blocks_for(seq.num_prompt + seq.max_tokens - 1)  # the last new token is never fed
        if needed > self.num_blocks:
            raise ValueError(f"request {seq.number} may need {needed} blocks: the pool has {self.num_blocks}")
        self.waiting.append(seq)

    def schedule(self) -> Plan:
        plan: Plan = []
        budget = self.budget
        for seq in list(self.running):
            num_new = min(seq.num_remaining, budget)
            if seq in self.running and self.make_room(seq, num_new):
                plan.append((seq, num_new))
                budget -= num_new
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            # Blocks for all its tokens, and one for every running sequence: with fewer, the next step would preempt it.
            if blocks_for(len(seq.token_ids)) + len(self.running) > len(self.free):
                break
            self.running.append(self.waiting.popleft())
            num_new = min(seq.num_remaining, budget)
            self.make_room(seq, num_new)
            plan.append((seq, num_new))
            budget -= num_new
        return plan

    def make_room(self, seq: Sequence, num_new: int) -> bool:
        """Extend the block table for num_new more tokens. If the pool is empty, the latest arrival is preempted: it
        gives up its blocks and waits; later its prompt and the answer so far are computed again. False if seq was."""
        while len(seq.block_table) < blocks_for(seq.num_computed + num_new):
            if self.free:
                seq.block_table.append(self.free.popleft())
                continue
            victim = self.running.pop()
            self.release(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        return True

    def release(self, seq: Sequence) -> None:
        self.free.extend(seq.block_table)
        seq.block_table, seq.num_computed = [], 0

    def commit(self, plan: Plan, sampled: list[int], end_token: int) -> None:
        """The step has run. `sampled`: one token for each entry; that of an unfinished prompt means nothing."""
        for (seq, num_new), token in zip(plan, sampled):
            seq.num_computed += num_new
            if seq.num_remaining:
                continue
            seq.token_ids.append(token)
            if token == end_token or len(seq.new_tokens) == seq.max_tokens:
                self.running.remove(seq)
                self.release(seq)  # free for others in the very next step


# ---- the computation: one step, whatever it contains -----------------------------------------------------------------


class Cache:
    """For each layer the keys and the values of all slots, [num_blocks * 16, 3, 64]. Slot = block * 16 + offset."""

    def __init__(self, model: Model, num_blocks: int) -> None:
        kv_heads = len(model.layers[0].k) // model.head_dim
        self.kv = torch.zeros(len(model.layers), 2, num_blocks * BLOCK_SIZE, kv_heads, model.head_dim)


def forward(model: Model, plan: Plan, cache: Cache) -> torch.Tensor:
    """The logits after the last fed token of each sequence, [sequences, vocabulary].

    The tokens of all sequences are rows of one matrix, so one read of the weights serves all of them: that is what
    batching gains. Norms, projections and MLP work row by row; only attention must know whose row is whose."""
    token_ids, positions, new_slots, contexts, rows = [], [], [], [], []
    for seq, num_new in plan:
        end = seq.num_computed + num_new
        every = torch.arange(end)
        slots = torch.tensor(seq.block_table)[every // BLOCK_SIZE] * BLOCK_SIZE + every % BLOCK_SIZE
        rows.append(slice(len(token_ids), len(token_ids) + num_new))
        token_ids += seq.token_ids[seq.num_computed : end]
        positions.append(every[seq.num_computed :])
        new_slots.append(slots[seq.num_computed :])
        contexts.append(slots)
    where, slots_of_rows = torch.cat(positions), torch.cat(new_slots)
    x = model.embedding[token_ids]
    for layer, (k_cache, v_cache) in zip(model.layers, cache.kv):
        q, k, v = project(model, layer, rms_norm(x, layer.attention_norm, model.eps), where)
        k_cache[slots_of_rows], v_cache[slots_of_rows] = k, v  # store first: a new token attends to itself too
        mixed = [attend(q[r], k_cache[context], v_cache[context]) for r, context in zip(rows, contexts)]  # gathers
        x = x + torch.cat(mixed) @ layer.out.T
        x = x + mlp(layer, rms_norm(x, layer.mlp_norm, model.eps))
    last = x[[r.stop - 1 for r in rows]]
    return rms_norm(last, model.norm, model.eps) @ model.embedding.T


# ---- the loop --------------------------------------------------------------------------------------------------------


def describe(plan: Plan) -> str:
    parts = []
    for seq, num_new in plan:
        fed = f"{seq.num_computed}" if num_new == 1 else f"{seq.num_computed}..{seq.num_computed + num_new - 1}"
        parts.append(f"{seq.number}[{fed}]")
    return " ".join(parts)


@torch.inference_mode()
def run(
    model: Model, requests: list[Request], scheduler: Scheduler, show: Callable[[str], None] = lambda line: None
) -> Run:
    prompts = [model.encode(request.question) for request in requests]
    started = time.perf_counter()
    cache = Cache(model, scheduler.num_blocks)
    seqs = [Sequence(i, list(p), len(p), r.max_tokens) for i, (p, r) in enumerate(zip(prompts, requests))]
    coming = deque(sorted(zip(requests, seqs), key=lambda pair: pair[0].arrives))
    step = num_passes = num_rows = 0
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][0].arrives <= step:
            scheduler.add(coming.popleft()[1])
        step += 1
        plan = scheduler.schedule()
        if not plan:  # the next request has not arrived yet
            continue
        num_tokens = sum(num_new for _, num_new in plan)
        show(f"step {step:2}, {num_tokens:2} tokens, {len(scheduler.free):3} blocks free: {describe(plan)}")
        logits = forward(model, plan, cache)
        scheduler.commit(plan, logits.argmax(dim=-1).tolist(), model.end_token)
        num_passes += 1
        num_rows += num_tokens
    return Run([seq.new_tokens for seq in seqs], num_passes, num_rows, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Engine 2: paged KV cache and continuous batching.")
    parser.add_argument("--num-blocks", type=int, default=64, help="blocks of the pool, 16 tokens each")
    parser.add_argument("--budget", type=int, default=64, help="at most so many tokens a step")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="at most so many sequences a step")
    arguments, requests = read_arguments(parser)
    model = load()
    scheduler = Scheduler(arguments.num_blocks, arguments.budget, arguments.max_num_seqs)
    print("each line: request[positions of the tokens that are fed]")
    report(run(model, requests, scheduler, print), model.tokenizer)
    print(f"{scheduler.num_preemptions} preemptions")


if __name__ == "__main__":
    main()

# Exercises 2.1 to 2.3 are in README.md. Write the answers into exercises.py, then: python docs/learn/check.py 2

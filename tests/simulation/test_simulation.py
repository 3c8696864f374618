"""Random traffic against the scheduler: every request gets its one right output, and every invariant holds throughout.

The simulator notices wrong KV reads, broken budgets, lost blocks and livelocks; `test_the_simulator_notices` breaks the
core on purpose to show that it does.
"""

from __future__ import annotations

import random

import pytest

from nanovllm.scheduling import block_manager
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import StopRule
from tests.simulation.simulator import VOCAB_SIZE, Outcome, Request, Setup, Simulation

POLICIES = [("fcfs", None), ("sjf", None), ("sjf", 5), ("sjf", 0), ("priority", None)]
# Prompts are cut from a few long texts, so that many share a prefix; two salts keep some of them apart.
TEXTS = [tuple(random.Random(i).randrange(VOCAB_SIZE) for _ in range(400)) for i in range(2)]


def prompt(text: int, shared: int, tail: int, seq_id: int) -> tuple[int, ...]:
    """`shared` tokens of a common text, then `tail` tokens of its own."""
    return TEXTS[text][:shared] + tuple((seq_id * 7 + i) % VOCAB_SIZE for i in range(tail))


def random_setup(rng: random.Random, **fixed: object) -> Setup:
    policy, max_wait_steps = rng.choice(POLICIES)
    max_num_seqs = rng.choice([1, 2, 3, 8])
    num_blocks = rng.choice([1, 2, 3, 5, 8, 13, 20, 40])
    options = {
        "num_blocks": num_blocks,
        "block_size": rng.choice([1, 2, 3, 4, 8]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 1, 5, 30, 200]),
        "max_model_len": rng.choice([12, 40, 1000]),
        "decode_steps": rng.choice([1, 1, 2, 5, 8]),
        "depth": rng.choice([0, 0, 1, 2]),
        "num_drafts": rng.choice([0, 1, 3, 4]),
        "max_draft_seqs": rng.choice([1, 2, 100]),
        "policy": policy,
        "max_wait_steps": max_wait_steps,
        "caching": rng.random() < 0.85,
        "failure_rate": rng.choice([0.0, 0.0, 0.05]),
        "seed": rng.randrange(2**32),
    }
    return Setup(**{**options, **fixed})


def random_requests(rng: random.Random, setup: Setup, num: int, aborts: bool = True) -> list[Request]:
    # Half of the runs are a crowd: short prompts, long outputs, all at once, which is what makes sequences preempted.
    crowd = rng.random() < 0.5
    requests = []
    for seq_id in range(num):
        shared = rng.choice([0, setup.block_size, rng.randrange(max(2, setup.capacity // (4 if crowd else 1)))])
        max_tokens = rng.choice([7, 20, 60] if crowd else [1, 2, 7, 20])
        stop = StopRule(
            max_tokens,
            min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
            eos_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1] if crowd else [0, 1, 3]))),
            stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), 0 if crowd else rng.choice([0, 2]))),
        )
        arrives = rng.randrange(3 if crowd else 30)
        requests.append(
            Request(
                seq_id,
                prompt(rng.randrange(len(TEXTS)), shared, rng.choice([0, 1, 3, 9]) or (shared == 0), seq_id),
                stop,
                salt=rng.choice(["", "", "b"]),
                priority=rng.randrange(3),
                arrives=arrives,
                aborts=arrives + rng.randrange(20) if aborts and rng.random() < 0.15 else None,
            )
        )
    return requests


def run(setup: Setup, requests: list[Request]) -> Simulation:
    simulation = Simulation(setup, requests)
    simulation.run()
    simulation.check_outcomes()
    return simulation


def test_ten_thousand_steps_of_random_traffic() -> None:
    num_steps = num_preemptions = num_cached = num_outgrown = num_failed = num_accepted = 0
    for seed in range(500):
        rng = random.Random(seed)
        setup = random_setup(rng)
        simulation = run(setup, random_requests(rng, setup, rng.randrange(1, 14)))
        num_steps += simulation.num_steps
        num_accepted += simulation.num_accepted
        for outcome in simulation.outcomes.values():
            num_preemptions += outcome.num_preemptions
            num_cached += outcome.num_cached_tokens
            num_failed += outcome.finish_reason == "error"
        num_outgrown += sum(
            len(simulation.requests[i].prompt) + len(o.token_ids) > setup.capacity
            for i, o in simulation.outcomes.items()
        )
    # The traffic must really reach what it is meant to test.
    assert num_steps > 10_000
    assert min(num_preemptions, num_cached, num_outgrown, num_failed, num_accepted) > 100


def test_output_is_the_same_for_every_policy_cache_k_drafts_and_overlap() -> None:
    """Other tests compare each run with the reference; here the runs are compared with each other, without it."""
    rng = random.Random(3)
    requests = random_requests(rng, Setup(num_blocks=6, block_size=4), 12, aborts=False)
    assert max(len(r.prompt) + r.stop.max_tokens for r in requests) <= 68

    def outputs(setup: Setup) -> dict[int, tuple[list[int], str]]:
        done: dict[int, Outcome] = run(setup, requests).outcomes
        return {i: (o.token_ids, o.finish_reason) for i, o in done.items()}

    # 17 and 40 blocks of 4: the largest request fits in both, so the size of the cache must not show.
    base = outputs(Setup(num_blocks=40))
    assert len(base) == len(requests)
    for policy, max_wait_steps in POLICIES:
        for num_blocks, block_size in [(17, 4), (40, 4), (68, 1), (9, 8)]:
            for decode_steps, depth, num_drafts in [(1, 0, 0), (1, 2, 0), (4, 1, 0), (8, 0, 0), (1, 0, 3), (3, 1, 2)]:
                setup = Setup(
                    num_blocks=num_blocks,
                    block_size=block_size,
                    decode_steps=decode_steps,
                    num_drafts=num_drafts,
                    max_draft_seqs=2,
                    depth=depth,
                    policy=policy,
                    max_wait_steps=max_wait_steps,
                    caching=depth != 2,
                )
                assert outputs(setup) == base


def test_decode_steps_and_overlap_are_really_used() -> None:
    request = Request(0, TEXTS[0][:5], StopRule(30))
    plans = {}
    for decode_steps in (1, 8):
        simulation = Simulation(Setup(num_blocks=10, decode_steps=decode_steps, depth=2), [request])
        schedule, seen = simulation.scheduler.schedule, []
        simulation.scheduler.schedule = lambda schedule=schedule, seen=seen: seen.append(schedule()) or seen[-1]  # type: ignore[method-assign]
        simulation.run()
        simulation.check_outcomes()
        plans[decode_steps] = [plan for plan in seen if plan.entries]
    assert len(plans[1]) == 30
    assert max(plan.num_steps for plan in plans[8]) == 8
    assert len(plans[8]) <= 8


# ---- the simulator can fail ------------------------------------------------------------------------------------------


def share_without_salt(patch: pytest.MonkeyPatch) -> None:
    def _hash(self: BlockManager, seq: object, index: int) -> bytes:
        ids = seq.token_ids[: (index + 1) * self.block_size]  # type: ignore[attr-defined]
        return block_manager._chain(b"", tuple(ids))

    patch.setattr(BlockManager, "_hash", _hash)


def hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    chain = block_manager._chain
    patch.setattr(block_manager, "_chain", lambda parent, tokens: chain(b"", tokens))


def keep_the_key_of_a_taken_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_forget", lambda self, block: None)


def free_at_once(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release
    patch.setattr(BlockManager, "release", lambda self, seq, after=None: release(self, seq))


def never_unpublish(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "unpublish", lambda self, blocks: None)


def lose_a_block(patch: pytest.MonkeyPatch) -> None:
    put_back = BlockManager._put_back
    patch.setattr(BlockManager, "_put_back", lambda self, blocks: put_back(self, blocks[1:]))


def never_retire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "retire", lambda self, step_id: None)


def keep_tokens_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    def _append(self: Scheduler, seq: object, token_ids: list[int]) -> list[int]:
        seq.token_ids += token_ids  # type: ignore[attr-defined]
        end = seq.stop.ends(token_ids[-1], seq.num_output)  # type: ignore[attr-defined]
        if end:
            self._finish(seq, *end)  # type: ignore[arg-type]
        return token_ids

    patch.setattr(Scheduler, "_append", _append)


@pytest.mark.parametrize(
    "damage",
    [
        share_without_salt,
        hash_without_parent,
        keep_the_key_of_a_taken_block,
        free_at_once,
        never_unpublish,
        lose_a_block,
        never_retire,
        keep_tokens_after_a_stop,
    ],
)
def test_the_simulator_notices(damage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)  # type: ignore[operator]
    for seed in range(150):
        rng = random.Random(seed)
        setup = random_setup(rng, depth=seed % 3, caching=True, failure_rate=0.05)
        try:
            run(setup, random_requests(rng, setup, 12))
        except (AssertionError, KeyError, IndexError):
            return
    pytest.fail("150 runs on a damaged core, and no invariant was broken")

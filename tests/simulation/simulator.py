"""A model runner without torch: executes StepPlans on a fake KV cache and notices every wrong read.

What is faked and why it finds faults:

- A slot holds one number, the *prefix value* of the token written there: a running hash of the salt and of every token
  up to it. That is what K and V are, a function of the whole prefix, so a block shared with the wrong sequence, a
  block reused too early and a token that was never computed again all show up as a wrong number when they are read.
- Within a step all entries write before any entry reads, as in a layer of a model. This is what makes it legal to
  share a block with a sequence of the same step.
- The next token is a function of the prefix value. So a request has one right output, whatever the policy, the cache
  size, the chunks, the preemptions, the number of decode steps or the overlap (see `expected`).
- Where a plan allows drafts, some tokens are guessed, a random number of them right. The others leave garbage behind
  the end of the sequence.
- Up to `depth` further plans are made before the oldest is committed; tokens not yet known to the scheduler come from
  the device's own rows, as on a GPU.
- A step may fail: its slots hold garbage from then on, and so do those of every step launched after it.

`check_scheduler` states the invariants that hold between any two calls.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult
from nanovllm.scheduling.policy import make_policy
from nanovllm.scheduling.scheduler import Scheduler, SchedulerLimits
from nanovllm.scheduling.sequence import Sequence, Status, StopRule

VOCAB_SIZE = 40
GARBAGE = None
PARAMS = SamplingParams()


def extend(value: int, token_id: int) -> int:
    """The prefix value after one more token: a 64-bit linear congruential step, mixed so that prefixes differ."""
    return ((value ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64


def sample(value: int) -> int:
    return (value >> 33) % VOCAB_SIZE  # the high bits: the low ones of such a generator repeat


@dataclass(frozen=True)
class Request:
    seq_id: int
    prompt: tuple[int, ...]
    stop: StopRule
    salt: str = ""
    priority: int = 0
    arrives: int = 0  # the round of the simulation in which it is added
    aborts: int | None = None  # and the round in which the caller gives up

    @property
    def first_value(self) -> int:
        return sum((i + 1) * ord(c) for i, c in enumerate(self.salt))  # travels as Arrival.seed

    def sequence(self) -> Sequence:
        return Sequence(
            self.seq_id,
            list(self.prompt),
            len(self.prompt),
            self.stop,
            PARAMS,
            seed=self.first_value,
            priority=self.priority,
            cache_salt=self.salt,
        )


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 8
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 1000
    decode_steps: int = 1
    num_drafts: int = 0
    max_draft_seqs: int = 2**31
    depth: int = 0  # plans made ahead of the one being committed
    policy: str = "fcfs"
    max_wait_steps: int | None = None
    caching: bool = True
    failure_rate: float = 0.0
    seed: int = 0

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    def scheduler(self) -> Scheduler:
        steps = (self.decode_steps, self.num_drafts)
        limits = SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, *steps)
        blocks = BlockManager(self.num_blocks, self.block_size, self.caching)
        scheduler = Scheduler(limits, blocks, make_policy(self.policy, self.max_wait_steps))
        scheduler.drafts.max_seqs = self.max_draft_seqs
        return scheduler


def expected(request: Request, setup: Setup) -> tuple[list[int], str] | None:
    """The one right answer: (output tokens, finish reason), or None if the request must be refused."""
    if len(request.prompt) >= min(setup.max_model_len, setup.capacity):
        return None
    value = request.first_value
    for token_id in request.prompt:
        value = extend(value, token_id)
    output: list[int] = []
    while True:
        output.append(sample(value))
        value = extend(value, output[-1])
        ids = request.stop.eos_token_ids | request.stop.stop_token_ids
        if output[-1] in ids and len(output) >= request.stop.min_tokens:
            return output, "stop"
        length = len(request.prompt) + len(output)
        # The newest token needs no slot until it is fed, so a full cache still gives one token more than it holds.
        if len(output) == request.stop.max_tokens or length == min(setup.max_model_len, setup.capacity + 1):
            return output, "length"


@dataclass
class Row:
    """What the runner keeps of a running sequence."""

    token_ids: list[int]
    first_value: int
    values: list[int] = field(default_factory=list)  # prefix value after each token
    table: list[int] = field(default_factory=list)

    def value(self, position: int) -> int:
        while len(self.values) <= position:
            last = self.values[-1] if self.values else self.first_value
            self.values.append(extend(last, self.token_ids[len(self.values)]))
        return self.values[position]


class FakeDevice:
    def __init__(self, setup: Setup) -> None:
        self.block_size = setup.block_size
        self.max_num_rows = setup.max_num_seqs
        self.slots: list[int | None] = [GARBAGE] * setup.capacity
        self.rows: dict[int, Row] = {}
        self._random = random.Random(setup.seed)
        self.poisoned = False  # a step failed and those after it in flight compute garbage

    def update_rows(self, plan: StepPlan) -> None:
        for seq_id in plan.departures:  # before arrivals: a preempted sequence may leave and come back in one plan
            self.rows.pop(seq_id, None)
        for arrival in plan.arrivals:
            assert arrival.seq_id not in self.rows, "arrives twice"
            self.rows[arrival.seq_id] = Row(list(arrival.token_ids), arrival.seed)
        assert len(self.rows) <= self.max_num_rows, "more rows than max_num_seqs"
        for entry in plan.entries:
            row = self.rows[entry.seq_id]
            assert entry.first_block == len(row.table), "the block table has a gap"
            row.table += entry.block_ids

    def execute(self, plan: StepPlan) -> StepResult:
        self.update_rows(plan)
        if plan.num_drafts:
            return self._execute_drafts(plan)
        sampled: list[list[int]] = [[] for entry in plan.entries if entry.samples]
        for ahead in range(plan.num_steps):
            spans = [(self.rows[e.seq_id], e.start + ahead, e.start + ahead + e.num_new) for e in plan.entries]
            self._write(spans)
            for row, _, end in spans:
                self._read(row, end)
            samplers = [span for span, entry in zip(spans, plan.entries) if entry.samples]
            for i, (row, _, end) in enumerate(samplers):
                assert end == len(row.token_ids), "samples from another token than the last"
                row.token_ids.append(sample(row.value(end - 1)))
                sampled[i].append(row.token_ids[-1])
        return StepResult(sampled)

    def _execute_drafts(self, plan: StepPlan) -> StepResult:
        sampled: list[list[int]] = [[] for _ in plan.entries]
        num_drafted = [0] * len(plan.entries)
        for ahead in range(plan.num_steps):
            spans, wrong = [], []
            for i, entry in enumerate(plan.entries):
                row = self.rows[entry.seq_id]
                start, count = len(row.token_ids) - 1, self._random.randint(0, plan.num_drafts)
                assert ahead or start == entry.start, "feeds another token than the last"
                for _ in range(self._random.randint(0, count)):
                    row.token_ids.append(sample(row.value(len(row.token_ids) - 1)))
                spans.append((row, start, len(row.token_ids)))
                wrong += [self._slot(row, position) for position in range(len(row.token_ids), start + 1 + count)]
                num_drafted[i] += count
            self._write(spans)
            for slot in wrong:
                self.slots[slot] = GARBAGE
            for i, (row, start, end) in enumerate(spans):
                self._read(row, end)
                row.token_ids.append(sample(row.value(end - 1)))
                sampled[i] += row.token_ids[start + 1 :]
        return StepResult(sampled, num_drafted=num_drafted)

    def _slot(self, row: Row, position: int) -> int:
        return row.table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, spans: list[tuple[Row, int, int]]) -> None:
        written: set[int] = set()
        for row, start, end in spans:
            for position in range(start, end):
                slot = self._slot(row, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.slots[slot] = GARBAGE if self.poisoned else row.value(position)

    def _read(self, row: Row, end: int) -> None:
        if not self.poisoned:
            for position in range(end):
                assert self.slots[self._slot(row, position)] == row.value(position), f"wrong KV at {position}"


@dataclass
class Outcome:
    token_ids: list[int]
    finish_reason: str
    num_preemptions: int
    num_cached_tokens: int
    finished_step: int


@dataclass
class _Flight:
    plan: StepPlan
    result: StepResult
    failed: bool
    tables: dict[int, set[int]]  # the blocks each of its entries may read or write


class Simulation:
    """Drives one scheduler the way the engine does and checks everything it can see."""

    def __init__(self, setup: Setup, requests: list[Request]) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.device = FakeDevice(setup)
        self.requests = {request.seq_id: request for request in requests}
        self.outcomes: dict[int, Outcome] = {}
        self.refused: set[int] = set()
        self.num_steps = self.num_accepted = 0
        self._random, self._now = random.Random(setup.seed), 0.0
        self._flights: deque[_Flight] = deque()
        self._sequences: dict[int, Sequence] = {}
        self._round = 0

    def run(self) -> dict[int, Outcome]:
        coming = sorted(self.requests.values(), key=lambda r: (r.arrives, r.seq_id), reverse=True)
        leaving = sorted((r for r in coming if r.aborts is not None), key=lambda r: r.aborts or 0, reverse=True)
        work = sum(len(r.prompt) + r.stop.max_tokens for r in coming)
        limit = max((r.arrives for r in coming), default=0) + work * (len(coming) + 1) + 100
        while coming or self.scheduler.has_work or self._flights:
            while coming and coming[-1].arrives <= self._round:
                self._add(coming.pop())
            while leaving and (leaving[-1].aborts or 0) <= self._round:
                self._note(self.scheduler.abort(leaving.pop().seq_id))
            self._advance(idle_ok=bool(coming))
            self._round += 1
            assert self._round <= limit, "livelock"
        check_scheduler(self.scheduler)
        assert self.scheduler.blocks.num_used == 0, "a block was lost"
        return self.outcomes

    def check_outcomes(self) -> None:
        """Every request ended as it must: with all of the right tokens, or with the first of them if it was cut."""
        for seq_id, request in self.requests.items():
            right = expected(request, self.setup)
            assert (seq_id in self.refused) == (right is None)
            if right is None:
                continue
            got = self.outcomes[seq_id]
            if got.finish_reason in ("abort", "error"):
                assert got.token_ids == right[0][: len(got.token_ids)]
                assert got.finish_reason == "error" or request.aborts is not None
            else:
                assert (got.token_ids, got.finish_reason) == right, f"sequence {seq_id}"

    def _add(self, request: Request) -> None:
        seq = request.sequence()
        try:
            self.scheduler.add(seq)
        except RequestError:
            self.refused.add(request.seq_id)
        else:
            self._sequences[seq.seq_id] = seq

    def _advance(self, idle_ok: bool) -> None:
        drafts, running = self.scheduler.drafts, self.scheduler.running
        while self._flights and drafts.need_tokens(running, [flight.plan for flight in self._flights]):
            self._commit()
        plan = self.scheduler.schedule()
        for seq in self.scheduler.take_ended():
            self._note(seq)
        check_plan(self.scheduler, plan)
        check_scheduler(self.scheduler)
        if plan.entries:
            self.num_steps += plan.num_steps
            self._launch(plan)
        if self._flights and (not plan.entries or len(self._flights) > self.setup.depth):
            self._commit()
        else:
            assert plan.entries or idle_ok or not self.scheduler.has_work, "nothing runs and nothing ever will"
        check_scheduler(self.scheduler)

    def _launch(self, plan: StepPlan) -> None:
        self._check_ownership(plan)
        fails = self._random.random() < self.setup.failure_rate
        if fails and self._random.random() < 0.5:  # the launch itself raises, before or after the rows were updated
            self.device.poisoned = True
            if self._random.random() < 0.5:
                self.device.execute(plan)
            self._fail(plan)
            return
        self.device.poisoned |= fails
        result = self.device.execute(plan)
        assert set(self.device.rows) == {seq.seq_id for seq in self.scheduler.running}, "rows and running set differ"
        tables = {e.seq_id: set(self.device.rows[e.seq_id].table) for e in plan.entries}
        self._flights.append(_Flight(plan, result, fails, tables))

    def _check_ownership(self, plan: StepPlan) -> None:
        """No block is written that another sequence may still read in a step in flight."""
        size = self.setup.block_size
        arrived = {arrival.seq_id for arrival in plan.arrivals}
        for entry in plan.entries:
            written = set(self._table(entry)[entry.start // size :])
            for flight in self._flights:
                for seq_id, table in flight.tables.items():
                    if seq_id != entry.seq_id or seq_id in arrived:
                        assert not written & table, "a block was given away while a step in flight may read it"

    def _table(self, entry: PlanEntry) -> list[int]:
        return self._sequences[entry.seq_id].block_table

    def _commit(self) -> None:
        flight = self._flights.popleft()
        if flight.failed:
            self._flights.clear()  # steps after a failed one fail with it
            self._fail(flight.plan)
            return
        self._now += self._random.random()
        for progress in self.scheduler.commit(flight.plan, flight.result, self._now):
            self.num_accepted += progress.drafts[1]
            if progress.seq.finished:
                self._note(progress.seq)

    def _fail(self, plan: StepPlan) -> None:
        # Half of the failures have a known cause: one entry ends, the others start over.
        culprit = self._random.choice(plan.entries).seq_id if self._random.random() < 0.5 else None
        for seq in self.scheduler.fail(plan, "the device failed", culprit):
            assert seq.finish_reason == "error"
            assert culprit in (None, seq.seq_id)
            self._note(seq)
        self.device.poisoned = any(flight.failed for flight in self._flights)

    def _note(self, seq: Sequence | None) -> None:
        if seq is not None:
            assert seq.finished
            assert seq.seq_id not in self.outcomes, "ended twice"
            assert not seq.block_table
            self.outcomes[seq.seq_id] = Outcome(
                seq.token_ids[seq.num_prompt :],
                seq.finish_reason or "",
                seq.num_preemptions,
                seq.num_cached_tokens,
                self.num_steps,
            )


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    limits = scheduler.limits
    ids = [entry.seq_id for entry in plan.entries]
    assert len(ids) == len(set(ids)), "a sequence is twice in one plan"
    assert len(ids) <= limits.max_num_seqs
    assert plan.num_tokens <= limits.max_num_batched_tokens
    assert 1 <= plan.num_steps <= limits.decode_steps
    assert plan.num_steps == 1 or plan.is_decode_only
    assert 0 <= plan.num_drafts <= limits.num_drafts
    assert plan.num_drafts == 0 or plan.is_decode_only
    assert len(ids) * (1 + plan.num_drafts) <= limits.max_num_batched_tokens or not plan.num_drafts
    assert all(entry.num_new >= 1 for entry in plan.entries), "a kernel cannot take zero query tokens"
    assert {arrival.seq_id for arrival in plan.arrivals} <= set(ids)


def check_scheduler(scheduler: Scheduler) -> None:
    """What holds between any two calls, whatever happened before."""
    blocks = scheduler.blocks
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs
    counts = [0] * blocks.num_blocks
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING
        assert len(seq.block_table) == len(set(seq.block_table)), "a block twice in one table"
        assert len(seq.block_table) * blocks.block_size >= seq.num_computed
        for block in seq.block_table:
            counts[block] += 1
    for seq in scheduler.waiting:
        assert seq.status is Status.WAITING
        assert not seq.block_table
        assert seq.num_computed == 0
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler._sequences)
    assert counts == blocks._ref_counts, "reference counts and block tables differ"

    free, held = set(blocks._free), set(blocks._held_until)
    owned = {block for block, count in enumerate(counts) if count}
    assert len(free) + len(held) + len(owned) == blocks.num_blocks
    assert free | held | owned == set(range(blocks.num_blocks)), "a block is in two states or in none"
    assert held <= {block for _, some in blocks._held for block in some}, "held and never to be returned"
    if not scheduler._flights:
        assert not held, "held for a step that is no longer in flight"

    findable = {block: key for key, some in blocks._found.items() for block in some}
    assert all(blocks._found.values()), "an empty bucket stays behind"
    assert findable == {b: key for b, key in enumerate(blocks._keys) if key is not None}, "the index is inconsistent"

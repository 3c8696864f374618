"""ModelRunner: a StepPlan in, tokens out. It works on tensors and blocks, never on a Sequence.

`launch(plan)` queues the work and returns; `InFlight.result()` waits for it. On a GPU the next plan can be made and
queued in between: what is new is uploaded in one copy, and the sampled tokens stay on the device until the next step
feeds them, while a copy of them travels to the host. On a CPU the same calls compute at once.

A plan of decodes runs in the DecodeLoop where there is one: a captured step, replayed num_steps times. Any other plan
is called, or replayed if its size was captured. Sampling is part of every step, whatever its parameters (samplers.py).
The host takes part between two steps only where a grammar needs a token to compute which tokens may follow, or where
the plain sampler runs.

A KV cache in 8-bit floats whose scales the checkpoint does not have: the first step, of whatever plan, is called and
not replayed, and each layer sets its scales by what it is about to write. They never change again, so that a block
means the same to every later step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from nanovllm.attention.base import LatentSpec
from nanovllm.hardware.device import Device
from nanovllm.hardware.graphs import shared_pool
from nanovllm.hardware.staging import Arriving, HostResult, transfers_of
from nanovllm.layers.scaled_attention import scaled_layers
from nanovllm.models.transformer import Transformer
from nanovllm.moe.load import ExpertLoad
from nanovllm.moe.rebalance import Balancer
from nanovllm.runner.captured_steps import CapturedSteps
from nanovllm.runner.decode_loop import DecodeLoop
from nanovllm.runner.draft_loop import DraftLoop
from nanovllm.runner.drafter import Drafter
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.mtp import MtpDrafter
from nanovllm.runner.recorded_decodes import RecordedDecodes, can_record
from nanovllm.runner.row_tables import RowTables
from nanovllm.runner.samplers import DeviceSampler, HostSampler, StepSampler
from nanovllm.runner.step import Bounds, Forward, StepOutput, draw_from, send_step, step_of, unstored_step
from nanovllm.runner.verify import verify
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import prompt_logprobs
from nanovllm.scheduling.drafts import MAX_ROWS
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

LOGIT_ROWS = 256  # prompt logprobs are made in pieces of so many rows: [256, vocab] in fp32 is 156 MB at 152k tokens


@dataclass(frozen=True)
class InFlight:
    """A step that was started. `result` is called once."""

    _finish: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self._finish()


@dataclass(frozen=True)
class Scored:
    """Prompt positions whose logprobs are wanted."""

    seq_id: int
    hidden: torch.Tensor
    following: torch.Tensor  # int64: the prompt tokens that follow them
    num_top: int


class ModelRunner:
    def __init__(
        self,
        model: Transformer,
        layout: CacheLayout,
        device: Device,
        limits: StepLimits,
        max_num_seqs: int,
        on_device: bool,
        drafter: Drafter | None = None,
    ) -> None:
        """`on_device`: sampling kernels and the decode loop are used (`runs_on_device`)."""
        self.model = model
        self.device = device
        self.layout = layout
        self.drafter = drafter
        self.load: ExpertLoad | None = None  # of a model with experts, once it is wanted
        self._balancer: Balancer | None = None
        self.overlap = 2 if on_device else 1  # plan the next step while one runs, unless it is computed inside launch
        self._reads_host = not captures_prompts(model)
        self._max_model_len = limits.max_model_len
        self._max_num_tokens = limits.max_num_batched_tokens
        self._caches = allocate(layout, model.specs, device)
        self._forward = Forward(model, self._caches, drafter.read if drafter and drafter.reads_steps else None)
        self.measures = any(not layer.from_checkpoint for layer in scaled_layers(model.layers))  # in the next step
        self.batch = InputBatch(max_num_seqs, limits.max_model_len, layout.block_size)
        self.transfers = transfers_of(device)
        num_rows, num_blocks = max_num_seqs + 1, -(-limits.max_model_len // layout.block_size)
        self._row_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)  # one row for padding
        self.sampler: StepSampler = HostSampler(self.batch)
        if on_device:
            num_guesses = 0 if drafter is None else MAX_ROWS
            self.sampler = DeviceSampler(self.batch, num_rows, model.head.vocab_size, self.transfers, num_guesses)
        if drafter is not None:
            drafter.join(self.batch, self.transfers, self.sampler.draw_uncounted)
        self._captured = CapturedSteps(self._compute, self.transfers, num_rows, num_blocks, limits.max_model_len)
        self._recorded: RecordedDecodes | None = None
        if can_record(model):
            places = (self._caches, self.transfers, limits.max_model_len)
            self._recorded = RecordedDecodes(model, *places, self.sampler.draw)
        self._tables = RowTables(self.batch, max_num_seqs, num_blocks, device.torch_device)
        self._loop: DecodeLoop | None = None
        self._draft_loop: DraftLoop | None = None
        if isinstance(self.sampler, DeviceSampler) and captures_attention(model):
            self._loop = DecodeLoop(
                self._forward,
                self.batch,
                self._tables,
                self._row_tokens,
                limits.max_model_len,
                self.transfers,
                self.sampler,
            )
            guesses = drafter is not None and drafter.can_be_captured
            if guesses and model.graph_safe:
                parts = (self.batch, self._tables, self.transfers, self.sampler)
                self._draft_loop = DraftLoop(self._forward, *parts, drafter, limits.max_model_len)  # type: ignore[arg-type]

    # ---- before the first plan ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        if self._loop is None:
            return
        self._loop.capture(shared_pool())
        if self._draft_loop is not None:
            self._draft_loop.capture(shared_pool())
        if self.model.graph_safe and not self._reads_host:
            self._captured.capture(shared_pool(), self._max_num_tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """What a visit launches outside of graphs is compiled now, not at the first token."""
        if self._loop is not None:
            self._loop.end(self._loop.begin((), 1))

    @torch.inference_mode()
    def launch_every_kernel(self) -> None:
        """What `capture` would launch, once, of one layer of each kind. For `compile_ahead`: nothing really runs."""
        if self.model.num_layer_kinds == 1:
            del self._caches[1:]  # the layers are alike, and the model runs as many as it is given caches
        assert self._loop is not None
        if not self._reads_host:
            self._captured.compute_smallest()  # first: it has the kernels that take longest to compile
        self._loop.compute_each()
        if self._draft_loop is not None:
            self._draft_loop.compute_each()
        self.warm_up()

    def use_balancer(self, balancer: Balancer | None) -> None:
        if balancer is not None:
            self._balancer, self.load = balancer, balancer.load

    def uncaptured(self) -> AbstractContextManager[None]:
        """Decodes kernel by kernel while it lasts (see DecodeLoop)."""
        return contextlib.nullcontext() if self._loop is None else self._loop.uncaptured()

    def reset(self) -> None:
        self.transfers.reset()
        self.batch.clear()
        self._tables.reset()

    # ---- one plan ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        if self._balancer is not None:
            self._balancer.before_launch(plan.num_steps)
        self.batch.apply(plan)
        if self._loop is not None:
            self._tables.apply(plan)
        if self.drafter is not None:
            self.drafter.apply(plan)
        if self._draft_loop is not None:
            self._draft_loop.apply(plan)
        self.sampler.arrive(plan.arrivals)
        if plan.num_drafts and (flight := self._launch_drafts(plan)) is not None:
            return flight
        visit = Visit(self, plan)
        if self._loop is not None and visit.only_decodes and not self.measures:
            visit.replay(self._loop)
        else:
            visit.call()
        if visit.needs_tokens:
            result = visit.result()
            return InFlight(lambda: result)
        return InFlight(visit.result)

    def _launch_drafts(self, plan: StepPlan) -> InFlight | None:
        """None: this plan runs without guesses. The first step of all sets the scales of a KV cache in 8 bits."""
        if isinstance(self.sampler, HostSampler):
            assert self.drafter is not None
            verified = verify(plan, self.batch, self.drafter, lambda rows: self.call(rows, 0, {}))
            return InFlight(lambda: verified)
        if self._draft_loop is None or self.measures:
            return None
        graph = self._draft_loop.find(plan)
        return None if graph is None else InFlight(self._draft_loop.launch(plan, graph, self.count))

    def call(self, entries: Sequence[PlanEntry], offset: int, scored: dict[int, range]) -> StepOutput:
        inputs = self.batch.inputs(entries, offset, scored.values())
        out = None if scored or self.measures else (self._recorded or self._captured).run(inputs)
        if out is None:
            bounds = Bounds(inputs.num_decodes, self._max_model_len, measures=self.measures)
            reads_host = self.layout.block_size if self._reads_host else None
            out = self._compute(*send_step(inputs, self.transfers, bounds, reads_host))
            self.measures = False  # not if the step failed: then nothing of it stays in the cache
        self.count(out, len(inputs.tokens))
        return out

    def count(self, out: StepOutput, num_rows: int, is_token: Callable[[], torch.Tensor] | None = None) -> None:
        """As ExpertLoad.add; `is_token` is called if loads are wanted."""
        if self.load is not None and self.load.is_wanted:
            self.load.add(out.choices, num_rows, None if is_token is None else is_token())

    def _compute(self, inputs: Sequence[torch.Tensor], bounds: Bounds) -> StepOutput:
        """`inputs`: the arrays of StepInputs on the device."""
        tokens, token_rows, positions, slots, starts, lens, tables, logit_rows, rows = inputs
        tokens = torch.where(tokens < 0, self._row_tokens[token_rows], tokens)
        step = step_of(tokens, positions, slots, starts, lens, tables, logit_rows, bounds)
        drawn_at = (positions[logit_rows[: len(rows)]] + 1).int()
        out = draw_from(self.model, self._forward(step, token_rows), rows, drawn_at, self.sampler.draw)
        if out.drawn is not None:
            self._row_tokens.index_copy_(0, rows.long(), out.drawn.tokens)
        return out


class Visit:
    """One plan on its way through the device."""

    def __init__(self, runner: ModelRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self.only_decodes = plan.is_decode_only
        if self.only_decodes:  # the longest first: the card should end on small pieces of work
            self._entries = self._order = tuple(sorted(plan.entries, key=attrgetter("start"), reverse=True))
        else:  # decodes first
            self._entries = tuple(sorted(plan.entries, key=lambda entry: entry.num_new > 1))
            self._order = tuple(entry for entry in self._entries if entry.samples)
        self._batch, self._sampler, self._transfers = runner.batch, runner.sampler, runner.transfers
        self.needs_tokens = self._sampler.needs_tokens(self._order)
        self._reports = self._sampler.reports(self._order)
        self._arriving: list[Arriving] = []  # tokens of the steps, [sequences, steps] each
        self._scored: list[Scored] = []

    def replay(self, loop: DecodeLoop) -> None:
        num_steps, count = self._plan.num_steps, len(self._order)
        lanes = loop.begin(self._order, num_steps, in_halves=self.needs_tokens)
        steps = itertools.count()

        def after_step(out: StepOutput) -> None:
            step = next(steps)
            self._runner.count(out, count, lambda: lanes.out[:count, step] >= 0)  # not of a text that had ended
            if self._reports.after_step is not None:
                self._reports.after_step(out)

        if self.needs_tokens:
            for step in range(num_steps):
                loop.run_in_halves(lanes, self._before_draw, after_step)
                self._take(lanes.out[:count, step : step + 1])
        else:
            loop.run(lanes, num_steps, after_step)
            self._take(lanes.out[:count, :num_steps])
        loop.end(lanes)
        self._reports.start()

    def call(self) -> None:
        for offset in range(self._plan.num_steps):
            self._before_draw()
            scored = self._batch.scored_rows(self._entries) if offset == 0 else {}
            out = self._runner.call(self._entries, offset, scored)
            self._keep_scored(out, scored)
            if not self._order:
                break
            if self._reports.after_step is not None:
                self._reports.after_step(out)
            self._take(out.drawn.tokens[: len(self._order), None])
        self._reports.start()

    def _before_draw(self) -> None:
        if self.needs_tokens:
            self._sampler.before_draw(self._order)

    def _take(self, tokens: torch.Tensor) -> None:
        """Tokens that were drawn: on their way to the host, or waited for."""
        arriving = self._transfers.start(tokens)
        if self.needs_tokens:
            arrived = arriving.wait()
            self._append(arrived)
            arriving = HostResult(arrived)
        self._arriving.append(arriving)

    def _append(self, tokens: np.ndarray) -> None:
        self._batch.append([entry.seq_id for entry in self._order], tokens)

    def _keep_scored(self, out: StepOutput, scored: dict[int, range]) -> None:
        starts = {entry.seq_id: entry.start for entry in self._entries} if scored else {}
        parts = out.scored.split([len(rows) for rows in scored.values()]) if scored else ()
        for (seq_id, rows), hidden in zip(scored.items(), parts):
            first = starts[seq_id] + 1
            following = self._batch.tokens(seq_id)[first : first + len(rows)].astype(np.int64)
            num_top = self._batch.arrival(seq_id).params.prompt_logprobs
            assert num_top is not None
            self._scored.append(Scored(seq_id, hidden, self._transfers.send([following])[0], num_top))

    def result(self) -> StepResult:
        parts = [arriving.wait() for arriving in self._arriving]
        tokens = np.concatenate(parts, axis=1) if parts else np.zeros((0, 0), dtype=np.int64)
        if not self.needs_tokens and parts:
            self._append(tokens)
        logprobs = self._reports.read(tokens) if parts else None
        found = tokens.tolist()
        if self._order != self._plan.entries:  # back into the order of the plan
            place = {entry.seq_id: i for i, entry in enumerate(self._order)}
            order = [place[entry.seq_id] for entry in self._plan.entries if entry.samples]
            found = [found[i] for i in order]
            logprobs = None if logprobs is None else [logprobs[i] for i in order]
        result = StepResult(token_ids=found, logprobs=logprobs)
        for part in self._scored:
            result.prompt_logprobs[part.seq_id] = score(self._runner.model, part)
        return result


def runs_on_device(model: Transformer, device: Device) -> bool:
    return device.is_gpu and model.ops.name == "triton"


def captures_attention(model: Transformer) -> bool:
    """Of decodes."""
    return all(layer.attention.backend.graph_safe for layer in model.layers)


def captures_prompts(model: Transformer) -> bool:
    """Latent attention cuts cached prefixes into pieces by lengths that the host knows (attention/latent.py)."""
    return captures_attention(model) and not any(isinstance(spec, LatentSpec) for spec in model.specs)


@torch.inference_mode()
def score(model: Transformer, part: Scored) -> list[TokenLogprobs]:
    scores: list[TokenLogprobs] = []
    for start in range(0, len(part.following), LOGIT_ROWS):
        piece = slice(start, start + LOGIT_ROWS)
        scores += prompt_logprobs(model.logits(part.hidden[piece]), part.following[piece], part.num_top)
    return scores


@torch.inference_mode()
def try_largest_step(model: Transformer, device: Device, limits: StepLimits, num_rows: int) -> None:
    """Compute the step that takes the most memory, before there is a cache."""
    num_tokens, longest, size = limits.max_num_batched_tokens, limits.max_model_len - 1, limits.block_size
    layout = CacheLayout(size, 1, 0)
    caches = allocate(layout, model.specs, device)
    lens = [longest] * (num_tokens // longest)
    lens += [num_tokens - sum(lens)] * (sum(lens) < num_tokens)
    step = unstored_step(lens, size, -(-limits.max_model_len // size), device.torch_device, num_rows)
    read = None if model.mtp is None else MtpDrafter(model, layout, device, limits, 0, 1).read
    model.logits(Forward(model, caches, read)(step, torch.zeros_like(step.positions))).float()

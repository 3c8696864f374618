"""GpuRunner: plans become work queued on the GPU; the host does not wait for it.

`launch(plan)` uploads what is new in one copy, queues the step and a download of the sampled tokens, and returns.
`InFlight.result()` waits for that download alone, so the next plan can be made and queued meanwhile.

A plan of decodes replays a captured graph num_steps times; any other plan is one step, captured if it is small.
Sampling is part of both, whatever the requests ask for: their parameters are rows of device memory (`DeviceRows`). The
host takes part in two cases. A grammar must know a token before it can say which may follow, so such a plan waits after
every step. Logprobs of more than MAX_LOGPROBS tokens are computed from a copy of the logits when the result is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch

from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import Download, Downloads, Uploader
from nanovllm.models.transformer import Transformer
from nanovllm.runner.decode_graphs import DecodeGraphs, Lanes
from nanovllm.runner.input_batch import InputBatch, StepArrays
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.runner.mixed_graphs import MixedGraphs, MixedInputs, compute_mixed
from nanovllm.runner.model_runner import InFlight, score, scored_rows
from nanovllm.runner.reports import Wanted
from nanovllm.sampling.device_rows import DeviceRows
from nanovllm.sampling.structured import Grammar
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult


class GpuRunner:
    overlap = 2  # plan the next step while one runs

    def __init__(
        self, model: Transformer, layout: CacheLayout, device: Device, max_num_seqs: int, max_model_len: int,
        max_num_tokens: int, eager: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.device = device
        self.layout = layout
        self._caches = allocate(layout, model.specs, device)
        self._batch = InputBatch(max_num_seqs, max_model_len, layout.block_size)
        self._uploader = Uploader(device)
        self._downloads = Downloads()
        num_blocks = -(-max_model_len // layout.block_size)
        self._max_model_len = max_model_len
        self._row_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device.torch_device)
        self._row_tables = torch.zeros(max_num_seqs, num_blocks, dtype=torch.int32, device=device.torch_device)
        self._changed_rows: dict[int, None] = {}  # rows whose block table on the device is behind
        self._sampler = DeviceRows(max_num_seqs + 1, model.head.vocab_size, device.torch_device)
        state = self._sampler.state
        self._graphs = DecodeGraphs(
            model, self._caches, device, max_num_seqs, max_model_len, layout.block_size, eager, state
        )
        most = 0 if eager or not model.graph_safe else max_num_tokens
        self._mixed_graphs = MixedGraphs(
            model, self._caches, device, self._row_tokens, state, num_blocks, most, max_model_len
        )

    def capture(self) -> None:
        with torch.inference_mode():
            self._graphs.capture()
            self._mixed_graphs.capture()
            self._keep_tokens(self._begin_lanes((), 1))  # compiled now, not at the first token

    def uncaptured(self) -> AbstractContextManager[None]:
        """Decodes kernel by kernel while it lasts (see DecodeGraphs)."""
        return self._graphs.uncaptured()

    def launch_every_kernel(self) -> None:
        """What `capture` would launch, once, of one layer of each kind. For `compile_ahead`: nothing really runs."""
        if self.model.num_layer_kinds == 1:
            del self._caches[1:]  # the layers are alike, and the model runs as many as it is given caches
        with torch.inference_mode():
            self._graphs.compute_each()
            self._mixed_graphs.compute_smallest()
            self._keep_tokens(self._begin_lanes((), 1))

    def reset(self) -> None:
        self.device.synchronize()  # an interrupted upload may still be read, and has recorded no event
        self._batch.clear()
        self._changed_rows.clear()
        self._downloads.reset()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        self._batch.apply(plan)
        for entry in plan.entries:
            if entry.block_ids:
                self._changed_rows[self._batch.row(entry.seq_id)] = None
        ids = [arrival.seq_id for arrival in plan.arrivals]
        arrived = {self._batch.row(seq_id): self._batch.sampling_row(seq_id) for seq_id in ids}
        self._sampler.fill(arrived, self._uploader.send)
        return self._launch_decodes(plan) if plan.is_decode_only else self._launch_mixed(plan)

    def _launch_decodes(self, plan: StepPlan) -> InFlight:
        lanes = self._begin_lanes(plan.entries, plan.num_steps)
        wanted = self._wanted(plan.entries, lanes.rows)
        has_grammar = any(self._grammar(entry) for entry in plan.entries)
        if has_grammar:
            self._run_with_grammars(plan, lanes, wanted)
        else:
            self._graphs.run(len(lanes.tokens), plan.num_steps, wanted.after_step)
        self._keep_tokens(lanes)
        download = self._downloads.start(lanes.out[: len(plan.entries), : plan.num_steps])
        wanted.start(self._downloads)
        return InFlight(lambda: self._collect(plan.entries, download, wanted, known=has_grammar))

    def _wanted(self, entries: Iterable[PlanEntry], rows: torch.Tensor) -> Wanted:
        num_tops = [self._batch.arrival(entry.seq_id).params.logprobs for entry in entries]
        return Wanted(num_tops, rows, self._sampler.state)

    def _run_with_grammars(self, plan: StepPlan, lanes: Lanes, wanted: Wanted) -> None:
        for step in range(plan.num_steps):
            self._send_masks(plan.entries)
            self._graphs.run(len(lanes.tokens), 1, wanted.after_step)
            tokens = self._downloads.start(lanes.out[: len(plan.entries), step]).wait()
            for entry, token_id in zip(plan.entries, tokens):
                self._batch.append(entry.seq_id, token_id)

    def _send_masks(self, entries: Iterable[PlanEntry]) -> None:
        masks = {}
        for entry in entries:
            if entry.samples and (grammar := self._grammar(entry)) is not None:
                output = self._batch.sampling_row(entry.seq_id).output_ids
                masks[self._batch.row(entry.seq_id)] = grammar.words(output, self.model.head.vocab_size)
        if masks:
            self._sampler.send_masks(masks, self._uploader.send)

    def _grammar(self, entry: PlanEntry) -> Grammar | None:
        found = self._batch.arrival(entry.seq_id).params.structured_outputs
        return found if isinstance(found, Grammar) else None

    def _begin_lanes(self, entries: tuple[PlanEntry, ...], num_steps: int) -> Lanes:
        """Point the lanes of a graph at the sequences of a plan; one upload."""
        from nanovllm.ops.triton.lanes import begin

        count, size = len(entries), self._graphs.size_for(len(entries))
        rows = np.full(size, -1, dtype=np.int32)
        rows[:count] = [self._batch.row(entry.seq_id) for entry in entries]
        positions = np.zeros(size, dtype=np.int32)
        positions[:count] = [entry.start for entry in entries]
        tokens = np.full(size, -1, dtype=np.int32)
        tokens[:count] = self._batch.known_tokens(rows[:count], positions[:count])
        num_blocks = (int(positions.max()) + num_steps) // self.layout.block_size + 1
        num_blocks = min(num_blocks, self._row_tables.shape[1])
        changed, tables = self._take_changed(num_blocks)
        d_rows, d_tokens, d_positions, d_changed, d_tables = self._uploader.send(
            [rows, tokens, positions, changed, tables]
        )
        lanes = self._graphs.lanes.first(size)
        lanes.rows.copy_(d_rows)
        lanes.step.zero_()
        if len(changed):
            self._row_tables[:, :num_blocks].index_copy_(0, d_changed, d_tables)
        begin(
            lanes.rows, d_tokens, d_positions, (self._row_tokens, self._row_tables),
            (lanes.tokens, lanes.positions, lanes.context_lens, lanes.slots, lanes.block_tables),
            self.layout.block_size, num_blocks,
        )  # fmt: skip
        return lanes

    def _keep_tokens(self, lanes: Lanes) -> None:
        from nanovllm.ops.triton.lanes import keep_tokens

        keep_tokens(lanes.rows, lanes.tokens, self._row_tokens)

    def _launch_mixed(self, plan: StepPlan) -> InFlight:
        entries = tuple(sorted(plan.entries, key=lambda entry: entry.num_new > 1))  # decodes first
        order = [entry for entry in entries if entry.samples]
        self._send_masks(order)
        arrays = self._batch.arrays(entries)
        scored = scored_rows(self._batch, entries, arrays)
        inputs = self._mixed_inputs(entries, order, arrays, scored)
        size = None if scored else self._mixed_graphs.size_for(len(inputs.tokens), len(entries))
        if size is not None:
            out = self._mixed_graphs.run(size, inputs)
        else:
            fields = [getattr(inputs, field) for field in MixedInputs.__dataclass_fields__]
            num_decodes = sum(entry.num_new == 1 for entry in entries)
            sent, state = self._uploader.send(fields), self._sampler.state
            out = compute_mixed(
                self.model, self._caches, sent, self._row_tokens, state, num_decodes, self._max_model_len
            )
        download = self._downloads.start(out.drawn.tokens[: len(order), None])
        wanted = self._wanted(order, out.rows)
        if wanted.after_step:
            wanted.after_step(out.logits, out.drawn)
        wanted.start(self._downloads)
        targets = {seq_id: self._batch.tokens(seq_id)[arrays.positions[rows.start : rows.stop] + 1].copy()
                   for seq_id, rows in scored.items()}  # fmt: skip
        num_tops = {seq_id: self._batch.arrival(seq_id).params.prompt_logprobs for seq_id in scored}

        def finish() -> StepResult:
            result = self._collect(order, download, wanted, plan)
            parts = out.scored.split([len(rows) for rows in scored.values()])
            with torch.inference_mode():
                for seq_id, hidden in zip(scored, parts):
                    result.prompt_logprobs[seq_id] = score(self.model, hidden, targets[seq_id], num_tops[seq_id])
            return result

        if any(self._grammar(entry) for entry in order):
            result = finish()  # the next mask needs these tokens
            return InFlight(lambda: result)
        return InFlight(finish)

    def _mixed_inputs(
        self, entries: tuple[PlanEntry, ...], sampling: list[PlanEntry], arrays: StepArrays, scored: dict[int, range]
    ) -> MixedInputs:
        rows = [self._batch.row(entry.seq_id) for entry in entries]
        token_rows = np.repeat(rows, [entry.num_new for entry in entries])
        last = arrays.query_starts[1:][[entry.samples for entry in entries]].astype(np.int64) - 1
        return MixedInputs(
            tokens=self._batch.known_tokens(token_rows, arrays.positions).astype(np.int64),
            token_rows=token_rows.astype(np.int64),
            positions=arrays.positions.astype(np.int64),
            slots=arrays.slots,
            query_starts=arrays.query_starts,
            context_lens=arrays.context_lens,
            block_tables=arrays.block_tables,
            logit_rows=np.concatenate([last, *(np.array(found, dtype=np.int64) for found in scored.values())]),
            rows=np.array([self._batch.row(entry.seq_id) for entry in sampling], dtype=np.int32),
        )

    def _collect(
        self, entries: tuple[PlanEntry, ...] | list[PlanEntry], download: Download, wanted: Wanted,
        plan: StepPlan | None = None, known: bool = False,
    ) -> StepResult:  # fmt: skip
        """Tokens in the order of `entries`, or, if a plan is given, in the order of its own sampling entries.
        `known`: the batch has them already."""
        tokens = download.wait()
        for entry, new in zip(entries, tokens):
            for token_id in () if known else new:
                self._batch.append(entry.seq_id, token_id)
        with torch.inference_mode():
            logprobs = wanted.read(tokens)
        if plan is not None:
            place = {entry.seq_id: i for i, entry in enumerate(entries)}
            order = [place[entry.seq_id] for entry in plan.entries if entry.samples]
            tokens = [tokens[i] for i in order]
            logprobs = None if logprobs is None else [logprobs[i] for i in order]
        return StepResult(token_ids=tokens, logprobs=logprobs)

    def _take_changed(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        rows = list(self._changed_rows)
        self._changed_rows.clear()
        return np.array(rows, dtype=np.int64), self._batch.block_table_rows(rows, num_blocks)

"""GpuRunner: plans become work queued on the GPU; the host does not wait for it.

`launch(plan)` uploads what is new in one copy, queues the step and a download of the sampled tokens, and returns.
`InFlight.result()` waits for that download alone, so the next plan can be made and queued meanwhile.

Two paths. A plan of decodes whose rows sample plainly (temperature or greedy) replays a captured graph num_steps
times. Any other plan is launched kernel by kernel; rows that need the full sampler (top-p, penalties, logprobs, ...)
are sampled there with the host's help, which waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

from nanovllm.executor.decode_graphs import DecodeGraphs, Lanes
from nanovllm.executor.input_batch import InputBatch
from nanovllm.executor.kv_cache import CacheLayout, allocate
from nanovllm.executor.mixed_graphs import MixedGraphs, MixedInputs, compute_mixed
from nanovllm.executor.model_runner import InFlight, ModelRunner
from nanovllm.hardware.device import Device
from nanovllm.hardware.staging import Download, Downloads, Uploader
from nanovllm.models.transformer import Transformer
from nanovllm.sampling.plain import is_plain
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
        self._graphs = DecodeGraphs(model, self._caches, device, max_num_seqs, max_model_len, layout.block_size, eager)
        most = 0 if eager or not model.graph_safe else max_num_tokens
        self._mixed_graphs = MixedGraphs(
            model, self._caches, device, self._row_tokens, num_blocks, most, max_model_len
        )
        # Sampling that needs the host, prompt logprobs included, is the plain runner's work on our caches and batch.
        self._host_runner = ModelRunner(model, layout, device, self._caches, self._batch, draw_plain=self._draw_plain)

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
        if not all(is_plain(self._batch.arrival(entry.seq_id).params) for entry in plan.entries):
            return self._launch_sampled_by_host(plan)
        if plan.is_decode_only:
            return self._launch_decodes(plan)
        return self._launch_mixed(plan)

    def _launch_sampled_by_host(self, plan: StepPlan) -> InFlight:
        result = self._host_runner.compute(plan)
        return InFlight(lambda: result)

    def _launch_decodes(self, plan: StepPlan) -> InFlight:
        lanes = self._begin_lanes(plan.entries, plan.num_steps)
        self._graphs.run(len(lanes.tokens), plan.num_steps)
        self._keep_tokens(lanes)
        download = self._downloads.start(lanes.out[: len(plan.entries), : plan.num_steps])
        return InFlight(lambda: self._collect(plan.entries, download))

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
        temperatures, seeds = self._sampling_arrays([entry.seq_id for entry in entries], size)
        num_blocks = (int(positions.max()) + num_steps) // self.layout.block_size + 1
        num_blocks = min(num_blocks, self._row_tables.shape[1])
        changed, tables = self._take_changed(num_blocks)
        d_rows, d_tokens, d_positions, d_temperatures, d_seeds, d_changed, d_tables = self._uploader.send(
            [rows, tokens, positions, temperatures, seeds, changed, tables]
        )
        lanes = self._graphs.lanes.first(size)
        lanes.rows.copy_(d_rows)
        lanes.temperatures.copy_(d_temperatures)
        lanes.seeds.copy_(d_seeds)
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
        inputs = self._mixed_inputs(entries, order)
        size = self._mixed_graphs.size_for(len(inputs.tokens), len(entries))
        if size is not None:
            sampled = self._mixed_graphs.run(size, inputs)
        else:
            fields = [getattr(inputs, field) for field in MixedInputs.__dataclass_fields__]
            num_decodes = sum(entry.num_new == 1 for entry in entries)
            sent = self._uploader.send(fields)
            sampled = compute_mixed(
                self.model, self._caches, sent, self._row_tokens, num_decodes, self._max_model_len
            )
        download = self._downloads.start(sampled[:, None])
        return InFlight(lambda: self._collect(order, download, plan))

    def _mixed_inputs(self, entries: tuple[PlanEntry, ...], sampling: list[PlanEntry]) -> MixedInputs:
        arrays = self._batch.arrays(entries)
        rows = [self._batch.row(entry.seq_id) for entry in entries]
        token_rows = np.repeat(rows, [entry.num_new for entry in entries])
        temperatures, seeds = self._sampling_arrays([entry.seq_id for entry in sampling], len(sampling))
        last = arrays.query_starts[1:][[entry.samples for entry in entries]]
        return MixedInputs(
            tokens=self._batch.known_tokens(token_rows, arrays.positions).astype(np.int64),
            token_rows=token_rows.astype(np.int64),
            positions=arrays.positions.astype(np.int64),
            slots=arrays.slots,
            query_starts=arrays.query_starts,
            context_lens=arrays.context_lens,
            block_tables=arrays.block_tables,
            logit_rows=last.astype(np.int64) - 1,
            rows=np.array([self._batch.row(entry.seq_id) for entry in sampling], dtype=np.int64),
            temperatures=temperatures,
            seeds=seeds,
        )

    def _collect(self, entries: tuple[PlanEntry, ...] | list[PlanEntry], download: Download,
                 plan: StepPlan | None = None) -> StepResult:  # fmt: skip
        """Tokens in the order of `entries`, or, if a plan is given, in the order of its own sampling entries."""
        tokens = download.wait()
        for entry, new in zip(entries, tokens):
            for token_id in new:
                self._batch.append(entry.seq_id, token_id)
        if plan is not None:
            by_id = {entry.seq_id: new for entry, new in zip(entries, tokens)}
            tokens = [by_id[entry.seq_id] for entry in plan.entries if entry.samples]
        return StepResult(token_ids=tokens)

    def _draw_plain(self, logits: torch.Tensor, seq_ids: list[int]) -> list[int]:
        """The rows of a host-sampled step that draw plainly: by the same kernel as in a graph, or a seed would give
        other tokens when another request needs the host."""
        from nanovllm.ops.triton.sampling import sample

        temperatures, seeds = self._sampling_arrays(seq_ids, len(seq_ids))
        positions = np.array([len(self._batch.tokens(seq_id)) for seq_id in seq_ids])
        return sample(logits, *self._uploader.send([temperatures, seeds, positions])).tolist()

    def _sampling_arrays(self, seq_ids: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        temperatures = np.zeros(size, dtype=np.float32)
        seeds = np.zeros(size, dtype=np.uint64)
        for i, seq_id in enumerate(seq_ids):
            arrival = self._batch.arrival(seq_id)
            temperatures[i] = 0.0 if arrival.params.is_greedy else arrival.params.temperature
            seeds[i] = arrival.seed
        return temperatures, seeds.view(np.int64)

    def _take_changed(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        rows = list(self._changed_rows)
        self._changed_rows.clear()
        return np.array(rows, dtype=np.int64), self._batch.block_table_rows(rows, num_blocks)

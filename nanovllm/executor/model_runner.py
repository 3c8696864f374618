"""ModelRunner: a StepPlan in, tokens out. Knows tensors and blocks, never a Sequence."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.attention.base import AttentionBatch
from nanovllm.executor.input_batch import InputBatch, StepArrays
from nanovllm.executor.kv_cache import CacheLayout, allocate
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import Step
from nanovllm.models.transformer import Transformer
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import prompt_logprobs, sample
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

LOGIT_ROWS = 256  # prompt logprobs are made in pieces of so many rows: [256, vocab] in fp32 is 156 MB at 152k tokens


class ModelRunner:
    def __init__(
        self, model: Transformer, layout: CacheLayout, device: Device, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model = model
        self.device = device
        self.layout = layout
        self._caches = allocate(layout, model.specs, device)
        self._batch = InputBatch(max_num_seqs, max_model_len, layout.block_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._batch.apply(plan)
        sampling = [entry for entry in plan.entries if entry.samples]
        result = StepResult(token_ids=[[] for _ in sampling], logprobs=[[] for _ in sampling])
        for offset in range(plan.num_steps):
            hidden = self._forward(plan.entries, offset, result)
            if not sampling:
                break
            rows = [self._batch.sampling_row(entry.seq_id) for entry in sampling]
            sampled = sample(self.model.logits(hidden), rows)
            for i, entry in enumerate(sampling):
                self._batch.append(entry.seq_id, sampled.token_ids[i])
                result.token_ids[i].append(sampled.token_ids[i])
                result.logprobs[i].append(sampled.logprobs[i])  # type: ignore[index]
        return result

    def _forward(self, entries: tuple[PlanEntry, ...], offset: int, result: StepResult) -> torch.Tensor:
        """Hidden states of the rows to sample from; prompt logprobs go straight into the result."""
        arrays = self._batch.arrays(entries, offset)
        scored = {e.seq_id: rows for i, e in enumerate(entries) if (rows := self._scored_rows(e, arrays, i))}
        sampled = [int(arrays.query_starts[i + 1]) - 1 for i, entry in enumerate(entries) if entry.samples]
        logit_rows = sampled + [row for rows in scored.values() for row in rows]
        hidden = self.model(self._step(arrays, logit_rows), self._caches)
        start = len(sampled)
        for seq_id, rows in scored.items():
            result.prompt_logprobs[seq_id] = self._score(seq_id, arrays, rows, hidden[start : start + len(rows)])
            start += len(rows)
        return hidden[: len(sampled)]

    def _scored_rows(self, entry: PlanEntry, arrays: StepArrays, index: int) -> range | None:
        """Rows of the step that hold prompt positions followed by another prompt token, if their logprobs are wanted."""
        arrival = self._batch.arrival(entry.seq_id)
        if arrival.params.prompt_logprobs is None:
            return None
        first = int(arrays.query_starts[index])
        return range(first, first + max(0, min(entry.num_new, arrival.num_prompt - 1 - entry.start)))

    def _score(self, seq_id: int, arrays: StepArrays, rows: range, hidden: torch.Tensor) -> list[TokenLogprobs]:
        num_top = self._batch.arrival(seq_id).params.prompt_logprobs
        assert num_top is not None
        following = self._batch.tokens(seq_id)[arrays.positions[rows.start : rows.stop] + 1].astype(np.int64)
        targets = torch.from_numpy(following).to(hidden.device)
        scores: list[TokenLogprobs] = []
        for start in range(0, len(rows), LOGIT_ROWS):
            piece = slice(start, start + LOGIT_ROWS)
            scores += prompt_logprobs(self.model.logits(hidden[piece]), targets[piece], num_top)
        return scores

    def _step(self, arrays: StepArrays, logit_rows: list[int]) -> Step:
        def to_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device.torch_device)

        return Step(
            token_ids=to_device(arrays.token_ids),
            positions=to_device(arrays.positions),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64).to(self.device.torch_device),
            attention=AttentionBatch(
                query_lens=np.diff(arrays.query_starts).tolist(),
                context_lens=arrays.context_lens.tolist(),
                blocks=self._block_indices(arrays),
                device_query_starts=to_device(arrays.query_starts),
                device_context_lens=to_device(arrays.context_lens),
                device_block_tables=to_device(arrays.block_tables),
                slots=to_device(arrays.slots),
            ),
        )

    def _block_indices(self, arrays: StepArrays) -> list[slice | torch.Tensor]:
        indices: list[slice | torch.Tensor] = []
        counts = -(-arrays.context_lens // self.layout.block_size)
        for blocks, count in zip(arrays.block_tables, counts.tolist()):
            first = int(blocks[0])
            if blocks[count - 1] == first + count - 1 and (np.diff(blocks[:count]) == 1).all():
                indices.append(slice(first, first + count))
            else:
                indices.append(torch.from_numpy(blocks[:count].astype(np.int64)).to(self.device.torch_device))
        return indices

"""ModelRunner: a StepPlan in, tokens out. Knows tensors and blocks, never a Sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention.base import AttentionBatch
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import KVCache, Step
from nanovllm.models.transformer import Transformer
from nanovllm.runner.input_batch import InputBatch, StepArrays
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.sampling.rows import TokenLogprobs
from nanovllm.sampling.sampler import prompt_logprobs, sample
from nanovllm.scheduling.plan import PlanEntry, StepPlan, StepResult

LOGIT_ROWS = 256  # prompt logprobs are made in pieces of so many rows: [256, vocab] in fp32 is 156 MB at 152k tokens


@dataclass(frozen=True)
class InFlight:
    """A step that was started. Its one owner asks for the result, once."""

    _finish: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self._finish()


class ModelRunner:
    overlap = 1  # computes inside launch: there is nothing to overlap with

    def __init__(
        self, model: Transformer, layout: CacheLayout, device: Device, caches: list[KVCache], batch: InputBatch
    ) -> None:
        self.model = model
        self.device = device
        self.layout = layout
        self._caches = caches
        self._batch = batch

    def launch(self, plan: StepPlan) -> InFlight:
        result = self.execute(plan)
        return InFlight(lambda: result)

    def reset(self) -> None:
        self._batch.clear()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._batch.apply(plan)
        return self.compute(plan)

    def compute(self, plan: StepPlan) -> StepResult:
        """The plan is already applied to the batch."""
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
        scored = scored_rows(self._batch, entries, arrays)
        sampled = [int(arrays.query_starts[i + 1]) - 1 for i, entry in enumerate(entries) if entry.samples]
        logit_rows = sampled + [row for rows in scored.values() for row in rows]
        hidden = self.model(self._step(arrays, logit_rows), self._caches)
        start = len(sampled)
        for seq_id, rows in scored.items():
            targets = self._batch.tokens(seq_id)[arrays.positions[rows.start : rows.stop] + 1]
            num_top = self._batch.arrival(seq_id).params.prompt_logprobs
            result.prompt_logprobs[seq_id] = score(self.model, hidden[start : start + len(rows)], targets, num_top)
            start += len(rows)
        return hidden[: len(sampled)]

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
                spans=self._spans(arrays),
                device_query_starts=to_device(arrays.query_starts),
                device_context_lens=to_device(arrays.context_lens),
                device_block_tables=to_device(arrays.block_tables),
                slots=to_device(arrays.slots),
                num_decodes=int((np.diff(arrays.query_starts) == 1).cumprod().sum()),  # leading ones only
                max_context_len=int(arrays.context_lens.max()),
            ),
        )

    def _spans(self, arrays: StepArrays) -> list[slice | torch.Tensor]:
        size = self.layout.block_size
        spans: list[slice | torch.Tensor] = []
        for blocks, context_len in zip(arrays.block_tables, arrays.context_lens.tolist()):
            count, first = -(-context_len // size), int(blocks[0])
            if blocks[count - 1] == first + count - 1 and (np.diff(blocks[:count]) == 1).all():
                spans.append(slice(first * size, first * size + context_len))
            else:
                spans.append(torch.from_numpy(blocks[:count].astype(np.int64)).to(self.device.torch_device))
        return spans


def scored_rows(batch: InputBatch, entries: tuple[PlanEntry, ...], arrays: StepArrays) -> dict[int, range]:
    """seq_id -> rows of the step that are followed by another prompt token, where prompt logprobs are wanted."""
    found = {}
    for index, entry in enumerate(entries):
        arrival = batch.arrival(entry.seq_id)
        count = min(entry.num_new, arrival.num_prompt - 1 - entry.start)
        if arrival.params.prompt_logprobs is not None and count > 0:
            first = int(arrays.query_starts[index])
            found[entry.seq_id] = range(first, first + count)
    return found


def score(model: Transformer, hidden: torch.Tensor, targets: np.ndarray, num_top: int | None) -> list[TokenLogprobs]:
    """Prompt logprobs of the tokens that follow these hidden states."""
    assert num_top is not None
    following = torch.from_numpy(targets.astype(np.int64)).to(hidden.device)
    scores: list[TokenLogprobs] = []
    for start in range(0, len(hidden), LOGIT_ROWS):
        piece = slice(start, start + LOGIT_ROWS)
        scores += prompt_logprobs(model.logits(hidden[piece]), following[piece], num_top)
    return scores


@torch.inference_mode()
def try_largest_step(
    model: Transformer, device: Device, num_tokens: int, max_model_len: int, num_rows: int, block_size: int
) -> None:
    """Compute the step that takes the most memory, before there is a cache: nothing is stored (slots of -1), and all
    block tables point to one block."""
    caches = allocate(CacheLayout(block_size, 1, 0), model.specs, device)
    lens = [max_model_len - 1] * (num_tokens // (max_model_len - 1))
    lens += [num_tokens - sum(lens)] * (sum(lens) < num_tokens)
    where = {"device": device.torch_device}
    starts = np.cumsum([0, *lens])
    positions = torch.cat([torch.arange(n, **where) for n in lens])
    batch = AttentionBatch(
        query_lens=lens,
        context_lens=lens,
        spans=[torch.zeros(-(-n // block_size), dtype=torch.int64, **where) for n in lens],
        device_query_starts=torch.tensor(starts, dtype=torch.int32, **where),
        device_context_lens=torch.tensor(lens, dtype=torch.int32, **where),
        device_block_tables=torch.zeros(len(lens), -(-max_model_len // block_size), dtype=torch.int32, **where),
        slots=torch.full((num_tokens,), -1, **where),
        max_context_len=max(lens),
    )
    rows = torch.zeros(num_rows, dtype=torch.int64, **where)
    hidden = model(Step(torch.zeros(num_tokens, dtype=torch.int64, **where), positions, rows, batch), caches)
    model.logits(hidden).float()

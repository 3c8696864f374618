"""ModelDrafter: guesses that a network writes one after another, each drawn as the token itself will be: by the sampler
of the request, with the noise of its position. Where the network and the large model agree about a position, they also
draw the same token, at any temperature.

    newest token at place n     the network is fed it, and draws guess 1
    guess j at place n + j      it is fed guess j, and draws guess j + 1

The network has K and V of its own, at the slots of the same blocks as the large model's, in tensors of their own: so
block tables, prefix caching and preemption serve it without knowing of it. How it comes to have K and V of the tokens
before is up to the subclass: draft_model.py reads them late, mtp.py with every step of the large model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanovllm.attention.base import CacheSpec
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import Step
from nanovllm.models.transformer import Transformer
from nanovllm.runner.drafter import Drafter
from nanovllm.runner.input_batch import InputBatch
from nanovllm.runner.kv_cache import CacheLayout, allocate
from nanovllm.runner.step import Bounds, StepOutput, draw_from, send_step, step_of
from nanovllm.scheduling.drafts import draft_lengths
from nanovllm.scheduling.plan import PlanEntry


class ModelDrafter(Drafter):
    can_be_captured = True
    first_rows = 1  # so many of the newest tokens are fed for the first guess

    def __init__(
        self,
        model: Transformer,
        specs: Sequence[CacheSpec],
        layout: CacheLayout,
        device: Device,
        max_model_len: int,
        most: int,
        reads_host: bool,
    ) -> None:
        """`model`: whose head the network uses. `specs`: of the network's own cache. `layout`: that of the large model.
        `reads_host`: attention needs lengths on the host."""
        self.model, self.lengths = model, draft_lengths(most)
        self._layout, self._max_model_len = layout, max_model_len
        self._reads_host = layout.block_size if reads_host else None
        self.caches = allocate(layout, specs, device)

    def forward(self, step: Step, token_rows: torch.Tensor) -> torch.Tensor:
        """What the head reads of the rows step.logit_rows. `token_rows`: the row of each token's sequence."""
        raise NotImplementedError

    # ---- on a host that has every token ------------------------------------------------------------------------

    def propose_all(self, batch: InputBatch, entries: Sequence[PlanEntry], most: int) -> list[np.ndarray]:
        self.catch_up(entries)
        seq_ids = [entry.seq_id for entry in entries]
        newest = [len(batch.tokens(seq_id)) - 1 for seq_id in seq_ids]
        drafts: list[list[int]] = [[] for _ in entries]
        for count in range(most):
            rows = []
            for seq_id, place in zip(seq_ids, newest):
                first = max(0, place + 1 - self.first_rows) if count == 0 else place + count
                rows += [PlanEntry(seq_id, at, 1, 0, (), True) for at in range(first, place + count + 1)]
            drawn = self.step(rows).drawn.tokens.tolist()
            ends = [i for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1].seq_id != row.seq_id]
            for draft, seq_id, end in zip(drafts, seq_ids, ends):
                draft.append(drawn[end])
                batch.add_draft(seq_id, np.array(draft, np.int32))
        found = [np.array(draft, np.int32) for draft in drafts]
        for seq_id, place, guesses in zip(seq_ids, newest, found):
            self.was_fed(seq_id, place, guesses[: most - 1])
        return found

    def was_fed(self, seq_id: int, place: int, guesses: np.ndarray) -> None:
        """The newest token, at this place, and these guesses after it."""

    def step(self, entries: Sequence[PlanEntry]) -> StepOutput:
        inputs = self._batch.inputs(entries)
        bounds = Bounds(inputs.num_decodes, self._max_model_len)
        sent, bounds = send_step(inputs, self._transfers, bounds, self._reads_host)
        tokens, token_rows, positions, slots, starts, lens, tables, logit_rows, rows = sent
        step = step_of(tokens, positions, slots, starts, lens, tables, logit_rows, bounds)
        drawn_at = (positions[logit_rows[: len(rows)]] + 1).int()
        return draw_from(self.model, self.forward(step, token_rows), rows, drawn_at, self._draw)

    # ---- in a captured step (draft_loop.py) --------------------------------------------------------------------

    def guess(self, state: Any, history: torch.Tensor, tables: torch.Tensor, recent: torch.Tensor, num: int) -> None:
        """What is drawn is in `recent` already."""
        from nanovllm.ops.triton.drafts import feed

        size, lanes = len(state.lanes), (state.lanes, state.ends)
        block_tables = state.block_tables.view(size, 1 + num, -1)
        rest = (lanes, history, tables)
        drawn = None
        for count in range(num):
            per_lane = self.first_rows if count == 0 else 1
            # In the rows of the step to come, which are written last. Not in new memory: while kernels are compiled
            # (compile_ahead) nothing writes it, and what is read from it would be no token.
            rows = tuple(part[: size * per_lane] for part in state.fed)
            feed(*rest, drawn, range(count + 1 - per_lane, count + 1), self._layout.block_size, rows)
            number, tokens, positions, lens, slots = rows
            starts = torch.arange(size * per_lane + 1, dtype=torch.int32, device=lens.device)
            last = torch.arange(per_lane - 1, size * per_lane, per_lane, device=lens.device)
            bounds = Bounds(size * per_lane, self._max_model_len)
            of_rows = block_tables[:, :per_lane].reshape(size * per_lane, -1)
            hidden = self.forward(step_of(tokens, positions, slots, starts, lens, of_rows, last, bounds), number)
            drawn = self._draw(self.model.logits(hidden), number[last], lens[last]).tokens
        feed(*rest, drawn, range(num + 1), self._layout.block_size, state.fed)

"""RowTables: the block tables of the running sequences on the device, by row. Only those that changed are sent."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.runner.input_batch import InputBatch
from nanovllm.scheduling.plan import StepPlan


class RowTables:
    def __init__(self, batch: InputBatch, num_rows: int, num_blocks: int, device: torch.device) -> None:
        self._batch = batch
        self.tables = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        self._changed: dict[int, int] = {}  # rows whose table on the device is behind -> blocks that they have

    def apply(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            if entry.block_ids:
                self._changed[self._batch.row(entry.seq_id)] = entry.first_block + len(entry.block_ids)

    def reset(self) -> None:
        self._changed.clear()

    def take_changed(self, last_position: int) -> list[np.ndarray]:
        """Rows and their tables, to be sent and `store`d: all blocks that they have, which may be reserved for later,
        and as many as a sequence reads that comes to this position."""
        needed = min(last_position // self._batch.block_size + 1, self.tables.shape[1])
        num_blocks, changed = max([needed, *self._changed.values()]), list(self._changed)
        self._changed.clear()
        return [np.array(changed, dtype=np.int64), self._batch.block_table_rows(changed, num_blocks)]

    def store(self, rows: torch.Tensor, tables: torch.Tensor) -> int:
        """Returns the number of blocks that each table has now."""
        num_blocks = tables.shape[1]
        if len(rows):
            self.tables[:, :num_blocks].index_copy_(0, rows, tables)
        return num_blocks

"""MtpDrafter: the large model's own layer for multi-token prediction guesses (models/mtp.py).

A draft model reads a prompt when it is first to guess. This layer cannot: it reads hidden states of the large model,
and nobody keeps those. So it reads in every step, whether prompt, decode or verification, behind the forward pass: K
and V of the same rows, at the same positions and slots. All that is in the large model's cache is then also in its own.

The row of a token at position p needs the hidden state of position p - 1. That is the row before it in the same step,
or it was in an earlier step. For the latter, a ring of a few hidden states is kept for each sequence:

    ring[row, p % size] = hidden state of position p        size: a power of two above the guesses of a step + 2

    read     of each sequence, the last `size` rows of the step go into the ring
    guess    the newest token, at e, takes e - 1; the layer's own hidden state goes to e, where guess 1 takes it, ...

Where a guess was wrong, nothing need be undone. The `read` that verifies it overwrites K, V and the ring at the places
of all guesses. What it writes behind the first wrong one is wrong again, and is overwritten by the next step, which
feeds these positions before any row takes them.
"""

from __future__ import annotations

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.device import Device
from nanovllm.layers.attention import Step
from nanovllm.lowrank.folder import DISABLE
from nanovllm.model_config import ModelConfig
from nanovllm.models.mtp import MtpLayer
from nanovllm.models.transformer import Transformer
from nanovllm.runner.kv_cache import CacheLayout
from nanovllm.runner.limits import StepLimits
from nanovllm.runner.low_rank import LowRank
from nanovllm.runner.model_drafter import ModelDrafter
from nanovllm.scheduling.plan import StepPlan
from nanovllm.weights.checkpoint import Checkpoint


class MtpDrafter(ModelDrafter):
    reads_steps = True

    def __init__(
        self, model: Transformer, layout: CacheLayout, device: Device, limits: StepLimits, max_num_seqs: int, most: int
    ) -> None:
        layer: MtpLayer = model.mtp
        super().__init__(model, [layer.spec], layout, device, limits.max_model_len, most, reads_host=True)
        self._size, self._spare_row = ring_size(most), max_num_seqs
        shape, dtype = (max_num_seqs + 1, self._size, layer.hidden_size), layer.spec.dtype
        self._ring = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        self._flat_ring = self._ring.view(-1, layer.hidden_size)

    def apply(self, plan: StepPlan) -> None:
        """A sequence arrives: before position 0 there is nothing. Behind a cached prefix the hidden state of its last
        token is not known, so that one key is made of zeros, too. Guesses may be worse for it, tokens are not."""
        for arrival in plan.arrivals:
            self._ring[self._batch.row(arrival.seq_id)].zero_()

    def read(self, step: Step, token_rows: torch.Tensor, hidden: torch.Tensor) -> None:
        rows, positions, size = self._rows(step, token_rows), step.positions, self._size
        before = self._flat_ring.index_select(0, self._places(rows, positions - 1))
        follows = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
        before[1:] = torch.where(follows[:, None], hidden[:-1], before[1:])
        layer, embedded = self.model.mtp, self.model.embed(step.token_ids)
        layer.store(embedded, before, self.model.rope(step), step, self.caches[0])
        # Others of the same sequence would be written to the same places, in no order.
        later = torch.nn.functional.pad(rows[size:], (0, min(size, len(rows))), value=-1)
        kept = torch.where(rows == later, self._spare_row, rows)
        self._flat_ring.index_copy_(0, self._places(kept, positions), hidden)

    def forward(self, step: Step, token_rows: torch.Tensor) -> torch.Tensor:
        """One row of each sequence."""
        rows, positions = self._rows(step, token_rows), step.positions
        before = self._flat_ring.index_select(0, self._places(rows, positions - 1))
        embedded, rope = self.model.embed(step.token_ids), self.model.rope(step)
        normed, own = self.model.mtp(embedded, before, rope, step, self.caches[0])
        self._flat_ring.index_copy_(0, self._places(rows, positions), own)
        return normed if step.logit_rows is None else normed[step.logit_rows]

    def _rows(self, step: Step, token_rows: torch.Tensor) -> torch.Tensor:
        """Padding goes to the spare row."""
        return torch.where(step.attention.slots < 0, self._spare_row, token_rows.long())

    def _places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows * self._size + (positions & (self._size - 1))


def ring_size(most: int) -> int:
    """For at most so many guesses. A step takes position e - 1 and writes e to e + most."""
    return 1 << (most + 2).bit_length()


def ring_bytes(model: Transformer, max_num_seqs: int, most: int) -> int:
    layer: MtpLayer = model.mtp
    return (max_num_seqs + 1) * ring_size(most) * layer.hidden_size * layer.spec.dtype.itemsize


def check_mtp(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, low_rank: LowRank | None) -> None:
    """Before anything is loaded."""
    rest = "set speculative_method to 'ngram', or to 'draft_model' with a smaller model"
    if not model.num_mtp_layers:
        raise ConfigError(
            f"speculative_method='mtp': {config.model} ({model.architecture}) has no layer for multi-token prediction "
            f"(num_nextn_predict_layers in config.json), DeepSeek-V3 has; {rest}"
        )
    first, names = f"model.layers.{model.num_layers}.", checkpoint.names()
    if names and config.load_format != "dummy" and f"{first}eh_proj.weight" not in names:
        raise ConfigError(
            f"speculative_method='mtp': {checkpoint.path} has no {first}eh_proj.weight: its layer for multi-token "
            f"prediction was left out when it was saved; take the published files, or {rest}"
        )
    if low_rank is not None:
        raise ConfigError(
            f"speculative_method='mtp': low-rank experts are made for the ordinary layers only; set {DISABLE}=1 for "
            f"the model's own, or {rest}"
        )

"""Whether a model runs with low-rank experts: finds the folder beside its weights and describes it for the executor.

The folder is used if it is there; it is never ignored silently. A folder for other weights, of another version or with
something missing is refused with a remedy (lowrank/folder.py), and NANOVLLM_DISABLE_SVD=1 turns it off.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.lowrank.checkpoint import SvdCheckpoint
from nanovllm.lowrank.folder import DISABLE, find_svd_folder, read_svd_metadata
from nanovllm.lowrank.format import MODE, SvdMetadata
from nanovllm.model_config import ModelConfig
from nanovllm.moe.layer import MakeExperts
from nanovllm.moe.resident import resident_experts
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expert_form import ExpertForm

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True)
class LowRank:
    folder: Path
    metadata: SvdMetadata
    forms: tuple[ExpertForm, ...]
    checkpoint: Checkpoint  # the model's, with these experts

    @property
    def resident(self) -> MakeExperts:
        return resident_experts(dict(zip(self.metadata.layer_ids, self.forms)))

    @property
    def notice(self) -> str:
        """For the log: the output differs from that of the model's own experts, and a user must see why."""
        return (
            f"low-rank experts in use: {self.metadata.kept:.0%} of the experts' bytes "
            f"([ModelRunner] Using SVD Expert Manager from {self.folder}); {DISABLE}=1 takes the model's own"
        )

    def describe(self) -> dict[str, Any]:
        metadata = self.metadata
        return {
            "format": "low-rank",
            "folder": str(self.folder),
            "method": metadata.method,
            "mode": MODE,
            "ranks": metadata.svd_ranks,
            "w2_modes": metadata.w2_modes,
            "kept": metadata.kept,
        }


def open_low_rank(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint) -> LowRank | None:
    folder = None if model.moe is None else find_svd_folder(checkpoint.path)
    if folder is None:
        return None
    if config.load_format == "dummy":  # only sizes are read: neither the model's weights nor these must exist
        metadata, files = read_svd_metadata(folder, model), checkpoint
    else:
        files = SvdCheckpoint(checkpoint, folder, model)
        metadata = files.metadata
        if not files.has_teacher:
            logger.warning("%s: the model's own experts are missing, so the folder is not compared with them", folder)
    return LowRank(folder, metadata, metadata.forms(), files)

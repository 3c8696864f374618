"""A model on disk as the loader reads it, whatever its format.

Only safetensors and GGUF are read: both are plain data. Pickle-based formats run code when they are opened and are
refused, and code that a model folder brings along (`auto_map`, modeling_*.py) is never imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import torch

from nanovllm.errors import ModelError
from nanovllm.weights.gguf_checkpoint import GGUFCheckpoint
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.quantised import PackedNumbers
from nanovllm.weights.safetensors_folder import SafetensorsFolder
from nanovllm.weights.shards import Location

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
EXPERT_DOWN = re.compile(r"\.(down_proj|w2)\.weight$")  # of those


class Checkpoint(Protocol):
    path: Path
    config: dict[str, Any]  # the shape of Hugging Face's config.json, for GGUF too
    generation_config: dict[str, Any]  # {} when absent

    def names(self) -> list[str]:
        """Hugging Face tensor names. Empty when the folder holds a config only."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU as stored (quantised: float32), touched only now. Not to be written to: it may
        be the file itself, mapped into memory."""

    def location(self, name: str) -> Location | None:
        """Where its bytes lie, for readers that stream them. None if they are stored in another form
        (GGUF, or quantised)."""

    def bytes_location(self, name: str) -> Location | None:
        """The same of a matrix in 8-bit floats that `read_packed` gives: its bytes, without the scales. None for all
        others."""

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) of a tensor, without reading the others where the format allows that."""

    def read_blocks(self, name: str) -> StoredBlocks | None:
        """A quantised matrix in GGUF's blocks, with its rows in Hugging Face's order; None if it is plain numbers, or
        stored in a form that blocks do not hold."""

    def quantised_types(self) -> dict[str, str]:
        """Of the tensors that `read_blocks` gives: name -> type of the blocks."""

    def read_packed(self, name: str) -> PackedNumbers | None:
        """A quantised matrix of a safetensors file as the small numbers and scales that it is made of; None for all
        others, and for 8-bit floats in blocks that no product takes."""

    def packed_forms(self) -> dict[str, str]:
        """Of the quantised matrices of a safetensors file: name -> form, in words."""

    def unused(self) -> list[str]:
        """Tensors that are not among `names`, because no weight is made of them (scales of activations)."""

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Layer -> by how much keys and values were divided before they were rounded to 8 bits, where it is stored."""

    def load_tokenizer(self) -> Any:
        """A transformers fast tokenizer, or a LightTokenizer in its place; ModelError if there is none."""

    def close(self) -> None: ...


def has_experts_in(checkpoint: Checkpoint, form: str) -> bool:
    """Whether all experts are stored in this one of `packed_forms`."""
    forms = checkpoint.packed_forms()
    names = [name for name in checkpoint.names() if EXPERT.search(name)]
    return bool(names) and all(forms.get(name) == form for name in names)


def open_checkpoint(path: Path) -> Checkpoint:
    """`path`: a folder in Hugging Face format, or a .gguf file."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; give a model folder (with config.json) or a .gguf file.")
    if path.suffix.lower() == ".gguf":
        return GGUFCheckpoint(path)
    raise ModelError(f"{path}: not a .gguf file; for safetensors give the folder that holds config.json.")

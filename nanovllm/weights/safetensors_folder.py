"""A model folder in Hugging Face format: config.json, *.safetensors (one file, or shards with an index), tokenizer.

Weights may be absent: such a folder still serves dummy loading. A quantised weight is several tensors in the files;
here it is one, `x.weight`, of numbers in float32, made when it is read (quantised.py).
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ModelError
from nanovllm.quantization_config import REMEDY, QuantizationConfig
from nanovllm.weights.four_bits import FourBitWeight
from nanovllm.weights.fp8 import Fp8Weight
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.quantised import PackedNumbers, QuantisedWeights
from nanovllm.weights.shards import PLAIN_DTYPES, Location, Shards, read_json


class SafetensorsFolder:
    """Meets `Checkpoint` (checkpoint.py)."""

    def __init__(self, path: Path):
        self.path = path
        self.config = _read_config(path)
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._shards = Shards(path)

    @cached_property
    def _quantised(self) -> QuantisedWeights:
        """At the first use: a folder whose tokenizer alone is wanted may have any weights."""
        return QuantisedWeights(QuantizationConfig.from_hf(self.config), self._shards)

    def names(self) -> list[str]:
        return self._quantised.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """ModelError for numbers that mean nothing alone."""
        if name in self._quantised:
            return self._quantised[name].shape
        if (dtype := self._shards.dtype(name)) not in PLAIN_DTYPES:
            raise ModelError(
                f"{self.path}: {name} is stored as {dtype}, not as plain numbers ({', '.join(PLAIN_DTYPES)}), and "
                f"config.json has no quantization_config that says what it means; {REMEDY}."
            )
        return self._shards.shape(name)

    def read(self, name: str) -> torch.Tensor:
        packed = self.read_packed(name)
        return self._shards.read(name) if packed is None else packed.expanded()

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        cut = [slice(0, size) for size in self.shape(name)]
        cut[dim] = slice(start, start + length)
        if name in self._quantised:
            return self._quantised[name].read(*cut).expanded()
        return self._shards.read(name, *cut)

    def read_packed(self, name: str) -> PackedNumbers | None:
        return self._quantised[name].read() if name in self._quantised else None

    def packed_forms(self) -> dict[str, str]:
        return {name: weight.form for name, weight in self._quantised.items()}

    def read_blocks(self, name: str) -> StoredBlocks | None:
        weight = self._quantised.get(name)
        return weight.read_blocks() if isinstance(weight, FourBitWeight) else None

    @cached_property
    def _types(self) -> dict[str, str]:
        weights = self._quantised.items()
        found = {name: weight.block_type for name, weight in weights if isinstance(weight, FourBitWeight)}
        return {name: kind for name, kind in found.items() if kind is not None}

    def quantised_types(self) -> dict[str, str]:
        return self._types

    def unused(self) -> list[str]:
        return self._quantised.unused

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        return self._quantised.kv_scales()

    def location(self, name: str) -> Location | None:
        """For readers that must survive a file that shrinks under them: touching a mapping of it would be a SIGBUS."""
        shape = self.shape(name)
        if name in self._quantised:
            return None
        found = self._shards.location(name)
        if found is None or found.num_bytes != math.prod(shape) * found.dtype.itemsize:
            raise ModelError(f"{self._shards.file(name)}: tensor {name} is not stored as plain numbers; convert it.")
        return found

    def bytes_location(self, name: str) -> Location | None:
        return self._shards.location(name) if isinstance(self._quantised.get(name), Fp8Weight) else None

    def load_tokenizer(self) -> Any:
        return load_tokenizer(self.path)

    def close(self) -> None:
        self._shards.close()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if path.is_file():
        return read_json(path)
    gguf = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f" Give one of its GGUF files instead: {', '.join(gguf)}." if gguf else ""
    raise ModelError(f"{path}: missing; a model folder needs one (Hugging Face format).{hint}")


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, from its data files only; nothing is fetched and no code of the folder is run."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import, so only here

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    has_fast = (folder / "tokenizer.json").is_file()
    if not has_fast and not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise ModelError(f"{folder}: has no tokenizer (tokenizer.json); put the model's tokenizer files there.")
    try:
        return AutoTokenizer.from_pretrained(str(folder), **options)
    except Exception as first:
        # A tokenizer class of the folder's own is not run; tokenizer.json is complete without it.
        if has_fast:
            with suppress(Exception):  # the first error is the one to report
                return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
        raise ModelError(f"{folder}: the tokenizer cannot be loaded ({first}).") from first

"""A model folder in Hugging Face format: config.json, *.safetensors (one file, or shards with an index), tokenizer.

Early AutoGPTQ and AutoAWQ wrote how weights are quantised into a file of its own, which is read where config.json says
nothing of it.

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
from nanovllm.quantization_config import AWQ, GPTQ, NAMES, REMEDY, SOURCE, QuantizationConfig
from nanovllm.weights.four_bits import FourBitWeight
from nanovllm.weights.fp8 import Fp8Weight
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.quantised import PackedNumbers, QuantisedWeights
from nanovllm.weights.shards import PLAIN_DTYPES, Location, Shards, read_json

OLD_FILES = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ, and of AutoAWQ, which used the first too
OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's


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
        return self._quantised[name].read().expanded() if name in self._quantised else self._shards.read(name)

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        cut = [slice(0, size) for size in self.shape(name)]
        cut[dim] = slice(start, start + length)
        if name in self._quantised:
            return self._quantised[name].read(*cut).expanded()
        return self._shards.read(name, *cut)

    def read_packed(self, name: str) -> PackedNumbers | None:
        weight = self._quantised.get(name)
        if weight is None or (isinstance(weight, Fp8Weight) and not weight.has_product):
            return None
        return weight.read()

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
        weight = self._quantised.get(name)
        return self._shards.location(name) if isinstance(weight, Fp8Weight) and weight.has_product else None

    def load_tokenizer(self) -> Any:
        return load_tokenizer(self.path)

    def close(self) -> None:
        self._shards.close()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        return config if any(config.get(name) for name in NAMES) else {**config, **_read_old_settings(folder)}
    gguf = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f" Give one of its GGUF files instead: {', '.join(gguf)}." if gguf else ""
    raise ModelError(f"{path}: missing; a model folder needs one (Hugging Face format).{hint}")


def _read_old_settings(folder: Path) -> dict[str, Any]:
    """quantization_config; {} without. The method follows from the names: of GPTQ `bits`, of AWQ `w_bit`."""
    file = next((file for file in OLD_FILES if (folder / file).is_file()), None)
    found = {} if file is None else {key: value for key, value in read_json(folder / file).items() if value is not None}
    if not found.keys() & {"bits", "w_bit"}:  # no such file, or one of another tool
        return {}
    method = AWQ if "w_bit" in found or file != OLD_FILES[0] else GPTQ
    settings = {OLD_NAMES.get(key, key): value for key, value in found.items()}
    return {NAMES[0]: {"quant_method": method, **settings, SOURCE: file}}


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

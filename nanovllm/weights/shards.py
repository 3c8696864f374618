"""The *.safetensors files of a model folder, open: tensors by their names, as they are stored.

Files are mapped into memory, so opening costs their headers and reading a tensor costs that tensor. Which tensor is in
which file is taken from the files themselves; the index only lists which files belong to the model, and must agree
with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
LOCATED_DTYPES = {**PLAIN_DTYPES, "F8_E4M3": torch.uint8}  # 8-bit floats are located as bytes


class Location(NamedTuple):
    """Where a tensor's bytes lie, row after row without gaps."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype


class Shards:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._shards: list[Any] = []  # open files
        self._shard_of: dict[str, Any] = {}  # tensor name -> open file
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        self._locations: dict[str, dict[str, Location]] = {}  # file name -> its tensors; filled at the first use
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        weight_map = _read_index(self.path)
        file_of = self._file_of
        for file_name in _shard_names(self.path, weight_map):
            shard = _open_shard(self.path / file_name)
            self._shards.append(shard)
            for name in shard.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name in file_of:
                    where = f"{file_of[name]} and {file_name}"
                    raise ModelError(f"{self.path}: tensor {name} is in two files, {where}; remove one of them.")
                file_of[name] = file_name
                self._shard_of[name] = shard
        for name, file_name in weight_map.items():
            if file_of.get(name) != file_name:
                index = self.path / _INDEX
                raise ModelError(f"{index}: lists {name} in {file_name}, where it is not; get the model again.")

    def names(self) -> list[str]:
        return list(self._shard_of)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def _find(self, name: str) -> Any:
        if name not in self._shard_of:
            raise ModelError(f"{self.path}: has no tensor {name}.")
        return self._shard_of[name]

    def dtype(self, name: str) -> str:
        """As safetensors spells it: F32, F8_E4M3, I32, ..."""
        return str(self._find(name).get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).get_slice(name).get_shape())

    def read(self, name: str, *cut: slice) -> torch.Tensor:
        """`cut`: a slice for each dimension; without, the whole. Only what lies in it is read."""
        try:
            found = self._find(name)
            return found.get_slice(name)[cut] if cut else found.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read ({error}).") from error

    def location(self, name: str) -> Location | None:
        """None if it is neither plain numbers nor 8-bit floats."""
        self._find(name)
        file_name = self._file_of[name]
        if file_name not in self._locations:
            self._locations[file_name] = read_locations(self.path / file_name)
        return self._locations[file_name].get(name)

    def file(self, name: str) -> Path:
        return self.path / self._file_of[name]

    def close(self) -> None:
        self._shard_of.clear()
        while self._shards:
            self._shards.pop().__exit__(None, None, None)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}.")
    return value


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; {} without an index. As in transformers, a single model.safetensors goes first."""
    path = folder / _INDEX
    if (folder / _SINGLE).is_file() or not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object of tensor name -> file name.")
    for name, file_name in weight_map.items():
        # Plain names only: an index must not reach out of its folder.
        plain = isinstance(file_name, str) and file_name.endswith(".safetensors")
        if not plain or any(sign in file_name for sign in ("/", "\\", ":", "\0")):
            raise ModelError(f"{path}: {name} -> {file_name!r}: must name a .safetensors file in this folder.")
    return weight_map


def _shard_names(folder: Path, weight_map: dict[str, str]) -> list[str]:
    if weight_map:
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            names = ", ".join(missing[:5])
            raise ModelError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {names}; get them first.")
        return files
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled and not files:
        raise ModelError(
            f"{folder}: holds {pickled[0]} but no safetensors. Pickled weights can run code and are never opened; "
            "convert them to safetensors, or get the safetensors version of the model."
        )
    return files


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu").__enter__()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); get it again.") from error


def read_locations(path: Path) -> dict[str, Location]:
    """A safetensors file: the header's length (8 bytes, little-endian), the header (JSON), the data."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size)) if header_size <= size - 8 else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header cannot be read ({error}); get it again.") from error
    locations = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry.get("dtype") not in LOCATED_DTYPES:
            continue
        start, stop = entry["data_offsets"]  # safe_open has checked that the header has this shape
        if not (type(start) is type(stop) is int and 0 <= start <= stop <= size - 8 - header_size):
            raise ModelError(f"{path}: {name} lies at {start}..{stop}, beyond the end of the file; get it again.")
        locations[name] = Location(path, 8 + header_size + start, stop - start, LOCATED_DTYPES[entry["dtype"]])
    return locations

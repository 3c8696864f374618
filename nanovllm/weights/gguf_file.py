"""The GGUF container (versions 2 and 3, little endian): metadata and where each tensor's bytes are.

Layout: magic "GGUF" | version u32 | tensor count u64 | metadata count u64 | metadata | tensor infos | padding | data.
  metadata     key string | type u32 | value;  string = length u64 + UTF-8;  array = type u32 + length u64 + items
  tensor info  name string | dimensions u32 | each dimension u64, fastest first | type u32 | offset u64 into the data

The file comes from strangers, so no number in it is trusted: each is checked against the bytes that are really there
before anything is allocated, sought or multiplied with it. Any violation is a ModelError that names the file, the field
and the value. What is allocated is at most a small multiple of the bytes read, because every count is first
held against the least number of bytes its items could take.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from nanovllm.errors import ModelError
from nanovllm.weights.gguf_quants import OTHER_TYPES, TENSOR_TYPES, StoredBlocks, TensorType, decode

# Metadata types that are plain numbers, by their number in the file. 7 is bool, one byte, 0 or 1.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_HEADER_BYTES = 24
_MIN_METADATA_BYTES = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, dimension count, one dimension, type, offset
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # PyTorch's order, slowest dimension first: the reverse of the file's
    kind: TensorType
    start: int  # in bytes, from the beginning of the file
    num_bytes: int


class _Cursor:
    """Reads forward through the file; `take` is the one place where bytes are claimed."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.pos, self.size = data, path, 0, len(data)

    def fail(self, field: str, value: object, why: str) -> NoReturn:
        raise ModelError(f"{self.path}: {field} is {value}: {why}. The file is damaged or not GGUF; get it again.")

    def take(self, num_bytes: int, field: str) -> int:
        """Claims the next bytes and returns where they start."""
        start, left = self.pos, self.size - self.pos
        if num_bytes > left:
            self.fail(f"the length of {field}", f"{num_bytes} bytes", f"only {left} bytes are left at offset {start}")
        self.pos = start + num_bytes
        return start

    def u32(self, field: str) -> int:
        return struct.unpack_from("<I", self.data, self.take(4, field))[0]

    def u64(self, field: str) -> int:
        return struct.unpack_from("<Q", self.data, self.take(8, field))[0]

    def count(self, field: str, min_item_bytes: int) -> int:
        value, left = self.u64(field), self.size - self.pos
        if value > left // min_item_bytes:
            self.fail(field, value, f"{left} bytes are left, room for at most {left // min_item_bytes}")
        return value

    def string(self, field: str) -> str:
        num_bytes = self.u64(field)
        start = self.take(num_bytes, field)
        try:
            return self.data[start : start + num_bytes].decode()
        except UnicodeDecodeError as error:
            self.fail(field, f"bytes {start}..{start + num_bytes}", f"not UTF-8 ({error.reason})")

    def strings(self, count: int, field: str) -> list[str]:
        """As `string`, in one loop: a vocabulary and its merges are 100,000 of them."""
        data, size, pos, length_at = self.data, self.size, self.pos, struct.Struct("<Q").unpack_from
        found: list[str] = []
        with suppress(struct.error, UnicodeDecodeError):
            while len(found) < count and (end := pos + 8 + length_at(data, pos)[0]) <= size:
                found.append(data[pos + 8 : end].decode())
                pos = end
        self.pos = pos
        if len(found) < count:
            self.string(field)  # says what is wrong with it
        return found

    def numbers(self, kind: int, length: int, field: str) -> np.ndarray:
        """A copy: a view would keep the file mapped after close."""
        dtype = np.dtype(_NUMBERS.get(kind, "u1"))
        start = self.take(length * dtype.itemsize, field)
        values = np.frombuffer(self.data, dtype, length, start).copy()
        if kind != _BOOL:
            return values
        if length and values.max() > 1:
            self.fail(field, int(values.max()), "a bool is 0 or 1")
        return values.astype(bool)

    def value(self, kind: int, field: str) -> Any:
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self.array(field)
        if kind == _BOOL or kind in _NUMBERS:
            return self.numbers(kind, 1, field)[0].item()
        self.fail(f"the type of {field}", kind, "must be 0 to 12")

    def array(self, field: str) -> list[str] | np.ndarray:
        kind = self.u32(field)
        if kind == _STRING:
            return self.strings(self.count(f"the length of {field}", 8), field)
        if kind == _BOOL or kind in _NUMBERS:
            return self.numbers(kind, self.count(f"the length of {field}", 1), field)
        # Arrays in arrays are legal on paper, used by no model, and the way to exhaust a reader's stack.
        self.fail(f"the item type of {field}", kind, "must be a number, bool or string")


class GGUFFile:
    """`metadata` by key (numbers, bools, strings, lists of strings, numpy arrays) and `tensors` by name."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size < _HEADER_BYTES:
                    raise ModelError(f"{path}: {size} bytes is less than a GGUF header, {_HEADER_BYTES}; get it again.")
                # A private copy-on-write map: PyTorch needs writable memory, the file stays as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
        try:
            cursor = _Cursor(self._map, path)
            num_tensors = self._read_header(cursor)
            self.metadata = self._read_metadata(cursor)
            self.tensors = self._read_tensors(cursor, num_tensors)
        except BaseException:
            self._map.close()
            raise

    def _read_header(self, cursor: _Cursor) -> int:
        magic = self._map[cursor.take(4, "magic") : 4]
        if magic != b"GGUF":
            cursor.fail("magic", magic, "must be b'GGUF'")
        version = cursor.u32("version")
        if version.to_bytes(4, "little") in (b"\0\0\0\2", b"\0\0\0\3"):
            cursor.fail("version", version, "the file is big endian; convert it to little endian")
        if version not in (2, 3):
            cursor.fail("version", version, "must be 2 or 3")
        return cursor.count("tensor count", _MIN_TENSOR_BYTES)

    @staticmethod
    def _read_metadata(cursor: _Cursor) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(cursor.count("metadata count", _MIN_METADATA_BYTES)):
            key = cursor.string(f"metadata key {index}")
            if key in metadata:
                cursor.fail(f"metadata key {index}", repr(key), "occurs twice")
            metadata[key] = cursor.value(cursor.u32(f"the type of {key}"), key)
        return metadata

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            cursor.fail("general.alignment", alignment, "must be a power of two from 8 on")
        infos = []
        names: set[str] = set()
        for index in range(num_tensors):
            name, shape, kind, offset = self._read_info(cursor, index)
            if name in names:
                cursor.fail(f"the name of tensor {index}", repr(name), "occurs twice")
            if offset % alignment:
                cursor.fail(f"the offset of {name}", offset, f"must be a multiple of general.alignment, {alignment}")
            names.add(name)
            infos.append((name, shape, kind, offset))
        data_start = -(-cursor.pos // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in infos:
            # Python's integers do not overflow, so a product of absurd dimensions is just too large for the file.
            num_bytes = math.prod(shape) // kind.block_len * kind.block_bytes
            start = data_start + offset
            if start + num_bytes > cursor.size:
                end = start + num_bytes
                cursor.fail(f"the end of {name} {list(shape)}", f"offset {end}", f"the file has {cursor.size} bytes")
            tensors[name] = GGUFTensor(name, shape, kind, start, num_bytes)
        return tensors

    @staticmethod
    def _read_info(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = cursor.string(f"the name of tensor {index}")
        num_dims = cursor.u32(f"the dimension count of {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            cursor.fail(f"the dimension count of {name}", num_dims, f"must be 1 to {_MAX_DIMS}")
        dims = [cursor.u64(f"dimension {i} of {name}") for i in range(num_dims)]
        if 0 in dims:
            cursor.fail(f"the shape of {name}", dims, "no dimension may be 0")
        type_id = cursor.u32(f"the type of {name}")
        kind = TENSOR_TYPES.get(type_id)
        if kind is None and type_id in OTHER_TYPES:
            raise ModelError(
                f"{cursor.path}: tensor {name} is of type {OTHER_TYPES[type_id]}, which is not supported; "
                f"use a file of {', '.join(t.name for t in TENSOR_TYPES.values())}."
            )
        if kind is None:
            cursor.fail(f"the type of {name}", type_id, "unknown tensor type")
        if dims[0] % kind.block_len:
            cursor.fail(f"the row length of {name}", dims[0], f"must be a multiple of {kind.block_len} ({kind.name})")
        return name, tuple(reversed(dims)), kind, cursor.u64(f"the offset of {name}")

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A new tensor: F32, F16 and BF16 as stored, quantised types as float32. No view of the file outlives this.
        `index`: only that entry of the first dimension."""
        tensor = self.tensors[name]
        raw, shape = self._raw(tensor, index)
        return decode(raw, tensor.kind).view(shape)

    def read_blocks(self, name: str, index: int | None = None) -> StoredBlocks | None:
        """A copy of a quantised matrix as it is stored; None if it is plain numbers."""
        tensor = self.tensors[name]
        raw, shape = self._raw(tensor, index)
        if tensor.kind.unpack is None or len(shape) != 2:
            return None
        return StoredBlocks(tensor.kind, raw.clone().view(shape[0], -1))

    def _raw(self, tensor: GGUFTensor, index: int | None) -> tuple[torch.Tensor, tuple[int, ...]]:
        shape, count, start = tensor.shape, tensor.num_bytes, tensor.start
        if index is not None:
            assert 0 <= index < shape[0]
            count //= shape[0]
            shape, start = shape[1:], start + index * count
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=start), shape

    def close(self) -> None:
        self._map.close()

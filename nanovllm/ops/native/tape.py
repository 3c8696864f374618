"""Recording the C calls of a function, to make them again in one call: what a captured graph is on a GPU.

The recorded calls have the addresses of the first run. So all memory that they write comes from a `Pool`, which stays,
and a function that does anything else than call C functions (a PyTorch operator, an allocation of its own) is not
recorded: its replay is the function itself.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from nanovllm.ops.native.ops import SIGNATURES, NativeOps

logger = logging.getLogger("nanovllm")
FUNCTIONS = (  # the numbers of tape.c
    "add_rms_norm",
    "silu_mul",
    "qk_norm_rope",
    "decode_attention",
    "float_linear",
    "gather_rows",
    "linear_rows",
    "dequantise_rows",
)
NUM_ARGUMENTS = 16
LINE, SMALLEST = 16, 1024  # floats: of a line of the cache, and of the smallest piece of a pool
# What a step may do with tensors beside calling C functions: look at them (`__get__`: shape, dtype and the like), and
# take another view of the same memory. Whatever else PyTorch computes would be missing in a replay.
LOOKS = {"__get__", "data_ptr", "dim", "from_numpy", "is_contiguous", "stride"}
VIEWS = {"__getitem__", "contiguous", "flatten", "view"}  # some copy where they must: then the storage is another


class Pool:
    """Memory at addresses that stay valid. What a tensor leaves is used again by the next one of about its size, in the
    same recording or another: there is one replay at a time, and its results are read before the next."""

    def __init__(self) -> None:
        self.pieces: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = {}
        self._ends: dict[int, weakref.finalize] = {}  # by address: what gives it back

    def empty(self, *shape: int) -> torch.Tensor:
        numbers = math.prod(shape)
        size = max(SMALLEST, 1 << (numbers - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free:
            self.pieces.append(np.empty(size + LINE, dtype=np.float32))
            first = -self.pieces[-1].ctypes.data % (4 * LINE) // 4
            free.append(self.pieces[-1][first : first + size])
        memory = free.pop()
        lease = memory[:numbers].reshape(shape)  # lives as long as a tensor or a view of it does
        end = self._ends[memory.ctypes.data] = weakref.finalize(lease, free.append, memory)
        end.atexit = False
        return torch.from_numpy(lease)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Its memory serves others from now on, although the tensor is kept."""
        self._ends[tensor.data_ptr()]()


class Recorder:
    """In place of the library: makes each call, and notes it."""

    def __init__(self, calls: list[tuple[str, Sequence[Any]]], library: Any) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*args: Any) -> Any:
            self._calls.append((name, args))
            return function(*args)

        return call


def _table(calls: list[tuple[str, Sequence[Any]]]) -> np.ndarray:
    """The array of `Call` of tape.c."""
    table = np.zeros((len(calls), 1 + NUM_ARGUMENTS), dtype=np.int64)
    for line, (name, args) in zip(table, calls):
        line[0] = FUNCTIONS.index(name)
        _, types = SIGNATURES[name]
        for place, (value, kind) in enumerate(zip(args, types), start=1):
            line[place] = np.float64(value).view(np.int64) if kind is ctypes.c_float else value or 0
    return table


class _Watch(TorchFunctionMode):
    """Notes what is done with tensors besides. Not a TorchDispatchMode, which sees more, but takes two seconds and
    125 MB for the modules that its first use imports."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", str(func))
        is_view = name in VIEWS and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if name not in LOOKS and not is_view:
            self.found = self.found or name
        return result


class Tape:
    """Records functions that call `kernels`. All that it returns may be called from one thread at a time."""

    def __init__(self, kernels: NativeOps) -> None:
        self._kernels, self.pool = kernels, Pool()

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        """(replay, the result of the first run). Results lie at the same address after every replay."""
        calls: list[tuple[str, Sequence[Any]]] = []
        with _Watch() as watch, self._kernels.recording(partial(Recorder, calls), self.pool.empty):
            result = function()
        if missing := watch.found or next((name for name, _ in calls if name not in FUNCTIONS), ""):
            logger.debug("a decode step is called and not recorded, because of %s", missing)
            return function, result
        self.pool.give_back(result)
        return partial(self._replay, _table(calls), function, result), result

    def _replay(self, calls: np.ndarray, function: Callable[[], torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        """A method, so that the pool lives as long as any recording."""
        if not self._kernels.replay(calls):
            return function()  # raises what is wrong
        return result

"""The operators of kernels.c, linear.c, quant.c and sampling.c behind the signatures of their plain twins.

What the kernels do not take (another dtype, other strides) goes to the twin.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from nanovllm.ops import activation, linear, norm, qk_norm_rope, rotary
from nanovllm.ops.native.build import load_library
from nanovllm.ops.quant import PackedMatrix, StackedMatrix

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "add_rms_norm": (None, [_POINTER] * 3 + [_FLOAT] + [_INT] * 2 + [_POINTER] * 2),
    "silu_mul": (None, [_POINTER, _INT, _INT, _POINTER]),
    "qk_norm_rope": (None, [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 3 + [_INT] * 6 + [_POINTER] * 3),
    "decode_attention": (ctypes.c_int, [_POINTER] * 5 + [_INT] * 8 + [_FLOAT, _POINTER]),
    "float_linear": (ctypes.c_int, [_POINTER] + [_INT] * 2 + [_POINTER, _INT] + [_POINTER] * 2 + [_INT]),
    "gather_rows": (ctypes.c_int, [_POINTER] + [_INT] * 2 + [_POINTER, _INT, _POINTER]),
    "linear_rows": (ctypes.c_int, [_INT, _POINTER] + [_INT] * 2 + [_POINTER, _INT] + [_POINTER] * 2 + [_INT]),
    "dequantise_rows": (ctypes.c_int, [_INT, _POINTER] + [_INT] * 2 + [_POINTER, _INT, _POINTER]),
    "quant_variant": (ctypes.c_char_p, []),
    "replay": (ctypes.c_int, [_POINTER, _INT]),
    "draw_rows": (ctypes.c_int, [_POINTER] + [_INT] * 2 + [_POINTER] * 2),
    "half_rows_linear": (None, [_POINTER] + [_INT] * 2 + [_POINTER] + [_INT] * 2 + [_POINTER]),
}
CACHE_FORMS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # of the KV cache, as kernels.c numbers them
# Above so many rows the work outweighs the calls, and torch uses all cores where these functions use one.
MAX_ROWS = 32
FEW_ROWS = 8  # of products with weights in 16 bits (linear.c)
# Products with quantised weights, milliseconds on one core of an AMD EPYC (Zen 5), 3072 x 576 in Q4_1, as integers by
# the instructions they are compiled for, and in float32 by MKL, which takes AVX2 on processors that are not Intel's:
#     rows            1       4      16      64     500
#     AVX-512 VNNI   0.022   0.046   0.155   0.60    4.8
#     AVX-VNNI       0.032   0.083   0.32    1.27   10
#     AVX2           0.038   0.103   0.41    1.61   12.6
#     plain C        1.5     4.8    19      75     590
#     float32        0.087   0.27    0.59    1.97   14.7
# Plain C is for processors without any of them; there the weights are expanded for more than a few rows.
PLAIN_ROWS = 2
EXPANDED_OUTPUTS = 512  # at once


Wanted = tuple[
    float, float, float, int, int, int
]  # temperature (0: greedy), top_p, min_p, top_k (0: off), seed, position


def _empty(*shape: int) -> torch.Tensor:
    """Whatever torch.set_default_dtype and set_default_device say: C writes float32."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _plain_enough(*tensors: torch.Tensor) -> bool:
    for tensor in tensors:  # noqa: SIM110  (a generator takes as long as a kernel)
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return False
    return True


class NativeOps:
    """The functions of one loaded library; raises ImportError with the reason if it cannot be built."""

    def __init__(self) -> None:
        library = load_library()
        if isinstance(library, str):
            raise ImportError(library)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library: Any = library
        self.quant_variant: str = library.quant_variant().decode()  # the instructions that quantised products use
        self._empty: Callable[..., torch.Tensor] = _empty  # memory for results

    @contextlib.contextmanager
    def recording(self, recorder: Callable[[Any], Any], empty: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Calls go through what `recorder` makes of the library, and results get other memory, while it lasts."""
        library = self._library
        self._library, self._empty = recorder(library), empty
        try:
            yield
        finally:
            self._library, self._empty = library, _empty

    def replay(self, calls: np.ndarray) -> bool:
        """Calls of tape.py once more; False if one of them failed."""
        return self._library.replay(calls.ctypes.data, len(calls)) == 0

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() != 2 or x.shape[0] > MAX_ROWS or not _plain_enough(x, weight):
            return norm.rms_norm(x, weight, eps)
        out = self._empty(*x.shape)
        self._library.add_rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, *x.shape, out.data_ptr(), None)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[0] > MAX_ROWS or not _plain_enough(x, residual, weight):
            return norm.add_rms_norm(x, residual, weight, eps)
        out, total = self._empty(*x.shape), self._empty(*x.shape)
        self._library.add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, *x.shape, out.data_ptr(), total.data_ptr()
        )
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if rows > MAX_ROWS or not _plain_enough(gate_up):
            return activation.silu_mul(gate_up)
        out = self._empty(rows, size)
        self._library.silu_mul(gate_up.data_ptr(), rows, size, out.data_ptr())
        return out

    def qk_norm_rope(
        self,
        qkv: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        num_q_heads: int,
    ) -> torch.Tensor:
        """Slots must lie inside the cache; -1 (padding) is not taken here, only graphs pad."""
        num_kv_heads, form = k_cache.shape[2], CACHE_FORMS.get(k_cache.dtype)
        head_dim = qkv.shape[1] // (num_q_heads + 2 * num_kv_heads)
        rows = qkv.shape[0]  # len() of a tensor takes 2 us
        if rows > MAX_ROWS or form is None or not _plain_enough(qkv, cos_sin, *(norm_weights or ())):
            angles = rotary.gather_angles(cos_sin, positions)
            return qk_norm_rope.qk_norm_rope(qkv, norm_weights, eps, angles, None, k_cache, v_cache, slots, num_q_heads)
        q_weight, k_weight = (w.data_ptr() for w in norm_weights) if norm_weights else (None, None)
        q = self._empty(rows, num_q_heads, head_dim)
        self._library.qk_norm_rope(
            qkv.data_ptr(), q_weight, k_weight, eps, cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            rows, num_q_heads, num_kv_heads, head_dim, cos_sin.shape[1] // 2, form,
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        )  # fmt: skip
        return q

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """q [seqs, heads, head_dim]; int32 context_lens [seqs]; block_tables [seqs, blocks]."""
        assert _plain_enough(q)
        assert block_tables.stride(1) == 1
        seqs, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k_cache.shape
        form, out = CACHE_FORMS[k_cache.dtype], self._empty(*q.shape)
        failed = self._library.decode_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), context_lens.data_ptr(), block_tables.data_ptr(),
            block_tables.stride(0), seqs, heads, kv_heads, head_dim, block_size, form, window or 0, scale,
            out.data_ptr(),
        )  # fmt: skip
        if failed:
            longest = int(context_lens.max())
            raise MemoryError(f"no memory for the attention scores of {seqs} sequences of up to {longest} tokens")
        return out

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | StackedMatrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return self._float_linear(x, weight, bias)
        (rows, size), (outputs, _) = x.shape, weight.shape
        x, out = x.contiguous(), self._empty(rows, outputs)
        assert x.dtype == torch.float32
        start = 0
        for matrix in weight.matrices:
            stop = start + matrix.shape[0]
            added = None if bias is None else bias[start:stop]
            if isinstance(matrix, torch.Tensor):
                self._float_linear(x, matrix, added, out[:, start:stop])
            elif rows > PLAIN_ROWS and self.quant_variant == "plain C":
                self._expanded_linear(x, matrix, added, out[:, start:stop])
            else:
                args = (matrix.form.index, matrix.data.data_ptr(), matrix.outputs, size, x.data_ptr(), rows)
                at = out.data_ptr() + 4 * start
                if self._library.linear_rows(*args, None if added is None else added.data_ptr(), at, outputs):
                    raise MemoryError(f"no memory for {rows} rows of {size} numbers")
            start = stop
        return out

    def _float_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`out`: columns of a larger result."""
        if x.dim() != 2 or not _plain_enough(x, weight):
            made = self._half_rows(x, weight, bias)
            return made if out is None else out.copy_(made)
        (rows, size), outputs = x.shape, weight.shape[0]
        out = self._empty(rows, outputs) if out is None else out
        args = (x.data_ptr(), rows, size, weight.data_ptr(), outputs, None if bias is None else bias.data_ptr())
        if self._library.float_linear(*args, out.data_ptr(), out.stride(0)):
            raise MemoryError(f"no memory for {rows} rows of {size} numbers")
        return out

    def _expanded_linear(
        self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        for start in range(0, matrix.outputs, EXPANDED_OUTPUTS):
            ids = torch.arange(start, min(start + EXPANDED_OUTPUTS, matrix.outputs), device="cpu")
            torch.mm(x, self._rows_of(matrix, ids).t(), out=out[:, start : start + len(ids)])
        if bias is not None:
            out.add_(bias)

    def _rows_of(self, matrix: PackedMatrix, ids: torch.Tensor) -> torch.Tensor:
        count = ids.shape[0]
        out = self._empty(count, matrix.size)
        place = (matrix.data.data_ptr(), *matrix.shape, ids.data_ptr(), count, out.data_ptr())
        if self._library.dequantise_rows(matrix.form.index, *place):
            raise IndexError(f"an id lies outside of the {matrix.outputs} rows of the embedding")
        return out

    def embed(self, ids: torch.Tensor, weight: torch.Tensor | StackedMatrix) -> torch.Tensor:
        [matrix] = [weight] if isinstance(weight, torch.Tensor) else weight.matrices
        ids = ids.contiguous()
        if isinstance(matrix, PackedMatrix):
            return self._rows_of(matrix, ids)
        if not _plain_enough(matrix):
            return torch.nn.functional.embedding(ids, matrix)
        count, (outputs, size) = ids.shape[0], matrix.shape
        out = self._empty(count, size)
        if self._library.gather_rows(matrix.data_ptr(), outputs, size, ids.data_ptr(), count, out.data_ptr()):
            raise IndexError(f"an id lies outside of the {outputs} rows of the embedding")
        return out

    def draw(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[int]:
        """A token for each row of logits [rows, vocab], -1 for a row without a maximum within 1e30."""
        assert _plain_enough(logits)
        rows, vocab = logits.shape
        packed = struct.pack(rows * "dddqqq", *chain.from_iterable(wanted))
        tokens = (ctypes.c_int64 * rows)()
        if self._library.draw_rows(logits.data_ptr(), rows, vocab, packed, tokens):
            raise MemoryError(f"no memory to draw from {vocab} logits")
        return list(tokens)

    def _half_rows(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What is no product of few rows with weights in 16 bits goes to the twin."""
        halves, is_few = (torch.float16, torch.bfloat16), x.dim() == 2 and 0 < x.shape[0] <= FEW_ROWS
        if not is_few or bias is not None or not x.dtype == weight.dtype in halves or not weight.is_contiguous():
            return linear.linear(x, weight, bias)
        (rows, size), outputs = x.shape, weight.shape[0]
        wide, out, is_half = x.float().contiguous(), _empty(rows, outputs), weight.dtype == torch.float16
        args = (wide.data_ptr(), rows, size, weight.data_ptr(), outputs, is_half, out.data_ptr())
        self._library.half_rows_linear(*args)
        return out.to(x.dtype)

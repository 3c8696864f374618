"""The operators of kernels.c behind the signatures of their plain twins.

What the kernels do not take (another dtype, other strides) goes to the twin.
"""

from __future__ import annotations

import ctypes

import torch

from nanovllm.ops import activation, norm, qk_norm_rope, rotary
from nanovllm.ops.native.build import load_library

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": (None, [_POINTER] * 3 + [_FLOAT] + [_INT] * 2 + [_POINTER] * 2),
    "silu_mul": (None, [_POINTER, _INT, _INT, _POINTER]),
    "qk_norm_rope": (None, [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 3 + [_INT] * 5 + [_POINTER] * 3),
    "decode_attention": (ctypes.c_int, [_POINTER] * 5 + [_INT] * 7 + [_FLOAT, _INT, _POINTER]),
}
# Above so many rows the work outweighs the calls, and torch uses all cores where these functions use one.
MAX_ROWS = 32


def _plain_enough(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


class NativeOps:
    """The functions of one loaded library; raises ImportError with the reason if it cannot be built."""

    def __init__(self) -> None:
        library = load_library()
        if isinstance(library, str):
            raise ImportError(library)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() != 2 or len(x) > MAX_ROWS or not _plain_enough(x, weight):
            return norm.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        self._library.add_rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, *x.shape, out.data_ptr(), None)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x) > MAX_ROWS or not _plain_enough(x, residual, weight):
            return norm.add_rms_norm(x, residual, weight, eps)
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library.add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, *x.shape, out.data_ptr(), total.data_ptr()
        )
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        if rows > MAX_ROWS or not _plain_enough(gate_up):
            return activation.silu_mul(gate_up)
        out = gate_up.new_empty(rows, size)
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
        _, _, num_kv_heads, head_dim = k_cache.shape
        if len(qkv) > MAX_ROWS or not _plain_enough(qkv, cos_sin, k_cache, v_cache, *(norm_weights or ())):
            angles = rotary.gather_angles(cos_sin, positions)
            return qk_norm_rope.qk_norm_rope(qkv, norm_weights, eps, angles, None, k_cache, v_cache, slots, num_q_heads)
        q_weight, k_weight = (w.data_ptr() for w in norm_weights) if norm_weights else (None, None)
        q = qkv.new_empty(len(qkv), num_q_heads, head_dim)
        self._library.qk_norm_rope(
            qkv.data_ptr(), q_weight, k_weight, eps, cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            len(qkv), num_q_heads, num_kv_heads, head_dim, cos_sin.shape[1] // 2,
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
        longest: int,
        window: int | None = None,
    ) -> torch.Tensor:
        """q [seqs, heads, head_dim]; int32 context_lens [seqs], none above `longest`; block_tables [seqs, blocks]."""
        assert _plain_enough(q, k_cache, v_cache)
        assert block_tables.stride(1) == 1
        seqs, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k_cache.shape
        out = torch.empty_like(q)
        failed = self._library.decode_attention(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), context_lens.data_ptr(), block_tables.data_ptr(),
            block_tables.stride(0), seqs, heads, kv_heads, head_dim, block_size, window or 0, scale, longest,
            out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the attention scores of {seqs} sequences of up to {longest} tokens")
        return out

"""What a weight becomes in each format: rounded as the format stores it, and expanded again.

    rounded, bits = FORMATS["Q4_K"].weight(matrix)      # float32 [outputs, inputs] -> the same shape, bits stored
    x = FORMATS["fp8-row"].inputs(x)                    # inputs of a product, for "fp8-row+inputs"
    k, v = FORMATS["kv-int8"].cache(k, v)               # keys and values

Every weight is rounded to the nearest number of its format, without calibration: what AWQ or GPTQ gain by looking at
inputs, and llama.cpp by searching better scales, is not in it. Such files are better than these figures.
A row that does not divide into blocks is kept in float32 as the engine does, or takes the type that llama.cpp takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.ops import fp8, quant
from nanovllm.ops.kv_cache import expand_kv, measure_scales, round_kv
from nanovllm.weights.four_bits import MIDDLE, Grouped
from nanovllm.weights.gguf_quants import TENSOR_TYPES

Rounded = tuple[torch.Tensor, int]  # the weight as the format holds it, and how many bits that takes
RoundWeight = Callable[[torch.Tensor], Rounded]
RoundNumbers = Callable[[torch.Tensor], torch.Tensor]
RoundCache = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
SUPER_BLOCK = 256
NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # what llama.cpp takes for rows that do not divide into 256
PIECE_ROWS = 256  # dequantise_rows unpacks eight rows for each


@dataclass(frozen=True)
class TriedFormat:
    """`weight` None: weights stay. `inputs` None: products do not round theirs. `cache` None: it is not rounded."""

    weight: RoundWeight | None = None
    inputs: RoundNumbers | None = None
    cache: RoundCache | None = None


# ---- 8-bit floats --------------------------------------------------------------------------------------------------


def fp8_rows(w: torch.Tensor) -> Rounded:
    q, scale = fp8.quantise(w, 0)
    return fp8.expand(q, scale[:, 0], w.dtype), 8 * w.numel() + 32 * scale.numel()


def fp8_blocks(w: torch.Tensor) -> Rounded:
    q, scale = fp8.quantise_blocks(w)
    return fp8.expand(q, scale, w.dtype), 8 * w.numel() + 32 * scale.numel()


def fp8_inputs(block: int, x: torch.Tensor) -> torch.Tensor:
    """`block`: 0 for a scale a token."""
    q, scale = fp8.quantise(F.pad(x, (0, -x.shape[1] % block if block else 0)), block)
    return (q.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)[:, : x.shape[1]]


# ---- 4 bits with a scale and a zero for a group, as AWQ, GPTQ and compressed-tensors store them ----------------------


def four_bits(size: int, symmetric: bool, w: torch.Tensor) -> Rounded:
    groups = F.pad(w, (0, -w.shape[1] % size)).unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scale = (span / 15).half().float()
    step = torch.where(scale > 0, scale, torch.inf)
    zero = torch.full_like(scale, MIDDLE) if symmetric else (-low / step).round()
    q = ((groups / step[..., None]).round() + zero[..., None]).clamp(0, 15).flatten(1)[:, : w.shape[1]]
    found = Grouped(q.to(torch.uint8), scale, zero.to(torch.uint8), torch.arange(w.shape[1]) // size)
    return found.expanded(), 4 * w.numel() + (16 if symmetric else 20) * scale.numel()


# ---- GGUF's types --------------------------------------------------------------------------------------------------


def gguf(name: str, w: torch.Tensor) -> Rounded:
    if w.shape[1] % SUPER_BLOCK and name in NARROW:
        name = NARROW[name]
    if w.shape[1] % quant.BLOCK:
        return w, 32 * w.numel()
    matrix = quant.quantise_matrix(name, w) if name in ("Q8_0", "Q4_1") else quant.pack(name, *ROUNDINGS[name](w))
    pieces = [quant.dequantise_rows(matrix, ids) for ids in torch.arange(len(w)).split(PIECE_ROWS)]
    return torch.cat(pieces), 8 * TYPES[name].block_bytes * w.numel() // TYPES[name].block_len


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, headers] -> uint8 [rows, headers, 2]: float16."""
    return x.half().unsqueeze(-1).view(torch.uint8)


def _from_middle(x: torch.Tensor, most: int) -> torch.Tensor:
    """The scale of each last dimension by which its largest number, whatever the sign, becomes -most."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -most


def _divide(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return torch.where(step == 0, 0.0, x / step).round()


def _round_scale(most: int, w: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Q4_0 and Q5_0: d (q - most)."""
    blocks = w.unflatten(1, (-1, quant.BLOCK))
    d = _from_middle(blocks, most).half().float()
    q = _divide(blocks, d).clamp(-most, most - 1) + most
    return q.flatten(1).to(torch.uint8), [_half_bytes(d[..., 0])]


def _round_super(w: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Q4_K: (d s) q - (n t). Scale and minimum of a block are Q4_1's, which are fitted; s and t are these in 6 bits.
    A minimum above zero cannot be stored: such a block begins at zero."""
    fitted = quant.numbers(quant.quantise_matrix("Q4_1", w))
    assert fitted.minimum is not None
    low, step = -fitted.minimum[: len(w)], fitted.scale[: len(w)]
    step = torch.where(low < 0, w.unflatten(1, (-1, quant.BLOCK)).amax(2) / 15, step)
    step, low = (x.unflatten(1, (-1, 8)) for x in (step, low))
    d, n = (x.amax(2).clamp(min=0).div(63).half().float() for x in (step, low))
    s, t = (_divide(x, unit[..., None]).clamp(0, 63) for x, unit in ((step, d), (low, n)))
    blocks = w.unflatten(1, (-1, 8, quant.BLOCK))
    q = _divide(blocks + (n[..., None] * t)[..., None], (d[..., None] * s)[..., None]).clamp(0, 15)
    return q.flatten(1).to(torch.uint8), [_half_bytes(d), _half_bytes(n), s.to(torch.uint8), t.to(torch.uint8)]


def _round_halves(w: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Q6_K: d s (q - 32), with s of 16 weights in 8 bits."""
    blocks = w.unflatten(1, (-1, 16, 16))
    step = _from_middle(blocks, 32)[..., 0]
    d = step.abs().amax(2).div(127).half().float()
    s = _divide(step, d[..., None]).clamp(-127, 127)
    q = _divide(blocks, (d[..., None] * s)[..., None]).clamp(-32, 31) + 32
    return q.flatten(1).to(torch.uint8), [_half_bytes(d), s.to(torch.int8).view(torch.uint8)]


ROUNDINGS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, list[torch.Tensor]]]] = {
    "Q4_0": partial(_round_scale, 8),
    "Q5_0": partial(_round_scale, 16),
    "Q4_K": _round_super,
    "Q6_K": _round_halves,
}


# ---- the KV cache --------------------------------------------------------------------------------------------------


def kv_cache(dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """8-bit floats (uint8) have the scales that the engine would measure if these tokens were its first."""
    scales = measure_scales(k, v) if dtype == torch.uint8 else torch.ones(2)
    return tuple(expand_kv(round_kv(x / scale, dtype), x.dtype) * scale for x, scale in zip((k, v), scales))


# ---- by name -------------------------------------------------------------------------------------------------------

NONE, INPUTS = "none", "+inputs"
FORMATS = {
    NONE: TriedFormat(),
    "fp8-row": TriedFormat(fp8_rows, partial(fp8_inputs, 0)),
    "fp8-block": TriedFormat(fp8_blocks, partial(fp8_inputs, fp8.BLOCK)),
    "int4-32": TriedFormat(partial(four_bits, 32, False)),
    "int4-128": TriedFormat(partial(four_bits, 128, False)),
    "int4-128-sym": TriedFormat(partial(four_bits, 128, True)),
    **{name: TriedFormat(partial(gguf, name)) for name in ("Q8_0", "Q6_K", "Q5_0", "Q4_1", "Q4_K", "Q4_0")},
    "kv-float16": TriedFormat(cache=partial(kv_cache, torch.float16)),
    "kv-int8": TriedFormat(cache=partial(kv_cache, torch.int8)),
    "kv-fp8": TriedFormat(cache=partial(kv_cache, torch.uint8)),
}
NAMES = [name + more for name, form in FORMATS.items() for more in ("", INPUTS) if form.inputs or not more]


def find_formats(names: str | None) -> dict[str, TriedFormat]:
    """By name, in the order given, after the unquantised model. None: all."""
    found = {NONE: FORMATS[NONE]}
    for name in NAMES if names is None else [part.strip() for part in names.split(",")]:
        if name not in NAMES:
            raise ConfigError(f"--formats {name!r}: must be of {', '.join(NAMES)}")
        form = FORMATS[name.removesuffix(INPUTS)]
        found[name] = form if name.endswith(INPUTS) else replace(form, inputs=None)
    return found

"""Rotary embedding: the table of cosines and sines for every position, for each way of stretching the context.

RoPE turns pair i of a head by the angle position * f_i, f_i = theta^(-2i/d). Beyond the trained length the angles are
larger than any in training; each scaling makes them smaller in another way:

    linear    f / factor: all frequencies divided by the same number
    dynamic   a larger theta, so that the slowest pair turns as far at the new length as it did at the old
    llama3    slow pairs are divided by factor, fast ones (which distinguish neighbours) kept, a ramp between
    yarn      the same with the ramp in rotations per context, and attention logits multiplied by a constant

A kind that is not here is refused when the config is read; ignoring one gives wrong text without an error.
"""

from __future__ import annotations

import math

import torch

from nanovllm.errors import ConfigError, ModelError
from nanovllm.model_config import RopeConfig, positive_float, sharpen

MAX_TABLE_BYTES = 2**30  # two million positions of a head of 128


def frequencies(rope: RopeConfig, max_position: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """([rotary_dim / 2] turning speeds, factor on cos and sin)."""
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    factor = positive_float(rope.params, "factor")
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "dynamic":
        # Keys already in the cache cannot be turned again when the text grows, so the table is made for the longest
        # text this engine serves; up to the trained length nothing changes.
        stretch = factor * max(max_model_len, max_position) / max_position - (factor - 1)
        return 1.0 / (rope.theta * stretch ** (dim / (dim - 2))) ** exponents, 1.0
    original = rope.params.get("original_max_position_embeddings", max_position)
    if rope.kind == "llama3":
        return _llama3(plain, factor, original, rope), 1.0
    assert rope.kind == "yarn"
    return _yarn(plain, factor, original, rope)


def _llama3(plain: torch.Tensor, factor: float, original: float, rope: RopeConfig) -> torch.Tensor:
    low = positive_float(rope.params, "low_freq_factor")
    high = positive_float(rope.params, "high_freq_factor")
    if high <= low:
        raise ModelError(f"config.json: high_freq_factor={high} must exceed low_freq_factor={low}")
    turns = original * plain / (2 * math.pi)  # full turns over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divide by factor, 1: keep
    return (1 - keep) * plain / factor + keep * plain


def _yarn(plain: torch.Tensor, factor: float, original: float, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    params, dim = rope.params, rope.rotary_dim

    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    fast, slow = positive_float(params, "beta_fast", 32.0), positive_float(params, "beta_slow", 1.0)
    if fast < slow:
        raise ModelError(f"config.json: beta_fast={fast} must be at least beta_slow={slow}")
    first, last = pair_turning(fast), pair_turning(slow)
    if params.get("truncate", True):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, dim - 1.0)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    keep = 1 - ramp.clamp(0, 1)

    attention = params.get("attention_factor")
    if attention is None:
        attention = sharpen(factor, 1.0)
        if params.get("mscale") and params.get("mscale_all_dim"):
            named = (sharpen(factor, positive_float(params, name)) for name in ("mscale", "mscale_all_dim"))
            attention = next(named) / next(named)
    return (1 - keep) * plain / factor + keep * plain, attention


def cos_sin_table(rope: RopeConfig, max_position: int, max_model_len: int) -> torch.Tensor:
    """[max_model_len, rotary_dim] in fp32: cosines, then sines. Computed on the CPU, whose sine is exact enough for
    angles of 100,000 radians."""
    longest = MAX_TABLE_BYTES // (4 * rope.rotary_dim)
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len}: the rotary table of this model can have at most {longest} positions; set "
            "max_model_len to what you need"
        )
    speeds, factor = frequencies(rope, max_position, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), speeds)
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)

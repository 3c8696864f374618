"""A GGUF file seen as a Hugging Face checkpoint: same tensor names, same config.json shape.

Families: llama, qwen2, qwen3. Each property in the file is honoured, or refused by name; none is ignored.

Two things differ from the Hugging Face format beyond names:
  - For `llama`, llama.cpp reorders the rows of the query and key projections. Its RoPE turns neighbours (0, 1),
    (2, 3), ...; Hugging Face's turns (0, d/2), (1, d/2 + 1), ... Reading undoes it, see `_undo_rope_order`.
  - llama3-style RoPE scaling is stored as one divisor per frequency (`rope_freqs.weight`), not as the four numbers
    of config.json. `llama3_rope_scaling` finds the four numbers again and proves them against the divisors.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.errors import ModelError
from nanovllm.weights.gguf_file import GGUFFile
from nanovllm.weights.gguf_tokenizer import build_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_MAX_INT = 2**31 - 1


class _Metadata:
    """Typed access to the file's metadata; a missing or mistyped value is an error that names the key."""

    def __init__(self, file: GGUFFile):
        self.values, self.path = file.metadata, file.path
        arch = self.values.get("general.architecture")
        if not isinstance(arch, str) or arch not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(f"{self.path}: general.architecture is {arch!r}; supported in GGUF: {known}.")
        self.arch = arch

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            return value[0].item()  # one number per layer, all the same
        return value

    def _refuse(self, key: str, value: object, why: str) -> ModelError:
        return ModelError(f"{self.path}: {self.arch}.{key} is {value}: {why}.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= _MAX_INT:
            raise self._refuse(key, value, f"must be one integer from 1 to {_MAX_INT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise self._refuse(key, value, "must be one finite number above 0")
        # float32 in the file: 1e-5 would read 9.99999974e-06. The shortest decimal is what the author wrote.
        return float(str(np.float32(value)))

    def require(self, key: str, expected: object, why: str) -> None:
        """A property we do not implement must be absent or say that it is off."""
        value = self._get(key, expected)
        if isinstance(value, np.ndarray) or value != expected:
            raise self._refuse(key, value, why)

    def string(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._refuse(key, value, "must be a string")
        return value

    def token_id(self, key: str) -> int | None:
        name = f"tokenizer.ggml.{key}_token_id"
        value = self.values.get(name)
        if value is not None and not (type(value) is int and 0 <= value <= _MAX_INT):
            raise ModelError(f"{self.path}: {name} is {value}: must be one integer from 0 to {_MAX_INT}.")
        return value


class GGUFCheckpoint:
    """Meets `Checkpoint` (checkpoint.py)."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        try:
            metadata = _Metadata(self._file)
            self._arch = metadata.arch
            self._stored = {hf_name(name, path): name for name in self._file.tensors if name != _ROPE_FREQS}
            self.config = build_config(self._file, metadata)
            self.generation_config = build_generation_config(metadata)
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return list(self._stored)

    def _stored_name(self, name: str) -> str:
        if name not in self._stored:
            raise ModelError(f"{self.path}: has no tensor {name}.")
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored_name(name)].shape

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """Blocks of a quantised row cannot be cut anywhere: the tensor is read, the piece is kept."""
        return self.read(name).narrow(dim, start, length)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._file.read(self._stored_name(name))
        if self._arch != "llama":
            return tensor
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            return self._undo_rope_order(name, tensor, self.config["num_attention_heads"])
        if name.endswith((".k_proj.weight", ".k_proj.bias")):
            return self._undo_rope_order(name, tensor, self.config["num_key_value_heads"])
        return tensor

    def _undo_rope_order(self, name: str, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Rows of one head in the file: 0, d/2, 1, d/2 + 1, ... (neighbours are a RoPE pair). Wanted: 0, 1, 2, ..."""
        if tensor.shape[0] % (2 * num_heads):
            raise ModelError(f"{self.path}: {name} has {tensor.shape[0]} rows, no multiple of 2 x {num_heads} heads.")
        rows = tensor.unflatten(0, (num_heads, -1, 2))  # [heads, d/2, 2, ...]
        return rows.transpose(1, 2).reshape(tensor.shape)

    def location(self, name: str) -> None:
        """Quantised, or with rows in another order: nothing that could be copied as it lies there."""

    def load_tokenizer(self) -> Any:
        return build_tokenizer(self._file.metadata, self.path)

    def close(self) -> None:
        self._file.close()


def hf_name(name: str, path: Path) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)", stem, re.ASCII)
    if suffix in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{suffix}"
        if layer and layer[2] in _LAYER_NAMES:
            return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    raise ModelError(f"{path}: tensor {name!r} has no place in a {', '.join(ARCHITECTURES)} model.")


def build_config(file: GGUFFile, meta: _Metadata) -> dict[str, Any]:
    """The config.json this model would have; values not implemented are refused here."""
    parts = file.metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise ModelError(f"{file.path}: is one of {parts} parts (split.count); merge the parts into one file first.")
    meta.require("expert_count", 0, "mixture-of-experts GGUF files are not supported; use the safetensors model")
    hidden_size, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    meta.require("attention.value_length", head_dim, f"must be the same as key_length, {head_dim}")
    meta.require("rope.dimension_count", head_dim, f"rotating only a part of head_dim={head_dim} is not supported")
    meta.require("attention.causal", True, "only causal models are supported")
    context_len = meta.integer("context_length")
    meta.require("attention.sliding_window", 0, "sliding-window attention is not supported in GGUF files")
    tensors = file.tensors
    for required in ("token_embd.weight", "blk.0.attn_q.weight"):
        if required not in tensors:
            raise ModelError(f"{file.path}: has no tensor {required}; not a language model, or only a part of one.")
    arch = meta.arch
    # Files without plain weights take bfloat16: it holds float32's range, and most of these models were trained in it.
    dtype = tensors["blk.0.attn_q.weight"].kind.dtype or torch.bfloat16
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, meta, head_dim, context_len),
        "max_position_embeddings": context_len,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": meta.token_id("bos"),
        "eos_token_id": meta.token_id("eos"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def build_generation_config(meta: _Metadata) -> dict[str, Any]:
    """A chat model may end a turn (eot) or a message to a tool (eom) with another token than a text (eos)."""
    eos_ids = [meta.token_id(key) for key in ("eos", "eot", "eom")]
    return {
        "bos_token_id": meta.token_id("bos"),
        "eos_token_id": list(dict.fromkeys(i for i in eos_ids if i is not None)),
        "pad_token_id": meta.token_id("padding"),
    }


def _rope_scaling(file: GGUFFile, meta: _Metadata, head_dim: int, context_len: int) -> dict[str, Any] | None:
    kind = meta.string("rope.scaling.type", "none")
    old_factor = meta.number("rope.scale_linear", 1.0)  # "linear" in files before 2024
    factor = meta.number("rope.scaling.factor", old_factor)
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    # llama.cpp multiplies these into YaRN's own magnitude; Hugging Face's attention_factor replaces it instead.
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        meta.require(f"rope.scaling.{key}", neutral, "only the standard form of YaRN is supported")
    meta.require("rope.scaling.yarn_log_multiplier", 0.0, "only the standard form of YaRN is supported")
    if _ROPE_FREQS in file.tensors:
        divisors = file.read(_ROPE_FREQS).double().tolist()
        if any(d != 1.0 for d in divisors):
            scaling = llama3_rope_scaling(divisors, meta.number("rope.freq_base", 10000.0), head_dim)
            if scaling is None or kind != "none":
                raise ModelError(
                    f"{file.path}: {_ROPE_FREQS} (with rope.scaling.type {kind!r}) is not llama3-style RoPE scaling, "
                    "the only kind supported in this form; use the safetensors model."
                )
            return scaling
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length", context_len)
        scaling["beta_fast"] = meta.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = meta.number("rope.scaling.yarn_beta_slow", 1.0)
        return scaling
    raise ModelError(f"{file.path}: {meta.arch}.rope.scaling.type is {kind!r}; supported: none, linear, yarn.")


def llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> list[float]:
    """Divisor of each RoPE frequency: 1 for short waves, `factor` for long ones, a blend between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        waves = scaling["original_max_position_embeddings"] * theta ** (-i / head_dim) / (2 * math.pi)
        blend = min(max((waves - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors


def llama3_rope_scaling(divisors: list[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The inverse of `llama3_divisors`, or None if there is none.

    In the blended band, blend = a * x - b, where x is the frequency in waves per token, a = context / (high - low) and
    b = low / (high - low). Two points give a and b; three unknowns behind two numbers leave one free, so take low = 1,
    as all known models do: high = 1 + 1 / b, context = a / b. Bands with fewer points try Llama 3's own numbers.
    """
    factor = max(divisors)
    if len(divisors) != head_dim // 2 or not (math.isfinite(factor) and factor > 1):
        return None
    guesses = [(4.0, 8192)]
    band = [
        (theta ** (-2 * i / head_dim) / (2 * math.pi), (1 / d - 1 / factor) / (1 - 1 / factor))
        for i, d in enumerate(divisors)
        if 1 + 1e-4 < d < factor * (1 - 1e-4)
    ]
    if len(band) >= 2:
        (x0, y0), (x1, y1) = band[0], band[-1]
        a = (y1 - y0) / (x1 - x0)
        b = a * x0 - y0
        if a > 0 and b > 0 and a / b <= _MAX_INT:
            guesses.append((float(f"{1 + 1 / b:.4g}"), round(a / b)))
    for high, context in guesses:
        scaling = {
            "rope_type": "llama3",
            "factor": float(str(np.float32(factor))),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(llama3_divisors(scaling, theta, head_dim), divisors)):
            return scaling
    return None

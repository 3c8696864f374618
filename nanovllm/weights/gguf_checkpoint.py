"""A GGUF file seen as a Hugging Face checkpoint: same tensor names, same config.json shape.

Families: llama (Mixtral too), qwen2, qwen3, qwen3moe (gguf_experts.py), deepseek2 (gguf_deepseek.py). Each
property in the file is honoured, or refused by name; none is ignored.

Two things differ from the Hugging Face format beyond names:
  - For `llama`, llama.cpp reorders the rows of the query and key projections. Its RoPE turns neighbours (0, 1),
    (2, 3), ...; Hugging Face's turns (0, d/2), (1, d/2 + 1), ... Reading undoes it, see `_undo_rope_order`.
  - llama3-style RoPE scaling is stored as one divisor per frequency (`rope_freqs.weight`), not as the four numbers
    of config.json. `llama3_rope_scaling` finds the four numbers again and proves them against the divisors.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.errors import ModelError
from nanovllm.weights import gguf_deepseek, gguf_experts
from nanovllm.weights.gguf_file import GGUFFile
from nanovllm.weights.gguf_quants import StoredBlocks
from nanovllm.weights.gguf_tokenizer import build_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES["qwen3moe"] = "Qwen3MoeForCausalLM"
ARCHITECTURES["deepseek2"] = "DeepseekV2ForCausalLM"  # or V3's, by the router

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
_MORE_NAMES = {
    "llama": gguf_experts.MIXTRAL_NAMES,
    "qwen3moe": gguf_experts.LAYER_NAMES,
    "deepseek2": gguf_deepseek.LAYER_NAMES,
}
_ROPE_FREQS = "rope_freqs.weight"
_MAX_INT = 2**31 - 1


class GGUFMetadata:
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

    def refuse(self, key: str, value: object, why: str) -> ModelError:
        return ModelError(f"{self.path}: {self.arch}.{key} is {value}: {why}.")

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.values

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= _MAX_INT:
            raise self.refuse(key, value, f"must be one integer from {low} to {_MAX_INT}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "must be true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise self.refuse(key, value, "must be one finite number above 0")
        # float32 in the file: 1e-5 would read 9.99999974e-06. The shortest decimal is what the author wrote.
        return float(str(np.float32(value)))

    def require(self, key: str, expected: object, why: str) -> None:
        """A property we do not implement must be absent or say that it is off."""
        value = self._get(key, expected)
        if isinstance(value, np.ndarray) or value != expected:
            raise self.refuse(key, value, why)

    def string(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, value, "must be a string")
        return value

    def token_id(self, key: str) -> int | None:
        name = f"tokenizer.ggml.{key}_token_id"
        value = self.values.get(name)
        if value is not None and not (type(value) is int and 0 <= value <= _MAX_INT):
            raise ModelError(f"{self.path}: {name} is {value}: must be one integer from 0 to {_MAX_INT}.")
        return value


class _Stored(NamedTuple):
    names: tuple[str, ...]  # in the file: two that are joined, or one
    shape: tuple[int, ...]
    number: int | None = None  # which of the matrices stacked there


class GGUFCheckpoint:
    """Meets `Checkpoint` (checkpoint.py)."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        try:
            metadata = GGUFMetadata(self._file)
            self._arch = metadata.arch
            self._stored: dict[str, _Stored] = {}
            for name in self._file.tensors:
                if name != _ROPE_FREQS:
                    self._stored |= self._places(name, hf_name(name, path, self._arch))
            self.config = build_config(self._file, metadata)
            self.generation_config = build_generation_config(metadata)
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return list(self._stored)

    def _places(self, stored: str, name: str) -> dict[str, _Stored]:
        """The tensors of Hugging Face's that are in a stored one: mostly one, by the same shape."""
        shape = self._file.tensors[stored].shape
        if ".experts." in name and len(shape) == 3:
            before, after = name.split(".experts.")
            return {f"{before}.experts.{e}.{after}": _Stored((stored,), shape[1:], e) for e in range(shape[0])}
        if name.endswith((".k_b.weight", ".v_b.weight")):
            return self._join_kv(stored)
        return {name: _Stored((stored,), shape)}

    def _join_kv(self, stored: str) -> dict[str, _Stored]:
        """W_UK and W_UV (gguf_deepseek.py). Files that have them joined besides are read there."""
        layer = stored.split(".attn_")[0]
        names = f"{layer}.attn_k_b.weight", f"{layer}.attn_v_b.weight"
        if f"{layer}.attn_kv_b.weight" in self._file.tensors or stored == names[1]:
            return {}
        shapes = [self._file.tensors[name].shape if name in self._file.tensors else () for name in names]
        if len(shapes[0]) != 3 or len(shapes[1]) != 3 or (shapes[0][0], shapes[0][1]) != (shapes[1][0], shapes[1][2]):
            raise ModelError(f"{self.path}: {' and '.join(names)} have shapes {shapes}; get the model again.")
        heads, rank, nope = shapes[0]
        joined = _Stored(names, (heads * (nope + shapes[1][1]), rank))
        return {hf_name(f"{layer}.attn_kv_b.weight", self.path, self._arch): joined}

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise ModelError(f"{self.path}: has no tensor {name}.")
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read_slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """Blocks of a quantised row cannot be cut anywhere: the tensor is read, the piece is kept."""
        return self.read(name).narrow(dim, start, length)

    def read(self, name: str) -> torch.Tensor:
        found = self._find(name)
        if len(found.names) > 1:
            to_k, to_v = map(self._file.read, found.names)
            return torch.cat((to_k.float().transpose(1, 2), to_v.float()), dim=1).flatten(0, 1)
        return self._in_order(name, self._file.read(found.names[0], found.number))

    def read_blocks(self, name: str) -> StoredBlocks | None:
        found = self._find(name)
        blocks = None if len(found.names) > 1 else self._file.read_blocks(found.names[0], found.number)
        return None if blocks is None else replace(blocks, raw=self._in_order(name, blocks.raw))

    def quantised_types(self) -> dict[str, str]:
        kinds = {name: self._file.tensors[found.names[0]].kind for name, found in self._stored.items()}
        return {name: kind.name for name, kind in kinds.items() if kind.unpack is not None}

    def read_packed(self, name: str) -> None:
        """Blocks are read with `read_blocks`."""

    def packed_forms(self) -> dict[str, str]:
        return {}

    def unused(self) -> list[str]:
        return []

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        return {}

    def _in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows as Hugging Face has them; of numbers or of blocks alike."""
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

    def bytes_location(self, name: str) -> None:
        """No type of blocks is 8-bit floats."""

    def load_tokenizer(self) -> Any:
        return build_tokenizer(self._file.metadata, self.path)

    def close(self) -> None:
        self._file.close()


def hf_name(name: str, path: Path, arch: str = "llama") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)(?:\.(0|[1-9]\d{0,4}))?", stem, re.ASCII)
    if suffix in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{suffix}"
        known = _LAYER_NAMES | _MORE_NAMES.get(arch, {})
        if layer and layer[3] and f"{layer[2]}_exps" in known:  # a tensor for each expert
            matrix = known[f"{layer[2]}_exps"].replace(".experts.", f".experts.{layer[3]}.")
            return f"model.layers.{layer[1]}.{matrix}.{suffix}"
        if layer and not layer[3] and layer[2] in known:
            suffix = "_bias" if layer[2] == "exp_probs_b" and suffix == "bias" else f".{suffix}"
            return f"model.layers.{layer[1]}.{known[layer[2]]}{suffix}"
    raise ModelError(f"{path}: tensor {name!r} has no place in a {', '.join(ARCHITECTURES)} model.")


def build_config(file: GGUFFile, meta: GGUFMetadata) -> dict[str, Any]:
    """The config.json this model would have; values not implemented are refused here."""
    parts = file.metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise ModelError(f"{file.path}: is one of {parts} parts (split.count); merge the parts into one file first.")
    arch, more = meta.arch, {}
    hidden_size, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if arch == "deepseek2":
        more = gguf_deepseek.config_of(meta)
        head_dim = more["qk_rope_head_dim"]
    else:
        more = gguf_experts.config_of(meta)
        head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
        meta.require("attention.value_length", head_dim, f"must be the same as key_length, {head_dim}")
        meta.require("rope.dimension_count", head_dim, f"rotating only a part of head_dim={head_dim} is not supported")
    meta.require("attention.causal", True, "only causal models are supported")
    context_len = meta.integer("context_length")
    meta.require("attention.sliding_window", 0, "sliding-window attention is not supported in GGUF files")
    tensors = file.tensors
    first = "blk.0.attn_output.weight"
    for required in ("token_embd.weight", first):
        if required not in tensors:
            raise ModelError(f"{file.path}: has no tensor {required}; not a language model, or only a part of one.")
    # Files without plain weights take bfloat16: it holds float32's range, and most of these models were trained in it.
    dtype = tensors[first].kind.dtype or torch.bfloat16
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
        **more,
    }


def build_generation_config(meta: GGUFMetadata) -> dict[str, Any]:
    """A chat model may end a turn (eot) or a message to a tool (eom) with another token than a text (eos)."""
    eos_ids = [meta.token_id(key) for key in ("eos", "eot", "eom")]
    return {
        "bos_token_id": meta.token_id("bos"),
        "eos_token_id": list(dict.fromkeys(i for i in eos_ids if i is not None)),
        "pad_token_id": meta.token_id("padding"),
    }


def _rope_scaling(file: GGUFFile, meta: GGUFMetadata, head_dim: int, context_len: int) -> dict[str, Any] | None:
    kind = meta.string("rope.scaling.type", "none")
    old_factor = meta.number("rope.scale_linear", 1.0)  # "linear" in files before 2024
    factor = meta.number("rope.scaling.factor", old_factor)
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    # llama.cpp multiplies these into YaRN's own magnitude; Hugging Face's attention_factor replaces it instead.
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        meta.require(f"rope.scaling.{key}", neutral, "only the standard form of YaRN is supported")
    if meta.arch != "deepseek2":
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
        return scaling | (gguf_deepseek.yarn_mscale(meta) if meta.arch == "deepseek2" else {})
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

"""QuantizationConfig: what config.json says about weights that are stored quantised, checked; the rest is refused here.

    quant_method           weights                                              read by
    "fp8"                  8-bit floats; a scale for a tensor, row or block     weights/fp8.py
    "compressed-tensors"   the same ("float-quantized"), or 4 bits in groups    weights/fp8.py, weights/four_bits.py
    "awq", "gptq"          4 bits in groups                                     weights/four_bits.py

Which weights are quantised is seen from the tensors: a module has `x.qweight` or `x.weight`. The lists of modules that
are not (`modules_to_not_convert`, `ignore`, ...) say the same again, and must not contradict the file. Entries that are
patterns (`re:...`) are not matched: an untrusted pattern can take forever.

What a file says about activations (`activation_scheme`, `input_activations`) is about computing in few bits and means
nothing here. With GPTQ's `desc_act`, and with `actorder` "group" of compressed-tensors, a tensor g_idx says which input
is in which group; with `actorder` "weight" inputs were only rounded in another order, and the file is as any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.errors import ModelError

NAMES = ("quantization_config", "compression_config")  # in config.json; the second is old, of compressed-tensors
SOURCE = "read_from"  # in there, a file beside config.json that it comes from: for messages
REMEDY = "get the 16-bit safetensors of the model, or a GGUF file"
SUPPORTED = "fp8, awq, gptq, compressed-tensors"
FP8, AWQ, GPTQ, PACKED = "fp8", "awq", "gptq", "pack-quantized"
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
# compressed-tensors' `actorder` -> whether inputs are in an order of their own
ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
MAX_SIZE = 2**20  # of a group or a block
MAX_LIST = 2**20  # entries
MAX_WORDS = 16  # of a module's name; published ones have up to 8


@dataclass(frozen=True)
class QuantizationConfig:
    form: str | None  # FP8, AWQ, GPTQ, PACKED: how a weight is stored; None: no weight is quantised
    block: tuple[int, int] | None = None  # FP8: rows and columns that share a scale; None: a whole tensor, or a row
    group_size: int | None = None  # 4 bits: inputs that share a scale; None: all
    symmetric: bool = False  # 4 bits: every zero is 8
    stored_zeros_are_less: bool = False  # GPTQ: the file has zero - 1
    plain: frozenset[str] = field(default=frozenset(), repr=False)  # modules that are not quantised, or parts of names
    act_order: bool = False  # 4 bits: a tensor says which input is in which group

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> QuantizationConfig | None:
        """None: config.json says nothing about quantised weights."""
        found = next((config[name] for name in NAMES if config.get(name)), None)
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise ModelError(f"config.json: {NAMES[0]}={found!r} must be an object")
        try:
            return cls._read(found)
        except ModelError as error:
            raise ModelError(f"{found.get(SOURCE) or 'config.json: quantization_config'}: {error}") from None

    @staticmethod
    def _read(found: Mapping[str, Any]) -> QuantizationConfig:
        readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
        method = found.get("quant_method")
        if not isinstance(method, str) or method not in readers:
            raise _refusal("quant_method", method, SUPPORTED)
        return replace(readers[method](found), plain=_plain_modules(found))

    def contradicted_by(self, module: str) -> str | None:
        """The entry by which this module is not quantised. In whole words: "mlp.gate" is no part of "mlp.gate_proj",
        though Hugging Face's search for substrings finds it there."""
        words = module.split(".")[:MAX_WORDS]
        ends = range(1, len(words) + 1)
        parts = (".".join(words[start:end]) for end in ends for start in range(end))
        return next((part for part in parts if part in self.plain), None)


def _refusal(name: str, value: object, has: str) -> ModelError:
    return ModelError(f"{name}={value!r} is not supported: this engine reads {has}; {REMEDY}")


def _choice(config: Mapping[str, Any], name: str, known: tuple[str, ...], default: str | None) -> str:
    """In lower case, as AutoAWQ's "GEMM" has to be read."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, str) or value.lower() not in known:
        raise _refusal(name, value, " or ".join(known))
    return value.lower()


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise ModelError(f"{name}={value!r} must be an integer in [1, {MAX_SIZE}]")
    return value


def _group_size(config: Mapping[str, Any], default: int | None) -> int | None:
    value = default if config.get("group_size") is None else config["group_size"]
    return None if value is None or (value == -1 and type(value) is int) else _size("group_size", value)


def _block(name: str, value: object) -> tuple[int, int]:
    """[rows, columns], or "128x128", as compressed-tensors may write it."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,7}x[0-9]{1,7}", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise ModelError(f"{name}={value!r} must be two integers")
    return _size(name, value[0]), _size(name, value[1])


def _boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ModelError(f"{name}={value!r} must be true or false")
    return value


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """{} if absent."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{name}={value!r} must be an object")
    return value


def _names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = config.get(name) or []
    if not isinstance(value, list) or len(value) > MAX_LIST or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{name} must be a list of module names")
    return tuple(value)


def _plain_modules(config: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(entry for name in LISTS for entry in _names(config, name) if not entry.startswith("re:"))


def _four_bits(config: Mapping[str, Any], name: str, what: str) -> None:
    if type(config.get(name)) is not int or config[name] != 4:
        raise _refusal(name, config.get(name), f"{what} in 4 bits")


def _fp8(config: Mapping[str, Any]) -> QuantizationConfig:
    _choice(config, "fmt", ("e4m3",), "e4m3")
    block = config.get("weight_block_size")
    return QuantizationConfig(FP8, None if block is None else _block("weight_block_size", block))


def _awq(config: Mapping[str, Any]) -> QuantizationConfig:
    """Other versions (gemv, gemv_fast, marlin, exllama) store the same numbers in another order."""
    _four_bits(config, "bits", "AWQ")
    for name in ("version", "format", "checkpoint_format"):  # the others in files of later tools
        _choice(config, name, ("gemm",), "gemm")
    _boolean(config, "zero_point", True)  # with or without: the file has qzeros
    return QuantizationConfig(AWQ, group_size=_group_size(config, 128))


def _gptq(config: Mapping[str, Any]) -> QuantizationConfig:
    _four_bits(config, "bits", "GPTQ")
    names = [name for name in ("format", "checkpoint_format") if config.get(name) is not None]
    found = {name: _choice(config, name, ("gptq", "gptq_v2"), None) for name in names}
    if len(set(found.values())) > 1:
        what = " contradicts ".join(f"{name}={value!r}" for name, value in found.items())
        raise ModelError(
            f"{what}: gptq_v2 stores zeros as they are, gptq one less; take out the wrong one, or {REMEDY}"
        )
    if _boolean(config, "is_marlin_format", False):
        raise _refusal("is_marlin_format", True, "checkpoint_format gptq or gptq_v2")
    for pattern, other in _object(config, "dynamic").items():  # of GPTQModel; "-:" is a module that is not quantised
        if not pattern.startswith("-:") and other:
            raise _refusal("dynamic", {pattern: other}, "one scheme for all modules")
    return QuantizationConfig(
        GPTQ,
        group_size=_group_size(config, 128),
        symmetric=_boolean(config, "sym", True),
        act_order=_boolean(config, "desc_act", False),
        stored_zeros_are_less="gptq_v2" not in found.values(),
    )


def _act_order(weights: Mapping[str, Any]) -> bool:
    """`true` is an old spelling of "group"."""
    value = weights.get("actorder")
    if value is None or isinstance(value, bool):
        return bool(value)
    return ORDERS[_choice(weights, "actorder", tuple(ORDERS), None)]


def _compressed(config: Mapping[str, Any]) -> QuantizationConfig:
    if _object(config, "transform_config"):
        raise _refusal("transform_config", dict(config["transform_config"]), "weights without rotations")
    _choice(_object(config, "sparsity_config"), "format", ("dense",), "dense")
    schemes = []
    for name, group in _object(config, "config_groups").items():
        if not isinstance(group, Mapping):
            raise ModelError(f"config_groups: {name}={group!r} must be an object")
        _names(group, "targets")
        if weights := _object(group, "weights"):
            schemes.append(_scheme(weights, group.get("format") or config.get("format")))
    if any(scheme != schemes[0] for scheme in schemes):
        raise _refusal("config_groups", list(config["config_groups"]), "one scheme for all weights")
    return schemes[0] if schemes else QuantizationConfig(None)  # none: only a KV cache, or activations


def _scheme(weights: Mapping[str, Any], form: object) -> QuantizationConfig:
    known = ("float-quantized", "naive-quantized", PACKED)
    form = _choice({"format": form}, "format", known, None)
    kind = _choice(weights, "type", ("int",) if form == PACKED else ("float",), "int")
    strategy = _choice(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    if _boolean(weights, "dynamic", False):
        raise _refusal("dynamic", True, "weights with scales that are in the file")
    group_size = _group_size(weights, None) if strategy == "group" else None
    act_order = strategy == "group" and _act_order(weights)
    symmetric = _boolean(weights, "symmetric", True)
    if kind == "int":
        _four_bits(weights, "num_bits", "compressed-tensors of integers")
        if strategy in ("tensor", "block"):
            raise _refusal("strategy", strategy, "4 bits by group or channel")
        return QuantizationConfig(PACKED, group_size=group_size, symmetric=symmetric, act_order=act_order)
    if act_order:
        raise _refusal("actorder", weights["actorder"], "8-bit floats with inputs in the order of the model")
    if type(weights.get("num_bits")) is not int or weights["num_bits"] != 8 or not symmetric:
        what = {name: weights.get(name) for name in ("num_bits", "symmetric")}
        raise _refusal("weights", what, "floats of 8 bits without a zero")
    if strategy == "block":
        return QuantizationConfig(FP8, _block("block_structure", weights.get("block_structure")))
    return QuantizationConfig(FP8, None if group_size is None else (1, group_size))

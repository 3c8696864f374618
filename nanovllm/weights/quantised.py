"""The quantised weights of a model folder: which of its tensors make which weight.

    config.json    of a weight x.weight the files have
    fp8            x.weight (F8_E4M3), x.weight_scale or x.weight_scale_inv         fp8.py
    awq, gptq      x.qweight, x.qzeros, x.scales (and x.g_idx)                      four_bits.py
    pack-quantized x.weight_packed, x.weight_scale, x.weight_shape, ...             four_bits.py

Names and shapes are checked for all weights before the first is read. Scales of activations are not used: the engine
computes in 16 or 32 bits. Those of a KV cache are, where it is one of 8-bit floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from nanovllm.errors import ModelError
from nanovllm.quantization_config import FP8, REMEDY, QuantizationConfig
from nanovllm.weights import four_bits, fp8
from nanovllm.weights.four_bits import FourBitWeight, Grouped
from nanovllm.weights.fp8 import Fp8Blocks, Fp8Weight
from nanovllm.weights.shards import Shards

PackedNumbers = Grouped | Fp8Blocks
QuantisedWeight = FourBitWeight | Fp8Weight
UNUSED = frozenset(
    f"{of}_{what}"
    for of in ("input", "output", "act", "activation", "q", "k", "v", "kv", "prob")
    for what in ("scale", "zero_point")
)
# self_attn.k_scale (compressed-tensors), self_attn.attn.k_scale (vLLM), self_attn.k_proj.k_scale (ModelOpt), and
# self_attn.kv_scale for both (AutoFP8)
KV_SCALE = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:\w+\.)?(k|v|kv)_scale$")


class QuantisedWeights(Mapping[str, QuantisedWeight]):
    """By their names in Hugging Face's plain form, x.weight."""

    def __init__(self, config: QuantizationConfig | None, stored: Shards) -> None:
        self._stored = stored
        self._weights: dict[str, QuantisedWeight] = {}
        self._parts: set[str] = set()  # tensors that are no weights of their own
        self.unused: list[str] = []
        if config is None:
            return
        form = None if config.form is None else four_bits.FORMATS.get(config.form)
        main, parts = ("weight", fp8.SCALES) if form is None else (form.words, tuple(form.dims))
        for name in stored.names() if config.form is not None else ():
            module, _, last = name.rpartition(".")
            if last == main and (form is not None or stored.dtype(name) == "F8_E4M3"):
                self._weights[f"{module}.weight"] = self._find(config, module)
            elif last in parts:
                self._check_part(name, f"{module}.{main}")
            if last in parts:
                self._parts.add(name)
        self.unused += [name for name in stored.names() if name.rpartition(".")[2] in UNUSED]

    def _find(self, config: QuantizationConfig, module: str) -> QuantisedWeight:
        name, path = f"{module}.weight", self._stored.path
        if entry := config.contradicted_by(module):
            raise ModelError(
                f"{path}: {module} is quantised in the file, but config.json lists {entry!r} among the modules that "
                "are not; take it out of the list, or get the model again."
            )
        if config.form == FP8:
            return Fp8Weight(self._stored, name, config.block)
        if name in self._stored:
            raise ModelError(f"{path}: {name} is there twice, quantised and as numbers; get the model again.")
        return FourBitWeight(self._stored, module, config)

    def _check_part(self, name: str, main: str) -> None:
        path = self._stored.path
        if main not in self._stored:
            raise ModelError(f"{path}: {name} belongs to {main}, which is not there; get the model again.")
        if main.endswith(".weight") and (dtype := self._stored.dtype(main)) != "F8_E4M3":
            if dtype.startswith("F8_"):  # as it was published
                what = f"which is {dtype}: of 8-bit floats this engine reads F8_E4M3; {REMEDY}"
                raise ModelError(f"{path}: {name} belongs to {main}, {what}.")
            raise ModelError(f"{path}: {name} belongs to {main}, which is {dtype}, not F8_E4M3; get the model again.")

    def names(self) -> list[str]:
        """Of all tensors of the model, quantised or not."""
        left_out = self._parts.union(self.unused, self._weights)
        plain = [name for name in self._stored.names() if name not in left_out]
        return [*plain, *self._weights]

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Layers that have both. Of scales by head the largest, with which all heads fit."""
        found: dict[tuple[int, str], float] = {}
        for name in self.unused:
            if match := KV_SCALE.search(name):
                scale = float(self._stored.read(name).float().max())
                if scale > 0 and math.isfinite(scale):
                    found.update({(int(match[1]), of): scale for of in match[2]})
        layers = sorted({layer for layer, of in found if of == "k"} & {layer for layer, of in found if of == "v"})
        return {layer: (found[layer, "k"], found[layer, "v"]) for layer in layers}

    def __getitem__(self, name: str) -> QuantisedWeight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

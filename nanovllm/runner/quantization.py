"""Whether the matrices of a model are computed in quantised form (EngineConfig.quantization), in which dtype its KV
cache is (kv_cache_dtype), and why not."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import replace
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.hardware.parallel import MAX_RANKS, Parallel
from nanovllm.layers.integers import IntegerForm
from nanovllm.layers.scaled import Scales
from nanovllm.layers.scaled_attention import ScaledAttention
from nanovllm.lowrank.folder import DISABLE
from nanovllm.model_config import ModelConfig
from nanovllm.ops.fp8 import BLOCK
from nanovllm.ops.integers import stored_group
from nanovllm.ops.kv_cache import E4M3
from nanovllm.ops.native.build import load_library
from nanovllm.ops.opset import Ops
from nanovllm.quantization_config import AWQ, FP8, GPTQ, PACKED, QuantizationConfig
from nanovllm.weights.checkpoint import EXPERT, EXPERT_DOWN, Checkpoint, has_experts_in
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers
from nanovllm.weights.four_bits import FORMATS
from nanovllm.weights.fp8 import Fp8Weight
from nanovllm.weights.quantised import KV_SCALE

logger = logging.getLogger("nanovllm")
FP8_FORM = Fp8Weight.form
FOUR_BITS = (AWQ, GPTQ, PACKED)
INTEGERS = {"int4": 4, "int8": 8}  # quantization= -> bits
TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # stay in 16 bits on a GPU
FP8_NAMES = ("fp8", "fp8_e4m3")  # vLLM's, for the same


def choose_scales(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, is_gpu: bool, low_rank: bool = False
) -> Scales | IntegerForm | None:
    """Of matrices in fewer bits on a GPU; None: they are not. `low_rank`: the model runs with low-rank experts."""
    given = (config, model, checkpoint, is_gpu)
    return _choose_floats(*given, low_rank) or _choose_integers(*given, low_rank)


def _choose_integers(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, is_gpu: bool, low_rank: bool
) -> IntegerForm | None:
    wanted = config.quantization
    if not is_gpu or wanted not in ("auto", *INTEGERS):
        return None
    why = why_not_integers()
    if wanted in INTEGERS:
        if low_rank:
            why = f"low-rank experts are kept in 16 bits; set {DISABLE}=1 for the model's own"
        if why:
            raise ConfigError(f"quantization={wanted!r}: {why}, or leave quantization out")
        return IntegerForm(INTEGERS[wanted], quantises=True, experts=_alike(model, INTEGERS[wanted], 32))
    if why:
        return None
    stored, is_dummy = QuantizationConfig.from_hf(checkpoint.config), config.load_format == "dummy"
    if stored is not None and stored.form in FOUR_BITS:
        has_files = bool(checkpoint.packed_forms())
        if not is_dummy and checkpoint.names() and not has_files:
            return None
        # Of config.json alone (`nanovllm plan`, dummy weights) all experts are taken to be in the form that it names.
        fits = not low_rank and not stored.act_order
        fits = fits and (not has_files or has_experts_in(checkpoint, FORMATS[stored.form].label))
        experts = _alike(model, 4, stored.group_size) if fits else None
        return IntegerForm(4, stored.group_size, quantises=is_dummy, experts=experts)
    types = {name: kind for name, kind in checkpoint.quantised_types().items() if name not in TABLES}
    if is_dummy or stored is not None or not types:
        return None
    form = IntegerForm.of_gguf(
        [kind for name, kind in types.items() if not EXPERT.search(name)] or list(types.values())
    )
    return replace(form, experts=None if low_rank else _experts_of_gguf(model, checkpoint, types))


def _alike(model: ModelConfig, bits: int, group: int | None) -> ExpertIntegers | None:
    """Gate, up and down in the same form; None: the model has no experts, or rows that are no multiple of 32."""
    if model.moe is None or model.hidden_size % 32 or model.moe.intermediate_size % 32:
        return None
    sizes = (model.hidden_size, model.moe.intermediate_size)
    forms = [(bits, stored_group(group or columns, columns, bits)) for columns in sizes]
    return ExpertIntegers(*forms)


def _experts_of_gguf(model: ModelConfig, checkpoint: Checkpoint, types: dict[str, str]) -> ExpertIntegers | None:
    """One form for all layers: the most bits and the smallest groups that any has. None: some are not quantised."""
    if model.moe is None:
        return None
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for name in checkpoint.names():
        if EXPERT.search(name):
            if name not in types:
                return None
            found[EXPERT_DOWN.search(name) is not None].add(types[name])
    forms = []
    for is_down in (False, True):
        each = [IntegerForm.of_gguf([kind]) for kind in found[is_down]]
        if not each:
            return None
        forms.append((max(form.bits for form in each), min(form.group or 32 for form in each)))
    return ExpertIntegers(*forms)


def why_not_integers() -> str:
    """On a GPU, with the remedy; empty: products with integers of 4 and 8 bits can be computed."""
    if importlib.util.find_spec("triton") is None:
        return "products with integers of 4 and 8 bits need triton (pip install triton)"
    return ""


def _choose_floats(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, is_gpu: bool, low_rank: bool
) -> Scales | None:
    """None: matrices are not in 8-bit floats."""
    wanted, forms = config.quantization, set(checkpoint.packed_forms().values())
    stored, is_dummy = QuantizationConfig.from_hf(checkpoint.config), config.load_format == "dummy"
    # Of config.json alone (`nanovllm plan`, dummy weights) all matrices are taken to be in the form that it names.
    is_estimate = is_dummy or not checkpoint.names()
    if is_estimate:
        forms = {FP8_FORM} if stored is not None and stored.form == FP8 else set()
    if wanted == "fp8":
        why = why_not_fp8(is_gpu)
        if low_rank:
            why = f"low-rank experts are kept in 16 bits; set {DISABLE}=1 for the model's own"
        if why:
            raise ConfigError(f"quantization='fp8': {why}, or leave quantization out")
    elif wanted != "auto" or forms != {FP8_FORM} or why_not_fp8(is_gpu):
        return None
    blocks = None if stored is None or forms != {FP8_FORM} else stored.block
    has_product = blocks in (None, (BLOCK, BLOCK))
    if wanted == "auto" and not has_product:
        return None
    block = BLOCK if blocks and has_product else 0
    quantises = is_dummy or (wanted == "fp8" and not block)
    has_experts = model.moe is not None and not low_rank
    fits = quantises or is_estimate or has_experts_in(checkpoint, FP8_FORM)
    return Scales(block, quantises, experts=has_experts and fits)


def scaled_facts(scales: Scales | IntegerForm | None) -> dict[str, Any]:
    """What ModelFacts are to know of them."""
    if isinstance(scales, IntegerForm):
        bits, group = (16, 1) if scales.experts is None else scales.experts.gate_up
        factor = 16 / (bits + 32 / group) if scales.experts is not None and scales.quantises else 1.0
        return {"quantization": scales.name, "expert_integers": scales.experts, "disk_factor": factor}
    if scales is None:
        return {}
    experts, factor = scales.block if scales.experts else None, 2.0 if scales.experts and scales.quantises else 1.0
    return {"quantization": "fp8", "expert_scales": experts, "disk_factor": factor}


def report_experts(scales: Scales | IntegerForm, model: ModelConfig, parallel: Parallel) -> None:
    """Why experts of a file in fewer bits are expanded, where they are."""
    if model.moe is None:
        return
    size, ranks = model.moe.intermediate_size, parallel.ranks_per_expert
    if not scales.experts:
        what = "8-bit floats" if isinstance(scales, Scales) else "integers, with inputs in their order"
        logger.info("experts are expanded: the file does not have all of them in %s", what)
        return
    integers = scales.experts if isinstance(scales, IntegerForm) else None
    form = ExpertForm.dense(model.hidden_size, size, scales.block if isinstance(scales, Scales) else None, integers)
    if not form.share(ranks).is_bytes:
        what = f"cut blocks of {form.scale_block} rows of an intermediate size of {size}"
        if integers is not None:
            what = f"cut an intermediate size of {size} within 32 inputs"
        good = [n for n in range(1, MAX_RANKS + 1) if size % n == 0 and form.share(n).is_bytes]
        logger.warning("experts are expanded: %d ranks %s; numbers of ranks that keep them: %s", ranks, what, good)


def why_not_fp8(is_gpu: bool) -> str:
    """With the remedy; empty: products with weights in 8-bit floats can be computed."""
    if not is_gpu:
        return "8-bit floats are computed on a GPU; on a CPU set quantization='int8'"
    if importlib.util.find_spec("triton") is None:
        return "products with 8-bit floats need triton (pip install triton)"
    return ""


def choose_packing(config: EngineConfig, checkpoint: Checkpoint, is_gpu: bool, ops: Ops) -> str | None:
    """None: numbers of `dtype`, as in a safetensors file. Else what layers/packed.py:Packing takes."""
    wanted = config.quantization
    if wanted in ("none", "fp8") or is_gpu:
        return None
    why = why_not_quantised(ops)
    if config.enable_eplb:  # on a GPU they move as blocks
        why = why or "on a CPU experts move between ranks as numbers of dtype; leave enable_eplb out"
    if wanted != "auto":
        if why:
            raise ConfigError(f"quantization={wanted!r}: {why}, or leave quantization out")
        return wanted
    if config.load_format == "dummy" or not checkpoint.quantised_types():
        return None
    if why:
        logger.warning("%s: its weights are expanded, which is slower: %s", checkpoint.path, why)
    return None if why else "auto"


def report_stored(
    checkpoint: Checkpoint,
    packing: str | None,
    scales: Scales | IntegerForm | None,
    dtype: torch.dtype,
    uses_kv_scales: bool,
) -> None:
    """What of a quantised file is not computed as it is stored."""
    forms = checkpoint.packed_forms() or checkpoint.quantised_types()
    if forms and scales is not None and _rounds_again(scales, checkpoint):
        text = "quantization=%r rounds weights again that the file has in %s; 'auto' rounds nothing"
        wanted = f"int{scales.bits}" if isinstance(scales, IntegerForm) else scales.name
        logger.warning(text, wanted, ", ".join(sorted(set(forms.values()))))
    if scales is not None:
        forms = {name: kind for name, kind in checkpoint.quantised_types().items() if name in TABLES}
    if forms and packing is None:
        size = sum(math.prod(checkpoint.shape(name)) for name in forms) * dtype.itemsize / 1e9
        form, what = ", ".join(sorted(set(forms.values()))), str(dtype).removeprefix("torch.")
        text = "%d matrices stored as %s are expanded to %s: %.2f GB in memory, of all ranks together"
        logger.info(text, len(forms), form, what, size)
    if unused := [name for name in checkpoint.unused() if not (uses_kv_scales and KV_SCALE.search(name))]:
        logger.info("%d scales of activations or of a KV cache are not used: %s, ...", len(unused), unused[0])


def _rounds_again(scales: Scales | IntegerForm, checkpoint: Checkpoint) -> bool:
    """Weights that the file has in fewer bits. Scales of a tensor or of rows stay as they are."""
    stored = QuantizationConfig.from_hf(checkpoint.config)
    stays = isinstance(scales, Scales) and stored is not None and stored.form == FP8 and stored.block is None
    return scales.quantises and not stays


def why_not_quantised(ops: Ops) -> str:
    """On a CPU, with the remedy; empty: quantised products can be computed."""
    if ops.quantised:
        return ""
    library = load_library()
    if isinstance(library, str):
        return f"products with quantised weights need compiled C code: {library}"
    return "products with quantised weights compute in float32; leave dtype out"


def load_kv_scales(layers: list[ScaledAttention], checkpoint: Checkpoint) -> None:
    """Of a KV cache in 8-bit floats, where the checkpoint has them for all layers."""
    found = checkpoint.kv_scales() if layers else {}
    if all(layer in found for layer in range(len(layers))):
        for attention, (k, v) in zip(layers, found.values()):
            attention.scales.copy_(torch.tensor([k, v]))
            attention.from_checkpoint = True


def choose_kv_dtype(config: EngineConfig, model: ModelConfig, is_gpu: bool, dtype: torch.dtype) -> torch.dtype | None:
    """None: the model's."""
    wanted = config.kv_cache_dtype
    if wanted == "auto":
        return None
    if why := _why_not_kv_dtype(config, model, is_gpu, dtype):
        raise ConfigError(f"kv_cache_dtype={wanted!r}: {why}, or set kv_cache_dtype='auto'")
    return E4M3 if wanted in FP8_NAMES else getattr(torch, wanted)


def _why_not_kv_dtype(config: EngineConfig, model: ModelConfig, is_gpu: bool, dtype: torch.dtype) -> str:
    """With the remedy; empty: the kernels write and read it, ops/native/kernels.c or those in ops/triton/."""
    if model.mla is not None:
        return "latent attention (DeepSeek) caches a vector a token in the model's dtype; use another model"
    reader, is_fp8 = "triton" if is_gpu else "native", config.kv_cache_dtype in FP8_NAMES
    if is_gpu and not is_fp8:
        return "a KV cache of these numbers is for CPUs; set device='cpu', or on a GPU kv_cache_dtype='fp8'"
    if is_fp8 and not is_gpu:
        return "a KV cache in 8-bit floats is for GPUs; on a CPU set kv_cache_dtype='float16' or 'int8'"
    if not is_gpu and dtype != torch.float32:
        return f"attention that reads it computes in float32, not {str(dtype)[6:]}; leave dtype out"
    if config.attn_backend not in ("auto", reader):
        return f"attn_backend={config.attn_backend!r} does not read it, {reader!r} does; leave attn_backend out"
    if is_gpu:
        return "" if importlib.util.find_spec("triton") else "it needs triton: pip install triton"
    library = load_library()
    return f"it needs compiled C code: {library}" if isinstance(library, str) else ""

"""ModelConfig: the facts of a model, read from config.json (or a GGUF's metadata put into the same shape).

Every integer that determines a size in memory is checked here, because a config file is untrusted input. How a family
differs from Llama (biases, q/k norm) is in its file under models/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# Largest sane values. Published models: theta up to 4e9, contexts stretched up to 512 times.
MAX_THETA, MAX_NUMBER = 1e15, 2.0**20
ROPE_NUMBERS = {
    "factor": MAX_NUMBER,
    "original_max_position_embeddings": 2**31 - 1,
    "low_freq_factor": MAX_NUMBER,
    "high_freq_factor": MAX_NUMBER,
    "beta_fast": MAX_NUMBER,
    "beta_slow": MAX_NUMBER,
    "attention_factor": MAX_NUMBER,
}
MAX_EXPERTS = 2**12  # a layer; the largest published models have some hundreds
# Defaults of transformers' config classes, for keys that a file does not have.
DEFAULTS: dict[str, Any] = {
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "sliding_window": None,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "MixtralForCausalLM": {"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3MoeForCausalLM": {"max_position_embeddings": 32768},
}


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None, high: int = 2**31 - 1) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {name!r}: is this a causal language model in Hugging Face format?")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"config.json: {name}={value!r} must be an integer in [1, {high}]")
    return value


def positive_float(
    config: Mapping[str, Any], name: str, default: float | None = None, low: float = 0.0, high: float = MAX_NUMBER
) -> float:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ModelError(f"config.json: {name}={value!r} must be a number above {low:g} and at most {high:g}")
    return float(value)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, kind, and the parameters of that kind (names as in the checkpoint)."""

    theta: float
    kind: str
    params: Mapping[str, Any]
    rotary_dim: int

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], head_dim: int, default_theta: float = DEFAULTS["rope_theta"]
    ) -> RopeConfig:
        # transformers 5 writes rope_parameters = {rope_theta, rope_type, ...}; earlier files have rope_theta beside an
        # optional rope_scaling. In a file with both, rope_scaling replaces all of rope_parameters, as in transformers.
        nested = config.get("rope_parameters")
        scaling = config.get("rope_scaling")
        for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
            if value is not None and not isinstance(value, Mapping):
                raise ModelError(f"config.json: {name}={value!r} must be an object or null")
        params = {key: value for key, value in (scaling or nested or {}).items() if value is not None}
        kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
        params.pop("type", None)
        if any(isinstance(value, Mapping) for value in params.values()):
            raise ModelError("config.json: rope_parameters per layer type are not supported")
        if kind not in ROPE_TYPES:
            raise ModelError(f"RoPE type {kind!r} is not supported: this engine has {', '.join(ROPE_TYPES)}")
        params.setdefault("rope_theta", config.get("rope_theta"))
        theta = positive_float(params, "rope_theta", default_theta, low=1.0, high=MAX_THETA)
        partial = params.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        partial = positive_float({"partial_rotary_factor": partial}, "partial_rotary_factor", 1.0)
        rotary_dim, smallest = int(head_dim * partial), 4 if kind == "dynamic" else 2
        if rotary_dim % 2 or not smallest <= rotary_dim <= head_dim:
            raise ModelError(
                f"config.json: rotary dimension {rotary_dim} must be even, at least {smallest} for RoPE type {kind!r}, "
                f"and at most head_dim={head_dim}"
            )
        for name, high in ROPE_NUMBERS.items():
            if name in params or (name == "factor" and kind != "default"):
                positive_float(params, name, low=1 / MAX_NUMBER, high=high)
        return cls(theta, kind, params, rotary_dim)


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers: a router chooses `top_k` of `num_experts` gated MLPs for every token."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert; ModelConfig.intermediate_size is that of dense layers
    renormalise: bool  # whether the chosen experts' probabilities are divided by their sum
    layers: tuple[bool, ...]  # which layers are sparse

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], architecture: str, num_layers: int) -> MoeConfig | None:
        """None for a model without experts."""
        if architecture == "MixtralForCausalLM":
            size_name, renormalise, layers = "intermediate_size", True, (True,) * num_layers
        elif architecture == "Qwen3MoeForCausalLM":
            size_name, renormalise = "moe_intermediate_size", config.get("norm_topk_prob") or False
            layers = _qwen3_moe_layers(config, num_layers)
        else:
            return None
        if not isinstance(renormalise, bool):
            raise ModelError(f"config.json: norm_topk_prob={renormalise!r} must be true or false")
        num_experts = _num_experts(config)
        top_k = positive_int(config, "num_experts_per_tok", high=MAX_EXPERTS)
        if top_k > num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok={top_k} must be at most the number of experts, {num_experts}"
            )
        if config.get("shared_expert_intermediate_size"):
            raise ModelError(
                f"config.json: shared_expert_intermediate_size={config['shared_expert_intermediate_size']!r}: shared "
                "experts (Qwen2-MoE) are not supported; use a Mixtral or Qwen3-MoE model"
            )
        size = positive_int(config, size_name, high=2**22)
        return cls(num_experts, top_k, size, renormalise, layers) if any(layers) else None


def _num_experts(config: Mapping[str, Any]) -> int:
    """Mixtral's files have num_local_experts, Qwen's num_experts; transformers 5 writes the first for both."""
    found = {name: config[name] for name in ("num_local_experts", "num_experts") if config.get(name) is not None}
    if len(found) == 2 and found["num_local_experts"] != found["num_experts"]:
        raise ModelError(f"config.json: num_local_experts and num_experts disagree ({found}); keep the right one")
    return positive_int(config, next(iter(found), "num_local_experts"), high=MAX_EXPERTS)


def _qwen3_moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer is sparse, unless mlp_only_layers names it."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r} must be a list of layer numbers")
    if any(not 0 <= i < num_layers for i in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r} must lie in [0, {num_layers - 1}]")
    every = positive_int(config, "decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers))


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str  # what the checkpoint was saved in
    sliding_window: int | None  # None = every layer attends to the whole context
    windowed_layers: tuple[bool, ...]  # which layers the window applies to
    eos_token_ids: tuple[int, ...]
    hf: Mapping[str, Any]  # the whole file, for what only one family reads
    moe: MoeConfig | None = None  # None = every layer is dense

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
            raise ModelError(f"config.json: architectures={architectures!r} must name exactly one model class")
        defaults = {**DEFAULTS, **FAMILY_DEFAULTS.get(architectures[0], {})}
        _refuse_quantised(config)
        num_heads = positive_int(config, "num_attention_heads", high=4096)
        hidden_size = positive_int(config, "hidden_size", high=2**20)
        head_dim = positive_int(config, "head_dim", hidden_size // num_heads, high=1024)
        num_kv_heads = positive_int(config, "num_key_value_heads", num_heads, high=4096)
        if num_heads % num_kv_heads:
            raise ModelError(f"config.json: {num_heads} attention heads do not divide over {num_kv_heads} KV heads")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act={config['hidden_act']!r} is not supported (silu is)")
        num_layers = positive_int(config, "num_hidden_layers", high=4096)
        vocab_size = positive_int(config, "vocab_size", high=2**24)
        window, windowed = _sliding_window({"sliding_window": defaults["sliding_window"], **config}, num_layers)
        tied = config.get("tie_word_embeddings") or False
        if not isinstance(tied, bool):
            raise ModelError(f"config.json: tie_word_embeddings={tied!r} must be true or false")
        return cls(
            architecture=architectures[0],
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size", high=2**22),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_float(config, "rms_norm_eps", defaults["rms_norm_eps"], high=1.0),
            max_position_embeddings=positive_int(
                config, "max_position_embeddings", defaults["max_position_embeddings"]
            ),
            rope=RopeConfig.from_hf(config, head_dim, defaults["rope_theta"]),
            tie_word_embeddings=tied,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            sliding_window=window,
            windowed_layers=windowed,
            eos_token_ids=_eos_token_ids(config, generation_config or {}, vocab_size),
            hf=config,
            moe=MoeConfig.from_hf(config, architectures[0], num_layers),
        )


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):  # the second is compressed-tensors' old name for it
        if found := config.get(name):
            method = found.get("quant_method") if isinstance(found, Mapping) else found
            raise ModelError(
                f"config.json: {name}: the weights are quantised (quant_method={method!r}), which this engine does not "
                "compute; get the 16-bit safetensors of the model, or a GGUF file"
            )


def _sliding_window(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Mistral windows every layer; Qwen switches it with use_sliding_window and names the layers in layer_types."""
    window, architecture = config["sliding_window"], config["architectures"][0]
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        known = ("full_attention", "sliding_attention")
        if len(layer_types) != num_layers or any(kind not in known for kind in layer_types):
            raise ModelError(f"config.json: layer_types={layer_types!r} does not fit {num_layers} attention layers")
        windowed = tuple(kind == "sliding_attention" for kind in layer_types)
    elif architecture == "LlamaForCausalLM":  # never had a window; files that were made from Mistral's may name one
        windowed = (False,) * num_layers
    elif architecture == "Qwen3MoeForCausalLM":  # has no max_window_layers: all layers or none
        windowed = (bool(config.get("use_sliding_window")),) * num_layers
    elif architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = positive_int(config, "max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
        windowed = tuple(bool(config.get("use_sliding_window")) and i >= first for i in range(num_layers))
    else:
        windowed = (window is not None,) * num_layers
    if not any(windowed) or window is None:
        return None, (False,) * num_layers
    return positive_int(config, "sliding_window"), windowed


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Those of generation_config come first: chat models end a turn with another token than a document. Ids outside the
    vocabulary are dropped: they can never be sampled."""
    ids: list[int] = []
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                continue
            if 0 <= token < vocab_size and token not in ids:
                ids.append(token)
    return tuple(ids)

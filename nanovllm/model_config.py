"""ModelConfig: the facts of a model, read from config.json (or a GGUF's metadata put into the same shape).

Every integer that determines a size in memory is checked here, because a config file is untrusted input. How a family
differs from Llama (biases, q/k norm) is in its file under models/.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.errors import ModelError
from nanovllm.quantization_config import QuantizationConfig

logger = logging.getLogger("nanovllm")

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
    "DeepseekV3ForCausalLM": {"max_position_embeddings": 4096},
}
MTP_NAMES = ("num_nextn_predict_layers", "num_mtp_layers")  # the second in files of transformers
DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
# (scoring_func, topk_method) of DeepSeek's routers -> whether experts are limited to the best groups
DEEPSEEK_ROUTERS = {
    ("softmax", "greedy"): False,
    ("softmax", "group_limited_greedy"): True,
    ("sigmoid", "noaux_tc"): True,
}


def positive_int(
    config: Mapping[str, Any], name: str, default: int | None = None, high: int = 2**31 - 1, low: int = 1
) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {name!r}: is this a causal language model in Hugging Face format?")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"config.json: {name}={value!r} must be an integer in [{low}, {high}]")
    return value


def count(config: Mapping[str, Any], name: str, high: int) -> int:
    """Absent means none."""
    return positive_int(config, name, 0, high, low=0)


def positive_float(
    config: Mapping[str, Any], name: str, default: float | None = None, low: float = 0.0, high: float = MAX_NUMBER
) -> float:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise ModelError(f"config.json: {name}={value!r} must be a number above {low:g} and at most {high:g}")
    return float(value)


def boolean(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name}={value!r} must be true or false")
    return value


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, kind, and the parameters of that kind (names as in the checkpoint)."""

    theta: float
    kind: str
    params: Mapping[str, Any]
    rotary_dim: int

    @property
    def score_factor(self) -> float:
        """What DeepSeek multiplies attention scores by when YaRN stretches the context: m^2, where q and k of other
        families are multiplied by m each (layers/rotary.py)."""
        if self.kind == "default" or not self.params.get("mscale_all_dim"):
            return 1.0
        stretch = positive_float(self.params, "factor")
        return sharpen(stretch, positive_float(self.params, "mscale_all_dim")) ** 2

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


def sharpen(factor: float, mscale: float) -> float:
    """YaRN's m: how much larger q and k are made when the context is stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are computed from one vector a token."""

    q_rank: int | None  # size of the vector that queries are computed from; None = from the hidden state itself
    kv_rank: int
    nope_dim: int  # of a head's q and k: the part without a position
    rope_dim: int  # and the part that is rotated; of k it is the same for all heads
    v_dim: int
    interleaved: bool  # RoPE turns pairs (0, 1), (2, 3), ... and not (0, n / 2), (1, n / 2 + 1), ...

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], architecture: str, num_heads: int) -> MlaConfig | None:
        if architecture not in DEEPSEEK:
            return None
        if positive_int(config, "num_key_value_heads", num_heads) != num_heads:
            raise ModelError(
                f"config.json: num_key_value_heads={config['num_key_value_heads']!r} must be num_attention_heads="
                f"{num_heads}: latent attention has one key and value for each head"
            )
        for name in ("attention_bias", "mlp_bias"):
            if boolean(config, name):
                raise ModelError(f"config.json: {name}=True is not supported for {architecture} (no published one has)")
        q_rank = None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank", high=2**20)
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        kv_rank, nope, rope, v = (positive_int(config, name, high=2**16) for name in names)
        interleaved = architecture == DEEPSEEK[0] or boolean(config, "rope_interleave", True)
        return cls(q_rank, kv_rank, nope, rope, v, interleaved)

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_size(self) -> int:
        """Numbers that are cached for a token, whatever the number of heads."""
        return self.kv_rank + self.rope_dim

    def expanded_size(self, num_heads: int) -> int:
        """Numbers that keys and values of a token would take."""
        return num_heads * (self.head_dim + self.v_dim)


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers: a router chooses `top_k` of `num_experts` gated MLPs for every token."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert; ModelConfig.intermediate_size is that of dense layers
    renormalise: bool  # whether the chosen experts' probabilities are divided by their sum
    layers: tuple[bool, ...]  # which layers are sparse
    scoring: str = "softmax"  # or "sigmoid": an expert's score does not depend on the others', and a bias is added
    num_groups: int = 1  # experts are chosen from the best `top_groups` of so many groups of neighbours
    top_groups: int = 1
    scale: float = 1.0  # on the weights of the chosen experts
    shared_size: int = 0  # intermediate size of an MLP that every token takes besides

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], architecture: str, num_layers: int) -> MoeConfig | None:
        """None for a model without experts."""
        more: dict[str, Any] = {}
        if architecture in DEEPSEEK and config.get("n_routed_experts") is None:
            return None
        if architecture in DEEPSEEK:
            size_name, layers = "moe_intermediate_size", _deepseek_layers(config, num_layers)
            renormalise, more = boolean(config, "norm_topk_prob", architecture == DEEPSEEK[1]), _router(config)
            if renormalise and architecture == DEEPSEEK[0]:
                raise ModelError(
                    "config.json: norm_topk_prob=true of DeepSeek-V2: published models have false, and implementations "
                    "disagree about what true means; set it to false if the model was trained so"
                )
        elif architecture == "MixtralForCausalLM":
            size_name, renormalise, layers = "intermediate_size", True, (True,) * num_layers
        elif architecture == "Qwen3MoeForCausalLM":
            size_name, renormalise = "moe_intermediate_size", boolean(config, "norm_topk_prob")
            layers = _qwen3_moe_layers(config, num_layers)
        else:
            return None
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
        if num_shared := more.pop("num_shared", 0):
            more["shared_size"] = num_shared * size
        _check_groups(num_experts, top_k, **more)
        return cls(num_experts, top_k, size, renormalise, layers, **more) if any(layers) else None


def _num_experts(config: Mapping[str, Any]) -> int:
    """Mixtral's files have num_local_experts, Qwen's num_experts, DeepSeek's n_routed_experts; transformers 5 may write
    the first for all."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    found = {name: config[name] for name in names if config.get(name) is not None}
    if any(number != next(iter(found.values())) for number in found.values()):
        raise ModelError(f"config.json: {' and '.join(found)} disagree ({found}); keep the right one")
    return positive_int(config, next(iter(found), "num_local_experts"), high=MAX_EXPERTS)


def _deepseek_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """The first layers are dense; of the others every moe_layer_freq-th is sparse."""
    first = count(config, "first_k_dense_replace", num_layers)
    every = positive_int(config, "moe_layer_freq", 1)
    return tuple(i >= first and i % every == 0 for i in range(num_layers))


def _router(config: Mapping[str, Any]) -> dict[str, Any]:
    """What MoeConfig has more for DeepSeek; `num_shared` besides."""
    is_v3 = config["architectures"][0] == DEEPSEEK[1]  # transformers 5 writes neither of the two names for it
    scoring = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    limited = DEEPSEEK_ROUTERS.get((scoring, method)) if isinstance(scoring, str) and isinstance(method, str) else None
    if limited is None:
        known = ", ".join(f"{a} with {b}" for a, b in DEEPSEEK_ROUTERS)
        raise ModelError(f"config.json: scoring_func={scoring!r} with topk_method={method!r}: this engine has {known}")
    found = {
        "scoring": scoring,
        "scale": positive_float(config, "routed_scaling_factor", 2.5 if is_v3 else 1.0),
        "num_shared": count(config, "n_shared_experts", 1024),
    }
    if limited:
        found["num_groups"] = positive_int(config, "n_group", high=MAX_EXPERTS)
        found["top_groups"] = positive_int(config, "topk_group", high=MAX_EXPERTS)
    return found


def _check_groups(
    num_experts: int, top_k: int, num_groups: int = 1, top_groups: int = 1, scoring: str = "", **_: Any
) -> None:
    least = 2 if scoring == "sigmoid" and num_groups > 1 else 1  # a group is as good as its best two
    if num_experts % num_groups or num_experts // num_groups < least:
        raise ModelError(
            f"config.json: n_group={num_groups}: {num_experts} experts must make equal groups of {least} or more"
        )
    if top_groups > num_groups or top_k > top_groups * (num_experts // num_groups):
        raise ModelError(
            f"config.json: topk_group={top_groups} of n_group={num_groups} groups with {num_experts // num_groups} "
            f"experts each: must be at most n_group and hold num_experts_per_tok={top_k} experts"
        )


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
    mla: MlaConfig | None = None  # None = keys and values are cached for every KV head
    num_mtp_layers: int = 0  # layers of the checkpoint, after the others, that guess more tokens (models/mtp.py)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
            raise ModelError(f"config.json: architectures={architectures!r} must name exactly one model class")
        defaults = {**DEFAULTS, **FAMILY_DEFAULTS.get(architectures[0], {})}
        QuantizationConfig.from_hf(config)  # refuses what weights/ does not read
        num_heads = positive_int(config, "num_attention_heads", high=4096)
        hidden_size = positive_int(config, "hidden_size", high=2**20)
        mla = MlaConfig.from_hf(config, architectures[0], num_heads)
        head_dim = mla.head_dim if mla else positive_int(config, "head_dim", hidden_size // num_heads, high=1024)
        num_kv_heads = positive_int(config, "num_key_value_heads", num_heads, high=4096)
        if num_heads % num_kv_heads:
            raise ModelError(f"config.json: {num_heads} attention heads do not divide over {num_kv_heads} KV heads")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act={config['hidden_act']!r} is not supported (silu is)")
        num_layers = positive_int(config, "num_hidden_layers", high=4096)
        vocab_size = positive_int(config, "vocab_size", high=2**24)
        window, windowed = _sliding_window({"sliding_window": defaults["sliding_window"], **config}, num_layers)
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
            rope=RopeConfig.from_hf(config, mla.rope_dim if mla else head_dim, defaults["rope_theta"]),
            tie_word_embeddings=boolean(config, "tie_word_embeddings"),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            sliding_window=window,
            windowed_layers=windowed,
            eos_token_ids=_eos_token_ids(config, generation_config or {}, vocab_size),
            hf=config,
            moe=MoeConfig.from_hf(config, architectures[0], num_layers),
            mla=mla,
            num_mtp_layers=max(count(config, name, 64) for name in MTP_NAMES) if mla else 0,
        )

    def with_mtp_layer(self) -> ModelConfig:
        """With the first MTP layer as one more of the ordinary ones: what is inside of it has their form."""
        count = self.num_layers + 1
        moe, windowed = MoeConfig.from_hf(self.hf, self.architecture, count), (*self.windowed_layers, False)
        return replace(self, num_layers=count, moe=moe, windowed_layers=windowed)


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
    given: dict[int, str] = {}  # -> the file
    for name, source in (("generation_config.json", generation_config), ("config.json", config)):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int | None):
                raise ModelError(f"{name}: eos_token_id={value!r}: {token!r} is no token id; write a number or a list")
            if token is not None:
                given.setdefault(token, name)
    ids = tuple(token for token in given if 0 <= token < vocab_size)
    if given and not ids:
        token, name = next(iter(given.items()))
        what = f"eos_token_id={token} is outside the vocabulary of {vocab_size}"
        logger.warning("%s: %s: no token ends an answer, only max_tokens and stops do", name, what)
    return ids

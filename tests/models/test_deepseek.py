"""DeepSeek-V2 and V3: the facts in config.json, and the published models at their true size (no memory)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.attention.base import expanded_bytes
from nanovllm.attention.latent import LatentBackend
from nanovllm.errors import ModelError
from nanovllm.hardware.device import Device
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import MlaConfig, ModelConfig, MoeConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.ops.opset import PLAIN
from nanovllm.runner.kv_cache import CacheLayout, allocate, block_bytes
from nanovllm.weights.loader import load_weights

MODELS = Path(__file__).resolve().parents[2] / "benchmarks/models"
V2_LITE: dict[str, Any] = json.loads((MODELS / "deepseek-v2-lite/config.json").read_text())
V3: dict[str, Any] = json.loads((MODELS / "deepseek-v3/config.json").read_text())
V2 = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
}


def load(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({k: v for k, v in {**base, **changes}.items() if v is not ...})


def test_the_published_facts() -> None:
    lite, big = load(V2_LITE), load(V3)
    assert lite.mla == MlaConfig(None, 512, 128, 64, 128, interleaved=True)
    assert big.mla == MlaConfig(1536, 512, 128, 64, 128, interleaved=True)
    layers = ((False,) + (True,) * 26, (False,) * 3 + (True,) * 58)
    assert lite.moe == MoeConfig(64, 6, 1408, False, layers[0], shared_size=2816)
    assert big.moe == MoeConfig(256, 8, 2048, True, layers[1], "sigmoid", 8, 4, 2.5, 2048)
    groups = load(V2).moe
    assert groups is not None
    assert (groups.scoring, groups.num_groups, groups.top_groups, groups.scale) == ("softmax", 8, 3, 16.0)
    assert (lite.head_dim, lite.rope.rotary_dim, lite.mla.latent_size) == (192, 64, 576)
    assert lite.mla.expanded_size(16) / lite.mla.latent_size == pytest.approx(8.9, abs=0.02)
    assert (lite.num_mtp_layers, big.num_mtp_layers) == (0, 1)


def test_yarn_sharpens_the_scores() -> None:
    """m = 0.1 * mscale * ln 40 + 1, squared."""
    assert load(V2_LITE).rope.score_factor == pytest.approx(1.2608**2, rel=1e-4)
    assert load(V3).rope.score_factor == pytest.approx(1.3689**2, rel=1e-4)
    assert load(V3, rope_scaling=None).rope.score_factor == 1.0
    assert load(V3, rope_scaling={"type": "yarn", "factor": 40}).rope.score_factor == 1.0


def test_what_transformers_5_leaves_out() -> None:
    """It writes head_dim = qk_rope_head_dim and neither topk_method nor scoring_func for V3."""
    saved = load(V3, scoring_func=..., topk_method=..., head_dim=64, moe_layer_freq=...)
    assert (saved.moe, saved.head_dim) == (load(V3).moe, 192)
    assert not load(V3, rope_interleave=False).mla.interleaved  # type: ignore[union-attr]
    assert load(V2_LITE, rope_interleave=False).mla.interleaved  # type: ignore[union-attr]
    assert load(V2_LITE, n_routed_experts=None).moe is None
    assert load(V2_LITE, n_shared_experts=None).moe.shared_size == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"first_k_dense_replace": 0}, "111111"),
        ({"first_k_dense_replace": ...}, "111111"),
        ({"first_k_dense_replace": 3}, "000111"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "001010"),
    ],
)
def test_which_layers_are_sparse(changes: dict[str, Any], layers: str) -> None:
    moe = load(V2_LITE, num_hidden_layers=6, **changes).moe
    assert moe is not None
    assert moe.layers == tuple(c == "1" for c in layers)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (V2_LITE, {"kv_lora_rank": ...}, "no 'kv_lora_rank'"),
        (V2_LITE, {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        (V2_LITE, {"q_lora_rank": 0}, "q_lora_rank=0"),
        (V2_LITE, {"qk_nope_head_dim": "128"}, "qk_nope_head_dim='128'"),
        (V2_LITE, {"qk_rope_head_dim": 63}, "rotary dimension 63 must be even"),
        (V2_LITE, {"v_head_dim": True}, "v_head_dim=True"),
        (V2_LITE, {"num_key_value_heads": 8}, "num_key_value_heads=8 must be num_attention_heads=16"),
        (V2_LITE, {"attention_bias": True}, "attention_bias=True is not supported"),
        (V2_LITE, {"n_routed_experts": -1}, "n_routed_experts=-1"),
        (V2_LITE, {"n_shared_experts": -1}, r"n_shared_experts=-1 must be an integer in \[0, 1024\]"),
        (V2_LITE, {"n_shared_experts": False}, "n_shared_experts=False"),
        (V2_LITE, {"first_k_dense_replace": 28}, r"first_k_dense_replace=28 must be an integer in \[0, 27\]"),
        (V2_LITE, {"moe_layer_freq": 0}, "moe_layer_freq=0"),
        (V2_LITE, {"topk_method": "best"}, "topk_method='best': this engine has softmax with greedy"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' with topk_method='greedy'"),
        (V3, {"scoring_func": ["sigmoid"]}, r"scoring_func=\['sigmoid'\]"),
        (V3, {"n_group": ...}, "no 'n_group'"),
        (V3, {"n_group": 7}, "n_group=7: 256 experts"),
        (V3, {"n_group": 256}, "n_group=256: 256 experts must make equal groups of 2 or more"),
        (V3, {"topk_group": 9}, "topk_group=9 of n_group=8"),
        (V3, {"n_group": 128, "topk_group": 3}, "must be at most n_group and hold num_experts_per_tok=8"),
        (V3, {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor=0"),
        (V3, {"rope_interleave": "no"}, "rope_interleave='no'"),
        (V3, {"num_nextn_predict_layers": 1.0}, r"num_nextn_predict_layers=1\.0"),
    ],
)
def test_untrusted_values_are_refused_by_name(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(base, **changes)


# ---- true sizes ------------------------------------------------------------------------------------------------------


def build(config: dict[str, Any]) -> Transformer:
    facts = ModelConfig.from_hf(config)
    where = Build(torch.bfloat16, torch.device("meta"), PLAIN, Parallel())
    return find_family(facts)(facts, Parts(where, LatentBackend(), max_model_len=16))


@pytest.mark.parametrize(
    ("config", "billions", "latent", "times"),
    [(V2_LITE, 15.7, 27 * 576, 8.9), (V2, 235.7, 60 * 576, 71.1), (V3, 671.0, 61 * 576, 71.1)],
    ids=["V2-Lite", "V2", "V3"],
)
def test_published_sizes(config: dict[str, Any], billions: float, latent: int, times: float) -> None:
    """Parameters as their publishers state them (V3's without the MTP layer), and what a token takes in the cache."""
    model, facts = build(config), ModelFacts(ModelConfig.from_hf(config))
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == billions
    assert facts.kv_bytes_per_token == block_bytes(model.specs, 1) == 2 * latent
    assert facts.expanded_kv_bytes == expanded_bytes(model.specs)
    assert facts.expanded_kv_bytes / facts.kv_bytes_per_token == pytest.approx(times, abs=0.05)


def test_the_cache_is_one_tensor_a_layer() -> None:
    model = build({**V2_LITE, "num_hidden_layers": 2})
    caches = allocate(CacheLayout(16, 3, 0), model.specs, Device.choose("cpu"))
    assert [[tensor.shape for tensor in cache] for cache in caches] == [[(3, 16, 576)]] * 2
    layout = CacheLayout.fit([10**6], model.specs, 16, None)
    assert (layout.bytes_per_block, layout.num_blocks) == (2 * 16 * 576 * 2, 10**6 // (2 * 16 * 576 * 2))


def published_names(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """And shapes; of the MTP layer a few."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    layers, size = config["num_hidden_layers"], config["moe_intermediate_size"]
    found = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    found["lm_head"] = found["model.embed_tokens"]
    for i in range(layers):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        at = f"{layer}.self_attn"
        found |= {f"{at}.kv_a_proj_with_mqa": (576, hidden), f"{at}.kv_a_layernorm": (512,)}
        found |= {f"{at}.kv_b_proj": (heads * 256, 512), f"{at}.o_proj": (hidden, heads * 128)}
        if rank is None:
            found[f"{at}.q_proj"] = (heads * 192, hidden)
        else:
            found |= {f"{at}.q_a_proj": (rank, hidden), f"{at}.q_a_layernorm": (rank,)}
            found[f"{at}.q_b_proj"] = (heads * 192, rank)
        mlps = {f"{layer}.mlp": config["intermediate_size"]}
        if i >= config["first_k_dense_replace"]:
            found[f"{layer}.mlp.gate"] = (config["n_routed_experts"], hidden)
            mlps = {f"{layer}.mlp.experts.{e}": size for e in range(config["n_routed_experts"])}
            mlps[f"{layer}.mlp.shared_experts"] = size * config["n_shared_experts"]
        for name, inner in mlps.items():
            found |= {f"{name}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
            found[f"{name}.down_proj"] = (hidden, inner)
    found = {f"{name}.weight": shape for name, shape in found.items()}
    if config["topk_method"] == "noaux_tc":
        sparse = range(config["first_k_dense_replace"], layers)
        bias = (config["n_routed_experts"],)
        found |= {f"model.layers.{i}.mlp.gate.e_score_correction_bias": bias for i in sparse}
    for i in range(config.get("num_nextn_predict_layers", 0)):
        names = ("eh_proj", "enorm", "shared_head.head", "mlp.experts.3.up_proj", "embed_tokens")
        found |= {f"model.layers.{layers + i}.{name}.weight": (1,) for name in names}
    return found


@pytest.mark.parametrize("config", [V2_LITE, V2, {**V3, "num_hidden_layers": 5}], ids=["V2-Lite", "V2", "V3"])
def test_every_published_tensor_has_one_place(config: dict[str, Any]) -> None:
    """The MTP layer's have none and are not missed."""

    class Published:
        path = Path("published")
        shapes = published_names(config)

        def names(self) -> list[str]:
            return list(self.shapes)

        def shape(self, name: str) -> tuple[int, ...]:
            return self.shapes[name]

        def read(self, name: str) -> torch.Tensor:
            return torch.empty(self.shapes[name], device="meta")

    model, checkpoint = build(config), Published()
    load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]
    del checkpoint.shapes["model.layers.4.mlp.shared_experts.up_proj.weight"]
    with pytest.raises(ModelError, match=r"1 not found in the checkpoint: layers\.4\.mlp\.shared\.gate_up"):
        load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]

"""DeepSeek-V2 and V3 as llama.cpp stores them (GGUF architecture `deepseek2`), seen as Hugging Face's.

Besides names three things differ:
  - the experts of a layer are one tensor, [experts, rows, columns]: each is read on its own, as a slice;
  - newer files have W_UK and W_UV apart, the first transposed (`attn_k_b` [heads, kv_rank, nope_dim], `attn_v_b`
    [heads, v_dim, kv_rank]): both are read and joined to the `kv_b_proj` that older files have (`attn_kv_b`);
  - in newer files `attention.key_length` and `value_length` are the sizes of the absorbed form, kv_rank + rope_dim and
    kv_rank; those of a head have other names then.

A file that names no groups of experts is routed without groups, as llama.cpp does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.weights import gguf_experts

if TYPE_CHECKING:
    from nanovllm.weights.gguf_checkpoint import GGUFMetadata

LAYER_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b",
    "attn_v_b": "self_attn.v_b",
    **gguf_experts.LAYER_NAMES,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
}
GATING = {1: "softmax", 2: "sigmoid"}


def config_of(meta: GGUFMetadata) -> dict[str, Any]:
    """What config.json has besides the names that all families share."""
    gating = meta.integer("expert_gating_func", 1)
    if gating not in GATING:
        raise meta.refuse("expert_gating_func", gating, "supported: 1 (softmax), 2 (sigmoid)")
    num_groups = meta.integer("expert_group_count", 1)
    rope_dim, is_sigmoid = meta.integer("rope.dimension_count"), GATING[gating] == "sigmoid"
    absorbed = "attention.key_length_mla" in meta
    head_dim = meta.integer("attention.key_length_mla" if absorbed else "attention.key_length")
    if head_dim <= rope_dim:
        raise meta.refuse("attention.key_length", head_dim, f"must exceed rope.dimension_count, {rope_dim}")
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "q_lora_rank": meta.integer("attention.q_lora_rank") if "attention.q_lora_rank" in meta else None,
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": meta.integer("attention.value_length_mla" if absorbed else "attention.value_length"),
        "num_key_value_heads": meta.integer("attention.head_count"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0, low=0),
        "n_routed_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "n_shared_experts": meta.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "scoring_func": GATING[gating],
        "topk_method": "noaux_tc" if is_sigmoid else "greedy" if num_groups == 1 else "group_limited_greedy",
        "n_group": num_groups,
        "topk_group": meta.integer("expert_group_used_count", 1),
        "norm_topk_prob": meta.boolean("expert_weights_norm", False),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
    }


def yarn_mscale(meta: GGUFMetadata) -> dict[str, Any]:
    """`yarn_log_multiplier` is 0.1 * mscale_all_dim here, and published models have mscale = mscale_all_dim. Without it
    llama.cpp rotates without a factor."""
    multiplier = meta.number("rope.scaling.yarn_log_multiplier") if "rope.scaling.yarn_log_multiplier" in meta else 0.0
    mscale = float(f"{10 * multiplier:.6g}")
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {"attention_factor": 1.0}

"""Mixtral and Qwen3-MoE as llama.cpp stores them (GGUF architectures `llama` with experts, `qwen3moe`), seen as Hugging
Face's.

The experts of a layer are one tensor, [experts, rows, columns]: each is read on its own, as a slice. Older files of
Mixtral (before April 2024) have a tensor for each, `blk.0.ffn_gate.3.weight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.weights.gguf_checkpoint import GGUFMetadata

LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}


def config_of(meta: GGUFMetadata) -> dict[str, Any]:
    """What config.json has besides the names that all families share; of a model without experts nothing."""
    is_qwen = meta.arch == "qwen3moe"
    if not is_qwen and (meta.arch != "llama" or meta.integer("expert_count", 0, low=0) == 0):
        meta.require("expert_count", 0, f"experts are not supported in GGUF files of {meta.arch}; use the safetensors")
        return {}
    meta.require("expert_gating_func", 1, "only softmax (1) is supported in this architecture")
    meta.require("expert_shared_count", 0, "shared experts are not supported in this architecture")
    meta.require("expert_weights_scale", 1.0, "a factor on the experts' weights is not supported in this architecture")
    meta.require("expert_weights_norm", True, "this architecture divides the experts' weights by their sum")
    found = {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp does so, and Qwen's published models
    }
    if is_qwen:
        return {**found, "model_type": "qwen3_moe", "moe_intermediate_size": meta.integer("expert_feed_forward_length")}
    return {**found, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}

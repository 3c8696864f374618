"""Mixture-of-experts families: the facts in config.json, and the published models at their true size (no memory)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.errors import ModelError
from nanovllm.hardware.parallel import Parallel
from nanovllm.layers.build import Build
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.models.registry import find_family
from nanovllm.models.transformer import Parts, Transformer
from nanovllm.ops.opset import PLAIN
from nanovllm.weights.loader import load_weights

MIXTRAL = {  # 8x7B
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    "max_position_embeddings": 32768, "hidden_act": "silu", "router_aux_loss_coef": 0.02, "output_router_logits": False,
}  # fmt: skip
MIXTRAL_22 = {
    **MIXTRAL,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
}
QWEN3 = {  # 30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "rope_theta": 1e6, "sliding_window": None, "max_window_layers": 48,
    "use_sliding_window": False, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def moe_of(base: dict[str, Any], **changes: Any) -> MoeConfig:
    config = {k: v for k, v in {**base, **changes}.items() if v is not ...}
    found = ModelConfig.from_hf(config).moe
    assert found is not None
    return found


def test_the_published_facts() -> None:
    assert moe_of(MIXTRAL) == MoeConfig(8, 2, 14336, True, (True,) * 32)
    assert moe_of(QWEN3) == MoeConfig(128, 8, 768, True, (True,) * 48)
    assert ModelConfig.from_hf(QWEN3).intermediate_size == 6144
    assert moe_of(MIXTRAL, norm_topk_prob=False).renormalise  # means nothing to a Mixtral
    assert not moe_of(QWEN3, norm_topk_prob=...).renormalise  # transformers' default
    assert moe_of(QWEN3, num_experts=..., num_local_experts=64).num_experts == 64
    assert moe_of(QWEN3, num_experts=64, num_local_experts=64).num_experts == 64


def test_a_dense_model_has_no_experts() -> None:
    assert ModelConfig.from_hf({**MIXTRAL, "architectures": ["MistralForCausalLM"]}).moe is None
    assert ModelConfig.from_hf({**QWEN3, "mlp_only_layers": list(range(48))}).moe is None
    assert ModelConfig.from_hf({**QWEN3, "decoder_sparse_step": 49}).moe is None


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "111111"),
        ({"mlp_only_layers": None}, "111111"),
        ({"mlp_only_layers": [0, 5]}, "011110"),
        ({"decoder_sparse_step": 2}, "010101"),
        ({"decoder_sparse_step": 3}, "001001"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [2, 3]}, "010001"),
        ({"decoder_sparse_step": 6}, "000001"),
    ],
)
def test_which_layers_are_sparse(changes: dict[str, Any], layers: str) -> None:
    assert moe_of(QWEN3, num_hidden_layers=6, **changes).layers == tuple(c == "1" for c in layers)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (MIXTRAL, {"num_local_experts": ...}, "no 'num_local_experts'"),
        (MIXTRAL, {"num_local_experts": 0}, r"num_local_experts=0 must be an integer in \[1, 4096\]"),
        (MIXTRAL, {"num_local_experts": 2**40}, "num_local_experts=1099511627776"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts='8'"),
        (MIXTRAL, {"num_local_experts": True}, "num_local_experts=True"),
        (MIXTRAL, {"num_experts_per_tok": ...}, "no 'num_experts_per_tok'"),
        (MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most the number of experts, 8"),
        (MIXTRAL, {"num_experts_per_tok": 1.5}, r"num_experts_per_tok=1\.5"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (MIXTRAL, {"num_experts": 16}, "disagree"),
        (QWEN3, {"num_experts": -1}, "num_experts=-1"),
        (QWEN3, {"moe_intermediate_size": ...}, "no 'moe_intermediate_size'"),
        (QWEN3, {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        (QWEN3, {"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers=3"),
        (QWEN3, {"mlp_only_layers": ["0"]}, r"mlp_only_layers=\['0'\]"),
        (QWEN3, {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (QWEN3, {"mlp_only_layers": [48]}, r"mlp_only_layers=\[48\] must lie in \[0, 47\]"),
        (QWEN3, {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        (QWEN3, {"shared_expert_intermediate_size": 5632}, "shared_expert_intermediate_size=5632.*not supported"),
    ],
)
def test_untrusted_values_are_refused_by_name(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        moe_of(base, **changes)


def test_the_window_of_both_families() -> None:
    windowed = ModelConfig.from_hf({**MIXTRAL, "sliding_window": 4096})
    assert (windowed.sliding_window, windowed.windowed_layers) == (4096, (True,) * 32)
    qwen = {**QWEN3, "sliding_window": 4096}
    assert ModelConfig.from_hf(qwen).sliding_window is None
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True}).windowed_layers == (True,) * 48


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GraniteMoeForCausalLM", "PhimoeForCausalLM"])
def test_other_mixtures_are_refused_by_name(architecture: str) -> None:
    config = ModelConfig.from_hf({**QWEN3, "architectures": [architecture]})
    with pytest.raises(ModelError, match=rf"{architecture}.*MixtralForCausalLM.*Qwen3MoeForCausalLM"):
        find_family(config)


# ---- true sizes ------------------------------------------------------------------------------------------------------


def build(config: dict[str, Any]) -> Transformer:
    facts = ModelConfig.from_hf(config)
    where = Build(torch.bfloat16, torch.device("meta"), PLAIN, Parallel())
    return find_family(facts)(facts, Parts(where, backend=None, max_model_len=16))  # type: ignore[arg-type]


class Published:
    """The names and shapes of a published checkpoint; its tensors have no values."""

    path = Path("published")

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim", hidden // heads)
        kv = config["num_key_value_heads"] * head
        is_mixtral = "moe_intermediate_size" not in config
        size = config["intermediate_size" if is_mixtral else "moe_intermediate_size"]
        num_experts = config["num_local_experts" if is_mixtral else "num_experts"]
        gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        table = (config["vocab_size"], hidden)
        self.shapes = {"model.embed_tokens": table, "lm_head": table, "model.norm": (hidden,)}
        for i in range(config["num_hidden_layers"]):
            layer, mlp = f"model.layers.{i}", "block_sparse_moe" if is_mixtral else "mlp"
            self.shapes |= {
                f"{layer}.input_layernorm": (hidden,),
                f"{layer}.post_attention_layernorm": (hidden,),
                f"{layer}.self_attn.q_proj": (heads * head, hidden),
                f"{layer}.self_attn.k_proj": (kv, hidden),
                f"{layer}.self_attn.v_proj": (kv, hidden),
                f"{layer}.self_attn.o_proj": (hidden, heads * head),
                f"{layer}.{mlp}.gate": (num_experts, hidden),
            }
            if not is_mixtral:
                self.shapes |= {f"{layer}.self_attn.{n}_norm": (head,) for n in "qk"}
            for e in range(num_experts):
                expert = f"{layer}.{mlp}.experts.{e}"
                self.shapes |= {f"{expert}.{n}": (size, hidden) for n in (gate, up)}
                self.shapes[f"{expert}.{down}"] = (hidden, size)
        self.shapes = {f"{name}.weight": shape for name, shape in self.shapes.items()}

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")


@pytest.mark.parametrize(
    ("config", "num_parameters", "num_tensors"),
    [(MIXTRAL, 46_702_792_704, 995), (MIXTRAL_22, 140_620_634_112, 1739), (QWEN3, 30_532_122_624, 18867)],
    ids=["8x7B", "8x22B", "30B-A3B"],
)
def test_published_models_fit(config: dict[str, Any], num_parameters: int, num_tensors: int) -> None:
    """The size the publishers state, and every tensor of theirs has exactly one place."""
    model, checkpoint = build(config), Published(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert len(checkpoint.names()) == num_tensors
    load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]
    del checkpoint.shapes[next(reversed(checkpoint.shapes))]
    with pytest.raises(ModelError, match=r"1 not found in the checkpoint: layers\.\d+\.mlp\.experts\.down\.weight"):
        load_weights(model, checkpoint, model.rules)  # type: ignore[arg-type]

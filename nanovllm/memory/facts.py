"""ModelFacts: how many bytes the parts of a model take, from its config alone. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nanovllm.model_config import ModelConfig
from nanovllm.weights.expert_form import ExpertForm


@dataclass(frozen=True)
class ModelFacts:
    """Bytes of a model's parts, by its config. `itemsize`: bytes per number of weights and cache. Sizes that do not
    divide by the ranks are refused elsewhere (hardware/parallel.py)."""

    config: ModelConfig
    itemsize: int = 2
    trained_len: int | None = None  # longest text it reads; None = max_position_embeddings
    forms: tuple[ExpertForm, ...] | None = None  # of the sparse layers, where experts are low-rank
    num_ranks: int = 1  # of several, all bytes and counts are those of one: each has the same
    expert_size: int = 1  # groups of ranks that experts are spread over (Parallel.expert_size)

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.config.moe.layers) if self.config.moe else 0

    @property
    def layer_experts(self) -> int:
        """In one layer."""
        return self.config.moe.num_experts // self.expert_size if self.config.moe else 0

    @property
    def num_experts(self) -> int:
        """In all layers together."""
        return self.num_sparse_layers * self.layer_experts

    @property
    def top_k(self) -> int:
        return self.config.moe.top_k if self.config.moe else 0

    @cached_property
    def shares(self) -> tuple[ExpertForm, ...]:
        """Forms of the sparse layers' experts, as far as this rank has them."""
        if self.config.moe is None:
            return ()
        dense = ExpertForm.dense(self.config.hidden_size, self.config.moe.intermediate_size)
        forms = self.forms or (dense,) * self.num_sparse_layers
        return tuple(form.share(self.num_ranks // self.expert_size) for form in forms)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Gate, up and down of one expert, by sparse layer."""
        return tuple(form.numel * self.itemsize for form in self.shares)

    @property
    def expert_bytes(self) -> int:
        """Of the largest: what an expert buffer takes."""
        return max(self.layer_bytes, default=0)

    @property
    def all_experts_bytes(self) -> int:
        return sum(self.layer_bytes) * self.layer_experts

    @property
    def mean_expert_bytes(self) -> float:
        return self.all_experts_bytes / self.num_experts if self.num_experts else 0.0

    @property
    def head_sizes(self) -> tuple[int, int]:
        """(numbers of a token's q, of its k or v). Ranks beyond the number of KV heads share one."""
        config = self.config
        kv_heads = max(config.num_kv_heads // self.num_ranks, 1)
        return config.num_heads // self.num_ranks * config.head_dim, kv_heads * config.head_dim

    @property
    def vocab_rows(self) -> int:
        return -(-self.config.vocab_size // self.num_ranks)

    @property
    def dense_bytes(self) -> int:
        """All parameters but the experts'; with what low-rank experts share. Exact: tests compare it with the models as
        built."""
        config, moe = self.config, self.config.moe
        hidden, size, (q, kv) = config.hidden_size, config.intermediate_size // self.num_ranks, self.head_sizes
        qkv_bias, out_bias, mlp_bias, head_norm = _extras(config)
        attention = hidden * (q + 2 * kv) + q * hidden + 2 * hidden  # with the layer's two norms
        attention += qkv_bias * (q + 2 * kv) + out_bias * hidden + head_norm * 2 * config.head_dim
        mlp = 3 * hidden * size + mlp_bias * (2 * size + hidden)
        router = moe.num_experts * hidden if moe else 0
        num = config.num_layers * attention + self.num_sparse_layers * router
        num += (config.num_layers - self.num_sparse_layers) * mlp
        num += self.vocab_rows * hidden * (1 if config.tie_word_embeddings else 2) + hidden
        num += sum(form.shared_numel for form in self.shares)
        return num * self.itemsize

    @property
    def embedding_bytes(self) -> int:
        """Of which a step reads only a few rows; 0 if the head is the same matrix, which is read whole."""
        return 0 if self.config.tie_word_embeddings else self.vocab_rows * self.config.hidden_size * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.config.num_layers * self.head_sizes[1] * self.itemsize

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most that a step of so many tokens, with logits for so many rows, holds at once: an upper estimate.

        Always alive: residual, branch and normed input, 3 x [T, H], and the rotary table and what a step takes of it.
        Beside them the largest of
          attention:  qkv, the rotated q and k, and the output;
          dense MLP:  gate and up [T, 2I] and their product [T, I];
          experts:    for each of T x k pairs the input gathered, gate and up, the product and the result, H + 3I + H.
                      (The fused kernel keeps only product and result; the grouped product of the library keeps all.)
                      And the router's logits and probabilities in fp32, and the pairs' ids and weights;
                      Spread over ranks, all may go to one rank: the rows that it is sent and sends back come on top;
          logits:     rows x vocabulary, as computed and twice in fp32 (raw, and as the sampler works on them): whole
                      on every rank.
        """
        config, moe, b = self.config, self.config.moe, self.itemsize
        hidden, (q, kv) = config.hidden_size, self.head_sizes
        longest = self.trained_len or config.max_position_embeddings
        always = 3 * num_tokens * hidden * b + (longest + num_tokens) * config.rope.rotary_dim * 4
        attention = num_tokens * ((q + 2 * kv) + (q + kv) + q) * b
        dense = num_tokens * 3 * (config.intermediate_size // self.num_ranks) * b
        if moe is not None and all(moe.layers):
            dense = 0
        experts = 0
        if moe is not None:
            ranks_per_expert = self.num_ranks // self.expert_size
            pairs, size = num_tokens * moe.top_k, moe.intermediate_size // ranks_per_expert
            experts = pairs * ((2 * hidden + 3 * size) * b + 16) + 8 * num_tokens * moe.num_experts
            experts += 2 * pairs * hidden * b if self.expert_size > 1 else 0
        logits = num_rows * config.vocab_size * (b + 8)
        return always + max(attention, dense, experts, logits)


def _extras(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
    """(qkv bias, out bias, MLP bias, head norm), as models/ builds them; a test compares the two."""
    name, hf = config.architecture, config.hf
    bias = bool(hf.get("attention_bias", False)) and not name.startswith(("Qwen2", "Mixtral"))
    mlp_bias = bool(hf.get("mlp_bias", False)) and name.startswith(("Llama", "Mistral"))
    return bias or name.startswith("Qwen2"), bias, mlp_bias, name.startswith("Qwen3")

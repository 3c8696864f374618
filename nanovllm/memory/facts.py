"""ModelFacts: how many bytes the parts of a model take, from its config alone. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nanovllm.model_config import ModelConfig
from nanovllm.weights.expert_form import ExpertForm, ExpertIntegers

# quantization -> bytes of a number in a matrix, and in the embedding and the head (layers/packed.py), with the scales
QUANTISED_BYTES = {"int8": (34 / 32, 34 / 32), "int4": (20 / 32, 34 / 32), "fp8": (1.0, 2.0)}
# On a GPU, as an engine describes them: the embedding and the head stay in 16 bits (layers/integers.py)
QUANTISED_BYTES |= {f"int4-{group}": (1 / 2 + 4 / group, 2.0) for group in (32, 64, 128)}
QUANTISED_BYTES |= {f"int8-{group}": (1 + 4 / group, 2.0) for group in (16, 32, 64)}
# kv_cache_dtype -> bytes of a number, and of the scale of a head's (ops/kv_cache.py)
KV_BYTES = {"float16": (2, 0), "int8": (1, 2), "fp8": (1, 0), "fp8_e4m3": (1, 0)}


EXPANDED_BYTES = 2**26  # ops/linear.py: PIECE_NUMBERS in 16 bits
INTEGER_ROWS = 256  # ops/triton/integers.py: MATMUL_ROWS
CAPTURED_TOKENS = 2048  # runner/captured_steps.py: the last of TOKEN_BUCKETS


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
    num_redundant: int | None = None  # places of a layer beside its experts', on all ranks; None = experts do not move
    quantization: str = "none"  # of all matrices but the routers
    kv_cache_dtype: str = "auto"
    stored_bytes: float | None = None  # of a number, on average, in matrices that stay as a GGUF file has them
    expert_scales: int | None = None  # of dense experts in 8-bit floats (ExpertForm.scale_block); None: they are not
    expert_integers: ExpertIntegers | None = None  # of dense experts in integers
    disk_factor: float = (
        1.0  # bytes of a file for each byte of an expert: above 1 if 16 bits are quantised as they are read
    )

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.config.moe.layers) if self.config.moe else 0

    @property
    def layer_experts(self) -> int:
        """In one layer, with redundant ones."""
        moe = self.config.moe
        return (moe.num_experts + (self.num_redundant or 0)) // self.expert_size if moe else 0

    @property
    def num_experts(self) -> int:
        """In all layers together."""
        return self.num_sparse_layers * self.layer_experts

    @property
    def redundant_experts(self) -> int:
        """Of those."""
        return self.num_sparse_layers * (self.num_redundant or 0) // self.expert_size

    @property
    def top_k(self) -> int:
        return self.config.moe.top_k if self.config.moe else 0

    @cached_property
    def shares(self) -> tuple[ExpertForm, ...]:
        """Forms of the sparse layers' experts, as far as this rank has them."""
        if self.config.moe is None:
            return ()
        sizes = (self.config.hidden_size, self.config.moe.intermediate_size)
        dense = ExpertForm.dense(*sizes, self.expert_scales, self.expert_integers)
        forms = self.forms or (dense,) * self.num_sparse_layers
        return tuple(form.share(self.num_ranks // self.expert_size) for form in forms)

    @property
    def expert_numbers(self) -> str:
        """In words, where they have fewer bits than the model's dtype; ranks that cut blocks of scales expand them."""
        for form in self.shares:
            if form.integers is not None:
                return form.integers.name
            if form.scale_block is not None:
                return "8-bit floats"
        return ""

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Gate, up and down of one expert, by sparse layer."""
        matrix, _ = self._number_bytes
        if self.quantization == "fp8" or "-" in self.quantization:  # of experts that are expanded on a GPU
            matrix = self.itemsize
        return tuple(form.num_bytes(self.itemsize if form.is_low_rank else matrix) for form in self.shares)

    @property
    def _number_bytes(self) -> tuple[float, float]:
        if self.stored_bytes is not None:
            return self.stored_bytes, self.stored_bytes
        matrix, table = QUANTISED_BYTES.get(self.quantization, (self.itemsize, self.itemsize))
        return matrix, self.itemsize if self.quantization == "fp8" else table

    @property
    def expert_bytes(self) -> int:
        """Of the largest: what an expert buffer takes."""
        return max(self.layer_bytes, default=0)

    @property
    def all_experts_bytes(self) -> int:
        return sum(self.layer_bytes) * self.layer_experts + self.spare_bytes

    @property
    def spare_bytes(self) -> int:
        """Where experts move between ranks (moe/rebalance.py), those of one layer pass through a spare buffer."""
        return 0 if self.num_redundant is None else self.expert_bytes * self.layer_experts

    @property
    def mean_expert_bytes(self) -> float:
        return sum(self.layer_bytes) / self.num_sparse_layers if self.num_sparse_layers else 0.0

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
        hidden, size = config.hidden_size, config.intermediate_size // self.num_ranks
        _, _, mlp_bias, _ = _extras(config)
        num_dense, num_sparse = config.num_layers - self.num_sparse_layers, self.num_sparse_layers
        attention, plain = self._attention_numel
        shared = 3 * hidden * (moe.shared_size // self.num_ranks) if moe else 0
        matrices = config.num_layers * attention + num_dense * 3 * hidden * size + num_sparse * shared
        tables = self.vocab_rows * hidden * (1 if config.tie_word_embeddings else 2)
        num = config.num_layers * (plain + 2 * hidden) + num_dense * mlp_bias * (2 * size + hidden) + hidden
        num += num_sparse * (moe.num_experts * hidden if moe else 0)  # routers
        num += sum(form.shared_numel for form in self.shares)
        biases = num_sparse * moe.num_experts if moe and moe.scoring == "sigmoid" else 0  # in fp32
        matrix, table = self._number_bytes
        return int(matrices * matrix + tables * table) + num * self.itemsize + biases * 4

    @property
    def _attention_numel(self) -> tuple[int, int]:
        """Parameters of a layer's attention: (of matrices that may be quantised, others)."""
        config, hidden, mla = self.config, self.config.hidden_size, self.config.mla
        if mla is not None:
            heads = config.num_heads // self.num_ranks
            q = heads * mla.head_dim
            q = hidden * q if mla.q_rank is None else mla.q_rank * (hidden + q)
            up = heads * (mla.nope_dim + mla.v_dim) * mla.kv_rank  # used as numbers (layers/mla.py)
            return q + hidden * mla.latent_size + heads * mla.v_dim * hidden, (mla.q_rank or 0) + mla.kv_rank + up
        q, kv = self.head_sizes
        qkv_bias, out_bias, _, head_norm = _extras(config)
        biases = qkv_bias * (q + 2 * kv) + out_bias * hidden + head_norm * 2 * config.head_dim
        return hidden * (q + 2 * kv) + q * hidden, biases

    @property
    def embedding_bytes(self) -> int:
        """Of which a step reads only a few rows; 0 if the head is the same matrix, which is read whole."""
        _, table = self._number_bytes
        return 0 if self.config.tie_word_embeddings else int(self.vocab_rows * self.config.hidden_size * table)

    @property
    def kv_bytes_per_token(self) -> int:
        """A latent is whole on every rank."""
        config = self.config
        if config.mla is not None:
            return config.num_layers * config.mla.latent_size * self.itemsize
        number, scale = KV_BYTES.get(self.kv_cache_dtype, (self.itemsize, 0))
        size = self.head_sizes[1]
        return config.num_layers * 2 * (size * number + size // config.head_dim * scale)

    @property
    def expanded_kv_bytes(self) -> int | None:
        """What a token would take if keys and values of all heads were cached; None where they are."""
        mla, heads = self.config.mla, self.config.num_heads // self.num_ranks
        return None if mla is None else self.config.num_layers * mla.expanded_size(heads) * self.itemsize

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most that a step of so many tokens, with logits for so many rows, holds at once: an upper estimate.

        Always alive: residual, branch and normed input, 3 x [T, H], and the rotary table and what a step takes of it.
        Beside them the largest of
          attention:  qkv, the rotated q and k, and the output; with latents q twice, the latent twice, keys and values
                      as computed and once more in fp32, and the output;
          dense MLP:  gate and up [T, 2I] and their product [T, I]; of shared experts, beside what the others gave;
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
        if config.mla is not None:
            expanded = config.mla.expanded_size(config.num_heads // self.num_ranks)
            attention = num_tokens * ((2 * q + 2 * config.mla.latent_size + expanded + q) * b + 4 * expanded)
        dense = num_tokens * 3 * (config.intermediate_size // self.num_ranks) * b
        if moe is not None and all(moe.layers):
            dense = 0
        if moe is not None and moe.shared_size:
            dense = max(dense, num_tokens * (3 * (moe.shared_size // self.num_ranks) + 2 * hidden) * b)
        experts = 0
        if moe is not None:
            ranks_per_expert = self.num_ranks // self.expert_size
            pairs, size = num_tokens * moe.top_k, moe.intermediate_size // ranks_per_expert
            experts = pairs * ((2 * hidden + 3 * size) * b + 16) + 8 * num_tokens * moe.num_experts
            experts += 2 * pairs * hidden * b if self.expert_size > 1 else 0
        logits = num_rows * config.vocab_size * (b + 8)
        return always + max(attention, dense + self._beside_products(num_tokens), experts, logits)

    def _beside_products(self, num_tokens: int) -> int:
        """Of the dense MLP with weights in fewer bits, on a GPU: x in 8 bits (FP8), or a piece of an expanded matrix
        (integers, more rows than their kernel takes; ops/linear.py)."""
        size = self.config.intermediate_size // self.num_ranks
        if self.quantization == "fp8":
            return num_tokens * size
        is_expanded = "-" in self.quantization and num_tokens > INTEGER_ROWS
        return min(EXPANDED_BYTES, 2 * size * self.config.hidden_size * self.itemsize) if is_expanded else 0

    def captured_bytes(self, num_tokens: int, num_rows: int) -> int:
        """What graphs keep for ever, where steps are captured: the scratch of the largest of them, and what the sampler
        knows of each row (counts of tokens, two masks)."""
        step = self.step_bytes(num_tokens, num_rows) * min(num_tokens, CAPTURED_TOKENS) // num_tokens
        return step + num_rows * self.config.vocab_size * 9 // 4


def _extras(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
    """(qkv bias, out bias, MLP bias, head norm), as models/ builds them; a test compares the two."""
    name, hf = config.architecture, config.hf
    bias = bool(hf.get("attention_bias", False)) and not name.startswith(("Qwen2", "Mixtral"))
    mlp_bias = bool(hf.get("mlp_bias", False)) and name.startswith(("Llama", "Mistral"))
    return bias or name.startswith("Qwen2"), bias, mlp_bias, name.startswith("Qwen3")

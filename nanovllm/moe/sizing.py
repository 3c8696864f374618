"""How the memory of a card and of its host is shared out: dense weights, experts, KV cache, scratch. No torch here.

    tiers = size_tiers(Memory(gpu_bytes, host_bytes), ModelFacts(model_config, itemsize=2), Wants(max_model_len=4096))

Everything is arithmetic in bytes on facts of config.json, so `nanovllm plan` and the engine decide alike, and a test
can stand on both sides of every boundary. Options named `_gb`, and GiB in messages, are 2**30 bytes.

What a card holds, in this order:

    usable = min(utilization x card, card - CUDA context)
    usable = dense weights + largest step + graphs and libraries + experts + KV cache

Resident: all experts, and the KV cache gets what is left (at least one sequence of max_model_len). Offload: the KV
cache gets a tenth of what is left, at least one such sequence; experts get slots for the rest, of which 2 x top_k
stream (all misses of a layer, and those of the next one, pass through them) and the others keep what is chosen often.
All experts live in host memory as far as it goes and on disk beyond: a slot is a copy, so eviction moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from nanovllm.errors import ConfigError
from nanovllm.model_config import ModelConfig
from nanovllm.weights.expert_layout import ExpertLayout

GIB = 2**30
CONTEXT_BYTES = 512 << 20  # what a CUDA context takes of a card before the first tensor: 0.3 to 0.6 GB by card
GRAPH_BYTES = 512 << 20  # kept free for captured graphs, the sampler's scratch, the libraries' buffers
KV_SHARE = 10  # offload: a tenth of what is left goes to the KV cache
STEP_SHARE = 20  # a step may take a twentieth of the card, if nobody says how many tokens it has
STEP_TOKENS = (256, 16384)  # and has at least and at most so many
MIN_HOST_RESERVE = 4 * GIB  # for the operating system, Python and the page cache that the disk tier reads through


class DoesNotFit(ConfigError):
    """The model cannot run in this memory. `missing_bytes` of GPU memory would make it run."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class ModelFacts:
    """Bytes of a model's parts, by its config. `itemsize`: bytes per number of weights and cache."""

    config: ModelConfig
    itemsize: int = 2
    trained_len: int | None = None  # longest text it reads; None = max_position_embeddings
    layouts: tuple[ExpertLayout, ...] | None = None  # of the sparse layers, where experts are low-rank

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.config.moe.layers) if self.config.moe else 0

    @property
    def num_experts(self) -> int:
        """In all layers together."""
        return self.num_sparse_layers * self.config.moe.num_experts if self.config.moe else 0

    @property
    def top_k(self) -> int:
        return self.config.moe.top_k if self.config.moe else 0

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Gate, up and down of one expert, by sparse layer."""
        if self.config.moe is None:
            return ()
        dense = ExpertLayout.dense(self.config.hidden_size, self.config.moe.intermediate_size)
        layouts = self.layouts or (dense,) * self.num_sparse_layers
        return tuple(layout.numel * self.itemsize for layout in layouts)

    @property
    def expert_bytes(self) -> int:
        """Of the largest: what a slot takes."""
        return max(self.layer_bytes, default=0)

    @property
    def all_experts_bytes(self) -> int:
        return sum(self.layer_bytes) * self.config.moe.num_experts if self.config.moe else 0

    @property
    def mean_expert_bytes(self) -> float:
        return self.all_experts_bytes / self.num_experts if self.num_experts else 0.0

    @property
    def dense_bytes(self) -> int:
        """All parameters but the experts'; with what low-rank experts share. Exact: tests compare it with the models as
        built."""
        config, moe = self.config, self.config.moe
        hidden, size = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_bias, out_bias, mlp_bias, head_norm = _extras(config)
        attention = hidden * (q + 2 * kv) + q * hidden + 2 * hidden  # with the layer's two norms
        attention += qkv_bias * (q + 2 * kv) + out_bias * hidden + head_norm * 2 * config.head_dim
        mlp = 3 * hidden * size + mlp_bias * (2 * size + hidden)
        router = moe.num_experts * hidden if moe else 0
        num = config.num_layers * attention + self.num_sparse_layers * router
        num += (config.num_layers - self.num_sparse_layers) * mlp
        num += config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
        num += sum(layout.shared_numel for layout in self.layouts or ())
        return num * self.itemsize

    @property
    def embedding_bytes(self) -> int:
        """Of which a step reads only a few rows; 0 if the head is the same matrix, which is read whole."""
        config = self.config
        return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self.itemsize

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most that a step of so many tokens, with logits for so many rows, holds at once: an upper estimate.

        Always alive: residual, branch and normed input, 3 x [T, H], and the rotary table and what a step takes of it.
        Beside them the largest of
          attention:  qkv, the rotated q and k, and the output;
          dense MLP:  gate and up [T, 2I] and their product [T, I];
          experts:    for each of T x k pairs the input gathered, gate and up, the product and the result, H + 3I + H.
                      (The fused kernel keeps only product and result; the grouped product of the library keeps all.)
                      And the router's logits and probabilities in fp32, and the pairs' ids and weights;
          logits:     rows x vocabulary, as computed and twice in fp32 (raw, and as the sampler works on them).
        """
        config, moe, b = self.config, self.config.moe, self.itemsize
        hidden = config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        longest = self.trained_len or config.max_position_embeddings
        always = 3 * num_tokens * hidden * b + (longest + num_tokens) * config.rope.rotary_dim * 4
        attention = num_tokens * ((q + 2 * kv) + (q + kv) + q) * b
        dense = num_tokens * 3 * config.intermediate_size * b
        if moe is not None and all(moe.layers):
            dense = 0
        experts = 0
        if moe is not None:
            pairs = num_tokens * moe.top_k
            experts = pairs * ((2 * hidden + 3 * moe.intermediate_size) * b + 16) + 8 * num_tokens * moe.num_experts
        logits = num_rows * config.vocab_size * (b + 8)
        return always + max(attention, dense, experts, logits)


def _extras(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
    """(qkv bias, out bias, MLP bias, head norm). models/ says the same when it builds; a test compares the two."""
    name, hf = config.architecture, config.hf
    bias = bool(hf.get("attention_bias", False)) and not name.startswith(("Qwen2", "Mixtral"))
    mlp_bias = bool(hf.get("mlp_bias", False)) and name.startswith(("Llama", "Mistral"))
    return bias or name.startswith("Qwen2"), bias, mlp_bias, name.startswith("Qwen3")


@dataclass(frozen=True)
class Memory:
    """`gpu_bytes` of the card, or of the smaller one that it stands in for. On a CPU: context_bytes=0."""

    gpu_bytes: int
    host_bytes: int
    utilization: float = 0.9
    free_bytes: int | None = None  # what other processes leave of the card; None = all
    context_bytes: int = CONTEXT_BYTES

    @property
    def usable_bytes(self) -> int:
        usable = min(int(self.gpu_bytes * self.utilization), self.gpu_bytes - self.context_bytes)
        return max(usable if self.free_bytes is None else min(usable, self.free_bytes), 0)

    def card_for(self, needed: int) -> int:
        """The smallest card with so many usable bytes."""
        return max(int(needed / self.utilization) + 1, needed + self.context_bytes)


def default_step_tokens(memory: Memory, model: ModelFacts, max_num_seqs: int) -> int:
    """max_num_batched_tokens for who gave none: large, because each piece of a prompt streams all experts once, but not
    at the price of the slots."""
    fewest, num_tokens = STEP_TOKENS
    while num_tokens > fewest and model.step_bytes(num_tokens, max_num_seqs) > memory.usable_bytes // STEP_SHARE:
        num_tokens //= 2
    return max(num_tokens, max_num_seqs)


@dataclass(frozen=True)
class Wants:
    """What the user asks for; lengths already resolved to numbers."""

    max_model_len: int
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 256
    placement: str = "auto"
    cache_gb: float | None = None
    host_gb: float | None = None
    block_size: int = 64
    reserve_bytes: int = GRAPH_BYTES


@dataclass(frozen=True)
class Tiers:
    """What goes where. Counts of experts are over all layers; a quota is one sparse layer's share of cached slots."""

    placement: str  # "resident" or "offload"
    quotas: tuple[int, ...]
    num_streaming: int
    host_experts: int
    disk_experts: int
    kv_bytes: int  # whole blocks
    kv_tokens: int
    longest_context: int  # of one sequence, the most that this placement allows (offload: with the fewest slots)
    usable_bytes: int
    dense_bytes: int
    step_bytes: int
    reserve_bytes: int
    expert_bytes: int  # of one; of the largest, where ranks differ
    resident_experts: int  # all, or none
    resident_bytes: int
    host_bytes: int  # of the experts there
    disk_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def num_cached(self) -> int:
        return sum(self.quotas)

    @property
    def num_slots(self) -> int:
        return self.num_cached + self.num_streaming

    @property
    def gpu_expert_bytes(self) -> int:
        return self.num_slots * self.expert_bytes + self.resident_bytes


def refuse_without_experts(model: ModelConfig, placement: str, cache_gb: float | None) -> None:
    """On a dense model these options would do nothing: who gives them hopes for memory that will not be saved."""
    asked = "expert_placement='offload'" if placement == "offload" else f"expert_cache_gb={cache_gb}"
    if model.moe is None and (placement == "offload" or cache_gb is not None):
        raise ConfigError(
            f"{asked}: {model.architecture} has no experts, all of its weights stay on the device; leave it out"
        )


def size_tiers(memory: Memory, model: ModelFacts, wants: Wants) -> Tiers:
    """Raises DoesNotFit with figures when there is no way; ConfigError when an option asks for the impossible."""
    refuse_without_experts(model.config, wants.placement, wants.cache_gb)
    budget = _Budget.of(memory, model, wants)
    everything = model.all_experts_bytes
    limited = wants.cache_gb is not None and int(wants.cache_gb * GIB) < everything
    fits = budget.left >= everything + budget.one_sequence
    if model.num_experts == 0 or wants.placement == "resident" or (wants.placement == "auto" and fits and not limited):
        return budget.resident()
    return budget.offload()


@dataclass(frozen=True)
class _Budget:
    memory: Memory
    model: ModelFacts
    wants: Wants
    usable: int
    step: int
    left: int  # for experts and KV cache; may be negative
    block: int  # bytes of one KV block
    one_sequence: int  # KV bytes of one sequence of max_model_len

    @classmethod
    def of(cls, memory: Memory, model: ModelFacts, wants: Wants) -> _Budget:
        usable = memory.usable_bytes
        step = model.step_bytes(wants.max_num_batched_tokens, wants.max_num_seqs)
        block = wants.block_size * model.kv_bytes_per_token
        one_sequence = -(-wants.max_model_len // wants.block_size) * block
        left = usable - model.dense_bytes - step - wants.reserve_bytes
        return cls(memory, model, wants, usable, step, left, block, one_sequence)

    def resident(self) -> Tiers:
        model, everything = self.model, self.model.all_experts_bytes
        needed = everything + self.one_sequence
        if needed > self.left:
            experts = f", {model.num_experts} experts {gib(everything)}" if everything else ""
            advice = ""
            if everything and self._offload_needs() <= self.left:
                slots = (self.left - self.one_sequence) // model.expert_bytes
                advice = (
                    f"; expert_placement='offload' (or 'auto') runs here with {min(slots, model.num_experts)} of "
                    f"{model.num_experts} experts on the GPU"
                )
            asked = "expert_placement='resident': " if everything and self.wants.placement == "resident" else ""
            raise self._refusal(needed, asked, experts, advice)
        return self._tiers("resident", (), 0, self.left - everything, self.left - everything)

    def offload(self) -> Tiers:
        model, wants = self.model, self.wants
        least = self._offload_needs()
        if wants.cache_gb is not None:
            self._check_cache(wants.cache_gb)
        if least > self.left:
            slots = f", {model.top_k} expert slots {gib(model.top_k * model.expert_bytes)}"
            raise self._refusal(least, "", slots, "")
        most_slots = model.num_experts + 2 * model.top_k
        most_kv = wants.max_num_seqs * self.one_sequence
        if wants.cache_gb is not None:
            num_slots = min(int(wants.cache_gb * GIB) // model.expert_bytes, most_slots)
            for_context = self.left - num_slots * model.expert_bytes
        else:
            kv = min(max(self.one_sequence, self.left // KV_SHARE), most_kv)
            kv = min(kv, self.left - model.top_k * model.expert_bytes)
            num_slots = min((self.left - kv) // model.expert_bytes, most_slots)
            for_context = self.left - model.top_k * model.expert_bytes
        # Twice top_k: one layer's misses are computed on while the next one's arrive. A card with fewer slots than
        # that keeps none: a kept expert is worth less than a ring in which copying and computing overlap.
        num_streaming = min(2 * model.top_k, num_slots)
        quotas = spread(num_slots - num_streaming, model.num_sparse_layers)
        kv = min(self.left - num_slots * model.expert_bytes, most_kv)
        return self._tiers("offload", quotas, num_streaming, kv, for_context)

    def _offload_needs(self) -> int:
        return self.one_sequence + self.model.top_k * self.model.expert_bytes

    def _check_cache(self, cache_gb: float) -> None:
        model = self.model
        num_slots = int(cache_gb * GIB) // model.expert_bytes
        if num_slots < model.top_k:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: holds {num_slots} experts of {gib(model.expert_bytes)}, but a token "
                f"needs {model.top_k} at once: give at least {ceil_gb(model.top_k * model.expert_bytes)}"
            )
        if int(cache_gb * GIB) > self.memory.gpu_bytes:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: the GPU has only {gib(self.memory.gpu_bytes)}; leave it out to use what "
                f"is left after dense weights and KV cache"
            )
        room = self.left - self.one_sequence
        wanted = min(num_slots, model.num_experts + 2 * model.top_k) * model.expert_bytes
        if wanted > room >= model.top_k * model.expert_bytes:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: dense weights ({gib(model.dense_bytes)}), the largest step "
                f"({gib(self.step)}), {gib(self.wants.reserve_bytes)} of reserve and one sequence of "
                f"{self.wants.max_model_len} tokens ({gib(self.one_sequence)}) leave {gib(room)} of {gib(self.usable)} "
                f"for experts: give at most {room * 100 // GIB / 100}, or leave it out"
            )

    def _refusal(self, needed: int, asked: str, experts: str, advice: str) -> DoesNotFit:
        """`needed`: bytes of experts and KV cache that `left` does not hold."""
        model, wants, memory, missing = self.model, self.wants, self.memory, needed - self.left
        card = memory.card_for(self.usable + missing)
        dense = "the dense part needs" if model.num_experts else "the weights need"
        longest = (self.left - (needed - self.one_sequence)) // self.block * wants.block_size
        ways = [f"lower max_model_len to at most {longest}"] * (longest > 0)
        if needed - self.one_sequence + model.dense_bytes + wants.reserve_bytes < self.usable:
            # otherwise no option helps: the weights do not become smaller
            ways += ["lower max_num_batched_tokens", "raise gpu_memory_utilization"]
        ways.append(f"take a card (gpu_memory_gb) of at least {ceil_gb(card)} GiB")
        return DoesNotFit(
            f"{asked}{gib(missing)} of GPU memory are missing: {dense} {gib(model.dense_bytes)}{experts}, one "
            f"sequence of {wants.max_model_len} tokens {gib(self.one_sequence)}, a step of "
            f"{wants.max_num_batched_tokens} tokens {gib(self.step)}, graphs and libraries {gib(wants.reserve_bytes)}; "
            f"of {gib(memory.gpu_bytes)} {gib(self.usable)} may be used; {', or '.join(ways)}{advice}",
            missing,
        )

    def _tiers(self, placement: str, quotas: tuple[int, ...], num_streaming: int, kv: int, for_context: int) -> Tiers:
        model, wants = self.model, self.wants
        num_blocks = kv // self.block
        longest = for_context // self.block * wants.block_size
        offloaded = model.num_experts if placement == "offload" else 0
        host, notes = self._host_experts(offloaded)
        host_bytes = bytes_of_first(host, model.layer_bytes)
        return Tiers(
            placement=placement,
            quotas=quotas,
            num_streaming=num_streaming,
            host_experts=host,
            disk_experts=offloaded - host,
            kv_bytes=num_blocks * self.block,
            kv_tokens=num_blocks * wants.block_size,
            longest_context=min(longest, model.trained_len or model.config.max_position_embeddings),
            usable_bytes=self.usable,
            dense_bytes=model.dense_bytes,
            step_bytes=self.step,
            reserve_bytes=wants.reserve_bytes,
            expert_bytes=model.expert_bytes,
            resident_experts=model.num_experts - offloaded,
            resident_bytes=0 if offloaded else model.all_experts_bytes,
            host_bytes=host_bytes,
            disk_bytes=model.all_experts_bytes - host_bytes if offloaded else 0,
            notes=notes,
        )

    def _host_experts(self, offloaded: int) -> tuple[int, tuple[str, ...]]:
        """How many experts host memory takes, and what the user should know about it."""
        if not offloaded:
            return 0, ()
        spare = max(self.memory.host_bytes - max(MIN_HOST_RESERVE, self.memory.host_bytes // 8), 0)
        notes = []
        if self.wants.host_gb is not None:
            wanted = int(self.wants.host_gb * GIB)
            if wanted > self.memory.host_bytes:
                notes.append(f"expert_host_gb={self.wants.host_gb}: the host has {gib(self.memory.host_bytes)}; "
                             f"{gib(spare)} of it are used")  # fmt: skip
            else:
                spare = wanted
        assert self.model.config.moe is not None
        host = count_fitting(spare, self.model.layer_bytes, self.model.config.moe.num_experts)
        if host < offloaded:
            notes.append(
                f"host memory takes {host} of {offloaded} experts; {offloaded - host} are read from disk each time "
                f"they are missing ({gib(self.model.all_experts_bytes)} of host memory would take all)"
            )
        return host, tuple(notes)


def count_fitting(num_bytes: int, layer_bytes: Sequence[int], num_experts: int) -> int:
    """How many experts so much host memory holds: the first ones of all layers before the second ones."""
    rounds = min(num_bytes // sum(layer_bytes), num_experts)
    if rounds == num_experts:
        return rounds * len(layer_bytes)
    left = num_bytes - rounds * sum(layer_bytes)
    more = sum(total <= left for total in accumulate(layer_bytes))
    return rounds * len(layer_bytes) + more


def bytes_of_first(count: int, layer_bytes: Sequence[int]) -> int:
    """Of so many experts, in that order."""
    rounds, more = divmod(count, max(len(layer_bytes), 1))
    return rounds * sum(layer_bytes) + sum(layer_bytes[:more])


def spread(total: int, num_layers: int) -> tuple[int, ...]:
    """Evenly; earlier layers get the remainder."""
    each, more = divmod(total, num_layers)
    return tuple(each + (layer < more) for layer in range(num_layers))


def ceil_gb(num_bytes: int) -> float:
    """In GiB with two digits, never less than it is: a figure that is offered must be enough."""
    return -(-num_bytes * 100 // GIB) / 100

"""How the memory of a card and of its host is divided: dense weights, experts, KV cache, scratch. No torch here.

    tiers = size_tiers(Memory(gpu_bytes, host_bytes), ModelFacts(model_config, itemsize=2), Wants(max_model_len=4096))

Everything is arithmetic in bytes on facts of config.json, so `nanovllm plan` and the engine decide alike, and a test
can check both sides of every boundary. Options named `_gb`, and GiB in messages, are 2**30 bytes. Of several ranks all
figures are those of one: its card, its part of the model (memory/facts.py), its share of the host.

What a card holds, in this order:

    usable = min(utilization x card, card - CUDA context)
    usable = dense weights + largest step + graphs and libraries + experts + KV cache

Resident: all experts, and the KV cache gets what is left (at least one sequence of max_model_len). Offload: the KV
cache gets a tenth of what is left, at least one such sequence; the rest is expert buffers, each with room for one
expert. 2 x top_k of them stream (all misses of a layer, and those of the next one, pass through them), the others keep
experts that are chosen often: the cached ones. If host memory holds all experts, a buffer holds a copy and eviction
moves no bytes. If it does not, host memory and cached buffers hold different experts (moe/offload/cache.py), and on
disk are those for which neither has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from nanovllm.errors import ConfigError
from nanovllm.memory.facts import ModelFacts
from nanovllm.model_config import ModelConfig

GIB = 2**30
CONTEXT_BYTES = 512 << 20  # what a CUDA context takes of a card before the first tensor: 0.3 to 0.6 GB by card
GRAPH_BYTES = 512 << 20  # kept free for captured graphs, the sampler's scratch, the libraries' buffers
KV_SHARE = 10  # offload: a tenth of what is left goes to the KV cache
STEP_SHARE = 20  # a step may take a twentieth of the card, if max_num_batched_tokens is not given
STEP_TOKENS = (256, 16384)  # and then has at least and at most so many
MIN_HOST_RESERVE = 4 * GIB  # for the operating system, Python and the page cache that the disk tier reads through


class DoesNotFit(ConfigError):
    """The model cannot run in this memory. `missing_bytes` of GPU memory would make it run."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


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

    def shared(self, per_host: int) -> Memory:
        """One of so many cards of a host, each with its part of the host's memory."""
        return replace(self, host_bytes=self.host_bytes // per_host)

    def card_for(self, needed: int) -> int:
        """The smallest card with so many usable bytes."""
        return max(int(needed / self.utilization) + 1, needed + self.context_bytes)


def default_step_tokens(memory: Memory, model: ModelFacts, max_num_seqs: int) -> int:
    """max_num_batched_tokens where it is not given: large, because each piece of a prompt streams all experts once, but
    its scratch memory takes room from expert buffers."""
    fewest, num_tokens = STEP_TOKENS
    while num_tokens > fewest and model.step_bytes(num_tokens, max_num_seqs) > memory.usable_bytes // STEP_SHARE:
        num_tokens //= 2
    return max(num_tokens, max_num_seqs)


@dataclass(frozen=True)
class Wants:
    """Settings of the engine that decide what fits; lengths already resolved to numbers."""

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
    """What goes where. Counts of experts are over all layers; a quota is one sparse layer's share of cached buffers."""

    placement: str  # "resident" or "offload"
    quotas: tuple[int, ...]
    num_streaming: int
    host_experts: int
    disk_experts: int  # neither in host memory nor in a cached buffer, once these are full
    held: tuple[int, ...]  # offload: experts that host memory and cached buffers hold together, by sparse layer
    kv_bytes: int  # whole blocks
    kv_tokens: int
    longest_context: int  # of one sequence, the most that this placement allows (offload: with the fewest buffers)
    usable_bytes: int
    dense_bytes: int
    step_bytes: int
    captured_bytes: (
        int  # kept by captured steps and the sampler; 0 with offloaded experts, whose prompts are not captured
    )
    reserve_bytes: int
    expert_bytes: int  # of one; of the largest, where ranks differ
    resident_experts: int  # all, or none
    resident_bytes: int
    host_bytes: int  # of the experts there
    disk_bytes: int  # of those that are only there
    notes: tuple[str, ...] = ()

    @property
    def num_cached(self) -> int:
        return sum(self.quotas)

    @property
    def lone_experts(self) -> int:
        """On the device and not in host memory, once the cached buffers are full."""
        return sum(self.held) - self.host_experts

    @property
    def num_buffers(self) -> int:
        return self.num_cached + self.num_streaming

    @property
    def gpu_expert_bytes(self) -> int:
        return self.num_buffers * self.expert_bytes + self.resident_bytes


def refuse_without_experts(model: ModelConfig, placement: str, cache_gb: float | None) -> None:
    """On a dense model these options would do nothing: they are refused, because they save no memory there."""
    asked = "expert_placement='offload'" if placement == "offload" else f"expert_cache_gb={cache_gb}"
    if model.moe is None and (placement == "offload" or cache_gb is not None):
        raise ConfigError(
            f"{asked}: {model.architecture} has no experts, all of its weights stay on the device; leave it out"
        )


def size_tiers(memory: Memory, model: ModelFacts, wants: Wants) -> Tiers:
    """Raises DoesNotFit with figures when there is no way; ConfigError when an option is impossible here."""
    refuse_without_experts(model.config, wants.placement, wants.cache_gb)
    budget = _Budget.of(memory, model, wants)
    everything = model.all_experts_bytes
    limited = wants.cache_gb is not None and int(wants.cache_gb * GIB) < everything
    fits = budget.left >= everything + budget.captured + budget.one_sequence
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
    captured: int  # of it, if all experts are resident
    block: int  # bytes of one KV block
    one_sequence: int  # KV bytes of one sequence of max_model_len

    @classmethod
    def of(cls, memory: Memory, model: ModelFacts, wants: Wants) -> _Budget:
        usable = memory.usable_bytes
        step = model.step_bytes(wants.max_num_batched_tokens, wants.max_num_seqs)
        block = wants.block_size * model.kv_bytes_per_token
        one_sequence = -(-wants.max_model_len // wants.block_size) * block
        left = usable - model.dense_bytes - step - wants.reserve_bytes
        captured = model.captured_bytes(wants.max_num_batched_tokens, wants.max_num_seqs) if wants.reserve_bytes else 0
        return cls(memory, model, wants, usable, step, left, captured, block, one_sequence)

    def resident(self) -> Tiers:
        model, everything = self.model, self.model.all_experts_bytes
        needed = everything + self.captured + self.one_sequence
        if needed > self.left:
            experts = f", {model.num_experts} experts {gib(everything)}" if everything else ""
            if model.spare_bytes:
                experts += f" ({model.redundant_experts} redundant, a spare buffer of {gib(model.spare_bytes)})"
            advice = ""
            if everything and self._offload_needs() <= self.left:
                buffers = (self.left - self.one_sequence) // model.expert_bytes
                advice = (
                    f"; expert_placement='offload' (or 'auto') runs here with {min(buffers, model.num_experts)} of "
                    f"{model.num_experts} experts on the GPU"
                )
            asked = "expert_placement='resident': " if everything and self.wants.placement == "resident" else ""
            if model.expert_size > 1:  # config.py refuses to offload experts that are spread
                asked = f"expert_parallel_size={model.expert_size}: "
                advice = f"; tensor_parallel_size={model.num_ranks} without it can offload" if advice else ""
            raise self._refusal(needed, self.captured, asked, experts, advice)
        kv = self.left - everything - self.captured
        return self._tiers("resident", (), 0, kv, kv)

    def offload(self) -> Tiers:
        model, wants = self.model, self.wants
        least = self._offload_needs()
        if wants.cache_gb is not None:
            self._check_cache(wants.cache_gb)
        if least > self.left:
            experts = f", {model.top_k} expert slots {gib(model.top_k * model.expert_bytes)}"
            raise self._refusal(least, 0, "", experts, "")
        most_buffers = model.num_experts + 2 * model.top_k
        most_kv = wants.max_num_seqs * self.one_sequence
        if wants.cache_gb is not None:
            num_buffers = min(int(wants.cache_gb * GIB) // model.expert_bytes, most_buffers)
            for_context = self.left - num_buffers * model.expert_bytes
        else:
            kv = min(max(self.one_sequence, self.left // KV_SHARE), most_kv)
            kv = min(kv, self.left - model.top_k * model.expert_bytes)
            num_buffers = min((self.left - kv) // model.expert_bytes, most_buffers)
            for_context = self.left - model.top_k * model.expert_bytes
        # Twice top_k: one layer's misses are computed on while the next one's arrive. A card with fewer buffers
        # than that keeps none: a kept expert gains less than a ring in which copying and computing overlap.
        num_streaming = min(2 * model.top_k, num_buffers)
        quotas = spread(num_buffers - num_streaming, model.num_sparse_layers)
        kv = min(self.left - num_buffers * model.expert_bytes, most_kv)
        return self._tiers("offload", quotas, num_streaming, kv, for_context)

    def _offload_needs(self) -> int:
        return self.one_sequence + self.model.top_k * self.model.expert_bytes

    def _check_cache(self, cache_gb: float) -> None:
        model = self.model
        num_buffers = int(cache_gb * GIB) // model.expert_bytes
        if num_buffers < model.top_k:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: holds {num_buffers} experts of {gib(model.expert_bytes)}, but a token "
                f"needs {model.top_k} at once: give at least {ceil_gb(model.top_k * model.expert_bytes)}"
            )
        if int(cache_gb * GIB) > self.memory.gpu_bytes:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: the GPU has only {gib(self.memory.gpu_bytes)}; leave it out to use what "
                f"is left after dense weights and KV cache"
            )
        room = self.left - self.one_sequence
        wanted = min(num_buffers, model.num_experts + 2 * model.top_k) * model.expert_bytes
        if wanted > room >= model.top_k * model.expert_bytes:
            raise ConfigError(
                f"expert_cache_gb={cache_gb}: dense weights ({gib(model.dense_bytes)}), the largest step "
                f"({gib(self.step)}), {gib(self.wants.reserve_bytes)} of reserve and one sequence of "
                f"{self.wants.max_model_len} tokens ({gib(self.one_sequence)}) leave {gib(room)} of {gib(self.usable)} "
                f"for experts: give at most {room * 100 // GIB / 100}, or leave it out"
            )

    def _refusal(self, needed: int, captured: int, asked: str, experts: str, advice: str) -> DoesNotFit:
        """`needed`: bytes of experts, captured steps and KV cache that `left` does not hold."""
        graphs = self.wants.reserve_bytes + captured
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
            f"{wants.max_num_batched_tokens} tokens {gib(self.step)}, graphs and libraries {gib(graphs)}; "
            f"of {gib(memory.gpu_bytes)} {gib(self.usable)} may be used; {', or '.join(ways)}{advice}",
            missing,
        )

    def _tiers(self, placement: str, quotas: tuple[int, ...], num_streaming: int, kv: int, for_context: int) -> Tiers:
        model, wants = self.model, self.wants
        num_blocks = kv // self.block
        longest = for_context // self.block * wants.block_size
        offloaded = model.num_experts if placement == "offload" else 0
        spare, notes = self._host_memory() if offloaded else (0, [])
        blocks = fit_host(spare, model.layer_bytes, model.layer_experts) if offloaded else ()
        held = tuple(min(a + b, model.layer_experts) for a, b in zip(quotas, blocks))
        if sum(blocks) < offloaded:
            lone, left = sum(held) - sum(blocks), offloaded - sum(held)
            notes.append(
                f"host memory takes {sum(blocks)} of {offloaded} experts ({gib(model.all_experts_bytes)} of it would "
                f"take all); {lone} more have a place on the GPU alone and are read from disk once"
                + (f"; {left} are read from disk each time they are missing" if left else "")
            )
        return Tiers(
            placement=placement,
            quotas=quotas,
            num_streaming=num_streaming,
            host_experts=sum(blocks),
            disk_experts=offloaded - sum(held),
            held=held,
            kv_bytes=num_blocks * self.block,
            kv_tokens=num_blocks * wants.block_size,
            longest_context=min(longest, model.trained_len or model.config.max_position_embeddings),
            usable_bytes=self.usable,
            dense_bytes=model.dense_bytes,
            step_bytes=self.step,
            captured_bytes=0 if offloaded else self.captured,
            reserve_bytes=wants.reserve_bytes,
            expert_bytes=model.expert_bytes,
            resident_experts=model.num_experts - offloaded,
            resident_bytes=0 if offloaded else model.all_experts_bytes,
            host_bytes=sum(map(mul, blocks, model.layer_bytes)),
            disk_bytes=sum((model.layer_experts - n) * size for n, size in zip(held, model.layer_bytes)),
            notes=tuple(notes),
        )

    def _host_memory(self) -> tuple[int, list[str]]:
        """Bytes of it for experts, and notes for the user about that."""
        spare = max(self.memory.host_bytes - max(MIN_HOST_RESERVE, self.memory.host_bytes // 8), 0)
        notes = []
        if self.wants.host_gb is not None:
            wanted = int(self.wants.host_gb * GIB)
            if wanted > self.memory.host_bytes:
                notes.append(
                    f"expert_host_gb={self.wants.host_gb}: the host has {gib(self.memory.host_bytes)}; "
                    f"{gib(spare)} of it are used"
                )
            else:
                spare = wanted
        return spare, notes


def fit_host(num_bytes: int, layer_bytes: Sequence[int], num_experts: int) -> tuple[int, ...]:
    """Experts of each layer that so much host memory holds: equally many, and of the last layers one more, as far as it
    goes. The first layers may have one more buffer (`spread`): so all layers hold the same number on both together."""
    rounds = min(num_bytes // sum(layer_bytes), num_experts)
    left = num_bytes - rounds * sum(layer_bytes) if rounds < num_experts else 0
    more = sum(total <= left for total in accumulate(reversed(layer_bytes)))
    return (rounds,) * (len(layer_bytes) - more) + (rounds + 1,) * more


def spread(total: int, num_layers: int) -> tuple[int, ...]:
    """Evenly; earlier layers get the remainder."""
    each, more = divmod(total, num_layers)
    return tuple(each + (layer < more) for layer in range(num_layers))


def ceil_gb(num_bytes: int) -> float:
    """In GiB with two digits, never less than it is: a figure that is offered must be enough."""
    return -(-num_bytes * 100 // GIB) / 100

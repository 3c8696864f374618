"""What several GPUs cost and gain: the time of a step from bytes, FLOPs, bandwidths and latencies. No torch here.

    topology = Topology(num_ranks=8, num_hosts=2)
    cost = decode_cost(facts_of_one_rank, topology, machine, batch=64, context=1024)
    cost.seconds, cost.computing, cost.talking, cost.sent_bytes

n ranks on h hosts, g = n / h on each. A rank reads 1/n of the weights and of the KV cache (with fewer KV heads than
ranks, more), and does 1/n of the FLOPs; what several ranks add is communication. In one step of T tokens of hidden size
H, b bytes a number, that is:

    all-reduce   T H b bytes      after the attention and after the MLP of every layer, and after the embedding
    all-gather   rows V b bytes   of the logits, once; rows = sequences that get a token

A collective is `start` + steps x latency + bytes / bandwidth. An all-reduce of m bytes over n ranks goes by a ring,
2 (n - 1) steps, each rank sending 2 m (n - 1) / n; or by a tree, 2 log2(n) steps and 2 m. Libraries take the faster
one, and so does this model: trees for one token, rings for prompts. Over hosts it is done in two stages, inside each
host and between hosts, where the network card of a host is shared by its g GPUs: each has 1/g of m to bring across.

Spread experts (moe/spread.py) replace a sparse layer's all-reduce by all-to-alls there and back, in which a rank sends
2 T k H b (n - 1) / n^2 times n / e bytes, and a gather of T H b (n - 1) / n; and the host must read counts before. A
shared MLP beside them (DeepSeek) is cut and keeps the all-reduce; beside experts that are cut it needs none of its own.

Computing and communication take turns, as they do in the engine. The rest (launches, sampling, scheduling) is not in
here: on one H200 the engine takes 1.04 to 1.31 times as long as computed here (docs/scaling.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanovllm.memory.facts import ModelFacts
from nanovllm.memory.speed import distinct_experts

START_SECONDS = 5e-6  # to launch one collective and for all ranks to be there; assumed
COUNTS_SECONDS = 50e-6  # spread experts: the host waits for the counts and launches what they decide; assumed
ROW_EXTRA = 8  # bytes of a row of an all-to-all beside the numbers


@dataclass(frozen=True)
class Link:
    """Between two GPUs of a host (each has so much, in each direction), or between two hosts (each has so much)."""

    bytes_per_second: float
    latency: float  # seconds, of one message


@dataclass(frozen=True)
class Machine:
    read: float  # bytes per second, of a GPU's own memory
    flops: float
    link: Link
    network: Link


@dataclass(frozen=True)
class Topology:
    num_ranks: int = 1
    num_hosts: int = 1
    expert_size: int = 1  # groups of ranks that experts are spread over

    @property
    def per_host(self) -> int:
        return self.num_ranks // self.num_hosts


@dataclass(frozen=True)
class Cost:
    """Of one step, on the rank with the most to do."""

    computing: float  # seconds, of reading or of arithmetic, whichever takes longer
    talking: float  # seconds in collectives
    read_bytes: float
    flops: float
    sent_bytes: float  # by one rank, to any other
    network_bytes: float  # by one host, to others
    exchanged_bytes: float  # of what a rank sent, that in all-to-alls
    num_collectives: int

    @property
    def seconds(self) -> float:
        return self.computing + self.talking


# ---- collectives ---------------------------------------------------------------------------------------------------


def all_reduce_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Without the start. Ring or tree, whichever is faster."""
    if num_ranks == 1:
        return 0.0
    ring = 2 * (num_ranks - 1) * (link.latency + num_bytes / num_ranks / link.bytes_per_second)
    tree = 2 * math.ceil(math.log2(num_ranks)) * link.latency + 2 * num_bytes / link.bytes_per_second
    return min(ring, tree)


def all_gather_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """`num_bytes`: of the result. A ring: each rank receives all but its own."""
    return (num_ranks - 1) * (link.latency + num_bytes / num_ranks / link.bytes_per_second)


@dataclass
class Collectives:
    """Adds up the collectives of a step."""

    topology: Topology
    machine: Machine
    seconds: float = 0.0
    sent_bytes: float = 0.0
    network_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    count: int = 0

    def all_reduce(self, num_bytes: float, times: int = 1) -> None:
        inside, hosts = self.topology.per_host, self.topology.num_hosts
        seconds = START_SECONDS + all_reduce_seconds(num_bytes, inside, self.machine.link)
        seconds += all_reduce_seconds(num_bytes, hosts, self.machine.network)  # g cards' parts of it over one link
        self._add(seconds, 2 * num_bytes * self._others, 2 * num_bytes * (hosts - 1) / hosts, times)

    def all_gather(self, num_bytes: float, times: int = 1) -> None:
        inside, hosts = self.topology.per_host, self.topology.num_hosts
        seconds = START_SECONDS + all_gather_seconds(num_bytes, inside, self.machine.link)
        seconds += all_gather_seconds(num_bytes, hosts, self.machine.network)
        self._add(seconds, num_bytes * self._others, num_bytes * (hosts - 1) / hosts, times)

    def all_to_all(self, num_bytes: float, times: int = 1) -> None:
        """Each rank has so many bytes for all together, evenly; 1/n of them are its own."""
        topology, machine = self.topology, self.machine
        inside, abroad = (topology.per_host - 1) / topology.num_ranks, 1 - topology.per_host / topology.num_ranks
        leaving = num_bytes * abroad * topology.per_host  # of a host
        seconds = START_SECONDS + num_bytes * inside / machine.link.bytes_per_second
        seconds += leaving / machine.network.bytes_per_second
        seconds += machine.network.latency if topology.num_hosts > 1 else machine.link.latency
        self._add(seconds, num_bytes * self._others, leaving, times)
        self.exchanged_bytes += num_bytes * self._others * times

    @property
    def _others(self) -> float:
        return (self.topology.num_ranks - 1) / self.topology.num_ranks

    def _add(self, seconds: float, sent: float, network: float, times: int) -> None:
        if self.topology.num_ranks == 1:
            return
        self.seconds += seconds * times
        self.sent_bytes += sent * times
        self.network_bytes += network * times
        self.count += times


# ---- steps ---------------------------------------------------------------------------------------------------------


def decode_cost(model: ModelFacts, topology: Topology, machine: Machine, batch: int, context: int) -> Cost:
    """One token for each of `batch` sequences that have `context` tokens. `model`: facts of one rank."""
    read = weights_read(model, batch) + batch * context * model.kv_bytes_per_token
    flops = 2 * batch * (weights_used(model) + head_bytes(model)) / model.itemsize
    flops += _attention_flops(model, batch, context)
    return _cost(model, topology, machine, read, flops, (batch, batch))


def prefill_cost(model: ModelFacts, topology: Topology, machine: Machine, num_prompts: int, length: int) -> Cost:
    """All prompts in one step; a token for each at its end."""
    num_tokens = num_prompts * length
    read = weights_read(model, num_tokens)
    flops = 2 * (num_tokens * weights_used(model) + num_prompts * head_bytes(model)) / model.itemsize
    flops += _attention_flops(model, num_tokens, length / 2)  # a token sees those before it: half of them on average
    return _cost(model, topology, machine, read, flops, (num_tokens, num_prompts))


def _cost(
    model: ModelFacts, topology: Topology, machine: Machine, read: float, flops: float, sizes: tuple[int, int]
) -> Cost:
    """`sizes`: tokens, and rows of logits."""
    config, (num_tokens, num_rows) = model.config, sizes
    assert (model.num_ranks, model.expert_size) == (topology.num_ranks, topology.expert_size)
    collectives = Collectives(topology, machine)
    hidden_bytes = num_tokens * config.hidden_size * model.itemsize
    spread = model.num_sparse_layers if topology.expert_size > 1 else 0
    has_shared = config.moe is not None and config.moe.shared_size > 0  # an MLP that is cut, beside spread experts
    collectives.all_reduce(hidden_bytes, 1 + 2 * config.num_layers - (0 if has_shared else spread))
    if spread:
        shares = topology.num_ranks // topology.expert_size  # a row goes to each rank that has a part of its expert
        rows = num_tokens * model.top_k * shares / topology.num_ranks
        collectives.all_to_all(rows * (config.hidden_size * model.itemsize + ROW_EXTRA), spread)
        collectives.all_to_all(rows * config.hidden_size * model.itemsize, spread)
        collectives.all_gather(hidden_bytes, spread)
        collectives.seconds += COUNTS_SECONDS * spread
    collectives.all_gather(num_rows * model.vocab_rows * topology.num_ranks * model.itemsize)
    computing = max(read / machine.read, flops / machine.flops)
    return Cost(
        computing,
        collectives.seconds,
        read,
        flops,
        collectives.sent_bytes,
        collectives.network_bytes,
        collectives.exchanged_bytes,
        collectives.count,
    )


def head_bytes(model: ModelFacts) -> int:
    """A rank's part of the head; the embedding is as large."""
    return model.vocab_rows * model.config.hidden_size * model.itemsize


def _body_bytes(model: ModelFacts) -> int:
    """Dense weights between the embedding and the head."""
    return model.dense_bytes - head_bytes(model) - model.embedding_bytes


def weights_read(model: ModelFacts, num_tokens: int) -> float:
    """Bytes that a step of so many tokens reads. Experts: those that even routing touches; spread ones are on one rank
    each, so a rank reads its share of them."""
    moe = model.config.moe
    touched = distinct_experts(moe.num_experts, moe.top_k, num_tokens) / model.expert_size if moe else 0.0
    return _body_bytes(model) + head_bytes(model) + touched * sum(model.layer_bytes)


def weights_used(model: ModelFacts) -> float:
    """By one token, in bytes, without the head. Of k experts, spread evenly, a rank computes k / e on average."""
    return _body_bytes(model) + model.top_k / model.expert_size * sum(model.layer_bytes)


def _attention_flops(model: ModelFacts, num_tokens: int, context: float) -> float:
    """Scores and weighted sum: two products of q's size with every position."""
    return 4 * num_tokens * context * model.head_sizes[0] * model.config.num_layers


# ---- the steps that are compared -----------------------------------------------------------------------------------

CONTEXT, PROMPTS = 1024, 16
CostOf = Callable[[ModelFacts, Topology, Machine], Cost]
WORKS: tuple[tuple[str, int, CostOf], ...] = (
    ("1 sequence", 1, lambda model, at, on: decode_cost(model, at, on, 1, CONTEXT)),
    ("64 sequences", 64, lambda model, at, on: decode_cost(model, at, on, 64, CONTEXT)),
    (f"{PROMPTS} prompts", PROMPTS * CONTEXT, lambda model, at, on: prefill_cost(model, at, on, PROMPTS, CONTEXT)),
)


@dataclass(frozen=True)
class Work:
    """One step, with its cost on these GPUs and on a single one, large enough or not."""

    name: str
    tokens: int
    cost: Cost
    alone: Cost

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.cost.seconds

    @property
    def speedup(self) -> float:
        return self.alone.seconds / self.cost.seconds


@dataclass(frozen=True)
class Scaling:
    topology: Topology
    machine: Machine
    works: tuple[Work, ...]

    @classmethod
    def of(cls, model: ModelFacts, topology: Topology, machine: Machine) -> Scaling:
        """`model`: facts of one rank."""
        whole = replace(model, num_ranks=1, expert_size=1)
        works = tuple(
            Work(name, tokens, cost(model, topology, machine), cost(whole, Topology(), machine))
            for name, tokens, cost in WORKS
        )
        return cls(topology, machine, works)
